"""What a counted engine does with legs, KV handles, leases and loads."""

from __future__ import annotations

import math

import pytest

from baton.domain.handoff import CacheUse, Leg, LegFailure, LegKind
from baton.domain.request import FinishReason
from baton.domain.value import evolve
from baton.perf.step_timing import StepBatch
from baton.simulator.engine.commands import CancelFetch, FreeSource, StartPull
from baton.simulator.network.timeline import Timeline
from baton.simulator.v1.settings import Scheduling
from baton.simulator.workloads.trace import encode_output_tokens
from tests.simulator.v1_cores import (
    SETTINGS,
    CacheMirror,
    LinearStepTiming,
    VirtualEngine,
    decode,
    leg,
    new_core,
    prefill,
    run_prefill,
    run_until_idle,
    with_changes,
)


# ---------------------------------------------------------------------- what is not accepted
@pytest.mark.parametrize(("tokens", "failure"), [(399, None), (400, LegFailure.INVALID)])
def test_a_prompt_must_leave_room_for_a_token(tokens: int, failure: LegFailure | None) -> None:
    assert new_core().add(leg("a", tokens)) is failure


@pytest.mark.parametrize(("tokens", "failure"), [(40, None), (41, LegFailure.INVALID)])
def test_a_prompt_must_fit_into_the_memory(tokens: int, failure: LegFailure | None) -> None:
    assert new_core(with_changes(SETTINGS, kv_blocks=10)).add(leg("a", tokens)) is failure


def test_states_take_blocks_of_every_request() -> None:
    """Of 20 blocks, a request of 16 tokens takes 4, or 9 with states: two run at once."""
    most = []
    for request_blocks in (0, 5):
        core = new_core(with_changes(SETTINGS, kv_blocks=20, request_blocks=request_blocks))
        for name in "abcd":
            assert core.add(leg(name, 8, 8)) is None
        running, now_s = [], 0.0
        while (took_s := core.begin(now_s, horizon_s=now_s)) is not None:
            core.check_integrity()
            running.append(core.load(now_s).running_requests)
            now_s += took_s
            core.finish(now_s)
        most.append(max(running))
    assert most == [4, 2]


def test_a_leg_is_taken_once() -> None:
    core = new_core()
    assert core.add(leg("a")) is None
    assert core.add(leg("a")) is LegFailure.REJECTED
    core.abort(["a"])
    run_prefill(core, prefill("a"))
    assert core.add(leg("a")) is LegFailure.REJECTED, "its blocks are kept under that name"


def test_a_full_queue_takes_no_more() -> None:
    core = new_core(with_changes(SETTINGS, max_waiting_requests=2))
    failures = [core.add(leg(name)) for name in "abc"]
    assert failures == [None, None, LegFailure.OVERLOADED]


def test_a_kv_handle_that_cannot_be_read_from_is_refused_and_one_of_another_prompt_is_a_fault() -> (
    None
):
    source, target = new_core(), new_core(engine_id="d0")
    one, other = prefill("a", 30), prefill("b", 30)
    ticket = run_prefill(source, one)
    short = evolve(ticket, params=ticket.params.replace(b"v1", b"v2"))
    with pytest.raises(AssertionError, match="another prompt"):
        target.add(decode("a", other.prompt_token_ids, ticket))
    assert target.add(decode("a", one.prompt_token_ids[:29], ticket)) is LegFailure.KV_LOAD_FAILED
    assert target.add(decode("a", one.prompt_token_ids, short)) is LegFailure.KV_LOAD_FAILED
    assert target.add(decode("a", one.prompt_token_ids, ticket)) is None


def test_kv_that_was_there_is_computed_again_once_it_was_given_up() -> None:
    core = new_core(with_changes(SETTINGS, kv_blocks=12, prefix_caching=False))
    for name in "ab":
        assert core.add_with_kv(leg(name, 20, 20)) is None
    run_until_idle(core)
    assert core.load(9.0).steps.prefill_tokens >= 20


def test_an_engine_without_prefix_cache_takes_kv_handles_of_one_with() -> None:
    one = prefill("a", 30)
    ticket = run_prefill(new_core(), one)
    target = new_core(with_changes(SETTINGS, prefix_caching=False), "d0")
    assert target.add(decode("a", one.prompt_token_ids, ticket)) is None


# ---------------------------------------------------------------------- lengths
@pytest.mark.parametrize(
    ("one", "tokens", "reason"),
    [
        (leg("a", output=7), 7, FinishReason.STOP),
        (evolve(leg("a", output=7), max_tokens=5), 5, FinishReason.LENGTH),
        (evolve(leg("a", output=7), resumed_tokens=4), 3, FinishReason.STOP),
        (evolve(leg("a", output=7), resumed_tokens=9), 1, FinishReason.STOP),
        (evolve(leg("a"), payload=b"", max_tokens=6), 6, FinishReason.LENGTH),
        (leg("a", 390, output=50), 10, FinishReason.LENGTH),
    ],
)
def test_a_leg_ends_after_its_expected_or_maximal_tokens(
    one: Leg, tokens: int, reason: FinishReason
) -> None:
    core = new_core()
    core.add(one)
    outputs = [output for _, output in run_until_idle(core)]
    assert sum(len(output.token_ids) for output in outputs) == tokens
    assert outputs[-1].finish is reason


def test_alone_a_leg_may_fill_the_memory_and_no_more() -> None:
    core = new_core(with_changes(SETTINGS, kv_blocks=10))
    core.add(leg("a", 5, output=100))
    outputs = [output for _, output in run_until_idle(core)]
    assert sum(len(output.token_ids) for output in outputs) == 36  # the last one needs no block


# ---------------------------------------------------------------------- seconds


def test_batches_say_all_that_they_compute() -> None:
    seen: list[StepBatch] = []

    class Recording(LinearStepTiming):
        def step_s(self, batch: StepBatch) -> float:
            seen.append(batch)
            return 1.0

    core = new_core(with_changes(SETTINGS, timing=Recording()))
    core.add(leg("a", 5, 9))
    core.add(leg("b", 20, 2))
    core.begin(0.0, horizon_s=9.0)
    core.finish(1.0)
    core.begin(1.0, horizon_s=9.0)
    # a is computed whole, and 11 of b; then a decodes beside the last 9 of b.
    first = StepBatch(16, 2, 15.0 + 66.0, 0, 0, 0, 1)
    second = StepBatch(9, 1, 9 * 11 + 45.0, 11, 1, 6, 1)
    assert seen == [first, second]


def test_a_horizon_ends_a_step_run_with_the_current_step() -> None:
    core = new_core(with_changes(SETTINGS, timing=LinearStepTiming(0.01, 0, 0, 0)))
    core.add(leg("a", 4, 100))
    core.begin(0.0, horizon_s=9.0)
    core.finish(0.01)
    assert core.begin(0.01, horizon_s=0.035) == pytest.approx(0.04)
    (output,) = core.finish(0.05)
    assert len(output.token_ids) == 4


def test_a_bend_in_the_timing_is_not_cut_short() -> None:
    class Bent(LinearStepTiming):
        def step_s(self, batch: StepBatch) -> float:
            return max(0.004, batch.decode_context_tokens * 1e-4)

    def lasts(*, jumps: bool) -> float:
        core = new_core(with_changes(SETTINGS, timing=Bent()), jumps=jumps)
        core.add(leg("a", 4, 100))
        return run_until_idle(core)[-1][0]

    assert lasts(jumps=True) == pytest.approx(lasts(jumps=False), rel=1e-6)


def test_an_arrival_ends_a_run_of_steps_only_if_it_can_get_a_slot() -> None:
    core = new_core(with_changes(SETTINGS, max_running_requests=1))
    core.add(leg("a", 4, 100))
    core.begin(0.0, horizon_s=9.0)
    core.finish(0.01)
    whole_s = core.begin(0.01, horizon_s=9.0)
    core.add(leg("b", 4, 1))
    left_s = core.interrupt(0.02)
    assert whole_s is not None
    assert left_s is not None
    assert left_s < 0.01, "nobody waited: the next step might have had b"
    core.finish(0.02 + left_s)
    whole_s = core.begin(0.1, horizon_s=9.0)
    core.add(leg("c", 4, 1))
    assert whole_s is not None
    assert core.interrupt(0.11) == pytest.approx(whole_s - 0.01)


# ---------------------------------------------------------------------- hand-offs
def test_a_finished_prefill_keeps_its_blocks_until_they_are_released() -> None:
    core = new_core()
    ticket = run_prefill(core, prefill("p", 30))
    assert (ticket.tokens, ticket.blocks) == (30, 8)
    assert core.load(0.1).kv_used_fraction == 8 / 200
    assert core.is_leased("p", 0.1)
    assert core.release("p", 0.1)
    assert core.load(0.1).kv_used_fraction == 0
    assert not core.release("p", 0.1)


def test_a_lease_ends_by_itself() -> None:
    core = new_core()
    run_prefill(core, prefill("p", 30))
    expiry_s = core.next_expiry_s()
    assert expiry_s is not None
    assert core.is_leased("p", expiry_s - 0.001)
    assert not core.is_leased("p", expiry_s)
    assert core.load(expiry_s).transfers.expired_leases == 1


def test_blocks_are_pulled_and_the_last_token_is_computed() -> None:
    source, target = new_core(), new_core(engine_id="d0")
    one = prefill("p", 30)
    ticket = run_prefill(source, one)
    target.add(decode("d", one.prompt_token_ids, ticket))
    assert target.begin(1.0, horizon_s=9.0) is None
    (order,) = target.pop_commands()
    assert isinstance(order, StartPull)
    assert (order.blocks, order.kv_handle.leg_id) == (8, "p")
    load = target.load(1.0)
    assert (load.pulling_requests, load.queued_requests, load.kv_used_fraction) == (1, 0, 8 / 200)
    target.pull_done("d", blocks=8, duration_s=0.5, source_kept=True)
    outputs = [output for _, output in run_until_idle(target)]
    assert outputs[0].cached_tokens == 29
    assert outputs[0].cache_use == CacheUse(29, 0)
    assert target.load(2.0).steps.prefill_tokens == 0
    (link,) = target.links()
    assert (link.source_id, link.pulls, link.moved_bytes, link.busy_s) == ("e0", 1, 8000, 0.5)


def test_resident_blocks_are_not_pulled() -> None:
    source, target = new_core(), new_core(engine_id="d0")
    one = prefill("p", 30, (1, 2, 3, 4))
    target.add(leg("before", 30, 2, ids=(1, 2, 3, 9)))
    run_until_idle(target)
    target.add(decode("d", one.prompt_token_ids, run_prefill(source, one)))
    target.begin(1.0, horizon_s=9.0)
    (order,) = target.pop_commands()
    assert isinstance(order, StartPull)
    assert order.blocks == 8 - 6


def test_a_kv_handle_for_blocks_that_are_all_here_frees_them_there() -> None:
    source, target = new_core(), new_core(engine_id="d0")
    one = prefill("p", 16, (1, 2))
    target.add(leg("before", 30, 2, ids=(1, 2)))
    run_until_idle(target)
    longer = leg("d", 29, ids=(1, 2)).prompt_token_ids
    target.add(decode("d", longer, run_prefill(source, one)))
    assert run_until_idle(target)
    (order,) = target.pop_commands()
    assert isinstance(order, FreeSource)
    assert order.kv_handle.leg_id == "p"


def test_a_failed_pull_is_computed_here() -> None:
    source, target = new_core(), new_core(engine_id="d0")
    one = prefill("p", 30)
    target.add(decode("d", one.prompt_token_ids, run_prefill(source, one)))
    target.begin(1.0, horizon_s=9.0)
    assert target.pull_failed("d") is None
    outputs = [output for _, output in run_until_idle(target)]
    assert outputs[0].cached_tokens == 0
    assert target.load(2.0).steps.prefill_tokens == 30
    assert target.load(2.0).transfers.failures == 1


def test_an_abort_during_a_pull_stops_it_and_frees_both_sides() -> None:
    source, target = new_core(), new_core(engine_id="d0")
    one = prefill("p", 30)
    target.add(decode("d", one.prompt_token_ids, run_prefill(source, one)))
    target.begin(1.0, horizon_s=9.0)
    target.pop_commands()
    target.abort(["d", "unknown"])
    cancel, free = target.pop_commands()
    assert cancel == CancelFetch(leg_id="d")
    assert isinstance(free, FreeSource)
    target.pull_done("d", blocks=8, duration_s=0.1, source_kept=True)
    assert target.load(1.0).kv_used_fraction == 0
    target.check_integrity()


def test_the_number_of_pulls_at_once_is_limited_and_the_next_waits_for_blocks() -> None:
    source, target = new_core(), new_core(engine_id="d0")
    legs = [prefill(name, 30) for name in "abc"]
    for other in legs:
        ticket = run_prefill(source, other)
        target.add(decode(f"d{other.leg_id}", other.prompt_token_ids, ticket))
    target.add(leg("local", 4, 1))
    target.begin(1.0, horizon_s=9.0)
    assert [order.leg_id for order in target.pop_commands() if isinstance(order, StartPull)] == [
        "da",
        "db",
    ]
    load = target.load(1.0)
    assert (load.pulling_requests, load.queued_requests, load.running_requests) == (2, 1, 1)
    assert [output.leg_id for output in target.finish(1.1)] == ["local"]
    target.pull_done("da", blocks=8, duration_s=0.1, source_kept=True)
    target.begin(1.2, horizon_s=9.0)
    (order,) = target.pop_commands()
    assert isinstance(order, StartPull)
    assert order.leg_id == "dc"


def test_a_pull_leaves_room_for_the_rest_of_running_prompts() -> None:
    source = new_core()
    target = new_core(with_changes(SETTINGS, kv_blocks=20, long_prefill_tokens=5), "d0")
    one = prefill("p", 30)
    ticket = run_prefill(source, one)
    target.add(leg("long", 60, 3))
    target.begin(0.0, horizon_s=9.0)
    target.finish(0.1)
    target.add(decode("d", one.prompt_token_ids, ticket))
    target.begin(0.1, horizon_s=9.0)
    assert target.load(0.1).kv_used_fraction == 6 / 20
    assert not target.pop_commands(), "of 14 free blocks the long prompt will need 9 more, d 8"


def test_when_all_are_preempted_legs_with_resident_blocks_take_their_slots() -> None:
    source = new_core()
    target = new_core(with_changes(SETTINGS, kv_blocks=12, max_running_requests=1), "d0")
    one = prefill("p", 30)
    target.add(decode("d", one.prompt_token_ids, run_prefill(source, one)))
    assert target.begin(0.0, horizon_s=0.0) is None
    target.add(leg("a", 12, 30))
    target.begin(0.0, horizon_s=0.0)
    target.pull_done("d", blocks=8, duration_s=0.1, source_kept=True)
    target.finish(0.1)
    for _ in range(4):
        target.begin(0.1, horizon_s=0.0)
        assert [output.leg_id for output in target.finish(0.2)] == ["a"]
    assert target.begin(0.2, horizon_s=0.0) is not None
    assert [output.leg_id for output in target.finish(0.3)] == ["d"]


def test_a_stretch_ends_with_the_step_in_which_a_lease_does() -> None:
    core = new_core()
    run_prefill(core, prefill("p", 30))
    expiry_s = core.next_expiry_s()
    assert expiry_s is not None
    core.add(leg("a", 4, 300))
    core.begin(0.1, horizon_s=9.0)
    core.finish(0.2)
    took_s = core.begin(0.2, horizon_s=9.0)
    assert took_s is not None
    assert expiry_s - 0.2 <= took_s < expiry_s - 0.2 + 0.005


def test_a_step_that_preempts_a_leg_admits_none() -> None:
    source = new_core()
    target = new_core(with_changes(SETTINGS, kv_blocks=12), "d0")
    one = prefill("p", 30)
    target.add(decode("d", one.prompt_token_ids, run_prefill(source, one)))
    assert target.begin(0.0, horizon_s=0.0) is None
    for name in "ab":
        target.add(leg(name, 4, 30))
    for _ in range(5):
        target.begin(0.0, horizon_s=0.0)
        target.finish(0.1)
    target.pull_done("d", blocks=8, duration_s=0.1, source_kept=True)
    target.begin(0.2, horizon_s=0.0)
    assert [output.leg_id for output in target.finish(0.3)] == ["a"], "b gave its blocks up"
    target.begin(0.3, horizon_s=0.0)
    assert [output.leg_id for output in target.finish(0.4)] == ["a", "d"]


# ---------------------------------------------------------------------- prefix cache
def test_a_sessions_next_turn_finds_the_answer_too() -> None:
    core = new_core()
    core.add(leg("a", 16, 17, ids=(1, 2, 3, 4)))
    run_until_idle(core)
    core.add(leg("b", 40, 1, ids=(1, 2, 3, 4, 5)))
    ((_, output),) = run_until_idle(core)
    assert output.cached_tokens == 32  # the last token of a was never computed
    assert output.cache_use == CacheUse(0, 8)


def test_without_prefix_caching_nothing_is_found_and_nothing_told() -> None:
    core = new_core(with_changes(SETTINGS, prefix_caching=False))
    for name in "ab":
        core.add(leg(name, 32, 2, ids=(1, 2, 3, 4)))
        ((_, first), *_) = run_until_idle(core)
        assert first.cached_tokens == 0
        assert first.cache_use == CacheUse(0, 0)
    assert not core.has_cache_update()
    assert not core.facts(replica_id="r", side_channel="s").cache_events


def test_salts_share_nothing() -> None:
    core = new_core()
    for salt in (None, "x", ""):
        core.add(evolve(leg("a", 32, 1, ids=(1, 2, 3, 4)), cache_salt=salt))
        ((_, output),) = run_until_idle(core)
        assert output.cached_tokens == 0


def test_updates_and_snapshots_tell_the_same() -> None:
    core, mirror, late = (
        new_core(with_changes(SETTINGS, kv_blocks=20)),
        CacheMirror(),
        CacheMirror(),
    )
    for number in range(8):
        core.add(leg(f"r{number}", 30 + number, 5, ids=(1, number % 3)))
        run_until_idle(core)
        mirror.apply(core.pop_cache_update())
    assert core.pop_cache_update() is None
    late.sequence = mirror.sequence
    late.apply(core.cache_snapshot())
    assert mirror.blocks == late.blocks == set(core._memory.blocks.idle_blocks())
    assert core.load(0.0).cache_sequence == mirror.sequence > 1


# ---------------------------------------------------------------------- other kinds of engines
def test_prefill_first_lets_decodes_wait_for_whole_prompts() -> None:
    core = new_core(with_changes(SETTINGS, scheduling=Scheduling.PREFILL_FIRST))
    core.add(leg("a", 8, 9))
    core.begin(0.0, horizon_s=9.0)
    core.finish(0.1)
    core.add(leg("b", 10, 2))
    core.add(leg("c", 10, 2))
    core.begin(0.1, horizon_s=9.0)
    assert [output.leg_id for output in core.finish(0.2)] == ["b"], "c does not fit beside it"
    core.begin(0.2, horizon_s=9.0)
    assert [output.leg_id for output in core.finish(0.3)] == ["c"]
    core.begin(0.3, horizon_s=9.0)
    assert [output.leg_id for output in core.finish(0.4)] == ["a", "b", "c"]


def test_prefill_first_computes_a_prompt_longer_than_a_step_in_one() -> None:
    core = new_core(with_changes(SETTINGS, scheduling=Scheduling.PREFILL_FIRST))
    core.add(leg("a", 100, 1))
    ((_, output),) = run_until_idle(core)
    assert output.finish is not None
    assert core.load(0.0).steps.steps == 1


def stages(number: int, **changes: object) -> VirtualEngine:
    timing = {"timing": LinearStepTiming(1.0, 0.0, 0.0, 0.0)}
    config = with_changes(SETTINGS, pipeline_stages=number, **(timing | changes))
    return VirtualEngine(new_core(config), Timeline())


@pytest.mark.parametrize("number", [1, 2, 4])
def test_prompts_flow_through_stages_one_behind_the_other(number: int) -> None:
    body = stages(number)
    for name in "abcdefgh":
        body.add(leg(name, 16, 1))
    body.timeline.run()
    ends = [story.last_at_s for story in body.legs.values()]
    assert ends == pytest.approx([1.0 + n / number for n in range(8)])
    body.sample_load()
    assert body.loads[0].steps.busy_s == pytest.approx(ends[-1]), "no second counts twice"


def test_stages_do_not_help_one_request_alone() -> None:
    body = stages(4)
    body.add(leg("a", 16, 10))
    body.timeline.run()
    assert body.legs["a"].last_at_s == pytest.approx(10.0)


def test_decodes_share_the_stages() -> None:
    body = stages(2, timing=LinearStepTiming(0.0, 0.1, 1.0, 0.0))
    for name in "abcd":
        body.add(leg(name, 4, 20))
    body.timeline.run()
    # Two at a time take two seconds, and two such batches overlap; all four together take four.
    assert body.legs["d"].last_at_s == pytest.approx(19 * 2.0, abs=4.0)


def test_an_arrival_enters_the_stages_as_soon_as_the_first_is_free() -> None:
    body = stages(2)
    body.add(leg("a", 16, 1))
    body.send_at(0.2, leg("b", 16, 1))
    body.send_at(0.7, leg("c", 16, 1))
    body.timeline.run()
    ends = [story.last_at_s for story in body.legs.values()]
    assert ends == pytest.approx([1.0, 1.5, 2.0])


def test_a_short_batch_does_not_overtake_a_long_one() -> None:
    body = stages(2, timing=LinearStepTiming(0.0, 1.0, 1.0, 0.0))
    body.add(leg("a", 16, 1))
    body.send_at(1.0, leg("b", 2, 1))
    body.timeline.run()
    # b enters when a leaves the first stage, at 8, and its second of two seconds follows a's end.
    assert [story.last_at_s for story in body.legs.values()] == pytest.approx([16.0, 17.0])


def test_stages_survive_aborts_and_want_of_memory() -> None:
    body = stages(3, kv_blocks=24)
    for number in range(12):
        body.send_at(number * 0.31, leg(f"r{number}", 21, 30))
    body.timeline.call_at(2.2, lambda: body.abort(["r0", "r2"]))
    body.timeline.run()
    tokens = [story.tokens for story in body.legs.values() if not story.aborted]
    assert tokens == [30] * 10
    assert body.core._scheduler.preemptions > 0
    assert body.core.load(body.timeline.now_s).kv_used_fraction == 0


# ---------------------------------------------------------------------- what it says
def test_facts_are_those_of_the_settings() -> None:
    facts = new_core().facts(replica_id="r", side_channel="r:0")
    assert (facts.kv_blocks, facts.block_size_tokens, facts.layout) == (200, 4, "v1")
    assert (facts.replica_id, facts.side_channel, facts.supports_prefix_fetch) == ("r", "r:0", True)


def test_streams_beside_a_prompt_have_no_queued_tokens() -> None:
    core = new_core()
    core.add(leg("a", 10, 50))
    core.begin(0.0, horizon_s=0.0)
    core.finish(0.1)
    core.add(leg("b", 13, 5))
    core.begin(0.1, horizon_s=0.0)
    assert core.load(0.1).running_requests == 2
    assert core.load(0.1).queued_tokens == 13


def test_queued_tokens_are_those_that_have_to_be_computed_here() -> None:
    source, target = new_core(), new_core(with_changes(SETTINGS, max_running_requests=1), "d0")
    one = prefill("p", 20)
    ticket = run_prefill(source, one)
    target.add(leg("a", 30, 5))
    target.begin(0.0, horizon_s=9.0)
    target.add(leg("b", 13, 5))
    target.add(decode("d", leg("p", 27).prompt_token_ids, ticket))
    load = target.load(0.0)
    assert (load.queued_requests, load.running_requests) == (2, 1)
    assert load.queued_tokens == 30 + 13 + 7
    target.finish(0.1)
    target.begin(0.1, horizon_s=9.0)
    assert target.load(0.1).queued_tokens == 14 + 13 + 7


def test_the_average_step_follows_the_last_ten() -> None:
    core = new_core(with_changes(SETTINGS, timing=LinearStepTiming(0.01, 0.0, 0.0, 0.0)))
    core.add(leg("a", 4, 60))
    run_until_idle(core)
    assert core.load(9.0).step_s == pytest.approx(0.01)
    assert math.isclose(core.load(9.0).steps.busy_s, 0.6)
    assert core.load(9.0).steps.context_tokens == sum(range(5, 64))
    assert (core.load(9.0).steps.prefill_steps, core.load(9.0).steps.decode_steps) == (1, 59)


def test_a_prefill_leg_draws_one_token() -> None:
    core = new_core()
    core.add(evolve(leg("a", 30, 9, kind=LegKind.PREFILL), payload=encode_output_tokens(9)))
    ((_, output),) = run_until_idle(core)
    assert (output.token_ids, output.finish) == ((0,), FinishReason.LENGTH)


# ---------- settings with which a counted engine could not work
@pytest.mark.parametrize("tokens", [0, 3, 17])
def test_a_budget_beside_streams_has_a_token_for_each_and_is_not_the_larger_one(
    tokens: int,
) -> None:
    wanted = (
        rf"^simulated engine: max_batched_tokens_while_decoding is {tokens}, expected from"
        r" max_running_requests=4"
        r" to max_batched_tokens=16$"
    )
    with pytest.raises(ValueError, match=wanted):
        with_changes(SETTINGS, max_batched_tokens_while_decoding=tokens)


@pytest.mark.parametrize("tokens", [None, 4, 16])
def test_a_budget_beside_streams_may_be_as_small_as_their_number_and_as_large_as_the_other(
    tokens: int | None,
) -> None:
    assert (
        with_changes(
            SETTINGS, max_batched_tokens_while_decoding=tokens
        ).max_batched_tokens_while_decoding
        == tokens
    )


def test_an_engine_that_cuts_no_prompt_has_no_budget_beside_streams() -> None:
    whole = with_changes(SETTINGS, scheduling=Scheduling.PREFILL_FIRST)
    wanted = (
        "^simulated engine: max_batched_tokens_while_decoding is 8, expected none with"
        " scheduling 'prefill_first',"
        " which cuts no prompt: leave one of them out$"
    )
    with pytest.raises(ValueError, match=wanted):
        with_changes(whole, max_batched_tokens_while_decoding=8)


def test_the_occupancy_of_an_engine_is_that_of_its_load_in_the_midst_of_steps() -> None:
    core = new_core()
    for name in "abcdef":
        core.add(leg(name))
    now_s = 0.0
    while (due_s := core.begin(now_s, horizon_s=1.0)) is not None:
        for part in (0.3, 0.9):
            at_s = now_s + part * due_s
            occupancy = core.occupancy(at_s)
            load = core.load(at_s)
            assert occupancy == (
                load.queued_requests,
                load.running_requests,
                load.pulling_requests,
                load.kv_used_fraction,
            )
        now_s += due_s
        core.finish(now_s)
        core.pop_commands()
    assert core.occupancy(now_s).running == 0
