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

_COMPRESSION_LEVEL = 1
"""Of compression: rows that repeat their keys shrink twentyfold at the first."""


def pack(value: object) -> bytes:
    """Plain values; what JSON has no word for becomes text."""
    return zlib.compress(json.dumps(value, default=str).encode(), _COMPRESSION_LEVEL)


def unpack(answer: object) -> object:
    """What was packed; anything else as it is."""
    return json.loads(zlib.decompress(answer)) if isinstance(answer, bytes) else answer


def pack_reports(reports: tuple[CoordinatorReport, ...]) -> bytes:
    """The reports of an ingress; a single one as itself, as other versions of baton send it."""
    payload = reports[0] if len(reports) == 1 else reports
    return zlib.compress(pickle.dumps(payload), _COMPRESSION_LEVEL)


def unpack_reports(answer: object) -> tuple[CoordinatorReport, ...]:
    """Reports that were packed; none for anything else."""
    if not isinstance(answer, bytes):
        return ()
    payload = pickle.loads(zlib.decompress(answer))  # noqa: S301 - from our own ingress, over Ray
    reports = payload if isinstance(payload, tuple) else (payload,)
    return tuple(report for report in reports if isinstance(report, CoordinatorReport))
