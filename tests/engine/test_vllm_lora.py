"""Two real engines with tiny LoRA adapters: loaded on demand, handed over, never mixed up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random

import pytest
import pytest_asyncio

from baton.control.fleet.cache_feed import CacheFeed
from baton.domain.cache import unpack_hashes
from baton.domain.errors import AdapterFailed
from baton.domain.fleet import Role
from baton.domain.handoff import Leg, LegKind
from baton.domain.value import evolve
from baton.engine.vllm.core.settings import AdapterSlots
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root
from tests.contracts.engine_contract import EngineListener, RunningPair, running_pair
from tests.engine.vllm_engines import VllmEngine, engine_settings, engine_with_checks, with_payload
from tests.fakes.scripted_engine import make_leg
from tests.fakes.tiny_adapter import RANK, write_tiny_adapter
from tests.fakes.tiny_model import tiny_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.thorough,
    pytest.mark.timeout(420),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

ADAPTERS = ("ada", "bob", "cy", "dee")
LOADED = 3
TOKENS = 16
BLOCK_TOKENS = 32
_NUMBERS = count()


@dataclass(frozen=True)
class Engines:
    """A prefill and a decode engine."""

    pair: RunningPair

    @property
    def decode(self) -> EngineListener:
        return self.pair.decode

    @property
    def vllm(self) -> VllmEngine:
        engine = self.pair.decode.engine
        assert isinstance(engine, VllmEngine)
        return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    folder = tmp_path_factory.mktemp("models")
    model = tiny_model(folder)
    adapters = {
        name: str(write_tiny_adapter(folder / name, model, seed=seed))
        for seed, name in enumerate(ADAPTERS, start=1)
    }
    adapters["lost"] = str(folder / "nowhere")
    slots = AdapterSlots(max_per_batch=2, max_loaded=LOADED, max_rank=RANK)
    prefill, decode = (
        engine_with_checks(
            replace(
                engine_settings(model, role),
                dtype="float32",  # rounding has no say
                adapters=adapters,
                adapter_slots=slots,
            )
        )
        for role in (Role.PREFILL, Role.DECODE)
    )
    async with running_pair(prefill, decode) as pair:
        yield Engines(pair)


def prompt() -> tuple[int, ...]:
    """One that nobody has seen."""
    random = Random(next(_NUMBERS))
    return tuple(random.randrange(400, 8000) for _ in range(3 * BLOCK_TOKENS + 5))


def leg(tokens: tuple[int, ...], adapter: str | None, *, salt: str | None = None) -> Leg:
    name = f"leg-{next(_NUMBERS)}"
    return with_payload(
        make_leg(name, prompt=tokens, max_tokens=TOKENS, adapter=adapter, cache_salt=salt)
    )


async def test_each_adapter_answers_in_its_own_way_and_always_the_same(engines: Engines) -> None:
    tokens = prompt()
    first = {item: await engines.decode.run(leg(tokens, item)) for item in (None, *ADAPTERS)}
    assert len(set(first.values())) == len(first)
    # The last adapter has taken the place of the first, which comes back.
    assert {item: await engines.decode.run(leg(tokens, item)) for item in first} == first


async def test_adapters_reported_as_loaded_are_those_that_vllm_has_loaded(engines: Engines) -> None:
    for name in ("ada", "bob", "ada", "cy", "dee", "ada"):
        await engines.decode.run(leg(prompt(), name))
        told = engines.vllm.load().adapters
        numbers = {ADAPTERS.index(name) + 1 for name in told.loaded}
        assert numbers == set(await engines.vllm._core.list_loras_async())
        assert len(told.loaded) <= LOADED
    assert told.loads >= len(ADAPTERS)
    assert told.loading_s > 0


async def test_an_adapters_prompt_is_handed_over_and_goes_on_as_in_one_engine(
    engines: Engines,
) -> None:
    tokens = prompt()
    for adapter in ("ada", "bob"):
        alone = await engines.decode.run(leg(tokens, adapter, salt="alone"))
        prefill = evolve(leg(tokens, adapter, salt="handed"), kind=LegKind.PREFILL)
        await engines.pair.prefill.run(prefill)
        ticket = engines.pair.prefill.outputs(prefill.leg_id)[-1].kv_handle
        pulls = engines.vllm.load().transfers.pulls
        decode = leg(tokens, adapter, salt="handed")
        decode = evolve(decode, kind=LegKind.DECODE, kv_handle=ticket)
        assert await engines.decode.run(decode) == alone
        assert engines.vllm.load().transfers.pulls == pulls + 1
        assert (engines.decode.outputs(decode.leg_id)[0].cached_tokens or 0) >= 3 * BLOCK_TOKENS


async def test_a_prefix_is_found_again_under_its_own_adapter_only(engines: Engines) -> None:
    tokens, cached = prompt(), []
    for adapter in (None, "ada", "bob", "ada", None):
        one = leg(tokens, adapter)
        await engines.decode.run(one)
        cached.append(engines.decode.outputs(one.leg_id)[0].cached_tokens)
    assert cached == [0, 0, 0, 3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS]


async def test_cached_blocks_have_hashes_that_contain_the_adapter(
    engines: Engines,
) -> None:
    tokens, facts = prompt(), engines.decode.facts
    root = chain_root(model=facts.model, block_size_tokens=BLOCK_TOKENS, adapter="ada")
    wanted = set(chain_hashes(root, tokens, BLOCK_TOKENS))
    feed = CacheFeed(
        model=facts.model, block_size_tokens=BLOCK_TOKENS, capacity_blocks=facts.kv_blocks
    )
    await engines.decode.run(leg(tokens, "ada"))
    async for batch in engines.vllm.kv_events():
        feed.apply(batch)
        held = {
            unpack_hash
            for change in feed.snapshot().changes
            for unpack_hash in unpack_hashes(change.packed_hashes)
        }
        if wanted <= held:
            break


async def test_an_adapter_that_is_not_there_costs_its_own_leg_and_nothing_else(
    engines: Engines,
) -> None:
    before = await engines.decode.run(leg(tokens := prompt(), "ada"))
    with pytest.raises(AdapterFailed, match=r"lost: .*nowhere"):
        await engines.vllm.submit(leg(tokens, "lost"))
    with pytest.raises(AdapterFailed, match=r"eve: this engine has no adapter of that name"):
        await engines.vllm.submit(leg(tokens, "eve"))
    assert await engines.decode.run(leg(tokens, "ada")) == before


async def test_a_name_that_is_loaded_again_from_elsewhere_finds_nothing_of_the_first(
    engines: Engines,
) -> None:
    """Prefixes are cached by what the fleet calls an adapter, which is another for each load."""
    tokens = prompt()
    wanted = {name: await engines.decode.run(leg(tokens, name)) for name in ("ada", "bob")}
    known = engines.vllm._adapters._known_adapters
    sources = dict(known.fixed)
    known.replace_added({"sql@1": sources["ada"]})
    assert await engines.decode.run(leg(tokens, "sql@1")) == wanted["ada"]
    known.replace_added({"sql@1": sources["ada"], "sql@2": sources["bob"]})
    assert await engines.decode.run(leg(tokens, "sql@2")) == wanted["bob"]
    assert await engines.decode.run(leg(tokens, "sql@1")) == wanted["ada"]
    known.replace_added({"sql@2": sources["bob"]})
    with pytest.raises(AdapterFailed, match="no adapter of that name"):
        await engines.vllm.submit(leg(tokens, "sql@1"))
