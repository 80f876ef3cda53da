"""A mixed load by three tenants, some of it refused, late or given up."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

_ANSWER_S = 30.0
_PREFIXES = tuple("".join(f"chapter {n} verse {k} " for k in range(60)) for n in range(4))


@dataclass(slots=True, kw_only=True)
class Load:
    """Requests at a rate, by open loop: none waits for another."""

    url: str
    keys: Mapping[str, str]
    """Tenants' keys."""
    requests_per_s: float = 6.0
    outcomes: Counter[str] = field(default_factory=Counter)
    """How requests ended, by status."""
    random: random.Random = field(default_factory=lambda: random.Random(7))

    async def run(self, seconds: float) -> None:
        """Ask for so long, and wait until what was asked has ended."""
        limits = httpx.Limits(max_connections=200)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + seconds
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=_ANSWER_S, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            while loop.time() < until_s:
                group.create_task(self._send_request(client))
                await asyncio.sleep(self.random.expovariate(self.requests_per_s))

    async def _send_request(self, client: httpx.AsyncClient) -> None:
        tenant = self.random.choice([*self.keys, *self.keys, ""])
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"} if tenant else {}
        if tenant and self.random.random() < 0.3:
            headers["x-slo-class"] = "batch"
        prompt = self.random.choice(_PREFIXES) + f"of {self.random.randrange(10_000)} "
        body = {
            "model": "tiny",
            "prompt": prompt * self.random.choice((1, 1, 2)),
            "max_tokens": self.random.choice((8, 32, 96)),
            "stream": True,
            "ignore_eos": True,
        }
        timeout_s = 0.15 if self.random.random() < 0.05 else _ANSWER_S
        try:
            async with asyncio.timeout(timeout_s):
                status = await _stream(client, body, headers)
        except TimeoutError:
            status = "gave up"
        except httpx.HTTPError as error:
            status = type(error).__name__
        self.outcomes[status] += 1


async def _stream(
    client: httpx.AsyncClient, body: Mapping[str, object], headers: Mapping[str, str]
) -> str:
    request = client.build_request("POST", "/v1/completions", json=dict(body), headers=headers)
    answer = await client.send(request, stream=True)
    try:
        async for _ in answer.aiter_raw():
            pass
    finally:
        await answer.aclose()
    return str(answer.status_code)
