"""What constrains answers, on its way from the Rust frontend: prepared before an engine sees it."""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.domain.errors import EngineStartFailed
from baton.domain.request import Request
from baton.engine.vllm.frontend.settings import FrontendSettings

with warnings.catch_warnings():
    # The vendors' modules warn while they are imported.
    warnings.simplefilter("ignore")
    from vllm.config import StructuredOutputsConfig
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.tokenizers import get_tokenizer
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine import FinishReason as EngineFinishReason
    from vllm.v1.serial_utils import MsgpackDecoder

    from baton.engine.vllm.frontend import engine_server as seam
    from baton.engine.vllm.frontend.engine_server import FleetEngineServer, Prepare
    from baton.engine.vllm.frontend.rust_requests import RustGrammars
    from baton.engine.vllm.wire.codec import UnsupportedRequest, unpack_frames
    from tests.engine.test_engine_server import FACTS, FixedClock, Frontend, HookCalls
    from tests.fakes.frontends import engine_request

WORD = "fourscore"


@pytest.fixture(scope="module")
def grammars(model: Path) -> RustGrammars:
    return RustGrammars(FrontendSettings(model=str(model), served_model_name="tiny"))


def asked(**constraint: object) -> SamplingParams:
    """As the Rust frontend sends it: with a backend, and otherwise as its client wrote it."""
    params = SamplingParams(
        max_tokens=9,
        structured_outputs=StructuredOutputsParams(**constraint),
    )
    assert params.structured_outputs is not None
    params.structured_outputs._backend = "xgrammar"
    return params


def prepared(grammars: RustGrammars, **constraint: object) -> StructuredOutputsParams:
    request = engine_request("r", sampling_params=asked(**constraint))
    grammars.prepare(request)
    assert request.sampling_params is not None
    assert request.sampling_params.structured_outputs is not None
    return request.sampling_params.structured_outputs


GOOD: list[dict[str, object]] = [
    {"choice": ["yes", "no"]},
    {"regex": "a+b"},
    {"grammar": 'root ::= "a" | "b"'},
    {"grammar": 'start: "a" | "b"'},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"json": '{"type": "array", "items": {"type": "string"}}'},
    {"json": {"type": "number", "multipleOf": 7}},
    {"json_object": True},
]
BAD: list[dict[str, object]] = [
    {"choice": []},
    {"regex": "a+("},
    {"grammar": "root ::= missing"},
    {"grammar": " "},
    {"json": {"type": "nonsense"}},
    {"json": "{not json"},
]


@pytest.mark.parametrize("constraint", GOOD, ids=str)
def test_engines_get_the_same_grammars_as_from_vllms_python_frontend(
    grammars: RustGrammars, model: Path, constraint: dict[str, object]
) -> None:
    python = asked(**constraint)
    assert python.structured_outputs is not None
    python.structured_outputs._backend = None
    config = StructuredOutputsConfig()
    facts = SimpleNamespace(is_diffusion=False)
    python._validate_structured_outputs(facts, config, get_tokenizer(str(model)))
    assert prepared(grammars, **constraint) == python.structured_outputs


def test_choices_become_a_grammar_for_engines_have_none_for_them(grammars: RustGrammars) -> None:
    told = prepared(grammars, choice=["yes", "no"])
    assert (told.choice, told._backend) == (None, "xgrammar")
    assert "yes" in str(told.grammar)


@pytest.mark.parametrize("constraint", BAD, ids=str)
def test_an_unsatisfiable_grammar_is_refused_with_the_name_of_its_field(
    grammars: RustGrammars, constraint: dict[str, object]
) -> None:
    with pytest.raises(UnsupportedRequest, match="structured_outputs or response_format: "):
        prepared(grammars, **constraint)


def test_another_backend_is_used_where_the_model_is_configured_so(model: Path) -> None:
    extra = {"structured-outputs-config": {"backend": "guidance"}}
    told = RustGrammars(FrontendSettings(model=str(model), served_model_name="tiny", extra=extra))
    assert prepared(told, regex="a+")._backend == "guidance"


def test_a_vllm_that_checks_in_another_way_is_said_at_the_start(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SamplingParams, "_validate_structured_outputs")
    with pytest.raises(EngineStartFailed, match=r"install vllm 0.32 or 0.33"):
        RustGrammars(FrontendSettings(model=str(model), served_model_name="tiny"))


# ---------------------------------------------------------------------- at the seam


@asynccontextmanager
async def seamed(
    folder: Path, told: HookCalls, prepare: Prepare
) -> AsyncIterator[tuple[FleetEngineServer, Frontend]]:
    frontend = Frontend(folder)
    made = FleetEngineServer(FACTS, told.hooks(), FixedClock(), prepare=prepare)
    await made.start(*frontend.addresses)
    frontend.bind()
    await frontend.ready()
    try:
        yield made, frontend
    finally:
        await made.close()
        frontend.close()


class Slow:
    """Prepares a request when it is told to."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def prepare(self, request: EngineCoreRequest) -> None:
        assert request.request_id
        self.begun.set()
        assert self.go_on.wait(20)


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 20)


async def test_a_request_is_handed_on_as_it_was_prepared(
    tmp_path: Path, grammars: RustGrammars
) -> None:
    told = HookCalls()
    arrived = asyncio.Event()

    def on_request(request: Request) -> None:
        told.requests.append(request)
        arrived.set()

    told.on_request = on_request
    async with seamed(tmp_path, told, grammars.prepare) as (made, frontend):
        await frontend.add("a", sampling_params=asked(choice=["yes", "no"]))
        await asyncio.wait_for(arrived.wait(), 20)
        assert made.open_requests == 1
    (request,) = told.requests
    sent = MsgpackDecoder(EngineCoreRequest).decode(unpack_frames(request.payload))
    assert sent.sampling_params.structured_outputs.choice is None


async def test_an_invalid_grammar_is_rejected_at_once_and_not_logged(
    tmp_path: Path, grammars: RustGrammars, caplog: pytest.LogCaptureFixture
) -> None:
    told = HookCalls()
    caplog.set_level(logging.INFO)
    async with seamed(tmp_path, told, grammars.prepare) as (made, frontend):
        await frontend.add("a", sampling_params=asked(regex=f"{WORD}("))
        (output,) = (await frontend.receive()).outputs
        assert (output.request_id, output.finish_reason) == ("a", EngineFinishReason.ERROR)
        assert made.open_requests == 0
    assert told.requests == []
    written = [str(vars(record)) for record in caplog.records]
    assert any("structured_outputs or response_format" in name for name in written)
    assert not any(WORD in name for name in written)


async def test_others_go_on_while_a_grammar_is_looked_at(tmp_path: Path) -> None:
    told, slow = HookCalls(), Slow()
    async with seamed(tmp_path, told, slow.prepare) as (made, frontend):
        await frontend.add("slow", sampling_params=asked(regex="a"))
        await until(slow.begun)
        await frontend.add("quick")
        assert await frontend.nothing_more()
        assert [request.request_id for request in told.requests] == ["quick"]
        assert made.open_requests == 2
        slow.go_on.set()


async def test_a_disconnect_meanwhile_is_forgotten(tmp_path: Path) -> None:
    told, slow = HookCalls(), Slow()
    async with seamed(tmp_path, told, slow.prepare) as (made, frontend):
        await frontend.add("slow", sampling_params=asked(regex="a"))
        await until(slow.begun)
        await frontend.abort("slow")
        assert await frontend.nothing_more()
        assert made.open_requests == 0
        slow.go_on.set()
        assert await frontend.nothing_more()
    assert (told.requests, told.aborts) == ([], [])


async def test_the_check_of_a_grammar_has_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seam, "_PREPARE_S", 0.05)
    told, slow = HookCalls(), Slow()
    async with seamed(tmp_path, told, slow.prepare) as (made, frontend):
        await frontend.add("slow", sampling_params=asked(regex="a"))
        (output,) = (await frontend.receive()).outputs
        assert "not looked through within" in output.stop_reason
        assert made.open_requests == 0
        slow.go_on.set()


async def test_the_number_of_waiting_grammar_checks_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seam, "_MAX_PREPARING", 2)
    told, slow = HookCalls(), Slow()
    async with seamed(tmp_path, told, slow.prepare) as (_, frontend):
        for name in ("a", "b", "c"):
            await frontend.add(name, sampling_params=asked(regex="a"))
        (output,) = (await frontend.receive()).outputs
        assert output.request_id == "c"
        assert "429" in output.stop_reason
        slow.go_on.set()


async def test_a_failed_preparation_is_answered(tmp_path: Path) -> None:
    def breaks(_request: EngineCoreRequest) -> None:
        raise RuntimeError("a bug")

    told = HookCalls()
    async with seamed(tmp_path, told, breaks) as (made, frontend):
        await frontend.add("a", sampling_params=asked(regex="a"))
        (output,) = (await frontend.receive()).outputs
        assert "could not be prepared" in output.stop_reason
        assert made.open_requests == 0
