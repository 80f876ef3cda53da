"""The terms of a request's admission: its place among others, and its tenant's charge."""

from __future__ import annotations

from typing import NamedTuple

from baton.policy.admission.rate_limits import TokenBucket


class PriorityBand(NamedTuple):
    """The rank of a request; the greater first."""

    priority: int
    is_attainable: bool


class Charge(NamedTuple):
    """The charge of an admitted request, and its buckets; None: to no limit."""

    tenant: str
    tokens: float
    request_bucket: TokenBucket | None
    token_bucket: TokenBucket | None
