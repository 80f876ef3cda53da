from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from baton.domain.fleet import LinkTotals
from baton.domain.handoff import CacheUse, LegKind
from baton.domain.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from baton.domain.value import evolve
from baton.engine.sim import OnTransferFailure, expected_tokens
from baton.simulator.engine.commands import CancelFetch, FreeSource, LoadBlocks, StartPull
from baton.simulator.engine.core import SimCore
from baton.simulator.engine.memory import HostTier
from tests.simulator.cores import (
    PROMPT,
    SETTINGS,
    decode_leg,
    expected,
    local_leg,
    new_core,
    pulled_tokens,
    run_prefill,
    run_until_idle,
    salted_leg,
    tokens_of,
)

SMALL = replace(SETTINGS, kv_blocks=10, max_len_tokens=40)
TIERED = replace(SMALL, host_blocks=20)
OTHER = tuple(reversed(PROMPT))


def tiers(events: Iterable[KvEvent]) -> list[tuple[str, str | None, int]]:
    """What happened where to how many blocks, without clearing."""
    return [
        (type(event).__name__, event.tier, len(event.block_hashes))
        for event in events
        if not isinstance(event, BlocksCleared)
    ]


def cached_tokens(core: SimCore, leg_id: str, prompt: tuple[int, ...] = PROMPT) -> int | None:
    """Run a leg that needs nothing from elsewhere; what it found."""
    core.add(local_leg(leg_id, prompt))
    return run_until_idle(core)[0].cached_tokens


# ---------------------------------------------------------------------- salts
def test_blocks_are_only_reused_under_the_salt_that_they_were_computed_under() -> None:
    core = new_core()
    found = {}
    for number, salt in enumerate([None, "", "tenant", None, "", "tenant"]):
        core.add(salted_leg(str(number), salt))
        found[number] = run_until_idle(core)[0].cached_tokens
    assert [found[number] for number in range(6)] == [0, 0, 0, 28, 28, 28]


def test_events_say_the_salt() -> None:
    core = new_core()
    core.add(salted_leg("a", "tenant"))
    run_until_idle(core)
    stored = [event for event in core.pop_events() if isinstance(event, BlocksStored)]
    assert {event.cache_salt for event in stored} == {"tenant"}


def test_blocks_of_another_salt_are_decoded_from_as_by_any_engine() -> None:
    leg, ticket = decode_leg("d", run_prefill(new_core()))
    assert pulled_tokens(leg, ticket) == expected(3)
    assert pulled_tokens(evolve(leg, cache_salt="tenant"), ticket) != expected(3)


# ---------------------------------------------------------------------- counting
def test_steps_and_their_tokens_add_up() -> None:
    core = new_core()
    core.add(local_leg("a", (5,) * 20, max_tokens=3))  # steps: 16 tokens; 4; a decode; a decode
    now_s = 10.0
    while (step := core.begin_step(now_s)) is not None:
        now_s += step.duration_s
        core.finish_step(now_s)
    steps = core.load().steps
    assert steps.busy_s == pytest.approx(now_s - 10.0)
    assert (steps.steps, steps.prefill_tokens) == (4, 20)
    assert (steps.decode_tokens, steps.context_tokens) == (2, 21 + 22)


def test_cached_tokens_are_not_counted_as_computed() -> None:
    core = new_core()
    core.add(local_leg("a"))
    run_until_idle(core)
    before = core.load().steps
    core.add(local_leg("b"))
    run_until_idle(core)
    assert core.load().steps.prefill_tokens - before.prefill_tokens == len(PROMPT) - 28


def test_pulls_are_counted_by_source() -> None:
    tickets = {name: run_prefill(new_core(engine_id=name)) for name in ("p0", "p1")}
    core = new_core()
    for leg_id, source in (("a", "p0"), ("b", "p1"), ("c", "p0")):
        core.reset_cache()
        core.add(*decode_leg(leg_id, tickets[source]))
        core.begin_step(0.0)
        if leg_id == "c":
            core.pull_failed(leg_id)
        else:
            core.pull_done(leg_id, blocks=8, duration_s=0.25, source_kept=True)
        run_until_idle(core)
    moved_bytes = 8 * SETTINGS.kv_block_bytes
    assert core.links() == (
        LinkTotals("p0", 1, moved_bytes, 0.25, failures=1, transport="sim"),
        LinkTotals("p1", 1, moved_bytes, 0.25, transport="sim"),
    )
    assert core.load().transfers[:4] == (2, 2 * moved_bytes, 0.5, 1)


# ---------------------------------------------------------------------- prefix fetches
def test_a_kv_handle_for_the_beginning_of_a_prompt_spares_computing_that() -> None:
    ticket = run_prefill(new_core(), prompt=PROMPT[:16])
    core = new_core()
    core.add(*decode_leg("d", ticket))
    assert core.begin_step(0.0) is None
    (order,) = core.pop_commands()
    assert isinstance(order, StartPull)
    assert order.blocks == 4
    core.pull_done("d", blocks=4, duration_s=0.1, source_kept=True)
    outputs = run_until_idle(core)
    assert outputs[0].cached_tokens == 16
    assert outputs[0].cache_use == CacheUse(16, 12)
    assert core.load().steps.prefill_tokens == len(PROMPT) - 16
    assert tokens_of(outputs, "d") == expected_tokens(PROMPT, 3, model="tiny", settings=SETTINGS)


def test_a_kv_handle_that_ends_within_a_block_spares_computing_to_there() -> None:
    ticket = run_prefill(new_core(), prompt=PROMPT[:18])
    core = new_core()
    core.add(*decode_leg("d", ticket))
    core.begin_step(0.0)
    core.pull_done("d", blocks=5, duration_s=0.1, source_kept=True)
    assert run_until_idle(core)[0].cached_tokens == 18


def test_the_beginning_of_another_prompt_is_decoded_from_as_by_any_engine() -> None:
    leg, ticket = decode_leg("d", run_prefill(new_core(), prompt=PROMPT[:16]), prompt=OTHER)
    assert pulled_tokens(leg, ticket) != expected(3, OTHER)


def test_a_failed_prefix_fetch_computes_everything() -> None:
    core = new_core(replace(SETTINGS, on_transfer_failure=OnTransferFailure.RECOMPUTE))
    core.add(*decode_leg("d", run_prefill(new_core(), prompt=PROMPT[:16])))
    core.begin_step(0.0)
    core.pull_failed("d")
    assert run_until_idle(core)[0].cached_tokens == 0


# ---------------------------------------------------------------------- the host's memory
def evicted_core() -> SimCore:
    """A core that has computed PROMPT, and let go of its blocks for another prompt."""
    core = new_core(TIERED)
    assert cached_tokens(core, "first") == 0
    assert cached_tokens(core, "second", OTHER) == 0
    return core


def fully_evicted_core() -> SimCore:
    """A core whose host has all of PROMPT, and whose KV cache has none of it."""
    core = new_core(TIERED)
    for number, prompt in enumerate([PROMPT, OTHER, (7,) * 30]):
        cached_tokens(core, str(number), prompt)
    return core


def test_the_last_token_is_computed_though_the_host_has_its_block() -> None:
    core = fully_evicted_core()
    core.add(local_leg("again", PROMPT[:28], max_tokens=2))
    core.begin_step(0.0)
    core.load_done("again")
    outputs = run_until_idle(core)
    assert outputs[0].cached_tokens == 24
    wanted = expected_tokens(PROMPT[:28], 2, model="tiny", settings=SETTINGS)
    assert tokens_of(outputs, "again") == wanted


def test_evicted_blocks_go_to_the_host_and_are_told_of_before_they_are_gone() -> None:
    core = evicted_core()
    assert tiers(core.pop_events()) == [
        ("BlocksStored", "gpu", 4),
        ("BlocksStored", "gpu", 3),
        ("BlocksStored", "cpu", 5),
        ("BlocksRemoved", "gpu", 5),
        ("BlocksStored", "gpu", 4),
        ("BlocksStored", "gpu", 3),
    ]


def test_blocks_in_the_host_are_loaded_in_time_and_count_as_cached() -> None:
    core = evicted_core()
    core.add(local_leg("again", max_tokens=3))
    assert core.begin_step(0.0) is None
    assert core.pop_commands() == (LoadBlocks(leg_id="again", blocks=5),)
    assert core.load().pulling_requests == 1
    core.pop_events()
    core.load_done("again")
    assert ("BlocksStored", "gpu", 5) in tiers(core.pop_events())
    outputs = run_until_idle(core)
    assert outputs[0].cached_tokens == 28  # two blocks were never evicted, five came back
    assert outputs[0].cache_use == CacheUse(20, 0)
    wanted = expected_tokens(PROMPT, 3, model="tiny", settings=SETTINGS)
    assert tokens_of(outputs, "again") == wanted


def test_a_load_delays_its_own_leg_only() -> None:
    core = evicted_core()
    core.add(local_leg("slow"))
    core.add(local_leg("fast", (7,)))
    assert core.begin_step(0.0) is not None
    assert [output.leg_id for output in core.finish_step(0.0)] == ["fast"]


def test_aborting_a_leg_whose_blocks_are_loaded_cancels_the_load() -> None:
    core = evicted_core()
    core.add(local_leg("again"))
    core.begin_step(0.0)
    core.pop_commands()
    core.abort(["again"])
    assert core.pop_commands() == (CancelFetch(leg_id="again"),)
    core.load_done("again")
    assert core.load().kv_used_fraction == 0
    core.check_integrity()


def test_a_block_stored_again_stays_in_the_host_until_evicted_there() -> None:
    core = new_core(replace(TIERED, host_blocks=5))
    cached_tokens(core, "first")
    cached_tokens(core, "second", OTHER)
    core.add(local_leg("again"))
    core.begin_step(0.0)
    core.load_done("again")
    run_until_idle(core)
    gone = [e for e in core.pop_events() if isinstance(e, BlocksRemoved) and e.tier == "cpu"]
    # Loading took five blocks from the second prompt, and those pushed out five in the host.
    assert sum(len(event.block_hashes) for event in gone) == 5
    core.pop_commands()
    core.add(local_leg("others", OTHER))
    core.begin_step(0.0)
    assert core.pop_commands() == (LoadBlocks(leg_id="others", blocks=5),)


def test_the_host_tier_evicts_the_least_recently_used() -> None:
    core = new_core(replace(SMALL, host_blocks=8))
    for number in range(3):
        cached_tokens(core, str(number), (20 + number,) * 30)
    core.add(local_leg("first again", (20,) * 30))
    core.begin_step(0.0)
    # Ten blocks were evicted, the tails before the heads: of the first prompt, the head is here.
    (order,) = core.pop_commands()
    assert isinstance(order, LoadBlocks)
    assert order.blocks == 3


def test_loaded_blocks_stay_in_the_host_tier_longer() -> None:
    core = new_core(replace(SMALL, host_blocks=14))
    cached_tokens(core, "first")
    ours = {h for e in core.pop_events() if isinstance(e, BlocksStored) for h in e.block_hashes}
    for number, prompt in enumerate([OTHER, (7,) * 30]):
        cached_tokens(core, str(number), prompt)
    core.add(local_leg("again"))
    core.begin_step(0.0)
    core.load_done("again")
    run_until_idle(core)
    gone = [e for e in core.pop_events() if isinstance(e, BlocksRemoved) and e.tier == "cpu"]
    pushed_out = {block_hash for event in gone for block_hash in event.block_hashes}
    assert len(ours) == 7
    assert pushed_out
    assert not pushed_out & ours


def test_a_kv_handle_is_not_pulled_where_the_host_has_its_blocks() -> None:
    core = evicted_core()
    leg, ticket = decode_leg("d", run_prefill(new_core(), prompt=PROMPT[:28]))
    core.add(leg, ticket)
    core.begin_step(0.0)
    assert core.pop_commands() == (FreeSource(kv_handle=ticket), LoadBlocks(leg_id="d", blocks=5))


def test_a_kv_handle_for_more_than_the_host_has_is_pulled() -> None:
    core = evicted_core()
    leg, ticket = decode_leg("d", run_prefill(new_core()))
    core.add(leg, ticket)
    core.begin_step(0.0)
    assert core.pop_commands() == (StartPull(leg_id="d", kv_handle=ticket, blocks=6),)
    core.pull_done("d", blocks=6, duration_s=0.1, source_kept=True)
    assert run_until_idle(core)[0].cached_tokens == len(PROMPT) - 1


def test_without_room_in_the_host_evicted_blocks_are_lost() -> None:
    core = new_core(SMALL)
    cached_tokens(core, "first")
    cached_tokens(core, "second", OTHER)
    assert {tier for _, tier, _ in tiers(core.pop_events())} == {"gpu"}
    assert cached_tokens(core, "again") == 8


# ---------------------------------------------------------------------- reset


def test_a_reset_empties_a_host_that_holds_whole_prompts() -> None:
    core = fully_evicted_core()
    core.add(local_leg("proof", PROMPT[:28]))
    core.begin_step(0.0)
    assert core.pop_commands() == (LoadBlocks(leg_id="proof", blocks=6),)
    core.abort(["proof"])
    assert core.reset_cache()
    assert cached_tokens(core, "again") == 0


def test_a_prefill_leg_may_find_its_blocks_in_the_host() -> None:
    core = evicted_core()
    core.add(evolve(local_leg("p"), kind=LegKind.PREFILL))
    core.begin_step(0.0)
    core.load_done("p")
    (output,) = run_until_idle(core)
    assert output.kv_handle is not None
    assert output.cached_tokens == 28


def test_a_step_that_decodes_takes_longer_with_more_blocks_in_use() -> None:
    core = new_core(replace(SETTINGS, decode_kv_s=1.0, max_batched_tokens=64))
    core.add(local_leg("a", (5,) * 40, max_tokens=3))
    core.begin_step(0.0)
    core.finish_step(0.0)
    step = core.begin_step(0.0)
    assert step is not None
    used = 11 / 50
    plain_s = SETTINGS.step_s(prefill_tokens=0, decode_requests=1)
    assert step.duration_s == pytest.approx(plain_s + used)


# --------------------------------------------------------------------------- host tier
def stored(*names: bytes, after: bytes | None = None) -> BlocksStored:
    return BlocksStored(
        block_hashes=names,
        parent_hash=after,
        token_ids=tuple(range(2 * len(names))),
        block_size_tokens=2,
        tier="gpu",
    )


def filled(room: int, *names: bytes) -> HostTier:
    """A tier that has taken over these blocks, one prompt's, tails first."""
    tier = HostTier(room)
    tier.record_gpu_blocks(stored(*names))
    list(tier.store_evicted(names[::-1]))
    return tier


def evict(tier: HostTier, *names: bytes) -> list[bytes]:
    """Let another prompt's blocks come and go; what they push out."""
    tier.record_gpu_blocks(stored(*names))
    return [
        name
        for event in tier.store_evicted(names[::-1])
        if isinstance(event, BlocksRemoved)
        for name in event.block_hashes
    ]


def test_the_tail_of_the_oldest_prefix_goes_first() -> None:
    tier = filled(3, b"a", b"b", b"c")
    assert evict(tier, b"x", b"y") == [b"c", b"b"]
    assert tier.match([b"a", b"b"]) == 1


def test_used_blocks_stay_longer() -> None:
    tier = filled(4, b"a", b"b")
    assert evict(tier, b"c", b"d") == []
    tier.touch([b"a", b"b"])
    assert evict(tier, b"x") == [b"d"]


def test_blocks_evicted_again_stay_longer_and_are_reported_once() -> None:
    tier = filled(3, b"a", b"b")
    assert evict(tier, b"x") == []
    tier.record_gpu_blocks(stored(b"a", b"b"))
    assert list(tier.store_evicted([b"b", b"a"])) == []
    assert evict(tier, b"y") == [b"x"]


def test_an_event_holds_blocks_that_follow_each_other() -> None:
    tier = HostTier(9)
    tier.record_gpu_blocks(stored(b"a", b"b"))
    tier.record_gpu_blocks(stored(b"c", after=b"b"))
    tier.record_gpu_blocks(stored(b"x"))
    events = list(tier.store_evicted([b"c", b"b", b"x", b"a"]))
    # From the last to the first: a, then x, which begins a prompt, then b and c, which follow a.
    told = [(e.block_hashes, e.parent_hash) for e in events if isinstance(e, BlocksStored)]
    assert told == [((b"a",), None), ((b"x",), None), ((b"b", b"c"), b"a")]
    assert events[2] == BlocksStored(
        block_hashes=(b"b", b"c"),
        parent_hash=b"a",
        token_ids=(2, 3, 0, 1),
        block_size_tokens=2,
        tier="cpu",
    )


def test_without_room_nothing_is_kept_nor_told() -> None:
    tier = filled(0, b"a")
    assert tier.block_hashes() == frozenset()
    assert evict(tier, b"b") == []
