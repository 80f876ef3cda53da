"""Starting and stopping a whole frontend."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

import httpx
import pytest

from baton.domain.errors import EngineStartFailed, LinkFailed
from baton.engine.vllm.fast_path.tokenization_cache import FastEncoder
from baton.engine.vllm.frontend.app import VllmFrontend
from baton.engine.vllm.frontend.settings import FrontendSettings
from tests.compat.echo_fleet import EchoFleet
from tests.compat.endpoint import MODEL, MonotonicClock, ServerThread, serve
from tests.fakes.frontends import fleet_facts
from tests.fakes.tiny_model import tiny_model

# vLLM warns of its own deprecated fields, and when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")

FACTS = fleet_facts(256, kv_blocks=64, max_running_requests=8, max_batched_tokens=256)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def fleet() -> EchoFleet:
    return EchoFleet()


@pytest.fixture
def thread(model_dir: Path, fleet: EchoFleet) -> Iterator[ServerThread]:
    settings = FrontendSettings(
        model=str(model_dir),
        served_model_name=MODEL,
        log_stats=True,
        routes=("completions", "metrics", "health"),
        extra={"return_tokens_as_token_ids": True, "override-generation-config": {"top_k": 3}},
    )
    with serve(settings, fleet) as running:
        yield running


def frontend(fleet: EchoFleet, settings: FrontendSettings) -> VllmFrontend:
    return VllmFrontend(settings, FACTS, hooks=fleet.hooks(), clock=MonotonicClock())


async def test_the_logs_of_ray_serve_outlive_vllms_configuration(
    model_dir: Path, fleet: EchoFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM configures logging once a process; Ray Serve's own handlers must outlive that."""
    monkeypatch.setattr("vllm.logger._last_configured_logging_config", None)
    target = logging.FileHandler(tmp_path / "ingress.log")
    serves = MemoryHandler(10, target=target)
    started = frontend(fleet, FrontendSettings(model=str(model_dir), served_model_name=MODEL))
    await started.start()
    kept = serves.target
    await started.close()
    serves.close()
    target.close()
    assert kept is target


def test_messages_of_earlier_turns_are_not_tokenized_again(
    model_dir: Path, fleet: EchoFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything remembered of who names a salt; in any way the prompt is the same."""
    asked: list[str] = []
    encode = FastEncoder.__call__

    def spy(
        self: FastEncoder,
        texts: list[str],
        *,
        add_special_tokens: bool = False,
    ) -> list[list[int]]:
        asked.extend(texts)
        return encode(self, texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(FastEncoder, "__call__", spy)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "oh"}]
    settings = FrontendSettings(model=str(model_dir), served_model_name=MODEL, routes=("chat",))
    prompts = []
    with serve(settings, fleet) as running, httpx.Client(base_url=running.base_url) as client:
        for more in ({"cache_salt": "mine"}, {}, {}):
            asked.clear()
            body = {"model": MODEL, "messages": turns, "max_tokens": 1, **more}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
            prompts.append(fleet.arrived.get(timeout=5).prompt_token_ids)
            if more:
                assert len(asked) == 1, "not in pieces that others could find"
        assert asked == [], "it was said before"
        body["messages"] = [*turns, {"role": "user", "content": "ah"}]
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert asked == ["<|user|>ah"]
    assert prompts == prompts[:1] * 3


def test_open_streams_end_with_an_error_when_the_frontend_closes(
    thread: ServerThread, fleet: EchoFleet
) -> None:
    """And the series of vLLM's frontend are there when asked for, and only asked-for routes."""
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 3}
    assert httpx.post(f"{thread.base_url}/v1/completions", json=body).status_code == 200
    metrics = httpx.get(f"{thread.base_url}/metrics").text
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 3.0' in metrics
    assert httpx.get(f"{thread.base_url}/v1/models").status_code == 404

    fleet.is_paused = True
    answers: list[httpx.Response] = []
    waiting = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{thread.base_url}/v1/completions", json=body, timeout=20)
        )
    )
    waiting.start()
    fleet.arrived.get(timeout=5)
    fleet.arrived.get(timeout=5)
    thread.close_frontend()
    waiting.join(10)
    (answer,) = answers
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert httpx.get(f"{thread.base_url}/health").status_code == 503


async def test_a_missing_model_is_one_clear_line(fleet: EchoFleet) -> None:
    wanted = FrontendSettings(model="/nonexistent/model", served_model_name="x")
    started_s = time.monotonic()
    with pytest.raises(EngineStartFailed, match="/nonexistent/model") as failure:
        await frontend(fleet, wanted).start()
    assert "\n" not in str(failure.value)
    assert time.monotonic() - started_s < 60


async def test_an_argument_that_vllm_does_not_know_is_refused(
    fleet: EchoFleet, model_dir: Path
) -> None:
    wanted = FrontendSettings(
        model=str(model_dir), served_model_name="x", extra={"no-such-thing": 1}
    )
    with pytest.raises(EngineStartFailed, match="no-such-thing"):
        await frontend(fleet, wanted).start()


async def test_a_frontend_that_is_not_started_refuses_deliveries(fleet: EchoFleet) -> None:
    idle = frontend(fleet, FrontendSettings(model="m", served_model_name="x"))
    assert not idle.healthy()
    assert idle.open_requests == 0
    with pytest.raises(LinkFailed, match="not running"):
        idle.deliver([])
    await idle.close()


def test_unknown_routes_are_refused() -> None:
    with pytest.raises(ValueError, match="embeddings"):
        FrontendSettings(model="m", served_model_name="x", routes=("chat", "embeddings"))


def test_extra_arguments_become_flags() -> None:
    settings = FrontendSettings(
        model="m",
        served_model_name="x",
        extra={
            "tool_call_parser": "hermes",
            "enable-auto-tool-choice": True,
            "enable-prefix-caching": False,
            "override-generation-config": {"top_k": 3},
        },
    )
    argv = settings.argv(max_len_tokens=128)
    assert argv[argv.index("--max-model-len") + 1] == "128"
    assert argv[argv.index("--tool-call-parser") + 1] == "hermes"
    assert "--enable-auto-tool-choice" in argv
    assert "--no-enable-prefix-caching" in argv
    assert json.loads(argv[argv.index("--override-generation-config") + 1]) == {"top_k": 3}


def test_images_travel_whole_with_every_request() -> None:
    # A cache of what was sent would be right for one engine, and there are several.
    argv = FrontendSettings(model="m", served_model_name="x").argv(max_len_tokens=128)
    assert argv[argv.index("--mm-processor-cache-gb") + 1] == "0"
