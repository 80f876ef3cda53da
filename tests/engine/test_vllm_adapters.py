"""The adapters of a vLLM engine, without the engine: what is loaded when, and what fails."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path

import pytest

from baton.domain.errors import AdapterFailed
from baton.runtime.known_adapters import KnownAdapters

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    from vllm.lora.request import LoRARequest

    from baton.engine.vllm.core.lora import EngineAdapters

SOURCES = {"ada": "/adapters/ada", "bob": "/adapters/bob"}


class Engine:
    """Loads what it is told to, but for what is missing."""

    def __init__(self, *missing: str) -> None:
        self.loaded: list[str] = []
        self.missing = missing

    async def load(self, request: LoRARequest) -> bool:
        await asyncio.sleep(0)
        if request.lora_name in self.missing:
            raise RuntimeError(f"Worker failed\nno adapter in {request.lora_path}\n")
        self.loaded.append(request.lora_name)
        return True


async def test_an_adapter_is_loaded_before_the_first_leg_that_needs_it_and_not_again() -> None:
    engine, adapters = Engine(), EngineAdapters(KnownAdapters(SOURCES), slots=2)
    first = await adapters.ensure_loaded("l1", "ada", engine.load)
    second = await adapters.ensure_loaded("l2", "ada", engine.load)
    assert first is second
    assert first is not None
    assert (first.lora_name, first.lora_path) == ("ada", "/adapters/ada")
    assert engine.loaded == ["ada"]
    told = adapters.adapter_load()
    assert (told.loaded, told.hits, told.loads) == (("ada",), 1, 1)


async def test_legs_that_come_together_load_their_adapter_once() -> None:
    engine, adapters = Engine(), EngineAdapters(KnownAdapters(SOURCES), slots=2)
    await asyncio.gather(*(adapters.ensure_loaded(f"l{n}", "ada", engine.load) for n in range(5)))
    assert engine.loaded == ["ada"]


async def test_an_adapter_that_lies_here_is_taken_from_where_it_lies(tmp_path: Path) -> None:
    sources = {"here": str(tmp_path), "lost": str(tmp_path / "no")}
    adapters = EngineAdapters(KnownAdapters(sources), slots=2)
    adapters.download_all()
    for name, path in (("here", tmp_path), ("lost", tmp_path / "no")):
        found = await adapters.ensure_loaded(name, name, Engine().load)
        assert found is not None
        assert found.lora_path == str(path)


async def test_a_leg_without_an_adapter_loads_nothing() -> None:
    engine, adapters = Engine(), EngineAdapters(KnownAdapters(SOURCES), slots=2)
    assert await adapters.ensure_loaded("l", None, engine.load) is None
    assert not engine.loaded


async def test_an_unknown_adapter_is_named_with_the_configured_ones() -> None:
    with pytest.raises(AdapterFailed, match=r"eve: this engine has no adapter .* it has ada, bob"):
        await EngineAdapters(KnownAdapters(SOURCES), slots=2).ensure_loaded(
            "l", "eve", Engine().load
        )


async def test_an_adapter_that_cannot_be_loaded_fails_its_own_leg_with_the_reason() -> None:
    engine, adapters = Engine("ada"), EngineAdapters(KnownAdapters(SOURCES), slots=2)
    with pytest.raises(AdapterFailed, match="ada: /adapters/ada: no adapter in /adapters/ada"):
        await adapters.ensure_loaded("l1", "ada", engine.load)
    assert not adapters.adapter_load().loaded
    assert await adapters.ensure_loaded("l2", "bob", engine.load) is not None


async def test_a_place_is_taken_from_the_adapter_that_no_leg_needs_any_more() -> None:
    engine, adapters = Engine(), EngineAdapters(KnownAdapters(SOURCES), slots=1)
    await adapters.ensure_loaded("l1", "ada", engine.load)
    adapters.on_leg_ended("l1")
    await adapters.ensure_loaded("l2", "bob", engine.load)
    assert adapters.adapter_load().loaded == ("bob",)


async def test_an_adapter_that_came_later_is_loaded_under_an_id_of_its_own() -> None:
    engine, known = Engine(), KnownAdapters(SOURCES)
    adapters = EngineAdapters(known, slots=4)
    await adapters.ensure_loaded("l0", "ada", engine.load)
    known.replace_added({"sql@1": "/adapters/sql"})
    first = await adapters.ensure_loaded("l1", "sql@1", engine.load)
    known.replace_added({"sql@2": "/adapters/other"})
    second = await adapters.ensure_loaded("l2", "sql@2", engine.load)
    assert first is not None
    assert second is not None
    assert (first.lora_path, second.lora_path) == ("/adapters/sql", "/adapters/other")
    assert len({first.lora_int_id, second.lora_int_id, 1, 2}) == 4
    assert engine.loaded == ["ada", "sql@1", "sql@2"]
    with pytest.raises(AdapterFailed, match="no adapter of that name"):
        await adapters.ensure_loaded("l3", "sql@1", engine.load)
