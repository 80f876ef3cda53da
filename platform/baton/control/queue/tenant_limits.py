"""Tenants' limits at one coordinator: rates, and requests at a time, as shares of the whole.

*Theory of operation.* A limit holds for the deployment; this coordinator has a fraction of it,
which is an equal one until `share` says another. What a request will use is charged when it
arrives, its prompt and the answer that is to be expected, and settled when it ends: what was not
used is given back, what was used beyond it is owed, in the buckets that were charged and nowhere
else: whoever gets a limit while requests run owes nothing for these. A request that got nothing at
all is given back whole. Names that are not configured count for whoever stands for them, so there
are never more accounts than tenants in the rules, and those of removed tenants until their last
request has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.domain.tenant import QuotaShare, RateLimit, Tenant
from baton.perf.fitting.decayed_sum import DecayedSum
from baton.policy.admission.rate_limits import Asked, Bucket

_ASKED_S = 10.0
"""Over which it is seen what tenants ask for: several rounds of dealing limits out."""
_LEAST_WAIT_S = 1.0
"""A refused client is not told to come back sooner."""
_DEALT_AGAIN_S = 2.0
"""Where a share is nothing at all, the next one is soon dealt."""
_DURATIONS_KEPT = 50


class Limited(NamedTuple):
    """A tenant has used up what it may use for now."""

    why: str
    retry_after_s: float


class Charge(NamedTuple):
    """What a request that was taken in was charged, and to which buckets; None: to no limit."""

    tenant: str
    tokens: float
    requests_from: Bucket | None
    tokens_from: Bucket | None


class Fractions(NamedTuple):
    """How much of each of a tenant's limits is for this coordinator."""

    requests: float
    tokens: float
    in_flight: float


@dataclass(slots=True)
class _Account:
    """One tenant's."""

    tenant: Tenant
    fractions: Fractions
    dealt: bool = False
    """Whether the fractions were dealt out, or are a guess."""
    requests: Bucket | None = None
    tokens: Bucket | None = None
    in_flight: int = 0
    mean_s: float = 0.0
    """How long its requests take, on average."""
    ended: int = 0
    asked_requests: DecayedSum = field(default_factory=lambda: DecayedSum(_ASKED_S))
    asked_tokens: DecayedSum = field(default_factory=lambda: DecayedSum(_ASKED_S))

    @property
    def places(self) -> int | None:
        """How many of its requests may be in flight here."""
        limit = self.tenant.max_in_flight
        if limit is None:
            return None
        places = int(limit * self.fractions.in_flight + 1e-6)
        return places if self.dealt else max(1, places)


class Tenancy:
    """The accounts of all tenants at one coordinator."""

    def __init__(self, tenants: Mapping[str, Tenant], *, coordinators: int = 1) -> None:
        """Begin with an equal share of each limit, full buckets and nobody in flight."""
        if coordinators < 1:
            raise ValueError(f"coordinators is {coordinators}, wanted at least 1")
        self._even = Fractions(*[1 / coordinators] * 3)
        self._tenants = dict(tenants)
        self._accounts: dict[str, _Account] = {}

    def reconfigure(self, tenants: Mapping[str, Tenant]) -> None:
        """Go by other limits; fractions of them stay as they are until they are dealt out anew."""
        self._tenants = dict(tenants)
        for name, account in tuple(self._accounts.items()):
            account.tenant = tenants.get(name, Tenant(name=name))
            _fit(account, None)
            self._forget(account)

    def share(self, shares: Mapping[str, QuotaShare], now_s: float) -> None:
        """Limits were dealt out anew."""
        for name, share in shares.items():
            if name in self._tenants:
                account = self._account(self._tenants[name], now_s)
                account.fractions = _fractions(account, share)
                account.dealt = True
                _fit(account, now_s)

    def ask(self, tenant: Tenant, tokens: float, now_s: float) -> Limited | Charge:
        """Why a request of so many tokens cannot be taken in now; or what it is charged."""
        account = self._account(tenant, now_s)
        account.asked_requests.add(1.0, now_s)
        account.asked_tokens.add(tokens, now_s)
        if (limited := self._limited(account, tokens, now_s)) is not None:
            self._forget(account)
            return limited
        account.in_flight += 1
        if account.requests is not None:
            account.requests.take(1.0)
        if account.tokens is not None:
            account.tokens.take(tokens)
        return Charge(tenant.name, tokens, account.requests, account.tokens)

    def would_limit(self, tenant: Tenant, now_s: float) -> Limited | None:
        """Why any request of a tenant would be refused now; nothing is charged."""
        account = self._accounts.get(tenant.name)
        return None if account is None else self._limited(account, 1.0, now_s)

    def ended(self, charge: Charge, *, used: float, took_s: float) -> None:
        """A request that was charged so has ended and used so many tokens; 0 for none."""
        account = self._accounts[charge.tenant]
        account.in_flight -= 1
        if charge.tokens_from is not None:
            charge.tokens_from.take(used - charge.tokens)
        if charge.requests_from is not None and not used:
            charge.requests_from.take(-1.0)
        if used:
            account.ended += 1
            account.mean_s += (took_s - account.mean_s) / min(account.ended, _DURATIONS_KEPT)
        self._forget(account)

    def asked(self, now_s: float) -> tuple[Asked, ...]:
        """What tenants with a limit have asked for here lately, per second."""
        return tuple(
            (name, account.asked_requests.rate(now_s), account.asked_tokens.rate(now_s))
            for name, account in sorted(self._accounts.items())
            if _is_limited(account.tenant)
        )

    def check_integrity(self, in_flight: Mapping[str, int]) -> None:
        """Raise AssertionError when accounts disagree with the requests in flight, by tenant."""
        counted = {name: one.in_flight for name, one in self._accounts.items() if one.in_flight}
        assert counted == dict(in_flight), f"accounts count {counted}, there are {in_flight}"

    def _limited(self, account: _Account, tokens: float, now_s: float) -> Limited | None:
        name, places = account.tenant.name, account.places
        if places is not None and account.in_flight >= places:
            # With n at a time, one ends every n-th part of what one takes.
            wait_s = account.mean_s / places if places else _DEALT_AGAIN_S
            why = f"tenant {name!r} has {account.in_flight} requests in flight, at most {places}"
            return Limited(f"{why} may be here", max(_LEAST_WAIT_S, wait_s))
        for bucket, amount, what in (
            (account.requests, 1.0, "requests"),
            (account.tokens, tokens, "tokens"),
        ):
            wait_s = 0.0 if bucket is None else bucket.wait_s(amount, now_s)
            if wait_s > 0:
                why = f"tenant {name!r} has used up its {what} per second"
                return Limited(why, max(_LEAST_WAIT_S, wait_s))
        return None

    def _account(self, tenant: Tenant, now_s: float) -> _Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = _Account(tenant, self._even)
            _fit(account, now_s)
        return account

    def _forget(self, account: _Account) -> None:
        """Keep no account of a tenant that is gone, or of nobody in particular."""
        name = account.tenant.name
        if not account.in_flight and name not in self._tenants:
            del self._accounts[name]


def _is_limited(tenant: Tenant) -> bool:
    rate = tenant.rate
    return (rate.requests_per_s, rate.tokens_per_s, tenant.max_in_flight) != (None, None, None)


def _fit(account: _Account, now_s: float | None) -> None:
    """Give an account the buckets that its limits and fractions say; what was in them stays."""
    rate, parts = account.tenant.rate, account.fractions
    account.requests = _fitted(account.requests, rate.requests_per_s, parts.requests, rate, now_s)
    account.tokens = _fitted(account.tokens, rate.tokens_per_s, parts.tokens, rate, now_s)


def _fitted(
    bucket: Bucket | None,
    limit_per_s: float | None,
    fraction: float,
    rate: RateLimit,
    now_s: float | None,
) -> Bucket | None:
    if limit_per_s is None:
        return None
    if bucket is None:
        return Bucket(limit_per_s * fraction, burst_s=rate.burst_s, now_s=now_s)
    bucket.change(limit_per_s * fraction, burst_s=rate.burst_s, now_s=now_s)
    return bucket


def _fractions(account: _Account, share: QuotaShare) -> Fractions:
    """A share as fractions of the limits; what has no limit, or no share, stays as it is."""
    rate, kept = account.tenant.rate, account.fractions
    return Fractions(
        _fraction(share.requests_per_s, rate.requests_per_s, kept.requests),
        _fraction(share.tokens_per_s, rate.tokens_per_s, kept.tokens),
        _fraction(share.max_in_flight, account.tenant.max_in_flight, kept.in_flight),
    )


def _fraction(share: float | None, limit: float | None, kept: float) -> float:
    return kept if share is None or limit is None else min(1.0, max(0.0, share / limit))
