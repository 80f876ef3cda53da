"""Quotas: dealt out by what is asked where, never more than there is, whoever is silent."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from baton.domain.demand import CoordinatorReport
from baton.domain.tenant import QuotaShare, RateLimit, Tenant
from baton.serving.controller.quota_allocator import IngressShares, QuotaAllocator, Shares
from baton.serving.scaling.ports import TickInputs

LIMIT = 100.0
PLACES = 10
ACME = Tenant(
    name="acme",
    rate=RateLimit(requests_per_s=LIMIT, tokens_per_s=1000.0),
    max_in_flight=PLACES,
)


class Ingresses:
    """Ingresses that begin with an equal share each, and may not hear."""

    def __init__(self, *names: str) -> None:
        share = QuotaShare(LIMIT / len(names), 1000.0 / len(names), PLACES // len(names))
        self.shares = {name: {"acme": share} for name in names}
        self.deaf: frozenset[str] = frozenset()
        self.sent: list[Shares] = []
        self.most = 0.0
        self._own: dict[str, IngressShares] = {}

    async def send(self, shares: Shares, *, at_most: bool) -> frozenset[str]:
        self.sent.append(shares)
        taken = frozenset(self.shares) - self.deaf
        for name in sorted(taken & shares.keys()):
            own = self._own.setdefault(name, IngressShares(name)).update(shares, at_most=at_most)
            assert own is not None
            self.shares[name] = dict(own)
            self._look()
        return taken

    def _look(self) -> None:
        rates = [share["acme"].requests_per_s or 0.0 for share in self.shares.values()]
        self.most = max(self.most, sum(rates))
        assert sum(share["acme"].max_in_flight or 0 for share in self.shares.values()) <= PLACES

    def looks(self, asked: Mapping[str, float]) -> TickInputs:
        reports = tuple(
            CoordinatorReport(
                coordinator_id=name, at_s=0.0, requested_rates=(("acme", rate, 10 * rate),)
            )
            for name, rate in asked.items()
            if name not in self.deaf
        )
        return TickInputs(reports=reports, missing=tuple(f"{name} is silent" for name in self.deaf))


def rates(ingresses: Ingresses) -> dict[str, float]:
    return {name: entry["acme"].requests_per_s or 0.0 for name, entry in ingresses.shares.items()}


async def test_an_ingress_with_more_demand_gets_more() -> None:
    ingresses = Ingresses("a", "b")
    desk = QuotaAllocator([ACME], ingresses.send)
    await desk.on_tick(ingresses.looks({"a": 200.0, "b": 0.0}))
    assert rates(ingresses)["a"] > 4 * rates(ingresses)["b"] > 0
    assert sum(rates(ingresses).values()) <= LIMIT * 1.0001


async def test_without_limits_no_share_is_sent() -> None:
    ingresses = Ingresses("a", "b")
    desk = QuotaAllocator([Tenant(name="acme")], ingresses.send)
    await desk.on_tick(ingresses.looks({"a": 200.0, "b": 0.0}))
    assert ingresses.sent == []


async def test_an_unchanged_share_is_not_sent_again() -> None:
    ingresses = Ingresses("a", "b")
    desk = QuotaAllocator([ACME], ingresses.send)
    await desk.on_tick(ingresses.looks({"a": 200.0, "b": 20.0}))
    ingresses.sent.clear()
    await desk.on_tick(ingresses.looks({"a": 200.0, "b": 20.1}))
    assert ingresses.sent == [], "rates are measured, and never twice the same"
    await desk.on_tick(ingresses.looks({"a": 200.0, "b": 25.0}))
    assert rates(ingresses)["b"] == 25.0


async def test_no_ingress_gets_a_share_that_another_has_not_returned() -> None:
    ingresses = Ingresses("a", "b")
    desk = QuotaAllocator([ACME], ingresses.send)
    await desk.on_tick(ingresses.looks({"a": 200.0, "b": 0.0}))
    before = rates(ingresses)
    ingresses.deaf = frozenset({"a"})
    await desk.on_tick(ingresses.looks({"a": 0.0, "b": 200.0}))
    assert rates(ingresses) == before
    ingresses.deaf = frozenset()
    await desk.on_tick(ingresses.looks({"a": 0.0, "b": 200.0}))
    assert rates(ingresses)["b"] > rates(ingresses)["a"]


async def test_the_share_of_a_removed_ingress_is_given_out_again() -> None:
    ingresses = Ingresses("a", "b")
    desk = QuotaAllocator([ACME], ingresses.send)
    await desk.on_tick(ingresses.looks({"a": 200.0, "b": 100.0}))
    del ingresses.shares["a"]
    await desk.on_tick(ingresses.looks({"b": 100.0}))
    assert rates(ingresses) == {"b": LIMIT}
    assert desk.accepted.keys() == {"b"}


async def test_a_new_allocator_never_gives_out_a_share_that_is_still_in_use() -> None:
    ingresses = Ingresses("a", "b")
    # `a` is heard first, so that it is raised before `b` has given anything back.
    await QuotaAllocator([ACME], ingresses.send).on_tick(ingresses.looks({"a": 0.0, "b": 200.0}))
    ingresses.most = 0.0
    await QuotaAllocator([ACME], ingresses.send).on_tick(ingresses.looks({"a": 100.0, "b": 100.0}))
    assert ingresses.most <= LIMIT * 1.0001
    assert rates(ingresses) == {"a": 50.0, "b": 50.0}


async def test_an_ingress_without_a_message_keeps_its_share() -> None:
    own = IngressShares("a")
    share = QuotaShare(5.0, None, None)
    assert own.update({"a": {"acme": share}}, at_most=False) == {"acme": share}
    assert own.update({"b": {"acme": QuotaShare(1.0, None, None)}}, at_most=True) is None
    assert own.update({"a": {"acme": QuotaShare(9.0, None, None)}}, at_most=True) == {"acme": share}


async def test_a_limit_that_is_changed_is_dealt_out_at_once() -> None:
    ingresses = Ingresses("a")
    desk = QuotaAllocator([ACME], ingresses.send)
    await desk.on_tick(ingresses.looks({"a": 200.0}))
    desk.reconfigure([Tenant(name="acme", rate=RateLimit(requests_per_s=5.0))])
    await desk.on_tick(ingresses.looks({"a": 200.0}))
    assert ingresses.shares["a"]["acme"] == QuotaShare(5.0, None, None)


_NAMES = ("a", "b", "c")
_ROUND = st.tuples(
    st.fixed_dictionaries({name: st.floats(min_value=0, max_value=1e4) for name in _NAMES}),
    st.frozensets(st.sampled_from(_NAMES), max_size=2),
)


@given(rounds=st.lists(_ROUND, max_size=6))
async def test_shares_never_add_up_to_more_than_the_limit_when_messages_are_lost(
    rounds: list[tuple[dict[str, float], frozenset[str]]],
) -> None:
    ingresses = Ingresses(*_NAMES)
    desk = QuotaAllocator([ACME], ingresses.send)
    # At first everyone has an equal share of its own accord; the desk has to hear of all of them.
    await desk.on_tick(ingresses.looks(dict.fromkeys(_NAMES, 1.0)))
    ingresses.most = 0.0
    for asked, deaf in rounds:
        ingresses.deaf = deaf
        await desk.on_tick(ingresses.looks(asked))
    ingresses.deaf = frozenset()
    await desk.on_tick(ingresses.looks(dict.fromkeys(_NAMES, 1.0)))
    assert ingresses.most <= LIMIT * (1 + 1e-9)
    assert min(rates(ingresses).values()) > 0
