"""Rate limits: the bucket that one coordinator draws from, and how limits are dealt out to all.

A tenant's limit holds for the whole deployment, and coordinators share no state: each has a share,
which whoever hears of all of them deals out anew every few seconds by what was asked of each. The
shares of a limit never add up to more than it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from baton.domain.tenant import QuotaShare, Tenant

_FLOOR = 0.2
"""Of a limit: dealt out evenly whatever was asked, so that where a tenant comes for the first time
it is not turned away. With four coordinators each keeps 5 %, and 80 % go to where they are used."""

Asked = tuple[str, float, float]
"""A tenant; the requests, and the tokens, per second that it has asked one coordinator for."""


class Bucket:
    """So much comes in per second; at most what comes in `burst_s` is kept.

    What is larger than the whole bucket is let through when the bucket is full, and leaves a debt:
    otherwise a prompt of more tokens than the bucket holds could never be served at all.
    """

    def __init__(self, rate_per_s: float, *, burst_s: float, now_s: float | None) -> None:
        """Begin full; None: to be filled from when it is first drawn from."""
        self._rate_per_s = rate_per_s
        self._capacity = self._level = rate_per_s * burst_s
        self._at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until so much can be taken; 0 when it can be now."""
        self._fill(now_s)
        missing = min(amount, self._capacity) - self._level
        if missing <= 0:
            return 0.0
        return missing / self._rate_per_s if self._rate_per_s > 0 else math.inf

    def take(self, amount: float) -> None:
        """Take so much; more than there is leaves a debt. A negative amount is given back."""
        self._level = min(self._capacity, self._level - amount)

    def change(self, rate_per_s: float, *, burst_s: float, now_s: float | None = None) -> None:
        """Fill at another rate from now on; None: from when it was last drawn from."""
        if now_s is not None:
            self._fill(now_s)
        self._rate_per_s, self._capacity = rate_per_s, rate_per_s * burst_s
        self._level = min(self._level, self._capacity)

    def _fill(self, now_s: float) -> None:
        gone_s = 0.0 if self._at_s is None else now_s - self._at_s
        if self._at_s is None or gone_s > 0:
            self._level = min(self._capacity, self._level + gone_s * self._rate_per_s)
            self._at_s = now_s


def share(
    tenants: Iterable[Tenant], asked: Mapping[str, Sequence[Asked]]
) -> dict[str, dict[str, QuotaShare]]:
    """Each coordinator's share of each tenant's limits, by what was asked of it lately.

    `asked` has every coordinator that takes requests, also those of which nothing was asked.
    """
    ids = sorted(asked)
    rates = {one: {tenant: rest for tenant, *rest in asked[one]} for one in ids}
    shares: dict[str, dict[str, QuotaShare]] = {one: {} for one in ids}
    if not ids:
        return shares  # while a deployment starts there is nobody to deal anything to
    for tenant in tenants:
        rate, most = tenant.rate, tenant.max_in_flight
        if (rate.requests_per_s, rate.tokens_per_s, most) == (None, None, None):
            continue
        wanted = [rates[one].get(tenant.name, (0.0, 0.0)) for one in ids]
        requests = [_sensible(one[0]) for one in wanted]
        dealt = zip(
            _dealt(rate.requests_per_s, requests),
            _dealt(rate.tokens_per_s, [_sensible(one[1]) for one in wanted]),
            _whole(most, requests),
            strict=True,
        )
        for one, parts in zip(ids, dealt, strict=True):
            shares[one][tenant.name] = QuotaShare(*parts)
    return shares


def deal(limit: float, wanted: Sequence[float]) -> list[float]:
    """A limit, dealt out: a floor for everyone, the rest max-min fair, what is left over evenly.

    Max-min fair: nobody gets more than it wants while another has less and wants more. Source:
    Bertsekas and Gallager, Data Networks, 6.5.2.
    """
    count = len(wanted)
    floor = _FLOOR * limit / count
    shares = [floor] * count
    left = limit - floor * count
    hungry = sorted((max(0.0, one - floor), place) for place, one in enumerate(wanted))
    for number, (more, place) in enumerate(hungry):
        given = min(more, left / (count - number))
        shares[place] += given
        left -= given
    return [one + max(0.0, left) / count for one in shares]


def _dealt(limit: float | None, wanted: Sequence[float]) -> list[float] | list[None]:
    return [None] * len(wanted) if limit is None else deal(limit, wanted)


def _whole(limit: int | None, wanted: Sequence[float]) -> list[int] | list[None]:
    """Places, dealt out in proportion to what is wanted: whole ones, all of them.

    Where there are fewer than coordinators, those that want most have one each; the others refuse
    until they are seen to want one, too.
    """
    if limit is None:
        return [None] * len(wanted)
    count, all_wanted = len(wanted), sum(wanted)
    even = _FLOOR if all_wanted else 1.0
    parts = [
        limit * (even / count + ((1 - even) * one / all_wanted if all_wanted else 0.0))
        for one in wanted
    ]
    whole = [int(one) for one in parts]
    by_rest = sorted(range(count), key=lambda place: (whole[place] - parts[place], place))
    for place in by_rest[: limit - sum(whole)]:
        whole[place] += 1
    return whole


def _sensible(rate: float) -> float:
    """A rate as it was reported, or none where that makes no sense."""
    return rate if 0 <= rate < math.inf else 0.0
