"""Which leg's cached tokens are a request's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.control.state.prompt_use import PromptUse, SharedPrompts, use_after_leg
from baton.domain.commands import Deliver, Delivery
from baton.domain.events import StepCompleted
from baton.domain.handoff import CacheUse, KvHandle, Leg, LegFailure, LegKind, LegOutput
from baton.domain.request import FinishReason, LocalOnlyReason, Phase, Request
from baton.domain.value import evolve
from tests.control.world import LIMITS, World, kv_handle_of, request

BLOCK = 16
TICKET = KvHandle(tokens=1, blocks=1, params=b"")


def leg(kind: LegKind, tokens: int, *, resumed_tokens: int = 0) -> Leg:
    return Leg(
        leg_id="r~1",
        request_id="r",
        kind=kind,
        prompt_token_ids=tuple(range(tokens)),
        resumed_tokens=resumed_tokens,
        max_tokens=4,
        kv_handle=TICKET if kind is LegKind.DECODE else None,
    )


def after(*said: tuple[Leg, int, CacheUse | None], prompt_tokens: int = 582) -> PromptUse | None:
    """What is known once these legs have spoken."""
    known = None
    for other, cached_tokens, cache in said:
        known = use_after_leg(
            known, other, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, cache_use=cache
        )
    return known


PREFILLED = leg(LegKind.PREFILL, 582), 0, CacheUse(0, 576)
PULLED = leg(LegKind.DECODE, 582), 582, CacheUse(582, 0)


@pytest.mark.parametrize("kind", [LegKind.LOCAL, LegKind.PREFILL])
def test_the_first_leg_that_computes_the_whole_prompt_decides(kind: LegKind) -> None:
    first = leg(kind, 582), 320, CacheUse(64, 256)
    again = leg(LegKind.LOCAL, 582), 576, CacheUse(0, 0)
    assert after(first, again) == (320, CacheUse(64, 256), True)


def test_a_decode_replicas_hit_on_a_remotely_prefilled_prompt_does_not_count() -> None:
    pulled = leg(LegKind.DECODE, 582), 582, CacheUse(262, 0)
    assert after(PREFILLED, pulled) == (0, CacheUse(0, 576), True)


def test_a_prefix_that_is_fetched_was_cached_and_the_rest_was_not() -> None:
    # Of 513 tokens, the last is computed so that the engine hands out the blocks of the others.
    front = leg(LegKind.PREFILL, 513), 512, CacheUse(0, 0)
    known = after(front)
    assert known == (512, CacheUse(0, 0), False)
    pulled = leg(LegKind.DECODE, 582), 513, CacheUse(513, 63)
    assert after(front, pulled) == (512, CacheUse(0, 64), True)


def test_of_a_prefix_that_both_held_in_part_the_longer_part_was_cached() -> None:
    front = leg(LegKind.PREFILL, 513), 480, CacheUse(0, 32)
    pulled = leg(LegKind.DECODE, 582), 513, CacheUse(13, 63)
    assert after(front, pulled) == (500, CacheUse(0, 76), True)


def test_the_tier_of_a_fetched_prefix_is_kept() -> None:
    front = leg(LegKind.PREFILL, 513), 512, CacheUse(256, 0)
    pulled = leg(LegKind.DECODE, 582), 513, CacheUse(513, 63)
    assert after(front, pulled) == (512, CacheUse(256, 64), True)


def test_a_fetch_that_failed_leaves_the_leg_after_it_to_decide() -> None:
    front = leg(LegKind.PREFILL, 513), 512, CacheUse(0, 0)
    cold = leg(LegKind.LOCAL, 582), 0, CacheUse(0, 576)
    assert after(front, cold) == (512, CacheUse(0, 64), True)
    warm = leg(LegKind.LOCAL, 582), 576, CacheUse(64, 0)
    assert after(front, warm) == (576, CacheUse(64, 0), True)


def test_a_leg_that_goes_on_after_generated_tokens_says_nothing_of_the_prompt() -> None:
    resumed = leg(LegKind.LOCAL, 590, resumed_tokens=8), 576, CacheUse(0, 8)
    assert after(resumed) is None
    assert after(PREFILLED, resumed) == after(PREFILLED)


def test_a_decode_leg_alone_leaves_it_unknown() -> None:
    assert after(PULLED) is None


def test_without_a_word_on_where_tokens_came_from_pulled_ones_are_not_taken_for_cached() -> None:
    front = leg(LegKind.PREFILL, 513), 512, None
    pulled = leg(LegKind.DECODE, 582), 513, None
    assert after(front, pulled) == (512, CacheUse(), True)


def test_an_empty_prompt_of_embeddings_is_a_whole_one() -> None:
    known = after((leg(LegKind.LOCAL, 0), 32, CacheUse(0, 0)), prompt_tokens=0)
    assert known == (32, CacheUse(0, 0), True)


@given(
    blocks=st.integers(1, 40),
    extra=st.integers(0, BLOCK - 1),
    held=st.integers(0, 40),
    own=st.integers(0, 40),
)
def test_every_way_says_what_one_engine_with_both_caches_would(
    blocks: int, extra: int, held: int, own: int
) -> None:
    """Of a prefix fetch; of a handoff, one engine with the cache of its prefill replica."""
    prompt_tokens = blocks * BLOCK + extra
    usable = (prompt_tokens - 1) // BLOCK
    held, own = min(held, usable) * BLOCK, min(own, usable) * BLOCK
    full = blocks * BLOCK

    def engine(cached: int) -> PromptUse:
        return PromptUse(cached, CacheUse(0, max(0, full - cached)), is_final=True)

    local = leg(LegKind.LOCAL, prompt_tokens), held, CacheUse(0, max(0, full - held))
    assert after(local, prompt_tokens=prompt_tokens) == engine(held)
    prefill = leg(LegKind.PREFILL, prompt_tokens), held, CacheUse(0, max(0, full - held))
    here = leg(LegKind.DECODE, prompt_tokens), prompt_tokens, CacheUse(prompt_tokens - own, 0)
    assert after(prefill, here, prompt_tokens=prompt_tokens) == engine(held)
    if own <= held:
        front = leg(LegKind.PREFILL, held + 1), held, CacheUse(0, 0)
        there = min(held + 1, prompt_tokens)
        pulled = CacheUse(there - own, max(0, full - there))
        rest = leg(LegKind.DECODE, prompt_tokens), there, pulled
        if held + 1 < prompt_tokens:
            assert after(front, rest, prompt_tokens=prompt_tokens) == engine(held)


# ---------------------------------------------------------------- several answers
def answers(count: int, *, prompt_tokens: int = 582) -> tuple[SharedPrompts, list[Request]]:
    """So many answers to one prompt, all of them in flight."""
    shared = SharedPrompts()
    asked = [
        evolve(request(f"{index}_r", prompt_tokens=prompt_tokens), fan_out_id="r")
        for index in range(count)
    ]
    for other in asked:
        shared.on_arrived(other)
    shared.check_integrity(asked)
    return shared, asked


def use(cached_tokens: int, created_tokens: int, *, external_tokens: int = 0) -> PromptUse:
    return PromptUse(cached_tokens, CacheUse(external_tokens, created_tokens), is_final=True)


def test_the_second_answer_finds_what_the_first_has_computed_though_it_ran_elsewhere() -> None:
    shared, (first, second) = answers(2)
    assert shared.client_use(first, use(0, 576), block_size_tokens=BLOCK) == use(0, 576)
    assert shared.client_use(second, use(0, 576), block_size_tokens=BLOCK) == use(576, 0)


def test_an_answer_that_found_more_itself_says_so() -> None:
    shared, (first, second) = answers(2)
    shared.client_use(first, use(320, 0), block_size_tokens=BLOCK)
    own = use(576, 0, external_tokens=64)
    assert shared.client_use(second, own, block_size_tokens=BLOCK) == own


def test_a_prompt_of_full_blocks_is_never_found_to_its_last_token() -> None:
    shared, (first, second) = answers(2, prompt_tokens=576)
    shared.client_use(first, use(0, 576), block_size_tokens=BLOCK)
    assert shared.client_use(second, use(0, 576), block_size_tokens=BLOCK) == use(560, 16)


def test_without_a_prefix_cache_no_answer_finds_anything() -> None:
    shared, (first, second) = answers(2)
    shared.client_use(first, use(0, 0), block_size_tokens=BLOCK)
    assert shared.client_use(second, use(0, 0), block_size_tokens=BLOCK) == use(0, 0)


def test_answers_that_have_ended_are_forgotten() -> None:
    shared, (first, second) = answers(2)
    shared.client_use(first, use(0, 576), block_size_tokens=BLOCK)
    shared.on_ended(first)
    shared.check_integrity([second])
    shared.on_ended(second)
    shared.check_integrity([])
    shared.on_arrived(second)
    assert shared.client_use(second, use(0, 576), block_size_tokens=BLOCK) == use(0, 576)


def test_requests_of_their_own_share_nothing() -> None:
    shared = SharedPrompts()
    for other in (request("a"), request("b")):
        shared.on_arrived(other)
        assert shared.client_use(other, use(0, 32), block_size_tokens=BLOCK) == use(0, 32)
    shared.check_integrity([])


# ---------------------------------------------------------------- as clients are told
def delivered(world: World) -> list[Delivery]:
    return [
        delivery
        for command in world.commands
        if isinstance(command, Deliver)
        for delivery in command.deliveries
    ]


def say(
    world: World,
    *token_ids: int,
    cached_tokens: int | None,
    cache: CacheUse | None = None,
    finish: FinishReason | None = None,
) -> None:
    """Have the only leg that runs give an output."""
    ((leg_id, (replica_id, running)),) = world.legs.items()
    ticket = None
    if finish is not None:
        del world.legs[leg_id]
        if running.kind is LegKind.PREFILL and finish is FinishReason.LENGTH:
            ticket, world.leased[leg_id] = kv_handle_of(running), replica_id
    output = LegOutput(
        leg_id, token_ids, finish, kv_handle=ticket, cached_tokens=cached_tokens, cache_use=cache
    )
    world.handle(StepCompleted(replica_id=replica_id, outputs=(output,)))


def pair() -> World:
    world = World(LIMITS)
    world.join_prefill_decode(decode=2)
    return world


def test_a_client_whose_prompt_was_handed_off_is_told_what_prefill_found() -> None:
    world = pair()
    world.arrive(request("r", max_tokens=2))
    say(world, 0, cached_tokens=0, cache=CacheUse(0, 32), finish=FinishReason.LENGTH)
    say(world, 0, cached_tokens=40, cache=CacheUse(40, 0))
    say(world, 1, cached_tokens=None, finish=FinishReason.LENGTH)
    told = [
        (delivery.token_ids, delivery.cached_tokens, delivery.cache_use)
        for delivery in delivered(world)
    ]
    assert told == [((0,), 0, CacheUse(0, 32)), ((1,), None, None)]
    assert world.records["r"].cached_tokens == 0


def test_a_handoff_that_breaks_does_not_make_a_cold_prompt_a_warm_one() -> None:
    world = pair()
    world.arrive(request("r", max_tokens=1))
    say(world, 0, cached_tokens=0, cache=CacheUse(0, 32), finish=FinishReason.LENGTH)
    ((leg_id, _),) = world.legs.items()
    world.fail_leg(leg_id, LegFailure.KV_LOAD_FAILED)
    world.advance(LIMITS.retry_s)
    ((_, (_, again)),) = world.legs.items()
    assert again.kind is LegKind.LOCAL
    say(world, 0, cached_tokens=32, cache=CacheUse(0, 0), finish=FinishReason.LENGTH)
    (told,) = delivered(world)
    assert (told.cached_tokens, told.cache_use) == (0, CacheUse(0, 32))
    assert world.records["r"].cached_tokens == 0


def test_cached_tokens_of_a_failed_leg_are_not_sent() -> None:
    world = pair()
    world.arrive(request("r", max_tokens=1))
    say(world, cached_tokens=0, cache=CacheUse(), finish=FinishReason.ERROR)
    world.advance(LIMITS.retry_s)
    say(world, 0, cached_tokens=32, cache=CacheUse(), finish=FinishReason.LENGTH)
    (told,) = delivered(world)
    assert told.cached_tokens == 32
    assert world.records["r"].outcome is Phase.FINISHED


def test_a_stream_that_moves_is_told_once() -> None:
    world = pair()
    world.arrive(evolve(request("r", max_tokens=3), resumable=True))
    say(world, 0, cached_tokens=16, cache=CacheUse(0, 16), finish=FinishReason.LENGTH)
    say(world, 0, cached_tokens=40, cache=CacheUse(40, 0))
    ((leg_id, _),) = world.legs.items()
    world.fail_leg(leg_id, LegFailure.ENGINE_ERROR)
    world.advance(LIMITS.retry_s)
    for _ in range(2):  # it is handed off again
        if world.legs:
            say(world, 1, cached_tokens=32, cache=CacheUse(), finish=FinishReason.LENGTH)
    told = [delivery.cached_tokens for delivery in delivered(world)]
    assert told[0] == 16
    assert set(told[1:]) == {None}
    assert world.records["r"].cached_tokens == 16


def test_each_answer_to_one_prompt_is_charged_for_its_own_computation() -> None:
    world = pair()
    for index in range(2):
        one = request(f"{index}_r", max_tokens=1, local_only=LocalOnlyReason.FAN_OUT)
        world.arrive(evolve(one, fan_out_id="r"))
    for leg_id, (replica_id, _) in tuple(world.legs.items()):
        del world.legs[leg_id]
        said = LegOutput(
            leg_id, (0,), FinishReason.LENGTH, cached_tokens=0, cache_use=CacheUse(0, 32)
        )
        world.handle(StepCompleted(replica_id=replica_id, outputs=(said,)))
    told = [(delivery.cached_tokens, delivery.cache_use) for delivery in delivered(world)]
    assert told == [(0, CacheUse(0, 32)), (32, CacheUse(0, 0))]
    assert [record.cached_tokens for record in world.records.values()] == [0, 0]
    world.coordinator.check_integrity()
