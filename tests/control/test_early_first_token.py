"""Clients get the token that ends their prefill, and decode goes on after it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.control.state.limits import CoordinatorLimits
from baton.domain.commands import Deliver
from baton.domain.events import ReplicaJoined, StepCompleted
from baton.domain.fleet import Role
from baton.domain.handoff import Leg, LegFailure, LegKind, LegOutput
from baton.domain.request import FinishReason, LocalOnlyReason, Phase
from baton.domain.value import evolve
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from tests.control.world import LIMITS, World, kv_handle_of, request
from tests.fakes.facts import replica_facts

EARLY = replace(LIMITS, early_first_token=True)


def fleet(limits: CoordinatorLimits = EARLY, *, decode: int = 1) -> World:
    world = World(limits)
    world.join_prefill_decode(decode=decode)
    return world


def only_leg(world: World) -> Leg:
    ((_, leg),) = world.legs.values()
    return leg


def test_the_first_token_does_not_wait_for_the_transfer() -> None:
    world = fleet()
    world.arrive(request("r", max_tokens=3))
    world.advance(0.5)
    world.step(only_leg(world).leg_id)
    assert world.tokens["r"] == [0]
    assert world.coordinator.phases() == {"r": Phase.TRANSFER}
    world.advance(0.25)
    world.run_to_end()
    record = world.records["r"]
    assert world.tokens["r"] == [0, 1, 2]
    assert (record.first_token_at_s, record.prefill_done_at_s) == (0.5, 0.5)
    assert record.max_itl_s == pytest.approx(0.25), "what the handoff took is a gap of its stream"
    assert (record.output_tokens, record.resumes, world.leased) == (3, 0, {})


def test_decode_goes_on_after_the_first_token_with_the_prompts_blocks() -> None:
    world = fleet()
    item = evolve(request("r", max_tokens=4), min_tokens=3)
    world.arrive(item)
    prefill = only_leg(world)
    assert (prefill.kind, prefill.emits_first_token) == (LegKind.PREFILL, True)
    world.step(prefill.leg_id)
    decode = only_leg(world)
    assert decode.prompt_token_ids == (*item.prompt_token_ids, 0)
    assert (decode.resumed_tokens, decode.max_tokens, decode.min_tokens) == (1, 3, 2)
    assert decode.kv_handle == kv_handle_of(prefill)
    assert not decode.emits_first_token


def test_a_request_that_cannot_migrate_waits_for_decode() -> None:
    world = fleet()
    world.arrive(request("r", resumable=False))
    prefill = only_leg(world)
    assert not prefill.emits_first_token
    world.step(prefill.leg_id)
    assert world.tokens["r"] == []
    assert only_leg(world).resumed_tokens == 0


def test_a_request_that_stays_on_one_replica_is_as_ever() -> None:
    world = fleet()
    world.arrive(request("r", local_only=LocalOnlyReason.PROMPT_LOGPROBS))
    assert only_leg(world).kind is LegKind.LOCAL
    assert not only_leg(world).emits_first_token
    world.run_to_end()
    assert world.tokens["r"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("max_tokens", "finish"), [(1, None), (4, FinishReason.STOP)], ids=["length", "stop"]
)
def test_a_first_token_that_is_the_last_moves_nothing(
    max_tokens: int, finish: FinishReason | None
) -> None:
    world = fleet()
    world.arrive(request("r", max_tokens=max_tokens))
    world.step(only_leg(world).leg_id, finish=finish)
    assert world.legs == {}
    record = world.records["r"]
    assert (record.outcome, record.reason) == (Phase.FINISHED, finish or FinishReason.LENGTH)
    assert (world.tokens["r"], world.leased, world.coordinator.lease_counts()) == ([0], {}, {})


def test_blocks_that_come_with_the_last_token_are_freed() -> None:
    # Engines keep them for a pull whatever ended the leg.
    world = fleet()
    world.arrive(request("r"))
    prefill = only_leg(world)
    replica_id, _ = world.legs.pop(prefill.leg_id)
    world.leased[prefill.leg_id] = replica_id
    last = LegOutput(prefill.leg_id, (0,), FinishReason.STOP, kv_handle=kv_handle_of(prefill))
    world.handle(StepCompleted(replica_id=replica_id, outputs=(last,)))
    assert world.records["r"].outcome is Phase.FINISHED
    assert world.leased == {}


def test_the_finish_reason_and_cached_tokens_are_sent_once() -> None:
    world = fleet()
    world.arrive(request("r", max_tokens=2))
    prefill = only_leg(world)
    replica_id, _ = world.legs.pop(prefill.leg_id)
    output = LegOutput(
        prefill.leg_id, (0,), FinishReason.LENGTH, kv_handle=kv_handle_of(prefill), cached_tokens=16
    )
    world.handle(StepCompleted(replica_id=replica_id, outputs=(output,)))
    decode = only_leg(world)
    replica_id, _ = world.legs.pop(decode.leg_id)
    output = LegOutput(decode.leg_id, (1,), FinishReason.LENGTH, cached_tokens=40)
    world.handle(StepCompleted(replica_id=replica_id, outputs=(output,)))
    delivered = [
        delivery
        for command in world.commands
        if isinstance(command, Deliver)
        for delivery in command.deliveries
    ]
    assert [(delivery.finish, delivery.cached_tokens) for delivery in delivered] == [
        (None, 16),
        (FinishReason.LENGTH, None),
    ]
    assert world.records["r"].cached_tokens == 16


@pytest.mark.parametrize("failure", [LegFailure.KV_LOAD_FAILED, LegFailure.UNREACHABLE])
def test_a_handoff_that_breaks_costs_a_client_time_and_no_token(failure: LegFailure) -> None:
    world = fleet(decode=2)
    world.arrive(request("r"))
    world.step(only_leg(world).leg_id)
    world.fail_leg(only_leg(world).leg_id, failure)
    world.advance(LIMITS.retry_s)
    assert only_leg(world).resumed_tokens == 1
    world.run_to_end()
    assert world.tokens["r"] == [0, 1, 2, 3]
    assert world.records["r"].outcome is Phase.FINISHED


def test_a_stream_that_is_prefilled_again_gets_its_next_token_from_there() -> None:
    world = fleet(decode=2)
    world.arrive(request("r"))
    world.step(only_leg(world).leg_id)
    decode = only_leg(world)
    world.step(decode.leg_id)
    world.disconnect(world.legs[decode.leg_id][0])
    again = only_leg(world)
    assert (again.kind, again.emits_first_token, again.resumed_tokens) == (LegKind.PREFILL, True, 2)
    world.step(again.leg_id)
    assert world.tokens["r"] == [0, 1, 2]
    world.run_to_end()
    assert world.tokens["r"] == [0, 1, 2, 3]


def test_a_disconnect_during_the_transfer_teaches_the_output_length() -> None:
    # Engines whose frontend looks for stop strings cancel what has come to one.
    world = fleet()
    for number in range(20):
        world.arrive(request(f"r{number}", max_tokens=100))
        world.step(only_leg(world).leg_id)
        world.cancel(f"r{number}")
        world.confirm_aborts()
    assert world.coordinator.fleet_model.timings.expected_output_tokens(100) < 10


def test_a_policy_may_hold_it_back_for_the_tpot_objective() -> None:
    for tpot_s, given in ((10.0, True), (1e-6, False)):
        options = PredictedOptions(tpot_slo_s=tpot_s, disaggregate=Disaggregate.ALWAYS)
        world = World(EARLY, policy=PredictedPlacer(options))
        world.join_prefill_decode()
        world.arrive(request("r"))
        assert only_leg(world).emits_first_token is given
        world.run_to_end()
        assert world.tokens["r"] == [0, 1, 2, 3]
        option = world.records["r"].decisions[0].chosen
        assert option is not None
        assert option.is_early_token is given


@pytest.mark.parametrize(("prefix_fetch", "takes_up"), [(False, True), (True, False)])
def test_no_first_token_before_a_handoff_where_decode_could_not_continue(
    *, prefix_fetch: bool, takes_up: bool
) -> None:
    world = World(EARLY)
    world.join("p0", Role.PREFILL)
    world.alive["d0"] = Role.DECODE
    facts = replica_facts(
        "d0", Role.DECODE, supports_prefix_fetch=prefix_fetch, supports_resume=takes_up
    )
    world.handle(ReplicaJoined(facts=facts))
    world.arrive(request("r"))
    assert not only_leg(world).emits_first_token
    world.run_to_end()
    assert world.tokens["r"] == [0, 1, 2, 3]


def test_a_first_token_that_fills_the_context_is_the_last() -> None:
    world = fleet()
    context = world.coordinator.fleet(0.0).replicas["p0"].facts.max_len_tokens
    world.arrive(request("r", prompt_tokens=context - 1, max_tokens=9))
    world.step(only_leg(world).leg_id)
    record = world.records["r"]
    assert (record.outcome, record.reason) == (Phase.FINISHED, FinishReason.LENGTH)
    assert (world.tokens["r"], world.legs, world.leased) == ([0], {}, {})


def test_a_session_is_not_looked_for_where_nothing_was_decoded() -> None:
    world = fleet(decode=1)
    world.arrive(evolve(request("a"), session_id="s"))
    world.run_to_end()
    world.arrive(evolve(request("b", max_tokens=1), session_id="s"))
    world.run_to_end()
    query = world.coordinator.fleet_model.placement_query
    world.arrive(evolve(request("c"), session_id="s"))
    entry = world.coordinator._lifecycle.requests["c"]
    assert query(entry, world.now_s).session_replica_id == "d0"


def test_after_the_first_token_no_first_token_deadline_holds_in_the_transfer() -> None:
    world = fleet(replace(EARLY, first_token_timeout_s=1.0, transfer_deadline_s=10.0))
    world.arrive(request("r"))
    world.advance(0.9)
    world.step(only_leg(world).leg_id)
    world.advance(5.0)
    assert world.coordinator.phases() == {"r": Phase.TRANSFER}
    assert only_leg(world).kind is LegKind.DECODE
    world.run_to_end()
    assert world.records["r"].resumes == 0


def test_a_token_whose_blocks_were_not_kept_was_given_all_the_same() -> None:
    world = fleet(decode=2)
    world.arrive(request("r"))
    prefill = only_leg(world)
    replica_id, _ = world.legs.pop(prefill.leg_id)
    output = LegOutput(prefill.leg_id, (0,), FinishReason.LENGTH)
    world.handle(StepCompleted(replica_id=replica_id, outputs=(output,)))
    world.advance(LIMITS.retry_s)
    world.run_to_end()
    assert world.tokens["r"] == [0, 1, 2, 3]
    first = world.records["r"].legs[0]
    assert (first.output_tokens, first.first_output_at_s) == (1, 0.0)


def test_requests_keep_what_held_when_they_came() -> None:
    world = fleet(LIMITS)
    world.arrive(request("before", max_tokens=2))
    (late,) = world.legs
    world.coordinator.reconfigure(limits=EARLY)
    world.step(late)
    assert world.tokens["before"] == []
    world.run_to_end()
    world.arrive(request("after", max_tokens=2))
    (early,) = world.legs
    world.coordinator.reconfigure(limits=LIMITS)
    world.step(early)
    assert world.tokens["after"] == [0]
    world.run_to_end()
    assert world.tokens == {"before": [0, 1], "after": [0, 1]}
