"""Divides tenants' limits among the ingresses by their recent demand.

Theory of operation. Each round of reports divides the limits anew (`policy.admission.rate_limits`).
The shares of a limit must never exceed it in total, not even while messages travel. So shares go
out in two steps. First every ingress gets the lower of its old and new share. After all have
accepted, they get the new share. An ingress that does not answer keeps its last share until it
answers or is gone.

A new controller does not know the shares in force. In the first step each ingress therefore keeps
the lower of its own and the received share.
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
        """Returns the coordinators that accepted; with `at_most` each keeps a lower share."""
        ...


_Limit = TypeVar("_Limit", int | None, float | None)
_MIN_CHANGE_FRACTION = 0.02
"""Of a share. Rates are noisy; smaller changes are not sent."""


class QuotaAllocator:
    """See the module. A `TickListener`."""

    def __init__(self, tenants: Iterable[Tenant], send: SendShares) -> None:
        self._tenants = tuple(tenants)
        self._send = send
        self._demand: dict[str, tuple[TenantRates, ...]] = {}
        self._accepted: dict[str, Mapping[str, QuotaShare]] = {}

    def reconfigure(self, tenants: Iterable[Tenant]) -> None:
        """Divide other limits from the next round on."""
        self._tenants = tuple(tenants)

    @property
    def accepted(self) -> Shares:
        """The last accepted shares."""
        return dict(self._accepted)

    async def on_tick(self, inputs: TickInputs) -> None:
        """Divide limits by one round of reports."""
        self._record_demand(inputs.reports, all_reported=not inputs.missing)
        shares = allocate_quotas(self._tenants, self._demand)
        if not any(shares.values()) or self._are_in_force(shares):
            return
        # A coordinator without a share admits an equal share.
        equal_shares = allocate_quotas(self._tenants, dict.fromkeys(shares, ()))
        previous = {
            coordinator_id: self._accepted.get(coordinator_id, equal_shares[coordinator_id])
            for coordinator_id in shares
        }
        lowered = {
            coordinator_id: _lower_shares(previous[coordinator_id], new)
            for coordinator_id, new in shares.items()
        }
        if lowered != previous or not shares.keys() <= self._accepted.keys():
            accepted = await self._send_shares(lowered, at_most=True)
            if not lowered.keys() <= accepted:
                return
        if not self._are_in_force(shares):
            await self._send_shares(shares, at_most=False)

    def _record_demand(self, reports: Iterable[CoordinatorReport], *, all_reported: bool) -> None:
        demand = {report.coordinator_id: report.requested_rates for report in reports}
        # While a report is missing, its coordinator counts as alive.
        self._demand = demand if all_reported else self._demand | demand
        self._accepted = {
            coordinator_id: accepted
            for coordinator_id, accepted in self._accepted.items()
            if coordinator_id in self._demand
        }

    def _are_in_force(self, shares: Shares) -> bool:
        return all(
            _are_close(self._accepted.get(coordinator_id), new)
            for coordinator_id, new in shares.items()
        )

    async def _send_shares(self, shares: Shares, *, at_most: bool) -> frozenset[str]:
        accepted = await self._send(shares, at_most=at_most)
        # A coordinator without a known share may hold less; it stays unknown until the last step.
        known = self._accepted.keys() if at_most else shares.keys()
        self._accepted |= {
            coordinator_id: shares[coordinator_id]
            for coordinator_id in accepted & shares.keys() & known
        }
        return accepted


class IngressShares:
    """The shares of one ingress."""

    def __init__(self, coordinator_id: str) -> None:
        self._coordinator_id = coordinator_id
        self._current: Mapping[str, QuotaShare] = {}

    def update(self, shares: Shares, *, at_most: bool) -> Mapping[str, QuotaShare] | None:
        """The shares from now on; None if the message has none for this ingress.

        With `at_most` each limit is the lower of the old and the new value.
        """
        own = shares.get(self._coordinator_id)
        if own is not None:
            own = self._current = _lower_shares(self._current, own) if at_most else own
        return own


def _lower_shares(
    current: Mapping[str, QuotaShare], shares: Mapping[str, QuotaShare]
) -> dict[str, QuotaShare]:
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
    """None is no limit; the new value decides whether there is a limit."""
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
