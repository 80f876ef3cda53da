"""One baton endpoint for all compatibility tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from baton.engine.gpus import use_cpu_without_gpus
from baton.engine.vllm.frontend.settings import FrontendSettings
from baton.engine.vllm.gate.limits import FrontendLimits
from tests.compat.echo_fleet import EchoFleet
from tests.compat.endpoint import (
    ADAPTER,
    MAX_BODY_BYTES,
    MAX_LEN_TOKENS,
    MODEL,
    Server,
    ServerThread,
    serve,
)
from tests.fakes.tiny_model import tiny_model

use_cpu_without_gpus(os.environ)  # before the first test imports vLLM


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def echo_server(model_dir: Path) -> Iterator[tuple[ServerThread, EchoFleet]]:
    echo = EchoFleet()
    settings = FrontendSettings(
        model=str(model_dir),
        served_model_name=MODEL,
        adapters={ADAPTER: "/adapters/ada"},
        limits=FrontendLimits(max_body_bytes=MAX_BODY_BYTES),
    )
    with serve(settings, echo) as thread:
        yield thread, echo


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Server:
    """The stand-in, or the running deployment that BATON_TEST_URL names.

    BATON_TEST_LACKS names, with commas, what the engines behind it cannot do.
    """
    if url := os.environ.get("BATON_TEST_URL"):
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        return Server(
            base_url=url,
            model=model["id"],
            max_len_tokens=model["max_model_len"],
            capabilities=frozenset({"logprobs", "json_schema"})
            - frozenset(os.environ.get("BATON_TEST_LACKS", "").split(",")),
        )
    thread, _ = request.getfixturevalue("echo_server")
    return Server(
        base_url=thread.base_url,
        model=MODEL,
        max_len_tokens=MAX_LEN_TOKENS,
        adapters=(ADAPTER,),
        capabilities=frozenset(),
    )


@pytest.fixture
def require_echo_server() -> None:
    """For what only the stand-in does: show what arrives, fail on demand, be set up by a test."""
    if "BATON_TEST_URL" in os.environ:
        pytest.skip("not for a running deployment: it asks for the stand-in behind the server")


@pytest.fixture
def fleet(echo_server: tuple[ServerThread, EchoFleet]) -> Iterator[EchoFleet]:
    """The stand-in behind the server, for tests that need it to misbehave."""
    _, echo = echo_server
    echo.reset()
    yield echo
    echo.reset()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=20
    ) as sdk:
        yield sdk


@pytest.fixture
def anthropic_client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.base_url, api_key="none", max_retries=0, timeout=20
    ) as sdk:
        yield sdk


@pytest.fixture
def require_capability(server: Server) -> Callable[[str], None]:
    def skip_without(capability: str) -> None:
        if capability not in server.capabilities:
            pytest.skip(f"the engine behind this server has no {capability}")

    return skip_without
