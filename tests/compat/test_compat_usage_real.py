"""Field by field: what clients are told they used, by baton with real engines and by plain vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from baton.domain.fleet import Role
from baton.runtime.link.options import LinkOptions
from tests.compat.usage_rig import (
    BLOCK_TOKENS,
    DECODE,
    MAX_LEN_TOKENS,
    MODEL,
    PREFILL,
    WAIT_S,
    Api,
    RequestPath,
    UsageIngress,
    expected_usage,
    parse_usage,
    request_usage,
    text,
)
from tests.engine.vllm_engines import ENVIRONMENT, VllmEngine, engine_settings
from tests.fakes.free_ports import free_port

pytestmark = [
    pytest.mark.real,
    pytest.mark.long,
    pytest.mark.timeout(420),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

START_S = 300.0
"""For all engines to be ready; they share few cores."""
_SERVER = "vllm.entrypoints.launchers.api_server.entry"
"""What `vllm serve` runs; the command itself wants a distribution of the name `vllm`."""
FRONT = 200
"""Characters of a prompt that a cache holds before it is asked for."""
APIS = pytest.mark.parametrize(
    "api",
    [
        Api.CHAT,
        Api.RESPONSES,
        Api.MESSAGES,
        pytest.param(Api.COMPLETIONS, marks=pytest.mark.thorough),
    ],
)
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
LINK = LinkOptions(heartbeat_interval_s=0.1, heartbeat_timeout_s=20.0)
"""Engines that start beside the link take its processor away."""


class PlainVllm:
    """`vllm serve` as a process of its own: one engine, no connector, nothing of baton's."""

    def __init__(self, model: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        options = {
            "served-model-name": MODEL,
            "host": "127.0.0.1",
            "port": self.url.rpartition(":")[2],
            "max-model-len": MAX_LEN_TOKENS,
            "block-size": BLOCK_TOKENS,
            "dtype": "float32",
            "kv-cache-memory-bytes": 64 << 20,
        }
        flags = ["--enforce-eager", "--enable-prompt-tokens-details"]
        named = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self._command = [sys.executable, "-m", _SERVER, "--model", str(model), *named, *flags]
        self._log = model.parent / f"plain-{model.name}.log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> httpx.AsyncClient:
        """Start it, and wait until it serves."""
        environment = os.environ | ENVIRONMENT | {"VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1"}
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        http = httpx.AsyncClient(base_url=self.url, timeout=WAIT_S)
        async with asyncio.timeout(START_S):
            while True:
                assert self._process.returncode is None, self._log.read_text()[-5000:]
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get("/health")).status_code == HTTPStatus.OK:
                        return http
                await asyncio.sleep(0.2)

    async def close(self) -> None:
        """End it and its engine."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(20):
                await self._process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


@dataclass
class Both:
    """Baton and plain vLLM, with the same model."""

    baton: UsageIngress
    plain: httpx.AsyncClient


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(model_dir: Path) -> AsyncIterator[Both]:
    baton, plain = UsageIngress(model_dir, link=LINK), PlainVllm(model_dir)

    async def add(name: str, role: Role) -> None:
        settings = replace(engine_settings(model_dir, role), replica_id=name, dtype="float32")
        await baton.fleet.host(name, VllmEngine(replace(settings, start_deadline_s=START_S)))

    try:
        await baton.start()
        async with asyncio.TaskGroup() as group:
            served = group.create_task(plain.start())
            group.create_task(add(PREFILL, Role.PREFILL))
            group.create_task(add(DECODE, Role.DECODE))
        yield Both(baton, served.result())
        await served.result().aclose()
    finally:
        await asyncio.gather(baton.close(), plain.close())


async def same(
    both: Both, api: Api, prompt: str, way: RequestPath, *, stream: bool
) -> list[dict[str, Any]]:
    """Ask both, see that they tell the same, and return what they tell."""
    wanted = await request_usage(both.plain, api, prompt, stream=stream)
    told, records = await both.baton.usage(api, prompt, way, stream=stream)
    assert told == wanted, [leg for record in records for leg in record.legs]
    return wanted


@STREAMED
@APIS
@pytest.mark.parametrize("way", [way for way in RequestPath if way is not RequestPath.FETCHED])
async def test_cold_and_warm_every_field_is_as_plain_vllm_tells_it(
    both: Both, way: RequestPath, api: Api, *, stream: bool
) -> None:
    prompt = text(f"{api} {way} {stream}")
    cold = await same(both, api, prompt, way, stream=stream)
    warm = await same(both, api, prompt, way, stream=stream)
    tokens = parse_usage(api, cold[-1]).prompt_tokens
    assert parse_usage(api, cold[-1]) == expected_usage(api, tokens, cached_tokens=0)
    assert parse_usage(api, warm[-1]) == expected_usage(api, tokens, cached_tokens=tokens)


@STREAMED
@APIS
async def test_a_prefix_that_is_fetched_is_told_as_plain_vllm_tells_one_in_its_cache(
    both: Both, api: Api, *, stream: bool
) -> None:
    prompt = text(f"{api} fetched {stream}")
    front_api = Api.COMPLETIONS if api is Api.COMPLETIONS else Api.CHAT
    await request_usage(both.plain, front_api, prompt[:FRONT], stream=False)
    await both.baton.warm(front_api, prompt[:FRONT], PREFILL)
    cold = await same(both, api, prompt, RequestPath.FETCHED, stream=stream)
    assert parse_usage(api, cold[-1]).cached_tokens, "nothing was found in a cache"
    await same(both, api, prompt, RequestPath.FETCHED, stream=stream)


@STREAMED
@pytest.mark.parametrize(
    "api", [Api.CHAT, pytest.param(Api.COMPLETIONS, marks=pytest.mark.thorough)]
)
async def test_two_answers_to_one_prompt_are_told_as_plain_vllm_tells_them(
    both: Both, api: Api, *, stream: bool
) -> None:
    prompt = text(f"{api} two {stream}")
    for _ in range(2):
        wanted = await request_usage(both.plain, api, prompt, stream=stream, n=2)
        told, _ = await both.baton.usage(api, prompt, RequestPath.LOCAL, stream=stream, n=2)
        assert told == wanted
