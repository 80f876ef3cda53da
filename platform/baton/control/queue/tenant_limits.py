"""Tenants' limits at one coordinator: rates, and requests in flight, as shares of the whole.

*Theory of operation.* This coordinator has a fraction of each limit: an equal one until
`apply_shares` sets another. The expected tokens of a request, prompt and answer, are charged when
it arrives and settled when it ends, in the buckets that were charged. So a tenant that gets a limit
while requests run owes nothing for these. A request without output is refunded. Tenants that are
not configured share one account, so accounts are as many as tenants in the rules; accounts of
removed tenants stay until their last request has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from baton.control.state.admission_terms import Charge
from baton.domain.tenant import QuotaShare, RateLimit, Tenant
from baton.perf.fitting.decayed_sum import DecayedSum
from baton.policy.admission.rate_limits import TenantRates, TokenBucket

_DEMAND_WINDOW_S = 10.0
"""Over which it is seen what tenants ask for: several rounds of dealing limits out."""
_MIN_RETRY_AFTER_S = 1.0
"""A rejected client gets no shorter Retry-After."""
_NEXT_SHARE_S = 2.0
"""Where a share is nothing at all, the next one is soon dealt."""
_MEAN_WINDOW_REQUESTS = 50


class LimitExceeded(NamedTuple):
    """A tenant has used up what it may use for now."""

    reason: str
    retry_after_s: float


class QuotaFractions(NamedTuple):
    """How much of each of a tenant's limits is for this coordinator."""

    requests: float
    tokens: float
    in_flight: float


@dataclass(slots=True)
class _Account:
    """One tenant's."""

    tenant: Tenant
    fractions: QuotaFractions
    has_share: bool = False
    """Whether the fractions were dealt out, or are a guess."""
    request_bucket: TokenBucket | None = None
    token_bucket: TokenBucket | None = None
    in_flight: int = 0
    mean_duration_s: float = 0.0
    """How long its requests take, on average."""
    ended_count: int = 0
    demanded_requests: DecayedSum = field(default_factory=partial(DecayedSum, _DEMAND_WINDOW_S))
    demanded_tokens: DecayedSum = field(default_factory=partial(DecayedSum, _DEMAND_WINDOW_S))

    @property
    def max_in_flight(self) -> int | None:
        """How many of its requests may be in flight here."""
        limit = self.tenant.max_in_flight
        if limit is None:
            return None
        share = int(limit * self.fractions.in_flight + 1e-6)
        return share if self.has_share else max(1, share)


class TenantLimits:
    """The accounts of all tenants at one coordinator."""

    def __init__(self, tenants: Mapping[str, Tenant], *, coordinators: int = 1) -> None:
        """Begin with an equal share of each limit, full buckets and no request in flight."""
        if coordinators < 1:
            raise ValueError(f"coordinators is {coordinators}, expected at least 1")
        self._equal_share = QuotaFractions(*[1 / coordinators] * 3)
        self._tenants = dict(tenants)
        self._accounts: dict[str, _Account] = {}

    def reconfigure(self, tenants: Mapping[str, Tenant]) -> None:
        """Go by other limits; fractions of them stay as they are until they are dealt out anew."""
        self._tenants = dict(tenants)
        for name, account in tuple(self._accounts.items()):
            account.tenant = tenants.get(name, Tenant(name=name))
            _update_buckets(account, None)
            self._drop_if_unused(account)

    def apply_shares(self, shares: Mapping[str, QuotaShare], now_s: float) -> None:
        """Limits were dealt out anew."""
        for name, share in shares.items():
            if name in self._tenants:
                account = self._account(self._tenants[name], now_s)
                account.fractions = _to_fractions(account, share)
                account.has_share = True
                _update_buckets(account, now_s)

    def acquire(self, tenant: Tenant, tokens: float, now_s: float) -> LimitExceeded | Charge:
        """Why a request of these tokens cannot be admitted now; or its charge."""
        account = self._account(tenant, now_s)
        account.demanded_requests.add(1.0, now_s)
        account.demanded_tokens.add(tokens, now_s)
        if (limited := self._check_account(account, tokens, now_s)) is not None:
            self._drop_if_unused(account)
            return limited
        account.in_flight += 1
        if account.request_bucket is not None:
            account.request_bucket.spend(1.0)
        if account.token_bucket is not None:
            account.token_bucket.spend(tokens)
        return Charge(
            tenant=tenant.name,
            tokens=tokens,
            request_bucket=account.request_bucket,
            token_bucket=account.token_bucket,
        )

    def check(self, tenant: Tenant, now_s: float) -> LimitExceeded | None:
        """Why any request of a tenant would be refused now; nothing is charged."""
        account = self._accounts.get(tenant.name)
        return None if account is None else self._check_account(account, 1.0, now_s)

    def settle(self, charge: Charge, *, used_tokens: float, duration_s: float) -> None:
        """A request that was charged so has ended and used these tokens; 0 for none."""
        account = self._accounts[charge.tenant]
        account.in_flight -= 1
        if charge.token_bucket is not None:
            charge.token_bucket.spend(used_tokens - charge.tokens)
        if charge.request_bucket is not None and not used_tokens:
            charge.request_bucket.spend(-1.0)
        if used_tokens:
            account.ended_count += 1
            account.mean_duration_s += (duration_s - account.mean_duration_s) / min(
                account.ended_count, _MEAN_WINDOW_REQUESTS
            )
        self._drop_if_unused(account)

    def requested_rates(self, now_s: float) -> tuple[TenantRates, ...]:
        """The recent demand here of tenants with a limit, per second."""
        return tuple(
            (name, account.demanded_requests.rate(now_s), account.demanded_tokens.rate(now_s))
            for name, account in sorted(self._accounts.items())
            if _is_limited(account.tenant)
        )

    def check_integrity(self, in_flight: Mapping[str, int]) -> None:
        """Raise AssertionError when accounts disagree with the requests in flight, by tenant."""
        counted = {
            name: account.in_flight for name, account in self._accounts.items() if account.in_flight
        }
        assert counted == dict(in_flight), f"accounts count {counted}, there are {in_flight}"

    def _check_account(
        self, account: _Account, tokens: float, now_s: float
    ) -> LimitExceeded | None:
        name, max_in_flight = account.tenant.name, account.max_in_flight
        if max_in_flight is not None and account.in_flight >= max_in_flight:
            # With n at a time, one ends every n-th part of a request's time.
            wait_s = account.mean_duration_s / max_in_flight if max_in_flight else _NEXT_SHARE_S
            reason = (
                f"tenant {name!r} has {account.in_flight} requests in flight, at most"
                f" {max_in_flight}"
            )
            return LimitExceeded(f"{reason} may be here", max(_MIN_RETRY_AFTER_S, wait_s))
        for bucket, amount, resource in (
            (account.request_bucket, 1.0, "requests"),
            (account.token_bucket, tokens, "tokens"),
        ):
            wait_s = 0.0 if bucket is None else bucket.wait_s(amount, now_s)
            if wait_s > 0:
                reason = f"tenant {name!r} has used up its {resource} per second"
                return LimitExceeded(reason, max(_MIN_RETRY_AFTER_S, wait_s))
        return None

    def _account(self, tenant: Tenant, now_s: float) -> _Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = _Account(tenant, self._equal_share)
            _update_buckets(account, now_s)
        return account

    def _drop_if_unused(self, account: _Account) -> None:
        """Keep no account of a tenant that is gone, or of none in particular."""
        name = account.tenant.name
        if not account.in_flight and name not in self._tenants:
            del self._accounts[name]


def _is_limited(tenant: Tenant) -> bool:
    rate = tenant.rate
    return (rate.requests_per_s, rate.tokens_per_s, tenant.max_in_flight) != (None, None, None)


def _update_buckets(account: _Account, now_s: float | None) -> None:
    """Give an account the buckets of its limits and fractions; their content stays."""
    rate, fractions = account.tenant.rate, account.fractions
    account.request_bucket = _updated_bucket(
        account.request_bucket, rate.requests_per_s, fractions.requests, rate, now_s
    )
    account.token_bucket = _updated_bucket(
        account.token_bucket, rate.tokens_per_s, fractions.tokens, rate, now_s
    )


def _updated_bucket(
    bucket: TokenBucket | None,
    limit_per_s: float | None,
    fraction: float,
    rate: RateLimit,
    now_s: float | None,
) -> TokenBucket | None:
    if limit_per_s is None:
        return None
    if bucket is None:
        return TokenBucket(limit_per_s * fraction, burst_s=rate.burst_s, now_s=now_s)
    bucket.set_rate(limit_per_s * fraction, burst_s=rate.burst_s, now_s=now_s)
    return bucket


def _to_fractions(account: _Account, share: QuotaShare) -> QuotaFractions:
    """A share as fractions of the limits; missing limits and shares change nothing."""
    rate, current = account.tenant.rate, account.fractions
    return QuotaFractions(
        _to_fraction(share.requests_per_s, rate.requests_per_s, current.requests),
        _to_fraction(share.tokens_per_s, rate.tokens_per_s, current.tokens),
        _to_fraction(share.max_in_flight, account.tenant.max_in_flight, current.in_flight),
    )


def _to_fraction(share: float | None, limit: float | None, current: float) -> float:
    return current if share is None or limit is None else min(1.0, max(0.0, share / limit))
