"""Deals tenants' limits out to the ingresses, by what each of them was asked for lately.

Theory of operation. With every round of reports the limits are dealt out anew
(`policy.admission.rate_limits`). So that the shares of a limit never add up to more than it, not
even while they are on their way, they are sent in two steps: first every ingress is told the
lesser of what it has and what it gets, and only when all have taken that, what they get. An
ingress that does not answer keeps what it was last told, and what it may have is nobody else's
until it answers or is gone.

A desk that begins anew, with a new controller, does not know what ingresses have. They do: in the
first step each keeps whichever is less, what it has or what it is told.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from typing import Protocol, TypeVar

from baton.domain.demand import CoordinatorReport
from baton.domain.tenant import QuotaShare, Tenant
from baton.policy.admission.rate_limits import TenantRates, allocate_quotas
from baton.serving.scaling.ports import TickInputs

Shares = Mapping[str, Mapping[str, QuotaShare]]
"""By coordinator, then by tenant."""


class SendShares(Protocol):
    """Tells coordinators their shares."""

    def __call__(self, shares: Shares, *, at_most: bool) -> Awaitable[frozenset[str]]:
        """Returns which of them have taken theirs; `at_most`: or have less, and keep that."""
        ...


_Limit = TypeVar("_Limit", int | None, float | None)
_MIN_CHANGE_FRACTION = 0.02
"""Of a share: rates are measured, and never twice the same; smaller changes are not sent."""


class QuotaAllocator:
    """See the module's theory of operation."""

    def __init__(self, tenants: Iterable[Tenant], send: SendShares) -> None:
        self._tenants = tuple(tenants)
        self._send = send
        self._demand: dict[str, tuple[TenantRates, ...]] = {}
        self._accepted: dict[str, Mapping[str, QuotaShare]] = {}
        """What each coordinator has taken last."""

    def reconfigure(self, tenants: Iterable[Tenant]) -> None:
        """Deal out other limits from the next round on."""
        self._tenants = tuple(tenants)

    @property
    def accepted(self) -> Shares:
        """What each coordinator has taken last."""
        return dict(self._accepted)

    async def on_tick(self, inputs: TickInputs) -> None:
        """Deal limits out by one round of reports."""
        self._record_demand(inputs.reports, all_reported=not inputs.missing)
        shares = allocate_quotas(self._tenants, self._demand)
        if not any(shares.values()) or self._are_in_force(shares):
            return
        # Who was told nothing yet lets in an equal share.
        equal_shares = allocate_quotas(self._tenants, dict.fromkeys(shares, ()))
        previous = {share: self._accepted.get(share, equal_shares[share]) for share in shares}
        lowered = {
            coordinator_id: _lower_shares(previous[coordinator_id], of_one)
            for coordinator_id, of_one in shares.items()
        }
        if lowered != previous or not shares.keys() <= self._accepted.keys():
            accepted = await self._send_shares(lowered, at_most=True)
            if not lowered.keys() <= accepted:
                return
        if not self._are_in_force(shares):
            await self._send_shares(shares, at_most=False)

    def _record_demand(self, reports: Iterable[CoordinatorReport], *, all_reported: bool) -> None:
        demand = {report.coordinator_id: report.requested_rates for report in reports}
        # While somebody is silent, who was there is taken to be there still.
        self._demand = demand if all_reported else self._demand | demand
        self._accepted = {
            coordinator_id: told
            for coordinator_id, told in self._accepted.items()
            if coordinator_id in self._demand
        }

    def _are_in_force(self, shares: Shares) -> bool:
        return all(
            _are_close(self._accepted.get(coordinator_id), of_one)
            for coordinator_id, of_one in shares.items()
        )

    async def _send_shares(self, shares: Shares, *, at_most: bool) -> frozenset[str]:
        accepted = await self._send(shares, at_most=at_most)
        # Whoever was told nothing yet may have less than that, and is a stranger until the end.
        known = self._accepted.keys() if at_most else shares.keys()
        self._accepted |= {share: shares[share] for share in accepted & shares.keys() & known}
        return accepted


class IngressShares:
    """What one ingress has of tenants' limits."""

    def __init__(self, coordinator_id: str) -> None:
        self._coordinator_id = coordinator_id
        self._current: Mapping[str, QuotaShare] = {}

    def update(self, shares: Shares, *, at_most: bool) -> Mapping[str, QuotaShare] | None:
        """What it has from now on; None when it is not among those that are told.

        With `at_most`, whichever is less: what it is told, or what it has.
        """
        own = shares.get(self._coordinator_id)
        if own is not None:
            own = self._current = _lower_shares(self._current, own) if at_most else own
        return own


def _lower_shares(
    current: Mapping[str, QuotaShare], shares: Mapping[str, QuotaShare]
) -> dict[str, QuotaShare]:
    """What a coordinator may have in either case."""
    return {
        tenant: _lower_share(current[tenant], new) if tenant in current else new
        for tenant, new in shares.items()
    }


def _lower_share(old: QuotaShare, new: QuotaShare) -> QuotaShare:
    return QuotaShare(
        requests_per_s=_lower_limit(old.requests_per_s, new.requests_per_s),
        tokens_per_s=_lower_limit(old.tokens_per_s, new.tokens_per_s),
        max_in_flight=_lower_limit(old.max_in_flight, new.max_in_flight),
    )


def _lower_limit(old: _Limit, new: _Limit) -> _Limit:
    """The lesser of two; None is no limit, and whether there is one is for the new one to say."""
    return new if old is None or new is None else min(old, new)


def _are_close(current: Mapping[str, QuotaShare] | None, shares: Mapping[str, QuotaShare]) -> bool:
    if current is None or current.keys() != shares.keys():
        return False
    return all(
        _is_close(before, now)
        for tenant, new in shares.items()
        for before, now in zip(current[tenant], new, strict=True)
    )


def _is_close(before: float | None, now: float | None) -> bool:
    if before is None or now is None:
        return before == now
    return abs(now - before) <= _MIN_CHANGE_FRACTION * max(abs(before), abs(now))
