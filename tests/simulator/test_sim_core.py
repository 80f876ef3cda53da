from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from baton.domain.handoff import KvHandle, LegFailure, LegKind, LegOutput
from baton.domain.request import FinishReason
from baton.domain.value import evolve
from baton.engine.sim import OnTransferFailure, expected_tokens
from baton.engine.sim.engine import UnreadableKvHandleError, decode_kv_handle
from baton.simulator.engine.commands import CancelFetch, FreeSource, StartPull
from baton.simulator.engine.meters import EngineMeters, PullMeter
from tests.simulator.cores import (
    PROMPT,
    SETTINGS,
    decode_leg,
    local_leg,
    new_core,
    run_prefill,
    run_until_idle,
    tokens_of,
)


# ---------------------------------------------------------------------- what is not accepted
@pytest.mark.parametrize(("tokens", "failure"), [(199, None), (200, LegFailure.INVALID)])
def test_a_prompt_must_leave_room_for_a_token(tokens: int, failure: LegFailure | None) -> None:
    assert new_core().add(local_leg("a", (5,) * tokens)) is failure


def test_the_id_of_a_live_leg_is_refused_and_that_of_an_ended_one_is_not() -> None:
    core = new_core()
    assert core.add(local_leg("a")) is None
    assert core.add(local_leg("a")) is LegFailure.REJECTED
    run_until_idle(core)
    assert core.add(local_leg("a")) is None


def test_the_id_of_a_leased_leg_is_refused() -> None:
    core = new_core()
    run_prefill(core, "p")
    assert core.add(local_leg("p")) is LegFailure.REJECTED


def test_one_leg_more_than_may_wait_is_rejected() -> None:
    core = new_core()
    assert [core.add(local_leg(str(n))) for n in range(4)] == [None] * 3 + [LegFailure.OVERLOADED]


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "sim/other/bfloat16/4x1"},
        {"tokens": len(PROMPT) + 1},
        {"blocks": 3},
    ],
)
def test_a_kv_handle_for_something_else_is_not_accepted(change: dict[str, object]) -> None:
    leg, ticket = decode_leg("d", run_prefill(new_core()))
    core = new_core()
    assert core.add(leg, evolve(ticket, **change)) is LegFailure.KV_LOAD_FAILED  # type: ignore[arg-type]  # parametrized
    assert core.add(leg, ticket) is None


@pytest.mark.parametrize("params", [b"", b"\xc1", b"\x92\xa1x\x80", b"\x92\xa1\xff\x80", b"nixl"])
def test_bytes_that_are_no_kv_handle_are_recognised(params: bytes) -> None:
    with pytest.raises(UnreadableKvHandleError):
        decode_kv_handle(KvHandle(tokens=1, blocks=1, params=params))


# ---------------------------------------------------------------------- batching
def test_a_long_prompt_is_computed_in_chunks_of_the_token_budget() -> None:
    core = new_core()
    core.add(local_leg("a", (5,) * 40))
    steps = []
    while (step := core.begin_step(0.0)) is not None:
        steps.append(step.tokens)
        core.finish_step(0.0)
    assert steps == [16, 16, 8]


def test_running_legs_are_served_before_new_ones() -> None:
    core = new_core()
    core.add(local_leg("old", (5,) * 8, max_tokens=5))
    core.begin_step(0.0)
    core.finish_step(0.0)
    core.add(local_leg("new", (6,) * 30))
    step = core.begin_step(0.0)
    assert step is not None
    assert (step.decode_requests, step.prefill_tokens) == (1, 15)
    assert [output.leg_id for output in core.finish_step(0.0)] == ["old"]


def test_a_step_takes_the_time_of_its_tokens() -> None:
    settings = replace(
        SETTINGS,
        prefill_tokens_per_s=100.0,
        decode_step_s=0.5,
        decode_request_s=0.01,
        step_overhead_s=0.002,
        speed=2.0,
    )
    core = new_core(settings)
    core.add(local_leg("a", (5,) * 8, max_tokens=3))
    core.add(local_leg("b", (6,) * 4, max_tokens=3))
    first = core.begin_step(1.0)
    assert first is not None
    assert first.duration_s == pytest.approx((0.002 + 12 / 100) / 2)
    core.finish_step(1.0 + first.duration_s)
    second = core.begin_step(2.0)
    assert second is not None
    assert second.duration_s == pytest.approx((0.002 + 0.5 + 2 * 0.01) / 2)


def test_the_average_step_time_follows_the_steps() -> None:
    core = new_core()
    core.add(local_leg("a", max_tokens=100))
    assert core.load().step_s == 0.0
    for n in range(40):
        core.begin_step(n)
        core.finish_step(n + 0.25)
    assert core.load().step_s == pytest.approx(0.25)


def test_without_legs_there_is_no_step() -> None:
    assert new_core().begin_step(0.0) is None


def test_steps_do_not_overlap() -> None:
    core = new_core()
    core.add(local_leg("a"))
    core.begin_step(0.0)
    with pytest.raises(AssertionError, match="under way"):
        core.begin_step(0.0)
    core.finish_step(0.0)
    with pytest.raises(AssertionError, match="no step"):
        core.finish_step(0.0)


def test_the_load_is_counted() -> None:
    core = new_core()
    core.add(local_leg("a", (5,) * 20, max_tokens=2))
    core.add(local_leg("b", (6,) * 7))
    core.begin_step(0.0)
    core.finish_step(0.0)
    load = core.load()
    assert (load.running_requests, load.queued_requests) == (1, 1)
    assert load.queued_tokens == (20 - 16) + 7
    assert load.kv_used_fraction == 5 / 50


# ---------------------------------------------------------------------- memory
def test_out_of_blocks_the_youngest_leg_recomputes_and_loses_no_token() -> None:
    settings = replace(SETTINGS, kv_blocks=12, max_len_tokens=48, max_batched_tokens=64)
    core = new_core(settings)
    prompts = {"old": (5,) * 16, "young": (6,) * 16}
    for leg_id, prompt in prompts.items():
        core.add(local_leg(leg_id, prompt, max_tokens=20))
    outputs = run_until_idle(core)
    ends = [output.leg_id for output in outputs if output.finish is FinishReason.LENGTH]
    assert ends == ["old", "young"]
    for leg_id, prompt in prompts.items():
        wanted = expected_tokens(prompt, 20, model="tiny", settings=settings)
        assert tokens_of(outputs, leg_id) == wanted
    # 2 x 36 tokens do not fit into 48: the young one paused until the old one was done.
    order = [output.leg_id for output in outputs]
    assert order[: order.index("old", 20) + 1].count("young") < 12
    assert order[-8:] == ["young"] * 8


def test_a_leg_that_is_ready_runs_in_the_step_that_puts_the_only_running_one_back() -> None:
    settings = replace(SETTINGS, kv_blocks=10, max_len_tokens=40, max_running_requests=1)
    core = new_core(settings)
    core.add(*decode_leg("ready", run_prefill(new_core())))  # takes 8 of the 10 blocks
    core.add(local_leg("running", (5,) * 8, max_tokens=9))  # takes the other 2, and soon a third
    assert core.begin_step(0.0) is not None
    core.pull_done("ready", blocks=8, duration_s=0.1, source_kept=True)
    assert [output.leg_id for output in core.finish_step(0.0)] == ["running"]
    assert core.begin_step(0.0) is not None
    assert [output.leg_id for output in core.finish_step(0.0)] == ["ready"]
    ends = [output.leg_id for output in run_until_idle(core) if output.finish is not None]
    assert ends == ["ready", "running"]


def test_leased_blocks_are_kept_while_others_need_room_until_the_lease_ends() -> None:
    settings = replace(SETTINGS, kv_blocks=10, max_len_tokens=40, lease_s=5.0)
    core = new_core(settings)
    run_prefill(core, "p", (5,) * 20)
    core.add(local_leg("big", (6,) * 36))
    assert core.begin_step(4.0) is None
    assert core.next_expiry_s is not None
    assert core.next_expiry_s < 5.1
    assert core.load().transfers.expired_leases == 0
    assert run_until_idle(core, 5.1)[-1].finish is FinishReason.LENGTH
    assert core.load().transfers.expired_leases == 1
    assert core.next_expiry_s is None


def test_a_lease_is_released_once() -> None:
    core = new_core()
    run_prefill(core, "p")
    assert core.load().kv_used_fraction > 0
    assert core.release("p", 1.0)
    assert core.load().kv_used_fraction == 0
    assert not core.release("p", 1.0)
    assert not core.release("never was", 1.0)


@given(
    prompts=st.lists(st.lists(st.integers(3, 4), min_size=1, max_size=24), min_size=1, max_size=12),
    max_tokens=st.integers(1, 6),
)
@hypothesis_settings(deadline=None)
def test_a_hit_is_the_longest_common_prefix_in_full_blocks(
    prompts: list[list[int]], max_tokens: int
) -> None:
    settings = replace(SETTINGS, kv_blocks=150)  # so many that nothing is evicted
    core = new_core(settings)
    computed: list[tuple[int, ...]] = []
    for number, prompt in enumerate(prompts):
        core.add(local_leg(str(number), tuple(prompt), max_tokens))
        outputs = run_until_idle(core)
        usable = prompt[:-1]  # the last token is computed for its logits
        common = 0
        for earlier in computed:
            shared = 0
            while shared < min(len(usable), len(earlier)) and usable[shared] == earlier[shared]:
                shared += 1
            common = max(common, shared)
        assert outputs[0].cached_tokens == common // 4 * 4
        # The last token was drawn and never computed.
        computed.append((*prompt, *tokens_of(outputs, str(number))[:-1]))


# ---------------------------------------------------------------------- transfers
def test_only_blocks_that_are_not_here_are_pulled() -> None:
    ticket = run_prefill(new_core())
    core = new_core()
    core.add(local_leg("warm", (*PROMPT[:17], 90)))
    run_until_idle(core)
    leg, sim_ticket = decode_leg("d", ticket)
    core.add(leg, sim_ticket)
    assert core.begin_step(0.0) is None
    (order,) = core.pop_commands()
    assert isinstance(order, StartPull)
    assert (ticket.blocks, order.blocks) == (8, 4)
    core.pull_done("d", blocks=order.blocks, duration_s=0.5, source_kept=True)
    outputs = run_until_idle(core)
    assert outputs[0].cached_tokens == len(PROMPT) - 1
    assert tokens_of(outputs, "d") == expected_tokens(PROMPT, 3, model="tiny", settings=SETTINGS)
    totals = core.load().transfers
    assert (totals.pulls, totals.moved_bytes) == (1, 4 * SETTINGS.kv_block_bytes)
    assert totals.busy_s == 0.5


def test_a_decode_leg_whose_blocks_are_all_here_pulls_nothing_and_frees_the_source() -> None:
    prompt = PROMPT[:28]
    ticket = run_prefill(new_core(), prompt=prompt)
    core = new_core()
    core.add(local_leg("warm", (*prompt, 90)))
    run_until_idle(core)
    leg = evolve(local_leg("d", (*prompt, 91)), kind=LegKind.DECODE, kv_handle=ticket)
    core.add(leg, decode_kv_handle(ticket))
    run_until_idle(core)
    assert core.pop_commands() == (FreeSource(kv_handle=decode_kv_handle(ticket)),)
    assert core.load().transfers.pulls == 0


@pytest.mark.parametrize("policy", list(OnTransferFailure))
def test_a_failed_pull_is_counted_and_ends_or_recomputes_the_leg(
    policy: OnTransferFailure,
) -> None:
    core = new_core(replace(SETTINGS, on_transfer_failure=policy))
    core.add(*decode_leg("d", run_prefill(new_core())))
    core.begin_step(0.0)
    output = core.pull_failed("d")
    outputs = run_until_idle(core)
    assert core.load().transfers.failures == 1
    assert core.load().kv_used_fraction == 0
    if policy is OnTransferFailure.FAIL:
        assert output == LegOutput("d", finish=FinishReason.ERROR)
        assert outputs == []
    else:
        assert output is None
        assert outputs[0].cached_tokens == 0
        wanted = expected_tokens(PROMPT, 3, model="tiny", settings=SETTINGS)
        assert tokens_of(outputs, "d") == wanted


def test_aborting_a_leg_in_its_transfer_cancels_the_pull_and_frees_both_sides() -> None:
    core = new_core()
    leg, ticket = decode_leg("d", run_prefill(new_core()))
    core.add(leg, ticket)
    core.begin_step(0.0)
    core.pop_commands()
    core.abort(["d"])
    assert core.pop_commands() == (CancelFetch(leg_id="d"), FreeSource(kv_handle=ticket))
    assert core.load().kv_used_fraction == 0
    core.pull_done("d", blocks=8, duration_s=0.1, source_kept=True)
    assert core.pull_failed("d") is None
    assert core.load().transfers == new_core().load().transfers


def test_aborting_a_decode_leg_that_waits_frees_the_source() -> None:
    core = new_core()
    leg, ticket = decode_leg("d", run_prefill(new_core()))
    core.add(leg, ticket)
    core.abort(["d"])
    assert core.pop_commands() == (FreeSource(kv_handle=ticket),)


def test_aborting_a_leg_that_is_ready_to_run_frees_its_blocks() -> None:
    core = new_core()
    core.add(*decode_leg("d", run_prefill(new_core())))
    core.begin_step(0.0)
    core.pull_done("d", blocks=8, duration_s=0.1, source_kept=True)
    core.abort(["d"])
    core.check_integrity()
    assert core.load().kv_used_fraction == 0
    assert run_until_idle(core) == []


def test_aborting_a_finished_prefill_leg_leaves_its_lease() -> None:
    core = new_core()
    run_prefill(core, "p")
    core.abort(["p"])
    assert core.is_leased("p", 1.0)


# --------------------------------------------------------------------------- meters
def test_pulls_are_counted_in_all_and_by_their_source() -> None:
    meter = PullMeter()
    meter.record_pull("a", moved_bytes=10, duration_s=0.5)
    meter.record_pull("b", moved_bytes=4, duration_s=0.25)
    meter.record_pull("a", moved_bytes=1, duration_s=0.25)
    meter.record_pull_failure("b")
    meter.record_expired_leases(2)

    a, b = meter.links
    assert (a.source_id, a.pulls, a.moved_bytes, a.busy_s, a.failures) == ("a", 2, 11, 0.75, 0)
    assert (b.source_id, b.pulls, b.moved_bytes, b.busy_s, b.failures) == ("b", 1, 4, 0.25, 1)
    totals = meter.transfers
    assert (totals.pulls, totals.moved_bytes, totals.busy_s) == (3, 15, 1.0)
    assert (totals.failures, totals.expired_leases) == (1, 2)


def test_the_first_step_is_its_own_average_and_later_ones_move_it() -> None:
    meters = EngineMeters()
    meters.record_step(1.0, prefill_tokens=8, decode_tokens=0, context_tokens=0)
    meters.record_step(2.0, prefill_tokens=0, decode_tokens=3, context_tokens=30)

    assert meters.step_s == 1.2
    assert meters.steps == (2, 3.0, 8, 3, 30, 1, 1)
