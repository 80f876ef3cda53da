"""On what terms a request was taken in: its place among others, and what its tenant paid."""

from __future__ import annotations

from typing import NamedTuple

from baton.policy.admission.rate_limits import TokenBucket


class PriorityBand(NamedTuple):
    """Who comes before whom; the greater first."""

    priority: int
    is_attainable: bool


class Charge(NamedTuple):
    """What a request that was taken in was charged, and to which buckets; None: to no limit."""

    tenant: str
    tokens: float
    request_bucket: TokenBucket | None
    token_bucket: TokenBucket | None
