"""One prefill and two decode engines behind the fleet link, as one ingress has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import zmq

from baton.control.coordinator import Coordinator
from baton.domain.commands import RequestRecord
from baton.domain.fleet import LinkTotals, ReplicaFacts, Role
from baton.domain.handoff import HitSource
from baton.domain.request import LocalOnlyReason, Request
from baton.policy.links.estimates import LinkRow, LinkState
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root
from baton.policy.prefix_cache.index import ReplicaIndexState
from baton.runtime.link.options import LinkOptions
from tests.engine.vllm_engines import VllmEngine, engine_settings, engine_with_peers, payload
from tests.fakes.fleet_rig import Fleet

DEADLINE_S = 60.0
"""For anything awaited here that says nothing of its own: engines share few cores."""
STREAMS = 8
DECODE_REPLICAS = ("d0", "d1")

LINK = LinkOptions(heartbeat_interval_s=0.1, heartbeat_timeout_s=10.0)
"""Engines that start beside the link take its processor away."""


class RealFleet:
    """The fleet as one ingress has it, and the clients of that ingress."""

    def __init__(self, name: str, engines: dict[str, VllmEngine], coordinator: Coordinator) -> None:
        self._random = Random(name)
        self._name = name
        self._sent = 0
        self.engines = engines
        self.coordinator = coordinator
        self.fleet = Fleet(coordinator, name=name, link=LINK)
        self.records = self.fleet.clients.records

    # ------------------------------------------------------------------ replicas
    async def start(self, name: str, role: Role, model: Path) -> None:
        settings = replace(engine_settings(model, role), replica_id=name)
        self.engines[name] = engine = engine_with_peers(settings)
        await self.fleet.host(name, engine)

    def facts(self, name: str) -> ReplicaFacts:
        return self.fleet.driver.fleet().replicas[name].facts

    def running(self, name: str) -> int:
        """Streams that a replica has reported."""
        return self.fleet.driver.fleet().replicas[name].load.running_requests

    def links(self) -> dict[str, tuple[LinkTotals, ...]]:
        """What each decode replica's engine has counted of its pulls."""
        return {name: self.engines[name].links() for name in DECODE_REPLICAS}

    def computed_tokens(self, name: str) -> int:
        """Prompt tokens that a replica's engine says it has computed."""
        return self.engines[name].load().steps.prefill_tokens

    # ------------------------------------------------------------------ requests
    def prompt(self, tokens: int) -> tuple[int, ...]:
        """A prompt that nobody has seen."""
        return tuple(self._random.randrange(100, 8000) for _ in range(tokens))

    def send(
        self,
        prompt: tuple[int, ...],
        *,
        max_tokens: int,
        salt: str | None = None,
        local_only: LocalOnlyReason | None = None,
    ) -> str:
        """Send a greedy request that ends by length only; returns its id."""
        self._sent += 1
        request = Request(
            request_id=f"{self._name}-{self._sent}",
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            arrived_at_s=asyncio.get_running_loop().time(),
            cache_salt=salt,
            local_only=local_only,
            payload=payload(cache_salt=salt),
        )
        self.fleet.driver.on_request(request)
        return request.request_id

    def tokens(self, request_id: str) -> tuple[int, ...]:
        """What a client has got so far."""
        return tuple(self.fleet.clients.tokens.get(request_id, ()))

    async def wait_ended(self, *request_ids: str) -> tuple[RequestRecord, ...]:
        """Wait until requests have ended."""
        await self.fleet.clients.wait_until(
            lambda: self.records.keys() >= set(request_ids), DEADLINE_S
        )
        assert not self.fleet.clients.errors
        return tuple(self.records[request_id] for request_id in request_ids)

    async def run(
        self, prompt: tuple[int, ...], *, max_tokens: int
    ) -> tuple[tuple[int, ...], RequestRecord]:
        """Send a request and wait for its end: its tokens and its story."""
        request_id = self.send(prompt, max_tokens=max_tokens)
        (record,) = await self.wait_ended(request_id)
        return self.tokens(request_id), record

    async def run_uncached(
        self, *prompts: tuple[int, ...], max_tokens: int
    ) -> list[tuple[int, ...]]:
        """What single engines answer that find nothing in a cache and fetch nothing."""
        request_ids = [
            self.send(
                value, max_tokens=max_tokens, salt=f"apart-{n}", local_only=LocalOnlyReason.FAN_OUT
            )
            for n, value in enumerate(prompts)
        ]
        for record in await self.wait_ended(*request_ids):
            assert record.cached_tokens == 0
        return [self.tokens(request_id) for request_id in request_ids]

    @asynccontextmanager
    async def streams(self, max_tokens: int) -> AsyncIterator[tuple[str, ...]]:
        """Streams on both decode replicas, all of which have begun; cancelled at the end."""
        request_ids = tuple(
            self.send(self.prompt(20), max_tokens=max_tokens) for _ in range(STREAMS)
        )
        await self.fleet.clients.wait_until(
            lambda: all(self.tokens(request_id) for request_id in request_ids), DEADLINE_S
        )
        await self.wait_until(lambda: all(self.running(name) for name in DECODE_REPLICAS))
        assert not self.records.keys() & set(request_ids), "the streams were too short to be of use"
        try:
            yield request_ids
        finally:
            self.fleet.driver.on_abort(request_ids)
            await self.wait_ended(*request_ids)

    def check_idle(self) -> None:
        """The coordinator's books agree, and nothing is held for anybody."""
        self.coordinator.check_integrity()
        assert not self.coordinator.phases()
        assert not self.coordinator.lease_counts()

    # ------------------------------------------------------------------ what is known
    async def wait_until(
        self, predicate: Callable[[], bool], timeout_s: float = DEADLINE_S
    ) -> None:
        """Wait for something that replicas report; they do every `heartbeat_interval_s`."""
        await self.fleet.wait_until(predicate, timeout_s)

    def pairs(self) -> dict[tuple[str, str], LinkRow]:
        """What is known of the pairs with a prefill replica."""
        rows = self.coordinator.fleet_model.links.rows(asyncio.get_running_loop().time())
        return {
            (row.source_id, row.target_id): row
            for row in rows
            if row.source_id not in DECODE_REPLICAS
        }

    async def wait_links_ok(self) -> None:
        """Wait until both decode replicas are known to pull from `p0`, and by what means."""
        await self.wait_pairs("p0", LinkState.OK, DEADLINE_S)
        await self.wait_until(
            lambda: all(row.pulls and row.transport for row in self.pairs().values())
        )

    async def wait_pairs(self, source_id: str, state: LinkState, timeout_s: float) -> None:
        """Wait until both decode replicas' pairs with a source are in a state."""
        links = self.coordinator.fleet_model.links
        await self.wait_until(
            lambda: all(links.state(source_id, target) is state for target in DECODE_REPLICAS),
            timeout_s,
        )

    def cached_blocks(self, name: str, tokens: tuple[int, ...]) -> int:
        """Leading blocks of a prompt that a replica has reported to hold."""
        facts = self.facts(name)
        size = facts.block_size_tokens
        hashes = chain_hashes(chain_root(model=facts.model, block_size_tokens=size), tokens, size)
        now_s = asyncio.get_running_loop().time()
        hit = self.coordinator.fleet_model.index.look_up(hashes, now_s).of(name)
        return hit.blocks if hit.source is HitSource.REPORTED else 0

    def index_states(self) -> dict[str, ReplicaIndexState | None]:
        """The index's own view of each replica."""
        now_s = asyncio.get_running_loop().time()
        index = self.coordinator.fleet_model.index
        return {
            name: index.replica_state(name, now_s) for name in self.fleet.driver.fleet().replicas
        }


GARBAGE = (
    (b"garbage",),
    (b"", b""),
    (b"", b"no message pack"),
    (b"", b"\x93\xc4\x0cget_meta_msg\x07\x07"),
    (b"", b"\x93\xc4\x0cget_meta_msg\x00\x00", b"one part more"),
)
"""Each ends vLLM's own handshake listener; the fourth asks for a rank that is not there."""


def send_garbage(address: str) -> None:
    """Send a side channel what it cannot read, each from a connection of its own."""
    for parts in GARBAGE:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, int(DEADLINE_S * 1000))
            dealer.connect(f"tcp://{address}")
            dealer.send_multipart(parts)
