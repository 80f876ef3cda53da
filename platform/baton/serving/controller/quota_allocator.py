"""Deals tenants' limits out to the ingresses, by what each of them was asked for lately.

Theory of operation. With every round of reports the limits are dealt out anew (`policy.quotas`). So
that the shares of a limit never add up to more than it, not even while they are on their way, they
are sent in two steps: first every ingress is told the lesser of what it has and what it gets, and
only when all have taken that, what they get. An ingress that does not answer keeps what it was last
told, and what it may have is nobody else's until it answers or is gone.

A desk that begins anew, with a new controller, does not know what ingresses have. They do: in the
first step each keeps whichever is less, what it has or what it is told.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from typing import Protocol, TypeVar

from baton.domain.demand import CoordinatorReport
from baton.domain.tenant import QuotaShare, Tenant
from baton.policy.admission.rate_limits import Asked, share
from baton.serving.scaling.ports import Looks

Shares = Mapping[str, Mapping[str, QuotaShare]]
"""By coordinator, then by tenant."""


class Send(Protocol):
    """Tells coordinators their shares."""

    def __call__(self, shares: Shares, *, at_most: bool) -> Awaitable[frozenset[str]]:
        """Returns which of them have taken theirs; `at_most`: or have less, and keep that."""
        ...


_Limit = TypeVar("_Limit", int | None, float | None)
_WORTH_IT = 0.02
"""Of a share: rates are measured, and never twice the same; smaller changes are not sent."""


class QuotaDesk:
    """See the module's theory of operation."""

    def __init__(self, tenants: Iterable[Tenant], send: Send) -> None:
        self._tenants = tuple(tenants)
        self._send = send
        self._asked: dict[str, tuple[Asked, ...]] = {}
        self._told: dict[str, Mapping[str, QuotaShare]] = {}
        """What each coordinator has taken last."""

    def reconfigure(self, tenants: Iterable[Tenant]) -> None:
        """Deal out other limits from the next round on."""
        self._tenants = tuple(tenants)

    @property
    def told(self) -> Shares:
        """What each coordinator has taken last."""
        return dict(self._told)

    async def take(self, looks: Looks) -> None:
        """Deal limits out by one round of reports."""
        self._note(looks.reports, all_came=not looks.missing)
        shares = share(self._tenants, self._asked)
        if not any(shares.values()) or self._are_in_force(shares):
            return
        # Who was told nothing yet lets in an equal share.
        even = share(self._tenants, dict.fromkeys(shares, ()))
        had = {one: self._told.get(one, even[one]) for one in shares}
        lesser = {one: _lesser(had[one], of_one) for one, of_one in shares.items()}
        if lesser != had or not shares.keys() <= self._told.keys():
            taken = await self._tell(lesser, at_most=True)
            if not lesser.keys() <= taken:
                return
        if not self._are_in_force(shares):
            await self._tell(shares, at_most=False)

    def _note(self, reports: Iterable[CoordinatorReport], *, all_came: bool) -> None:
        asked = {one.coordinator_id: one.wanted_rates for one in reports}
        # While somebody is silent, who was there is taken to be there still.
        self._asked = asked if all_came else self._asked | asked
        self._told = {one: told for one, told in self._told.items() if one in self._asked}

    def _are_in_force(self, shares: Shares) -> bool:
        return all(_close(self._told.get(one), of_one) for one, of_one in shares.items())

    async def _tell(self, shares: Shares, *, at_most: bool) -> frozenset[str]:
        taken = await self._send(shares, at_most=at_most)
        # Whoever was told nothing yet may have less than that, and is a stranger until the end.
        known = self._told.keys() if at_most else shares.keys()
        self._told |= {one: shares[one] for one in taken & shares.keys() & known}
        return taken


class OwnShares:
    """What one ingress has of tenants' limits."""

    def __init__(self, coordinator_id: str) -> None:
        self._coordinator_id = coordinator_id
        self._have: Mapping[str, QuotaShare] = {}

    def take(self, shares: Shares, *, at_most: bool) -> Mapping[str, QuotaShare] | None:
        """What it has from now on; None when it is not among those that are told.

        With `at_most`, whichever is less: what it is told, or what it has.
        """
        own = shares.get(self._coordinator_id)
        if own is not None:
            own = self._have = _lesser(self._have, own) if at_most else own
        return own


def _lesser(
    told: Mapping[str, QuotaShare], shares: Mapping[str, QuotaShare]
) -> dict[str, QuotaShare]:
    """What a coordinator may have in either case."""
    return {
        tenant: _least(told[tenant], new) if tenant in told else new
        for tenant, new in shares.items()
    }


def _least(old: QuotaShare, new: QuotaShare) -> QuotaShare:
    return QuotaShare(
        requests_per_s=_less(old.requests_per_s, new.requests_per_s),
        tokens_per_s=_less(old.tokens_per_s, new.tokens_per_s),
        max_in_flight=_less(old.max_in_flight, new.max_in_flight),
    )


def _less(old: _Limit, new: _Limit) -> _Limit:
    """The lesser of two; None is no limit, and whether there is one is for the new one to say."""
    return new if old is None or new is None else min(old, new)


def _close(told: Mapping[str, QuotaShare] | None, shares: Mapping[str, QuotaShare]) -> bool:
    if told is None or told.keys() != shares.keys():
        return False
    return all(
        _near(before, now)
        for tenant, new in shares.items()
        for before, now in zip(told[tenant], new, strict=True)
    )


def _near(before: float | None, now: float | None) -> bool:
    if before is None or now is None:
        return before == now
    return abs(now - before) <= _WORTH_IT * max(abs(before), abs(now))
