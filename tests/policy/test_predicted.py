from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import Load, ReplicaView, Role
from baton.domain.handoff import HandoffMode, HitSource, PlacementDecision, RouteReason
from baton.domain.request import LocalOnlyReason
from baton.domain.slo import Slo
from baton.domain.value import evolve
from baton.perf.timing import decode_delay_s
from baton.policy.placement.candidates import PlacementOptions
from baton.policy.placement.port import (
    Disaggregate,
    NoRoute,
    NoRouteReason,
    PlacementContext,
    PlacementQuery,
)
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.policy.placement.replica_cost import (
    fill_relative_costs,
    holds_nothing,
    idle_cost,
    is_idle,
    replica_cost,
)
from baton.policy.placement.slo_impact import SloImpact
from tests.fakes.timings import (
    FixedLinks,
    FixedTimings,
    KnownHits,
    LinearTiming,
    placement_context,
    replica_view,
)

BUSY = Load(running_requests=20)


def query(prompt_tokens: int = 1600, **changes: object) -> PlacementQuery:
    return evolve(PlacementQuery(prompt_tokens=prompt_tokens, max_tokens=100), **changes)  # type: ignore[arg-type]


def placed(
    item: PlacementQuery, around: PlacementContext, options: PredictedOptions | None = None
) -> PlacementDecision:
    decision = PredictedPlacer(options).place(item, around)
    assert isinstance(decision, PlacementDecision)
    return decision


def pd(decode_load: Load = BUSY) -> tuple[ReplicaView, ReplicaView]:
    return replica_view("p0", Role.PREFILL), replica_view("d0", Role.DECODE, decode_load)


def goes_on() -> tuple[ReplicaView, ReplicaView]:
    """As `pd`, whose decode replica goes on after another engine's token."""
    return replica_view("p0", Role.PREFILL), replica_view(
        "d0", load=BUSY, supports_prefix_fetch=True
    )


def test_an_empty_prompt_saves_nothing() -> None:
    hits = KnownHits({"d0": 99})
    decision = placed(
        query(0, hits=hits, local_only=LocalOnlyReason.PROMPT_EMBEDS), placement_context(*pd())
    )
    assert decision.options[0].hit_tokens == 0


# ------------------------------------------------------------------ what wins


def test_a_long_prompt_goes_to_the_prefill_pool_when_it_would_stall_streams() -> None:
    decision = placed(query(), placement_context(*pd()))
    assert decision.route.mode is HandoffMode.PULL
    assert decision.route.prefill_replica_id == "p0"
    assert decision.route.reason is RouteReason.DISAGGREGATED


def test_a_short_prompt_stays_on_the_decode_replica() -> None:
    decision = placed(query(10), placement_context(*pd()))
    assert decision.route.mode is HandoffMode.LOCAL
    assert decision.route.reason is RouteReason.LOCAL_FASTER


def test_a_prompt_that_decode_has_cached_stays_there() -> None:
    hits = KnownHits({"d0": 99})
    decision = placed(query(hits=hits), placement_context(*pd()))
    assert decision.route.mode is HandoffMode.LOCAL
    assert decision.options[0].hit_tokens == 99 * 16
    assert decision.options[0].hit_source is HitSource.REPORTED
    assert decision.options[0].hit_age_s == 0.5


def test_a_prefix_hit_is_worth_the_prefill_it_saves_and_no_more() -> None:
    held, free = replica_view("held"), replica_view("free")
    hits = KnownHits({"held": 50})  # 800 of 1,600 tokens: 80 ms
    assert placed(query(hits=hits), placement_context(held, free)).route.decode_replica_id == "held"
    for queued, winner in ((600, "held"), (1200, "free")):  # 60 + 10 ms, 120 + 10 ms
        waiting = replica_view("held", load=Load(queued_tokens=queued))
        decision = placed(query(hits=hits), placement_context(waiting, free))
        assert decision.route.decode_replica_id == winner, queued


def test_a_long_queue_before_prefill_sends_the_request_to_decode() -> None:
    _, decode = pd()
    full = replica_view("p0", Role.PREFILL, Load(queued_tokens=100_000))
    assert placed(query(), placement_context(full, decode)).route.mode is HandoffMode.LOCAL


def test_a_slow_link_sends_the_request_to_decode() -> None:
    slow = FixedLinks(bytes_per_s=1e3)
    assert placed(query(), placement_context(*pd(), links=slow)).route.mode is HandoffMode.LOCAL


def test_unreported_work_counts_as_queued() -> None:
    first = replica_view("a", unreported_tokens=2000, unreported_legs=1)
    decision = placed(query(), placement_context(first, replica_view("b")))
    assert decision.route.decode_replica_id == "b"


def test_unreported_work_counts_for_other_coordinators_too() -> None:
    view = replica_view("a", unreported_tokens=1000, unreported_legs=2)
    alone, crowded = (
        replica_cost(
            query(), view, LinearTiming(), output_tokens=10, at_s=0.0, peer_load_factor=crowd
        )
        for crowd in (1.0, 3.0)
    )
    assert crowded.running_streams == 3 * alone.running_streams == 6
    added_s = crowded.backlog_s - alone.backlog_s
    assert added_s == pytest.approx(2000 * 0.0001 + 4 * 0.001 / 2)  # and half a longer step


def test_an_old_report_of_a_queue_counts_for_less_every_second() -> None:
    queued = replica_view("a", load=Load(queued_tokens=10_000))
    now = placed(query(), placement_context(queued)).options[0].queue_s
    later = placed(query(), placement_context(queued, at_s=0.4)).options[0].queue_s
    long_after = placed(query(), placement_context(queued, at_s=60.0)).options[0].queue_s
    assert now == pytest.approx(1.0)
    assert later == pytest.approx(0.6)
    assert long_after == 0


def test_a_full_batch_is_waited_for() -> None:
    full = replica_view("a", load=Load(running_requests=64))
    decision = placed(query(), placement_context(full))
    stream_s = 10 * (0.01 + 65 * 0.001)
    assert decision.options[0].queue_s >= stream_s / 64
    free = placement_context(full, replica_view("b", load=Load(running_requests=60)))
    assert placed(query(10), free).route.decode_replica_id == "b"


def test_full_memory_is_waited_for() -> None:
    full = replica_view("a", load=Load(kv_used_fraction=0.99))
    decision = placed(query(), placement_context(full, replica_view("b")))
    assert decision.route.decode_replica_id == "b"


def test_blocks_in_host_memory_cost_the_time_to_load_them() -> None:
    warm, cold = replica_view("warm"), replica_view("cold")
    few = KnownHits({"warm": 90}, {"warm": 10})  # saves 144 ms, loads for 10 ms
    assert placed(query(hits=few), placement_context(warm, cold)).route.decode_replica_id == "warm"
    slow = KnownHits({"warm": 90}, {"warm": 90})
    assert placed(query(hits=slow), placement_context(warm)).options[0].prefill_s == pytest.approx(
        0.01 + 160 * 0.0001 + 90 * 0.001
    )


def test_slow_hardware_is_known_by_its_timing() -> None:
    timings = FixedTimings(by_pool={"slow": LinearTiming(per_token_s=0.001)})
    around = placement_context(replica_view("a", pool="slow"), replica_view("b"), timings=timings)
    assert placed(query(), around).route.decode_replica_id == "b"


def test_a_prefix_is_not_stored_twice_where_what_is_stored_is_used_again() -> None:
    held, free = replica_view("held", load=Load(queued_tokens=1200)), replica_view("free")
    around, hits = placement_context(held, free), KnownHits({"held": 50})
    assert placed(query(hits=hits), around).route.decode_replica_id == "free"
    assert placed(query(hits=hits, reuses_per_token=2.0), around).route.decode_replica_id == "held"


def test_an_uneven_load_counts_for_as_long_as_it_lasts() -> None:
    views = [replica_view("a", load=Load(running_requests=30)), replica_view("b")]
    costs = [
        replica_cost(query(), view, LinearTiming(), output_tokens=10, at_s=0) for view in views
    ]
    fill_relative_costs(costs, reuses_per_token=0.0)
    many, none = costs
    lasts = (15 + 1) / (30 + 1)
    assert many.own_decode_s == pytest.approx(10 * (0.01 + 0.016 + lasts * 0.015))
    assert many.stream_slowdown_s == pytest.approx(lasts * 10 * 0.001)
    assert none.own_decode_s == pytest.approx(10 * (0.01 + 0.016 - 0.015 / 31))
    assert none.stream_slowdown_s == pytest.approx(10 * 0.001 / 31)


@given(
    st.integers(1, 20_000),
    st.sampled_from(Role),
    st.sampled_from(
        [
            replica_view("c", load=Load(running_requests=1)),
            replica_view("c", load=Load(queued_requests=1, queued_tokens=9)),
            replica_view("c", load=Load(pulling_requests=1)),
            replica_view("c", load=Load(kv_used_fraction=0.5)),
            replica_view("c", inflight_legs=1, inflight_streams=1),
            replica_view("c", unreported_legs=1, unreported_tokens=50),
        ]
    ),
    st.none() | st.floats(0.0, 2000.0),
    st.floats(0.0, 100.0),
)
def test_an_idle_replica_costs_as_computed_for_another_and_a_busy_one_is_not_idle(
    prompt_tokens: int, role: Role, busy: ReplicaView, context: float | None, at_s: float
) -> None:
    timing, item = LinearTiming(), query(prompt_tokens)
    first, second = (replica_view(name, role) for name in "ab")
    assert is_idle(first)
    assert holds_nothing(item, first)
    computed = [
        replica_cost(item, view, timing, output_tokens=10, at_s=at_s, stream_context=stream_context)
        for view, stream_context in ((first, None), (second, context))
    ]
    assert idle_cost(computed[:1], second, timing) == computed[1]
    assert idle_cost(computed[:1], second, LinearTiming()) is None
    assert not is_idle(busy)
    assert not holds_nothing(query(hits=KnownHits({"a": 1})), first)
    assert not holds_nothing(query(adapter="x"), first)


def test_idle_replicas_of_different_roles_or_room_have_costs_of_their_own() -> None:
    timing, first = LinearTiming(), replica_view("a")
    known = [replica_cost(query(), first, timing, output_tokens=10, at_s=0.0)]
    small = replace(first.facts, kv_blocks=first.facts.kv_blocks // 2)
    assert idle_cost(known, evolve(first, facts=small), timing) is None
    assert idle_cost(known, replica_view("b", Role.PREFILL), timing) is None


class Room:
    """So many free blocks everywhere."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks

    def free_blocks(self, replica_id: str) -> int:
        del replica_id
        return self._blocks


def test_free_room_in_a_cache_means_no_eviction() -> None:
    item = query(hits=KnownHits({"b": 50}))
    found = []
    for free in (0, 60, 200):
        costs = [
            replica_cost(item, replica_view(name), LinearTiming(), output_tokens=1, at_s=0)
            for name in "ab"
        ]
        fill_relative_costs(costs, reuses_per_token=2.0, cache_capacity=Room(free))
        found.append(costs[0].eviction_cost_s)
    # 1,600 tokens are stored, of which 960 have room in 60 blocks; of the rest, 640 make way.
    assert found == pytest.approx([2 * 799 * 0.0001, 2 * 639 * 0.0001, 0.0])


def test_streams_that_share_a_prefix_attend_to_all_of_it_each() -> None:
    # 20 streams of 1,000 tokens, most of them the same blocks: a tenth of the cache is in use.
    load = Load(running_requests=20, kv_used_fraction=0.1)
    views = (replica_view("busy", load=load), replica_view("idle"))
    contexts = {"busy": 1000.0, "idle": None}
    costs = [
        replica_cost(
            query(1000),
            view,
            LinearTiming(),
            output_tokens=10,
            at_s=0,
            stream_context=contexts[view.replica_id],
        )
        for view in views
    ]
    assert [cost.context_tokens for cost in costs] == [20_000, 0]


class Saturating(LinearTiming):
    """A step that grows less and less with what it attends to."""

    def step_s(self, *, running: int, context_tokens: int = 0) -> float:
        del running
        used = min(1.0, context_tokens / 40_000)
        return 0.006 + used * (0.054 - 0.026 * used)


def test_an_idle_replica_is_never_dearer_for_streams_that_run_elsewhere() -> None:
    load = Load(running_requests=20, kv_used_fraction=0.1)
    costs = [
        replica_cost(
            query(1000),
            view,
            Saturating(),
            output_tokens=100,
            at_s=0,
            stream_context=1000.0 if view.load.running_requests else None,
        )
        for view in (replica_view("busy", load=load), replica_view("idle"))
    ]
    fill_relative_costs(costs, reuses_per_token=0.0)
    busy, idle = costs
    assert idle.own_decode_s < busy.own_decode_s


def test_short_prompts_delay_streams_by_the_cost_of_any_prefill() -> None:
    class Fixed(LinearTiming):
        def prefill_s(
            self, tokens: int, *, running: int = 0, context_tokens: int = 0, length_tokens: int = 0
        ) -> float:
            return 0.02 + LinearTiming.prefill_s(self, tokens, running=running) if tokens else 0.0

    assert decode_delay_s(Fixed(), 0) == 0
    assert decode_delay_s(Fixed(), 1) == pytest.approx(0.02 + 0.0001)
    assert decode_delay_s(Fixed(), 1000) == pytest.approx(0.02 + 0.1)


def test_eviction_cost_is_the_prefix_that_another_replica_already_holds() -> None:
    views = [replica_view("a", load=Load(running_requests=4)), replica_view("b")]
    item = query(hits=KnownHits({"b": 50}))
    costs = [replica_cost(item, view, LinearTiming(), output_tokens=1, at_s=0) for view in views]
    fill_relative_costs(costs, reuses_per_token=2.0)
    twice, once = costs
    assert twice.eviction_cost_s == pytest.approx(2 * 799 * 0.0001 * (1 + 4))
    assert once.eviction_cost_s == 0


# ------------------------------------------------------------------ prefix fetch


def test_a_prefix_is_fetched_from_a_holder_that_is_too_busy_itself() -> None:
    holder = replica_view("h", load=Load(running_requests=63), supports_prefix_fetch=True)
    free = replica_view("f", supports_prefix_fetch=True)
    decision = placed(query(hits=KnownHits({"h": 90})), placement_context(holder, free))
    assert decision.route.reason is RouteReason.PREFIX_FETCH
    assert decision.route.prefill_replica_id == "h"
    assert decision.route.decode_replica_id == "f"
    assert decision.route.prefill_tokens == 90 * 16 + 1


def test_nothing_is_fetched_from_an_engine_that_cannot_do_it() -> None:
    holder = replica_view("h", load=Load(running_requests=63))
    decision = placed(
        query(hits=KnownHits({"h": 90})), placement_context(holder, replica_view("f"))
    )
    assert decision.route.mode is HandoffMode.LOCAL


@pytest.mark.parametrize("disaggregate", [Disaggregate.ALWAYS, Disaggregate.NEVER])
def test_nothing_is_fetched_unless_disaggregation_is_auto(disaggregate: Disaggregate) -> None:
    holder = replica_view("h", load=Load(running_requests=63), supports_prefix_fetch=True)
    around = placement_context(holder, replica_view("f", supports_prefix_fetch=True))
    options = PredictedOptions(disaggregate=disaggregate)
    decision = placed(query(hits=KnownHits({"h": 90})), around, options)
    assert decision.route.mode is HandoffMode.LOCAL


# ------------------------------------------------------------------ objectives


def test_the_ttft_objective_comes_before_interference() -> None:
    queued = replica_view("p0", Role.PREFILL, Load(queued_tokens=3000))  # 0.3 s and more
    _, decode = pd()
    around = placement_context(queued, decode)
    assert placed(query(), around).route.mode is HandoffMode.PULL
    strict = PredictedOptions(ttft_slo_s=0.3)
    assert placed(query(), around, strict).route.mode is HandoffMode.LOCAL


def test_a_first_token_of_prefill_waits_for_no_transfer_and_costs_the_same() -> None:
    late = placed(query(), placement_context(*goes_on())).options[0]
    early = placed(query(allow_early_token=True), placement_context(*goes_on())).options[0]
    assert early.ttft_s == late.queue_s + late.prefill_s
    assert late.ttft_s == early.first_decode_token_s > early.ttft_s
    assert early.cost_s == late.cost_s
    around = placement_context(*goes_on())
    tight = PredictedOptions(ttft_slo_s=(early.ttft_s + late.ttft_s) / 2)
    assert placed(query(allow_early_token=True), around, tight).route.mode is HandoffMode.PULL
    assert placed(query(), around, tight).options[0].ttft_s <= late.ttft_s


@pytest.mark.parametrize(("prefix_fetch", "takes_up"), [(False, True), (True, False)])
def test_no_first_token_is_predicted_before_a_handoff_that_decode_cannot_continue(
    *, prefix_fetch: bool, takes_up: bool
) -> None:
    prefill, decode = goes_on()
    facts = replace(decode.facts, supports_prefix_fetch=prefix_fetch, supports_resume=takes_up)
    unable = evolve(decode, facts=facts)
    assert (
        placed(query(allow_early_token=True), placement_context(prefill, decode))
        .options[0]
        .is_early_token
    )
    assert (
        not placed(query(allow_early_token=True), placement_context(prefill, unable))
        .options[0]
        .is_early_token
    )


def test_a_handoff_that_breaks_the_pace_after_an_early_token_misses_the_objective() -> None:
    slo = Slo(ttft_s=0.2, tpot_s=0.05)
    timing = LinearTiming(per_step_s=0.01, per_token_s=0.0001, per_stream_s=0.0005)
    queued = Load(queued_tokens=3000, queued_requests=1)
    around = placement_context(
        replica_view("p0", Role.PREFILL),
        replica_view("d0", load=queued, supports_prefix_fetch=True),
        timings=FixedTimings(timing=timing, output_tokens=3.0),
        links=FixedLinks(setup_s=0.2),
    )
    options = PredictedOptions(ttft_slo_s=0.2, tpot_slo_s=0.05)
    for early in (False, True):
        item = query(1000, max_tokens=3, slo=slo, allow_early_token=early)
        assert placed(item, around, options).route.reason is RouteReason.DECODE_ON_PREFILL


def test_time_already_waited_brings_the_deadline_nearer() -> None:
    queued = replica_view("p0", Role.PREFILL, Load(queued_tokens=3000))
    around = placement_context(queued, pd()[1])
    options = PredictedOptions(ttft_slo_s=0.8)
    assert placed(query(), around, options).route.mode is HandoffMode.PULL
    assert placed(query(waited_s=0.5), around, options).route.mode is HandoffMode.LOCAL


def test_interference_counts_for_less_while_streams_are_far_ahead_of_their_tpot() -> None:
    queued = replica_view("p0", Role.PREFILL, Load(queued_tokens=3000))
    around = placement_context(queued, pd()[1])
    relaxed = PredictedOptions(tpot_slo_s=10.0)
    assert placed(query(), around, relaxed).route.mode is HandoffMode.LOCAL


def kept(
    *views: ReplicaView,
    item: PlacementQuery | None = None,
    slo_impact: SloImpact | None = None,
    timings: FixedTimings | None = None,
) -> list[str]:
    """The replicas that are looked at, of a large fleet."""
    around = placement_context(*views, timings=timings or FixedTimings())
    options = PlacementOptions(item or query(), around, slo=Slo(), slo_impact=slo_impact)
    ids = [view.replica_id for view in views]
    return [cost.view.replica_id for cost in options.costs(ids, leave_out_worse=True)]


IDLE, ONE, TWO = Load(), Load(running_requests=1), Load(running_requests=2)


def test_of_replicas_of_a_kind_the_least_loaded_is_looked_at() -> None:
    two, one, other = (
        replica_view(name, load=load) for name, load in zip("abc", (TWO, ONE, ONE), strict=True)
    )
    assert kept(two, one, other) == ["b"]
    assert kept(two, one, replica_view("c", load=IDLE)) == ["c"]
    waiting = replica_view("c", load=Load(running_requests=1, queued_requests=1, queued_tokens=9))
    assert kept(waiting, one) == ["b"]


@pytest.mark.parametrize(
    ("other", "item"),
    [
        pytest.param(replica_view("b", load=TWO, block_size_tokens=32), query(), id="another kind"),
        pytest.param(replica_view("b", load=TWO, layout="x"), query(), id="another layout"),
        pytest.param(
            replica_view("b", load=TWO), query(session_replica_id="b"), id="the session's"
        ),
        pytest.param(replica_view("b", load=TWO), query(hits=KnownHits({"b": 1})), id="a holder"),
        pytest.param(replica_view("b", load=TWO), query(adapter="x"), id="with an adapter"),
    ],
)
def test_a_replica_that_may_be_better_is_looked_at(
    other: ReplicaView, item: PlacementQuery
) -> None:
    assert kept(replica_view("a", load=ONE), other, item=item) == ["a", "b"]


def test_a_replica_of_another_pool_is_looked_at_where_its_engine_takes_another_time() -> None:
    one = replica_view("a", load=ONE, pool="old")
    two = replica_view("b", load=TWO, pool="new")
    assert kept(one, two) == ["a"]
    timings = FixedTimings(by_pool={"new": LinearTiming(per_step_s=0.001)})
    assert kept(one, two, timings=timings) == ["a", "b"]


def test_all_are_looked_at_where_streams_have_an_objective_or_the_least_loaded_waits() -> None:
    one, two = replica_view("a", load=ONE), replica_view("b", load=TWO)
    assert kept(one, two, slo_impact=SloImpact(0.02)) == ["a", "b"]
    full = replica_view("a", load=Load(running_requests=1, kv_used_fraction=1.0))
    assert kept(full, two) == ["a", "b"]
    leased = replica_view("a", load=Load(kv_used_fraction=1.0))
    assert kept(leased, two) == ["a", "b"]
    behind = replica_view("a", load=Load(running_requests=1, queued_tokens=10))
    assert kept(behind, two) == ["a", "b"]


def test_the_loads_of_replicas_that_are_left_out_count_in_the_means() -> None:
    views = [
        replica_view(name, load=load) for name, load in zip("abc", (ONE, TWO, TWO), strict=True)
    ]
    options = PlacementOptions(query(), placement_context(*views), slo=Slo(), slo_impact=None)
    (alone,) = options.costs("abc", leave_out_worse=True)
    assert alone == options.costs("abc")[0]


@pytest.mark.parametrize("wrong", [{"ttft_slo_s": 0.0}, {"tpot_slo_s": -1.0}, {"shortlist": 0}])
def test_objectives_must_make_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PredictedOptions(**wrong)  # type: ignore[arg-type]


# ------------------------------------------------------------------ what forces a choice


def test_with_no_replica_there_is_no_route() -> None:
    answer = PredictedPlacer().place(query(), placement_context())
    assert answer == NoRoute(reason=NoRouteReason.NO_REPLICA)
    draining = placement_context(replica_view("a", draining=True))
    assert PredictedPlacer().place(query(), draining) == NoRoute(reason=NoRouteReason.ALL_DRAINING)


@pytest.mark.parametrize(
    ("views", "changes", "reason"),
    [
        ([replica_view("p", Role.PREFILL)], {}, RouteReason.NO_DECODE_REPLICA),
        ([replica_view("d")], {}, RouteReason.NO_PREFILL_REPLICA),
        ([replica_view("m", Role.MIXED)], {}, RouteReason.MIXED_POOL),
        (list(pd()), {"local_only": LocalOnlyReason.FAN_OUT}, RouteReason.LOCAL_ONLY),
        (list(pd()), {"avoid": frozenset({"p0"})}, RouteReason.NO_PREFILL_REPLICA),
        (
            [replica_view("p", Role.PREFILL, layout="other"), replica_view("d")],
            {},
            RouteReason.INCOMPATIBLE,
        ),
    ],
)
def test_a_forced_local_route_has_its_reason(
    views: list[ReplicaView], changes: dict[str, object], reason: RouteReason
) -> None:
    decision = placed(evolve(query(), **changes), placement_context(*views))  # type: ignore[arg-type]
    assert decision.route.mode is HandoffMode.LOCAL
    assert decision.route.reason is reason


def test_pairs_out_of_order_are_not_used() -> None:
    broken = FixedLinks(blocked_pairs=frozenset({("p0", "d0")}))
    decision = placed(query(), placement_context(*pd(), links=broken))
    assert decision.route.reason is RouteReason.NO_LINK
    other = placement_context(
        *pd(), replica_view("d1", load=Load(running_requests=60)), links=broken
    )
    decision = placed(query(), other, PredictedOptions(disaggregate=Disaggregate.ALWAYS))
    assert decision.route.decode_replica_id == "d1"


def test_disaggregation_can_be_forced_and_forbidden() -> None:
    always = PredictedOptions(disaggregate=Disaggregate.ALWAYS)
    assert placed(query(10), placement_context(*pd()), always).route.mode is HandoffMode.PULL
    never = PredictedOptions(disaggregate=Disaggregate.NEVER)
    decision = placed(query(), placement_context(*pd()), never)
    assert decision.route.reason is RouteReason.DISAGGREGATION_OFF


def test_a_replica_that_failed_the_request_is_the_last_resort() -> None:
    busy = replica_view("b", load=Load(running_requests=60))
    around = placement_context(replica_view("a"), busy)
    assert placed(query(avoid=frozenset({"a"})), around).route.decode_replica_id == "b"
    only = placement_context(replica_view("a"))
    assert placed(query(avoid=frozenset({"a"})), only).route.decode_replica_id == "a"


# ------------------------------------------------------------------ the decode leg


def test_decode_is_chosen_by_the_bytes_still_to_move() -> None:
    source = replica_view("p", Role.PREFILL)
    around = placement_context(source, replica_view("d0"), replica_view("d1"))
    hits = KnownHits({"d1": 99})
    assert PredictedPlacer().place_decode(query(hits=hits), source, around) == "d1"


def test_decode_is_never_a_replica_that_cannot_pull() -> None:
    source = replica_view("p", Role.PREFILL)
    views = (source, replica_view("d0"), replica_view("d1", layout="other"))
    broken = FixedLinks(blocked_pairs=frozenset({("p", "d0")}))
    around = placement_context(*views, links=broken)
    assert PredictedPlacer().place_decode(query(), source, around) is None


def test_decode_prefers_the_smaller_batch() -> None:
    source = replica_view("p", Role.PREFILL)
    around = placement_context(source, replica_view("d0", load=BUSY), replica_view("d1"))
    assert PredictedPlacer().place_decode(query(), source, around) == "d1"


# ------------------------------------------------------------------ sessions, ties, large fleets


def test_a_session_stays_where_it_was_among_near_equals() -> None:
    around = placement_context(*(replica_view(f"d{i}") for i in range(4)))
    for wanted in ("d0", "d1", "d2", "d3"):
        decision = placed(query(session_replica_id=wanted), around)
        assert decision.route.decode_replica_id == wanted
    loaded = placement_context(
        replica_view("d0", load=Load(queued_tokens=5000)), replica_view("d1")
    )
    decision = placed(query(session_replica_id="d0"), loaded)
    assert decision.route.decode_replica_id == "d1"


def test_the_same_view_gives_the_same_route_in_any_order() -> None:
    views = [replica_view(f"d{i}") for i in range(6)]
    first = placed(query(), placement_context(*views))
    assert first == placed(query(), placement_context(*reversed(views)))


def test_coordinators_break_ties_differently() -> None:
    around = placement_context(*(replica_view(f"d{i}") for i in range(8)))
    chosen = set()
    for seed in range(20):
        decision = PredictedPlacer(seed=seed).place(query(), around)
        assert isinstance(decision, PlacementDecision)
        chosen.add(decision.route.decode_replica_id)
    assert len(chosen) > 3


def test_a_large_fleet_is_sampled_but_holders_are_always_looked_at() -> None:
    views = [replica_view(f"d{i:03}") for i in range(300)]
    placer = PredictedPlacer(PredictedOptions(shortlist=4))
    decision = placer.place(query(hits=KnownHits({"d123": 99})), placement_context(*views))
    assert isinstance(decision, PlacementDecision)
    assert decision.route.decode_replica_id == "d123"
    assert decision.options_considered <= 9


def test_a_large_fleet_is_sampled_but_the_sessions_replica_is_always_looked_at() -> None:
    views = [replica_view(f"d{i:03}") for i in range(300)]
    placer = PredictedPlacer(PredictedOptions(shortlist=4))
    decision = placer.place(query(session_replica_id="d123"), placement_context(*views))
    assert isinstance(decision, PlacementDecision)
    assert decision.route.decode_replica_id == "d123"


def test_a_large_fleet_is_sampled_among_those_that_have_not_failed() -> None:
    views = [replica_view(f"d{i:03}") for i in range(40)]
    avoid = frozenset(f"d{i:03}" for i in range(30))
    placer = PredictedPlacer(PredictedOptions(shortlist=2))
    for _ in range(50):
        item = query(avoid=avoid, hits=KnownHits({"d001": 90}), session_replica_id="d002")
        decision = placer.place(item, placement_context(*views))
        assert isinstance(decision, PlacementDecision)
        assert decision.route.decode_replica_id not in avoid


# ------------------------------------------------------------------ the numbers


def test_a_decision_shows_the_best_three_and_its_own_first() -> None:
    around = placement_context(*pd(), replica_view("d1"), replica_view("d2"))
    decision = placed(query(), around)
    assert len(decision.options) == 3
    assert decision.options_considered > 3
    best = decision.options[0]
    assert best.decode_replica_id == decision.route.decode_replica_id
    assert best.mode is decision.route.mode


def test_the_numbers_of_a_handoff_are_those_of_its_parts() -> None:
    around = placement_context(replica_view("p0", Role.PREFILL), replica_view("d0", load=BUSY))
    option = placed(query(), around).options[0]
    assert option.mode is HandoffMode.PULL
    assert option.queue_s == 0
    assert option.prefill_s == pytest.approx(0.01 + 1600 * 0.0001)
    assert option.transfer_s == pytest.approx(0.002 + 100 * 1024 / 1e9)
    assert option.decode_s == pytest.approx((0.01 + 21 * 0.001) * 1.5)
    assert option.interference_s == pytest.approx(20 * 10 * 0.001 / 21)  # until one of 20 has ended
    assert option.ttft_s == pytest.approx(0.17 + 0.002 + 0.0001024 + 0.0465)


loads = st.builds(
    Load,
    running_requests=st.integers(0, 80),
    queued_requests=st.integers(0, 80),
    queued_tokens=st.integers(0, 100_000),
    kv_used_fraction=st.floats(0, 1),
    pulling_requests=st.integers(0, 20),
)
fleets = st.lists(st.tuples(st.sampled_from(list(Role)), loads, st.booleans()), max_size=8)


@given(fleets, st.integers(1, 4000), st.sampled_from(list(Disaggregate)), st.integers(0, 3))
def test_a_route_names_replicas_that_take_new_work_in_every_fleet(
    fleet: list[tuple[Role, Load, bool]], prompt: int, disaggregate: Disaggregate, shortlist: int
) -> None:
    views = [
        replica_view(f"r{i}", role, load, draining=draining, supports_prefix_fetch=True)
        for i, (role, load, draining) in enumerate(fleet)
    ]
    around = placement_context(*views)
    options = PredictedOptions(disaggregate=disaggregate, shortlist=shortlist + 1)
    hits = KnownHits({f"r{i}": i for i in range(5)})
    answer = PredictedPlacer(options).place(query(prompt, hits=hits), around)
    serving = {view.replica_id for view in views if not view.draining}
    if isinstance(answer, NoRoute):
        assert not serving
        return
    route = answer.route
    assert route.decode_replica_id in serving
    assert route.prefill_replica_id is None or route.prefill_replica_id in serving
    assert route.prefill_replica_id != route.decode_replica_id
    for option in answer.options:
        numbers = (option.queue_s, option.prefill_s, option.transfer_s, option.decode_s)
        assert min(*numbers, option.interference_s) >= 0


@given(loads, st.integers(1, 3000), st.integers(0, 50_000))
def test_more_queue_never_attracts_a_request(load: Load, prompt: int, more: int) -> None:
    heavier = load._replace(queued_tokens=load.queued_tokens + more)
    other = replica_view("other", load=load)
    around = placement_context(replica_view("one", load=load), other)
    before = placed(query(prompt), around).route.decode_replica_id
    after = placed(query(prompt), placement_context(replica_view("one", load=heavier), other))
    if before == "other":
        assert after.route.decode_replica_id == "other"


# ------------------------------------------------------------------ queues


class Squared(LinearTiming):
    """An engine on which a prompt takes longer with its square; a queue of short ones does not."""

    def prefill_s(
        self, tokens: int, *, running: int = 0, context_tokens: int = 0, length_tokens: int = 0
    ) -> float:
        del running, context_tokens
        return 1e-8 * tokens * min(tokens, length_tokens or tokens)


def queued(role: Role, uncached: int, load: Load, **changes: object) -> float:
    view = replica_view("r", role, load, **changes)
    cost = replica_cost(query(uncached), view, Squared(), output_tokens=10.0, at_s=0.0)
    return cost.backlog_s


def test_a_queue_of_short_prompts_is_not_taken_for_a_long_one() -> None:
    one = queued(Role.DECODE, 1600, Load(queued_requests=1, queued_tokens=32_000))
    twenty = queued(Role.DECODE, 1600, Load(queued_requests=20, queued_tokens=32_000))
    assert twenty == pytest.approx(1e-8 * 32_000 * 1600, rel=0.05)
    assert one > 10 * twenty


def test_prompts_that_a_prefill_replica_computes_are_part_of_its_queue() -> None:
    load = Load(queued_requests=10, running_requests=10, queued_tokens=32_000)
    assert queued(Role.PREFILL, 1600, load) == pytest.approx(1e-8 * 32_000 * 1600, rel=0.05)


def test_a_long_prompt_is_not_made_short_by_the_queue_before_it() -> None:
    load = Load(queued_requests=20, queued_tokens=20_000)
    assert queued(Role.PREFILL, 16_000, load) == pytest.approx(1e-8 * 20_000 * 1000, rel=0.1)
