from __future__ import annotations

import pickle
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.engine.sim import SimSettings, expected_tokens
from baton.simulator.engine.blocks import BlockPool
from baton.simulator.engine.settings import SettingInvalid
from baton.simulator.engine.tokens import TokenStream

TOTAL = 8


@dataclass(eq=False)
class SlowBlock:
    owners: int = 0
    block_hash: bytes | None = None
    given_back_at: int = 0


class SlowPool:
    """The same promises as BlockPool, kept by looking at every block every time."""

    def __init__(self) -> None:
        self.blocks = [SlowBlock() for _ in range(TOTAL)]
        self.clock = 0
        self.evicted: list[bytes] = []

    def match(self, hashes: list[bytes]) -> list[SlowBlock]:
        found = []
        for block_hash in hashes:
            same = [block for block in self.blocks if block.block_hash == block_hash]
            if not same:
                break
            found.append(same[0])
        return found

    def try_take(self, cached: list[SlowBlock], fresh: int) -> list[SlowBlock] | None:
        unowned = [b for b in self.blocks if not b.owners and b not in cached]
        if fresh > len(unowned):
            return None
        # Empty ones first, then the one given back longest ago.
        unowned.sort(key=lambda block: (block.block_hash is not None, block.given_back_at))
        for block in unowned[:fresh]:
            if block.block_hash is not None:
                self.evicted.append(block.block_hash)
            block.block_hash = None
        taken = [*cached, *unowned[:fresh]]
        for block in taken:
            block.owners += 1
        return taken

    def give_back(self, blocks: list[SlowBlock]) -> None:
        for block in reversed(blocks):
            self.clock += 1
            block.owners -= 1
            block.given_back_at = self.clock

    def remember(self, block: SlowBlock, block_hash: bytes) -> SlowBlock:
        equal = [other for other in self.blocks if other.block_hash == block_hash]
        if not equal or equal == [block]:
            block.block_hash = block_hash
            return block
        block.owners -= 1
        equal[0].owners += 1
        return equal[0]


def chain(prompt: list[int]) -> list[bytes]:
    """Block hashes that say all that is before them."""
    return [bytes(prompt[: end + 1]) for end in range(len(prompt))]


class PoolAgainstSlowTwin(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.twin = SlowPool()
        self.held: list[tuple[list[bytes], list[int], list[SlowBlock]]] = []

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=5), growth=st.integers(0, 2))
    def take(self, prompt: list[int], growth: int) -> None:
        hashes = chain(prompt)
        cached, twin_cached = self.pool.match(hashes), self.twin.match(hashes)
        assert len(cached) == len(twin_cached)
        fresh = len(prompt) - len(cached) + growth
        blocks = self.pool.try_allocate(cached, fresh)
        twin_blocks = self.twin.try_take(twin_cached, fresh)
        assert (blocks is None) == (twin_blocks is None)
        if blocks is not None and twin_blocks is not None:
            self.held.append((hashes, blocks, twin_blocks))
        assert list(self.pool.pop_evicted()) == self.twin.evicted
        self.twin.evicted = []

    @rule(index=st.integers(0, 10), full=st.integers(0, 5))
    def fill(self, index: int, full: int) -> None:
        if self.held:
            hashes, blocks, twin_blocks = self.held[index % len(self.held)]
            for position in range(min(full, len(hashes))):
                own, twin_own = blocks[position], twin_blocks[position]
                blocks[position] = self.pool.cache_full_block(own, hashes[position])
                twin_blocks[position] = self.twin.remember(twin_own, hashes[position])
                assert (blocks[position] == own) == (twin_blocks[position] is twin_own)

    @rule(index=st.integers(0, 10))
    def give_back(self, index: int) -> None:
        if self.held:
            _, blocks, twin_blocks = self.held.pop(index % len(self.held))
            self.pool.free(blocks)
            self.twin.give_back(twin_blocks)

    @invariant()
    def blocks_are_conserved_and_equal_the_twins(self) -> None:
        pool, twin = self.pool, self.twin.blocks
        pool.check_integrity([blocks for _, blocks, _ in self.held])
        assert len(pool._empty) + len(pool._idle) + pool.used_blocks == TOTAL
        assert pool.used_blocks == sum(1 for block in twin if block.owners)
        assert len(pool._idle) == sum(1 for b in twin if not b.owners and b.block_hash)

    @invariant()
    def a_cached_blocks_predecessors_are_cached(self) -> None:
        cached = self.pool._block_of
        assert all(block_hash[:-1] in cached for block_hash in cached if len(block_hash) > 1)


TestPoolAgainstSlowTwin = PoolAgainstSlowTwin.TestCase
TestPoolAgainstSlowTwin.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_taking_without_room_changes_nothing() -> None:
    pool = BlockPool(4)
    held = pool.try_allocate((), 3)
    assert held is not None
    assert pool.try_allocate((), 2) is None
    assert pool.used_blocks == 3
    pool.check_integrity([held])


def test_the_integrity_check_notices_an_unowned_block() -> None:
    pool = BlockPool(4)
    assert pool.try_allocate((), 1) is not None
    with pytest.raises(AssertionError, match="owners are"):
        pool.check_integrity([])


# --------------------------------------------------------------------------- sim tokens
SETTINGS = SimSettings()
PROMPTS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60)


def after(prompt: list[int], count: int, model: str = "tiny") -> tuple[int, ...]:
    return expected_tokens(prompt, count, model=model, settings=SETTINGS)


@given(prompt=PROMPTS, done=st.integers(0, 20))
def test_a_sequence_goes_on_the_same_from_any_point(prompt: list[int], done: int) -> None:
    whole = after(prompt, 20)
    assert after([*prompt, *whole[:done]], 20 - done) == whole[done:]


@given(prompt=PROMPTS, index=st.integers(0, 59))
def test_a_lost_or_repeated_token_changes_what_follows(prompt: list[int], index: int) -> None:
    index %= len(prompt)
    lost = prompt[:index] + prompt[index + 1 :]
    repeated = prompt[: index + 1] + prompt[index:]
    follows = after(prompt, 16)
    assert after(repeated, 16) != follows
    assert after(lost, 16) != follows


@given(prompt=PROMPTS, first=st.integers(0, 59), second=st.integers(0, 59))
def test_swapped_tokens_change_what_follows(prompt: list[int], first: int, second: int) -> None:
    first, second = first % len(prompt), second % len(prompt)
    swapped = list(prompt)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    assert (after(swapped, 16) == after(prompt, 16)) == (swapped == prompt)


def test_every_token_is_a_printable_id() -> None:
    tokens = after([5, 6, 7], 3000)
    assert set(tokens) == set(range(3, 97))


def test_the_tokens_of_two_models_differ() -> None:
    assert after([5, 6, 7], 16, "one") != after([5, 6, 7], 16, "two")


def test_the_context_ends_a_sequence() -> None:
    settings = SimSettings(max_len_tokens=10)
    assert len(expected_tokens([3] * 7, 100, model="tiny", settings=settings)) == 3


@pytest.mark.parametrize("min_tokens", [0, 5])
def test_an_end_token_is_drawn_with_its_probability_but_not_before_min_tokens(
    min_tokens: int,
) -> None:
    settings = SimSettings(eos_probability=0.25)
    lengths = []
    for seed in range(400):
        tokens = expected_tokens(
            [seed, 8], 1000, model="tiny", settings=settings, min_tokens=min_tokens
        )
        assert tokens.index(settings.eos_token_id) == len(tokens) - 1
        lengths.append(len(tokens))
    assert min(lengths) == min_tokens + 1
    # Geometric with mean 1 / 0.25; the mean of 400 has a standard deviation of 0.17.
    assert sum(lengths) / len(lengths) - min_tokens == pytest.approx(4, abs=0.7)


def test_the_state_of_a_long_sequence_is_no_larger() -> None:
    short, long = (TokenStream("tiny", SETTINGS, [9] * n) for n in (1, 100_000))
    assert short._state.bit_length() <= 64
    assert long._state.bit_length() <= 64


# --------------------------------------------------------------------------- sim settings
@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"prefill_tokens_per_s": 0.0}, "more than 0"),
        ({"speed": float("nan")}, "more than 0"),
        ({"block_size_tokens": 0}, "more than 0"),
        ({"transfer_setup_s": -0.1}, "at least 0"),
        ({"max_len_tokens": 1}, "at least 2"),
        ({"max_pulls": 0}, "at least 1"),
        ({"kv_blocks": 255}, "room for one request of max_len_tokens=4096"),
        ({"max_batched_tokens": 255}, "at least max_running_requests=256"),
        (
            {"max_batched_tokens_while_decoding": 255},
            "from max_running_requests=256 to max_batched_tokens=2048",
        ),
        ({"vocab_size": 3}, "more than 3"),
        ({"eos_probability": 1.1}, "from 0 to 1"),
        ({"side_channel_port": 65_536}, "from 0 to 65535"),
        ({"host_blocks": -1}, "at least 0"),
        ({"host_bytes_per_s": 0.0}, "more than 0"),
        ({"prefill_step_s": -1.0}, "at least 0"),
        ({"prefill_quadratic_s": -1.0}, "at least 0"),
        ({"decode_kv_s": -0.1}, "at least 0"),
        ({"decode_kv_quadratic_s": -0.1}, "at least 0"),
        ({"decode_kv_quadratic_s": 0.1}, "at most decode_kv_s"),
    ],
)
def test_an_impossible_setting_is_named_with_the_expected_one(
    change: dict[str, float], wanted: str
) -> None:
    (name,) = change
    with pytest.raises(ValueError, match=f"{name} is .*, expected {wanted}"):
        replace(SimSettings(), **change)  # type: ignore[arg-type]  # parametrized


def test_a_bad_setting_travels_by_pickle() -> None:
    error = SettingInvalid("speed", 0.0, "more than 0")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert str(again) == str(error) == "simulated engine: speed is 0.0, expected more than 0"
    assert (again.name, again.got, again.expected) == ("speed", 0.0, "more than 0")


def test_engines_of_different_models_or_blocks_have_different_layouts() -> None:
    one = SimSettings()
    layouts = {
        one.layout("a"),
        one.layout("b"),
        replace(one, block_size_tokens=32).layout("a"),
        replace(one, kv_dtype="fp8").layout("a"),
        replace(one, kv_block_bytes=1).layout("a"),
    }
    assert len(layouts) == 5
    assert replace(one, kv_blocks=9999, speed=2.0).layout("a") == one.layout("a")


def test_a_published_polynomial_can_be_set() -> None:
    """Source: the timing model of NVIDIA Dynamo's mock engine, n tokens and a share u in use:
    prefill ms = 4.209989e-7 n^2 + 1.518344e-2 n + 16.50142,
    decode ms = -25.74 u^2 + 54.01 u + 5.74.
    """
    settings = SimSettings(
        prefill_step_s=0.016_501_42,
        prefill_tokens_per_s=1e3 / 1.518344e-2,
        prefill_quadratic_s=4.209989e-10,
        decode_step_s=0.00574,
        decode_request_s=0.0,
        decode_kv_s=0.05401,
        decode_kv_quadratic_s=0.02574,
        step_overhead_s=0.0,
    )
    prefill_s = settings.step_s(prefill_tokens=4000, decode_requests=0, kv_used_fraction=0.5)
    assert prefill_s == pytest.approx((4.209989e-7 * 4000**2 + 1.518344e-2 * 4000 + 16.50142) / 1e3)
    decode_s = settings.step_s(prefill_tokens=0, decode_requests=9, kv_used_fraction=0.5)
    assert decode_s == pytest.approx((-25.74 * 0.25 + 54.01 * 0.5 + 5.74) / 1e3)
    both_s = settings.step_s(prefill_tokens=4000, decode_requests=9, kv_used_fraction=0.5)
    assert both_s == pytest.approx(prefill_s + decode_s)


def test_speed_divides_every_duration() -> None:
    one, two = SimSettings(), SimSettings(speed=2.0)
    assert two.transfer_s(10**9) == pytest.approx(one.transfer_s(10**9) / 2)
    assert two.host_load_s(100) == pytest.approx(one.host_load_s(100) / 2)
    assert two.step_s(prefill_tokens=9, decode_requests=1) == pytest.approx(
        one.step_s(prefill_tokens=9, decode_requests=1) / 2
    )


def test_a_step_that_prefills_nothing_pays_nothing_for_prefill() -> None:
    settings = SimSettings(prefill_step_s=1.0, prefill_quadratic_s=1.0)
    assert settings.step_s(prefill_tokens=0, decode_requests=1) < 0.1
