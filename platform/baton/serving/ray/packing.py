"""Packs answers to control calls, so that they travel inside Ray's messages.

Ray puts larger values than 100 kB into its object store, and hands out a reference. Ray may abort a
process that drops such a reference as soon as it has read it, as commands do (2.60:
"ObjectUnknownOwner", seen with 500 kB of ticks). Packed, only the reports of thousands of tenants
are larger; for those see `serve_control.CallResults.refs`.
"""

from __future__ import annotations

import json
import pickle
import zlib

from baton.domain.demand import CoordinatorReport

_COMPRESSION_LEVEL = 1
"""Rows that repeat their keys shrink twentyfold at the first level."""


def pack(value: object) -> bytes:
    """Plain values; values that JSON does not have become text."""
    return zlib.compress(json.dumps(value, default=str).encode(), _COMPRESSION_LEVEL)


def unpack(answer: object) -> object:
    """The packed value; anything else unchanged."""
    return json.loads(zlib.decompress(answer)) if isinstance(answer, bytes) else answer


def pack_reports(reports: tuple[CoordinatorReport, ...]) -> bytes:
    """The reports of an ingress; a single one as itself, as other versions of baton send it."""
    payload = reports[0] if len(reports) == 1 else reports
    return zlib.compress(pickle.dumps(payload), _COMPRESSION_LEVEL)


def unpack_reports(answer: object) -> tuple[CoordinatorReport, ...]:
    """Packed reports; none for anything else."""
    if not isinstance(answer, bytes):
        return ()
    payload = pickle.loads(zlib.decompress(answer))  # noqa: S301 - from our own ingress, over Ray
    reports = payload if isinstance(payload, tuple) else (payload,)
    return tuple(report for report in reports if isinstance(report, CoordinatorReport))
