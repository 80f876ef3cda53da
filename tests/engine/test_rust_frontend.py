"""vLLM's Rust frontend as a process of ours: with a stand-in for it here, with itself below."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from baton.domain.commands import Delivery
from baton.domain.errors import EngineFailed, EngineStartFailed, LinkFailed
from baton.domain.handoff import CacheUse
from baton.domain.request import FinishReason, Request
from baton.engine.vllm.frontend.rust_arguments import (
    SUPPORTED_ROUTES,
    build_rust_arguments,
    unsupported_settings,
)
from baton.engine.vllm.frontend.rust_frontend import (
    PATH_VARIABLE,
    PROGRAM,
    RustFrontend,
    check_version,
    find_rust_frontend,
)
from baton.engine.vllm.frontend.settings import FrontendHooks, FrontendSettings, RequestCapabilities
from baton.engine.vllm.gate.limits import FrontendLimits
from tests.fakes import rust_program
from tests.fakes.frontends import engine_request, fleet_facts, open_hooks

with warnings.catch_warnings():
    # The vendors' modules warn while they are imported.
    warnings.simplefilter("ignore")
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from baton.engine.vllm.wire.codec import unpack_frames

FACTS = fleet_facts(512, adapters=1)


NO_SCHEMA = {"name": "x", "schema": {"type": "nonsense"}}


class FixedClock:
    def now_s(self) -> float:
        return 12.5


class Fleet:
    """What the hooks were told."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Request] = asyncio.Queue()
        self.aborts: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        self.healthy = True

    def hooks(self) -> FrontendHooks:
        return open_hooks(self.requests.put_nowait, self.aborts.put_nowait, lambda: self.healthy)

    async def next_request(self) -> Request:
        return await asyncio.wait_for(self.requests.get(), 20)

    async def next_abort(self) -> tuple[str, ...]:
        return await asyncio.wait_for(self.aborts.get(), 20)


def settings(model: str = "m", **changes: object) -> FrontendSettings:
    fields: dict[str, object] = {
        "model": model,
        "served_model_name": "tiny",
        "routes": tuple(sorted(SUPPORTED_ROUTES)),
        "start_timeout_s": 60.0,
    }
    return FrontendSettings(**(fields | changes))  # type: ignore[arg-type]  # tests know the names


def frontend(fleet: Fleet, what: FrontendSettings) -> RustFrontend:
    return RustFrontend(what, FACTS, hooks=fleet.hooks(), clock=FixedClock())


def client(path: Path) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=20)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def write_request(folder: Path, external_id: str) -> None:
    """What the stand-in asks for next."""
    name = f"cmpl-{external_id}"
    asked = engine_request(f"{name}-0123abcd", external_req_id=name)
    (frame,) = MsgpackEncoder().encode(asked)
    (folder / "request").write_bytes(frame)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_REQUEST", str(tmp_path / "request"))
    path = tmp_path / "vllm-rs"
    words = shlex.join([sys.executable, str(Path(rust_program.__file__))])
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    path.chmod(0o700)
    monkeypatch.setenv(PATH_VARIABLE, str(path))


# ---------------------------------------------------------------- with a stand-in


@pytest.mark.usefixtures("stand_in")
async def test_it_is_told_what_it_serves_and_how_large_a_body_may_be(fleet: Fleet) -> None:
    rust = frontend(fleet, settings(limits=FrontendLimits(max_body_bytes=12345)))
    async with client(await rust.start()) as http:
        told = (await http.get("/told")).json()
    assert told["served_model_name"] == ["tiny"]
    assert told["env"]["VLLM_HTTP_MAX_REQUEST_BODY_SIZE"] == "12345"
    await rust.close()


@pytest.mark.usefixtures("stand_in")
async def test_a_request_reaches_the_fleet_under_its_tenant_and_is_answered(
    fleet: Fleet, tmp_path: Path
) -> None:
    rust = frontend(fleet, settings())
    async with client(await rust.start()) as http:
        write_request(tmp_path, f"x~{rust.tenant_handle('acme')}~gold")
        await http.get("/ask")
        request = await fleet.next_request()
        assert (request.tenant, request.slo_class) == ("acme", "gold")
        assert rust.open_requests == 1
        rust.deliver([Delivery(request.request_id, (5,), FinishReason.STOP)])
        assert (await http.get("/answer")).json() == 1
    assert rust.open_requests == 0
    await rust.close()


@pytest.mark.usefixtures("stand_in")
async def test_a_request_past_the_gate_is_answered_with_an_error(
    fleet: Fleet, tmp_path: Path
) -> None:
    rust = frontend(fleet, settings())
    async with client(await rust.start()) as http:
        write_request(tmp_path, "x")
        await http.get("/ask")
        assert (await http.get("/answer")).json() == 1
    assert fleet.requests.empty()
    await rust.close()


@pytest.mark.usefixtures("stand_in")
async def test_when_it_dies_all_is_aborted_and_it_is_broken(fleet: Fleet, tmp_path: Path) -> None:
    rust = frontend(fleet, settings())
    async with client(await rust.start()) as http:
        write_request(tmp_path, f"x~{rust.tenant_handle('acme')}~")
        await http.get("/ask")
        request = await fleet.next_request()
        assert rust.healthy()
        with pytest.raises(httpx.TransportError):
            await http.get("/die")
    assert await fleet.next_abort() == (request.request_id,)
    assert rust.has_failed
    assert not rust.healthy()
    assert rust.open_requests == 0
    await rust.close()


@pytest.mark.usefixtures("stand_in")
async def test_nothing_is_left_behind(fleet: Fleet) -> None:
    rust = frontend(fleet, settings())
    path = await rust.start()
    pid = rust.pid
    assert pid is not None
    assert path.parent.stat().st_mode & 0o077 == 0
    await rust.close()
    await rust.close()
    assert not path.parent.exists()
    assert not psutil.pid_exists(pid)
    with pytest.raises(LinkFailed):
        rust.fail("x", EngineFailed("x", "gone"))


@pytest.mark.usefixtures("stand_in")
async def test_it_is_unhealthy_while_the_fleet_is_and_not_broken(fleet: Fleet) -> None:
    rust = frontend(fleet, settings())
    assert not rust.healthy()
    await rust.start()
    fleet.healthy = False
    assert not rust.healthy()
    assert not rust.has_failed
    await rust.close()


@pytest.mark.usefixtures("stand_in")
async def test_why_it_does_not_start_is_said_in_its_own_words(fleet: Fleet) -> None:
    rust = frontend(fleet, settings("broken"))
    with pytest.raises(EngineStartFailed, match="no such model"):
        await rust.start()
    assert rust.pid is None


async def test_where_it_is_not_installed_that_is_said(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATH_VARIABLE, "/nowhere/vllm-rs")
    with pytest.raises(EngineStartFailed, match="expected the path of an executable"):
        await frontend(fleet, settings()).start()


# ---------------------------------------------------------------- with itself


class Real:
    """The program itself, a client of tenant `acme`, and the fleet behind it."""

    def __init__(self, fleet: Fleet, rust: RustFrontend, http: httpx.AsyncClient) -> None:
        self._fleet, self.rust, self.http = fleet, rust, http
        self.headers = {"x-request-id": f"x~{rust.tenant_handle('acme')}~gold"}

    def ask(self, **body: object) -> asyncio.Task[httpx.Response]:
        asked = {"model": "tiny", "prompt": "def", "max_tokens": 2} | body
        posted = self.http.post("/v1/completions", json=asked, headers=self.headers)
        return asyncio.create_task(posted)

    async def asked(self, **body: object) -> tuple[asyncio.Task[httpx.Response], Request]:
        """What will be answered, and what the fleet is asked."""
        return self.ask(**body), await self._fleet.next_request()

    async def served(self, **body: object) -> Request:
        """What the fleet is asked, which it answers with one token."""
        answer, request = await self.asked(**body)
        self.deliver(request, 300, FinishReason.STOP)
        assert (await answer).status_code == 200
        return request

    def deliver(self, request: Request, token: int, finish: FinishReason | None = None) -> None:
        self.rust.deliver([Delivery(request.request_id, (token,), finish)])

    def fail(self, request: Request) -> None:
        self.rust.fail(request.request_id, EngineFailed(request.request_id, "the engine died"))


@asynccontextmanager
async def running(fleet: Fleet, what: FrontendSettings) -> AsyncIterator[Real]:
    try:
        find_rust_frontend(os.environ)
    except EngineStartFailed as missing:
        pytest.skip(str(missing))
    rust = frontend(fleet, what)
    async with client(await rust.start()) as http:
        yield Real(fleet, rust, http)
    await rust.close()


@pytest.fixture
async def real(fleet: Fleet, model: Path) -> AsyncIterator[Real]:
    async with running(fleet, settings(str(model), adapters={"ada": "/adapters/ada"})) as real:
        yield real


async def test_a_completion_is_made_of_the_fleets_tokens(real: Real) -> None:
    asked, request = await real.asked(min_tokens=2)
    assert request.request_id.startswith("cmpl-x~")
    assert (request.tenant, request.slo_class, request.max_tokens) == ("acme", "gold", 2)
    real.rust.deliver([Delivery(request.request_id, (300,), cached_tokens=0)])
    real.deliver(request, 301, FinishReason.LENGTH)
    answer: dict[str, Any] = (await asked).json()
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_cached_tokens_are_those_of_the_fleet(model: Path, fleet: Fleet) -> None:
    extra = {"enable-prompt-tokens-details": True}
    async with running(fleet, settings(str(model), extra=extra)) as real:
        for stream in (False, True):
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            asked, request = await real.asked(prompt="def " * 40, **options)
            cached = Delivery(
                request.request_id, (300,), cached_tokens=16, cache_use=CacheUse(0, 16)
            )
            real.rust.deliver([cached])
            real.deliver(request, 301, FinishReason.LENGTH)
            text = (await asked).text
            *_, last = [line for line in text.splitlines() if '"usage":{' in line]
            usage = json.loads(last.removeprefix("data: "))["usage"]
            assert usage["prompt_tokens"] == len(request.prompt_token_ids)
            assert usage["prompt_tokens_details"]["cached_tokens"] == 16


async def test_the_gates_id_counts_before_the_one_in_a_body(real: Real) -> None:
    other = real.rust.tenant_handle("other")
    assert (await real.served(request_id=f"y~{other}~")).tenant == "acme"


async def test_arguments_of_a_client_are_none_of_ours(real: Real) -> None:
    request = await real.served(
        priority=-9,
        vllm_xargs={"baton_caller": ["other", "x", "y"]},
        kv_transfer_params={"do_remote_prefill": True},
    )
    assert (request.tenant, request.priority) == ("acme", 0)
    assert b"do_remote_prefill" not in request.payload


async def test_a_client_that_leaves_is_aborted(real: Real, fleet: Fleet) -> None:
    asked, request = await real.asked(stream=True)
    asked.cancel()
    assert await fleet.next_abort() == (request.request_id,)
    assert real.rust.open_requests == 0


async def test_a_failure_before_the_first_token_is_a_500_without_a_reason(real: Real) -> None:
    asked, request = await real.asked()
    real.fail(request)
    answer = await asked
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "Internal server error"


async def test_choices_reach_the_fleet_as_a_grammar(real: Real) -> None:
    request = await real.served(structured_outputs={"choice": ["yes", "no"]})
    sent = MsgpackDecoder(EngineCoreRequest).decode(unpack_frames(request.payload))
    told = sent.sampling_params.structured_outputs
    assert (told.choice, "yes" in told.grammar) == (None, True)


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"regex": "a+("}},
        {"structured_outputs": {"grammar": "root ::= missing"}},
        {"response_format": {"type": "json_schema", "json_schema": NO_SCHEMA}},
    ],
)
async def test_an_unsatisfiable_form_is_rejected_without_an_engine(
    real: Real, fleet: Fleet, body: dict[str, object]
) -> None:
    answer = await real.ask(**body)
    assert answer.status_code == 500, "the program has no other status for what an engine says"
    assert fleet.requests.empty()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"stop_token_ids": [999999]}, "stop_token_ids"),
        ({"allowed_token_ids": [999999]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logprobs": 50}, "logprobs"),
        ({"prompt_logprobs": 50}, "prompt_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"prompt": [999999, 5]}, "prompt"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ],
)
async def test_the_program_checks_all_other_fields_itself_and_names_them(
    real: Real, fleet: Fleet, body: dict[str, object], field: str
) -> None:
    answer = await real.ask(**body)
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]
    assert fleet.requests.empty()


async def test_a_request_without_the_gates_id_is_not_run(real: Real, fleet: Fleet) -> None:
    real.headers = {"x-request-id": "x"}
    assert (await real.ask()).status_code == 500
    assert fleet.requests.empty()


async def test_an_adapter_is_named_to_the_fleet(real: Real) -> None:
    assert (await real.served(model="ada")).adapter == "ada"


async def test_a_body_that_is_too_large_is_refused(model: Path, fleet: Fleet) -> None:
    limits = FrontendLimits(max_body_bytes=1000)
    async with running(fleet, settings(str(model), limits=limits)) as real:
        answer = await real.ask(prompt="a" * 2000)
    assert answer.status_code == 400
    assert "length limit" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [{"n": 2}, {"prompt": ["a", "b"]}, {"use_beam_search": True, "n": 2}]
)
async def test_several_answers_or_prompts_are_refused(
    real: Real, fleet: Fleet, body: dict[str, object]
) -> None:
    answer = await real.ask(**body)
    assert answer.status_code == 400
    assert fleet.requests.empty()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_anthropics_routes_are_not_there(real: Real, path: str) -> None:
    assert (await real.http.post(path, json={})).status_code == 501


async def test_openais_responses_are_not_there(real: Real) -> None:
    assert (await real.http.post("/v1/responses", json={})).status_code == 404


async def test_more_tokens_than_the_context_holds_are_cut(real: Real) -> None:
    request = await real.served(max_tokens=10_000)
    assert request.max_tokens == FACTS.max_len_tokens - len(request.prompt_token_ids)


async def test_a_stream_that_breaks_off_ends_with_an_error_and_done(real: Real) -> None:
    asked, request = await real.asked(stream=True)
    real.deliver(request, 300)
    real.fail(request)
    answer = await asked
    *_, error, done = [line for line in answer.text.splitlines() if line]
    assert answer.status_code == 200
    assert "Internal server error" in error
    assert done == "data: [DONE]"


async def test_a_chunk_before_the_last_has_no_finish_reason(real: Real) -> None:
    asked, request = await real.asked(stream=True)
    real.deliver(request, 300)
    real.deliver(request, 301, FinishReason.LENGTH)
    lines = [line for line in (await asked).text.splitlines() if line.startswith("data: {")]
    *before, last = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert before
    assert not any("finish_reason" in choice for choice in before)
    assert last["finish_reason"] == "length"


async def test_tokens_and_text_are_told_for_each_other(real: Real) -> None:
    told = (await real.http.post("/tokenize", json={"model": "tiny", "prompt": "def"})).json()
    back = await real.http.post("/detokenize", json={"model": "tiny", "tokens": told["tokens"]})
    assert back.json()["prompt"] == "def"


async def test_media_are_refused_and_not_fetched(real: Real) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [image]}]}
    answer = await real.http.post("/v1/chat/completions", json=body, headers=real.headers)
    assert answer.status_code == 400
    assert "unsupported multimodal content" in answer.json()["error"]["message"]


async def test_its_log_contains_no_prompt(real: Real) -> None:
    asked, request = await real.asked(prompt="SECRETWORD")
    real.fail(request)
    await asked
    assert real.rust._process is not None
    assert "SECRETWORD" not in real.rust._process.tail()


# -------------------------------------------------------------------- the program


def program(folder: Path, says: str = "vllm-rs 0.33.0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PROGRAM
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o700)
    return path


def test_the_variable_goes_before_the_package(tmp_path: Path) -> None:
    said, package = program(tmp_path / "said"), program(tmp_path / "vllm").parent
    assert find_rust_frontend({PATH_VARIABLE: str(said)}, package=package) == said


@pytest.mark.parametrize("said", ["", "auto", "1", "True"])
def test_the_package_goes_before_the_path(tmp_path: Path, said: str) -> None:
    package, other = program(tmp_path / "vllm"), program(tmp_path / "bin")
    environ = {PATH_VARIABLE: said, "PATH": str(other.parent)}
    assert find_rust_frontend(environ, package=package.parent) == package


def test_the_path_comes_last(tmp_path: Path) -> None:
    found = program(tmp_path / "bin")
    assert find_rust_frontend({"PATH": str(found.parent)}, package=tmp_path / "vllm") == found


def test_a_variable_that_names_no_program_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    package = program(tmp_path / "vllm").parent
    with pytest.raises(EngineStartFailed, match="expected the path of an executable vllm-rs"):
        find_rust_frontend({PATH_VARIABLE: str(tmp_path / "none")}, package=package)


def test_an_unexecutable_file_is_not_the_program(tmp_path: Path) -> None:
    program(tmp_path / "vllm").chmod(0o600)
    with pytest.raises(EngineStartFailed, match="nor on the PATH") as failed:
        find_rust_frontend({"PATH": ""}, package=tmp_path / "vllm")
    assert "vllm 0.33" in str(failed.value)


def test_a_version_that_was_tried_is_taken(tmp_path: Path) -> None:
    assert check_version(program(tmp_path)) == "0.33.0"


@pytest.mark.parametrize("says", ["vllm-rs 0.34.1", "something else", ""])
def test_an_untested_version_is_refused(tmp_path: Path, says: str) -> None:
    with pytest.raises(EngineStartFailed, match=r"of a version 0\.33\."):
        check_version(program(tmp_path, says))


def test_a_program_that_does_not_run_is_reported(tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match="does not run"):
        check_version(tmp_path / "none")


# -------------------------------------------------------------------- its arguments


def frontend_settings(**changes: object) -> FrontendSettings:
    fields: dict[str, object] = {
        "model": "/models/m",
        "served_model_name": "m",
        "routes": tuple(sorted(SUPPORTED_ROUTES)),
    }
    return FrontendSettings(**(fields | changes))  # type: ignore[arg-type]  # tests know the names


def told(**changes: object) -> dict[str, object]:
    document: dict[str, object] = json.loads(
        build_rust_arguments(frontend_settings(**changes), max_len_tokens=512)
    )
    return document


def test_the_model_its_name_and_its_context_are_told() -> None:
    found = told()
    assert (found["model"], found["model_tag"]) == ("/models/m", "/models/m")
    assert (found["served_model_name"], found["max_model_len"]) == (["m"], 512)


def test_media_are_closed_in_every_configuration() -> None:
    assert told()["language_model_only"] is True
    assert told(extra={"stream-interval": 4})["language_model_only"] is True


def test_raw_arguments_lose_their_dashes_and_never_replace_ours() -> None:
    found = told(extra={"tool-call-parser": "hermes", "stream_interval": 4})
    assert (found["tool_call_parser"], found["stream_interval"]) == ("hermes", 4)


def test_adapters_are_told_with_their_paths() -> None:
    found = told(adapters={"ada": "/adapters/ada"})
    assert found["enable_lora"] is True
    assert found["lora_modules"] == [{"name": "ada", "path": "/adapters/ada"}]
    assert "lora_modules" not in told()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"routes": ("chat", "messages", "responses")}, "has no messages, responses"),
        ({"limits": FrontendLimits(max_messages=8)}, "admission.max_messages"),
        (
            {"capabilities": RequestCapabilities(media_domains=("a.example",))},
            "server.allow.media_domains",
        ),
        ({"capabilities": RequestCapabilities(prompt_embeds=True)}, "server.allow.prompt_embeds"),
        ({"extra": {"api-key": "k", "host": "h"}}, "pass over api_key, host"),
    ],
)
def test_an_unavailable_feature_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(EngineStartFailed, match=said):
        told(**changes)


def test_all_that_cannot_be_had_is_said_at_once() -> None:
    problems = unsupported_settings(routes=("responses",), max_messages=8, prompt_embeds=True)
    assert list(problems) == [
        "server.routes",
        "admission.max_messages",
        "server.allow.prompt_embeds",
    ]
