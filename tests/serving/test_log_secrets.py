"""What a client asks and the key it shows are in no log, whatever becomes of the request."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from baton.domain.request import Request
from baton.engine.vllm.gate.access import Access
from baton.engine.vllm.gate.gate import Gate
from baton.engine.vllm.gate.limits import FrontendLimits
from baton.runtime.keys.api_keys import KeyRing, mint
from baton.telemetry.logs import LogFormat, configure_logs
from baton.telemetry.requests.recorders import Recorders
from baton.telemetry.requests.request_log import RequestLog
from tests.engine.test_frontend_gate import Client, current
from tests.fakes.fleet_rig import ENGINE, Fleet, running_fleet

PROMPT = "the-merger-closes-on-friday"
PROMPT_IDS = tuple(770_001_003 + 17 * number for number in range(40))
NOW = datetime.now(UTC)
KEY, TOKEN = mint("acme", now=NOW)
_, OTHER_TOKEN = mint("beta", now=NOW)
RING = KeyRing([KEY])
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(autouse=True)
def _everything_is_logged() -> Iterator[None]:
    logger = logging.getLogger("baton")
    before = logger.handlers, logger.propagate, logger.level
    configure_logs(LogFormat.JSON, "debug")
    yield
    logger.handlers, logger.propagate, logger.level = before


class Front:
    """A gate whose app asks a fleet for what a body says, as vLLM's handlers would."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.gate = Gate(
            self._app,
            routes=("chat",),
            limits=FrontendLimits(max_body_bytes=10_000),
            healthy=lambda: True,
            admit=lambda _n, _caller: None,
            access=Access(look_up=lambda token: RING.look_up(token, NOW), anonymous=False),
        )

    async def _app(self, _scope: object, receive: Any, send: Any) -> None:  # noqa: ANN401
        body = json.loads((await receive())["body"])
        if body["messages"] == "broken":
            raise RuntimeError("a handler that does not say what it was given")
        exchange = current()
        request_id = body["id"]
        self._fleet.driver.on_request(
            Request(
                request_id=request_id,
                prompt_token_ids=PROMPT_IDS,
                max_tokens=body["max_tokens"],
                arrived_at_s=asyncio.get_running_loop().time(),
                tenant=exchange.caller.tenant,
                trace=exchange.trace,
                payload=PROMPT.encode(),
            )
        )
        await self._fleet.clients.wait_until(lambda: request_id in self._fleet.clients.records)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}", "more_body": False})

    async def ask(
        self, request_id: str, token: str = TOKEN, *, messages: object = PROMPT, max_tokens: int = 3
    ) -> None:
        body = {"id": request_id, "messages": messages, "max_tokens": max_tokens}
        headers = [
            (b"authorization", f"Bearer {token}".encode()),
            (b"traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01".encode()),
        ]
        client = Client(headers=headers)
        client.body = [
            {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        ]
        await client.ask(self.gate)


async def served_and_failed(fleet: Fleet) -> None:
    """One that is served, some that are refused, one whose handler breaks, and one resumed."""
    book = RequestLog()
    fleet.driver._recorder = Recorders(fleet.clients, book)
    front = Front(fleet)
    await front.ask("served")
    await front.ask("refused", OTHER_TOKEN)
    await front.ask("too large", messages=PROMPT * 1000)
    with pytest.raises(RuntimeError, match="does not say"):
        await front.ask("broken", messages="broken")
    stream = asyncio.create_task(front.ask("resumed", max_tokens=60))
    await fleet.clients.wait_until(lambda: len(fleet.clients.tokens.get("resumed", ())) > 5)
    # One of the two runs it; the other one dies with nothing to lose.
    busy = max(("d0", "d1"), key=lambda name: fleet.engines[name].load().running_requests)
    fleet.engines[busy].die()
    await stream


async def test_no_prompt_and_no_key_is_in_any_line_and_each_line_is_json(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with running_fleet(decode=2, settings=replace(ENGINE, decode_step_s=0.005)) as fleet:
        await served_and_failed(fleet)
    captured = capfd.readouterr()
    lines = [json.loads(line) for line in captured.err.splitlines()]
    events = {line["event"] for line in lines}
    assert {"leg_sent", "request_ended", "route", "resume", "engine_failed"} <= events
    ended = {line["request_id"]: line for line in lines if line["event"] == "request_ended"}
    assert ended["served"]["trace_id"] == TRACE_ID
    everything = captured.err + captured.out
    secrets = [PROMPT, TOKEN, OTHER_TOKEN, TOKEN.rpartition("_")[2], *map(str, PROMPT_IDS)]
    assert [secret for secret in secrets if secret in everything] == []
