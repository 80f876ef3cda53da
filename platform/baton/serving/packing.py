"""Answers to control calls, packed so that they travel inside Ray's messages.

Ray puts what is larger than 100 kB into its object store, and hands out a reference to it. A
process that drops such a reference as soon as it has read it, as one that asks a question and
leaves does, may be aborted by Ray (2.60: "ObjectUnknownOwner", seen with 500 kB of ticks). Packed,
all but the reports of thousands of tenants stay far below; see `serve_control.Answers.refs` for
those.
"""

from __future__ import annotations

import json
import pickle
import zlib

from baton.domain.demand import CoordinatorReport

_LEVEL = 1
"""Of compression: rows that repeat their keys shrink twentyfold at the first."""


def packed(told: object) -> bytes:
    """Plain values; what JSON has no word for becomes text."""
    return zlib.compress(json.dumps(told, default=str).encode(), _LEVEL)


def unpacked(answer: object) -> object:
    """What was packed; anything else as it is."""
    return json.loads(zlib.decompress(answer)) if isinstance(answer, bytes) else answer


def packed_report(report: CoordinatorReport) -> bytes:
    """A report."""
    return zlib.compress(pickle.dumps(report), _LEVEL)


def unpacked_report(answer: object) -> CoordinatorReport | None:
    """A report that was packed; None for anything else."""
    if not isinstance(answer, bytes):
        return None
    found = pickle.loads(zlib.decompress(answer))  # noqa: S301 - from our own ingress, over Ray
    return found if isinstance(found, CoordinatorReport) else None
