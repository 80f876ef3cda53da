"""Rate limits: the bucket that one coordinator draws from, and how limits are dealt out to all.

A tenant's limit holds for the whole deployment, and coordinators share no state. Each has a share,
which the controller divides anew every few seconds by the demand on each. The shares of a limit
never add up to more than it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from baton.domain.tenant import QuotaShare, Tenant

_EVEN_SHARE_FRACTION = 0.2
"""Of a limit: divided evenly without regard to demand, so that a tenant's first requests at a
coordinator are not rejected. With four coordinators each keeps 5 %, and 80 % go to where they are
used."""

TenantRates = tuple[str, float, float]
"""A tenant; the requests, and the tokens, per second that it has asked one coordinator for."""


class TokenBucket:
    """A bucket that fills at a rate, up to the amount of `burst_s`.

    An amount larger than the whole bucket passes when the bucket is full, and leaves a debt.
    Otherwise a prompt of more tokens than the bucket holds could never be served.
    """

    def __init__(self, rate_per_s: float, *, burst_s: float, now_s: float | None) -> None:
        """Begin full; None: to be filled from when it is first drawn from."""
        self._rate_per_s = rate_per_s
        self._capacity = self._tokens = rate_per_s * burst_s
        self._filled_at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until this amount can be taken; 0 when it can be now."""
        self._fill(now_s)
        shortfall = min(amount, self._capacity) - self._tokens
        if shortfall <= 0:
            return 0.0
        return shortfall / self._rate_per_s if self._rate_per_s > 0 else math.inf

    def spend(self, amount: float) -> None:
        """Take this amount; more than there is leaves a debt. A negative amount is given back."""
        self._tokens = min(self._capacity, self._tokens - amount)

    def set_rate(self, rate_per_s: float, *, burst_s: float, now_s: float | None = None) -> None:
        """Fill at another rate from now on; None: from when it was last drawn from."""
        if now_s is not None:
            self._fill(now_s)
        self._rate_per_s, self._capacity = rate_per_s, rate_per_s * burst_s
        self._tokens = min(self._tokens, self._capacity)

    def _fill(self, now_s: float) -> None:
        elapsed_s = 0.0 if self._filled_at_s is None else now_s - self._filled_at_s
        if self._filled_at_s is None or elapsed_s > 0:
            self._tokens = min(self._capacity, self._tokens + elapsed_s * self._rate_per_s)
            self._filled_at_s = now_s


def allocate_quotas(
    tenants: Iterable[Tenant], requested: Mapping[str, Sequence[TenantRates]]
) -> dict[str, dict[str, QuotaShare]]:
    """Each coordinator's share of each tenant's limits, by recent demand on it.

    `requested` has every coordinator that takes requests, also those of which nothing was asked.
    """
    coordinator_ids = sorted(requested)
    rates = {
        coordinator_id: {tenant: rates_per_s for tenant, *rates_per_s in requested[coordinator_id]}
        for coordinator_id in coordinator_ids
    }
    shares: dict[str, dict[str, QuotaShare]] = {
        coordinator_id: {} for coordinator_id in coordinator_ids
    }
    if not coordinator_ids:
        return shares  # while a deployment starts there is no coordinator
    for tenant in tenants:
        rate, max_in_flight = tenant.rate, tenant.max_in_flight
        if (rate.requests_per_s, rate.tokens_per_s, max_in_flight) == (None, None, None):
            continue
        tenant_rates = [
            rates[coordinator_id].get(tenant.name, (0.0, 0.0)) for coordinator_id in coordinator_ids
        ]
        requests = [_valid_rate_or_zero(tenant_rate[0]) for tenant_rate in tenant_rates]
        allocations = zip(
            _rate_shares(rate.requests_per_s, requests),
            _rate_shares(
                rate.tokens_per_s,
                [_valid_rate_or_zero(tenant_rate[1]) for tenant_rate in tenant_rates],
            ),
            _integer_shares(max_in_flight, requests),
            strict=True,
        )
        for coordinator_id, parts in zip(coordinator_ids, allocations, strict=True):
            shares[coordinator_id][tenant.name] = QuotaShare(*parts)
    return shares


def max_min_shares(limit: float, demands: Sequence[float]) -> list[float]:
    """A limit, dealt out: a floor for everyone, the rest max-min fair, what is left over evenly.

    Max-min fair: no claim gets more than it wants while another has less and wants more. Source:
    Bertsekas and Gallager, Data Networks, 6.5.2.
    """
    count = len(demands)
    floor = _EVEN_SHARE_FRACTION * limit / count
    shares = [floor] * count
    remaining = limit - floor * count
    unmet = sorted((max(0.0, value - floor), place) for place, value in enumerate(demands))
    for number, (more, place) in enumerate(unmet):
        granted = min(more, remaining / (count - number))
        shares[place] += granted
        remaining -= granted
    return [share + max(0.0, remaining) / count for share in shares]


def _rate_shares(limit: float | None, demands: Sequence[float]) -> list[float] | list[None]:
    return [None] * len(demands) if limit is None else max_min_shares(limit, demands)


def _integer_shares(limit: int | None, demands: Sequence[float]) -> list[int] | list[None]:
    """Places, divided in proportion to demand: whole places, all of them.

    Where there are fewer than coordinators, those that want most have one each; the others refuse
    until they are seen to want one, too.
    """
    if limit is None:
        return [None] * len(demands)
    count, total_demand = len(demands), sum(demands)
    even_fraction = _EVEN_SHARE_FRACTION if total_demand else 1.0
    parts = [
        limit
        * (
            even_fraction / count
            + ((1 - even_fraction) * demand / total_demand if total_demand else 0.0)
        )
        for demand in demands
    ]
    counts = [int(part) for part in parts]
    by_remainder = sorted(range(count), key=lambda place: (counts[place] - parts[place], place))
    for place in by_remainder[: limit - sum(counts)]:
        counts[place] += 1
    return counts


def _valid_rate_or_zero(rate: float) -> float:
    """A rate as it was reported, or none where that makes no sense."""
    return rate if 0 <= rate < math.inf else 0.0
