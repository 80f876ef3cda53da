"""The usage that clients of each API are told, by a whole baton in one process or by plain vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx

from baton.control.coordinator import Coordinator
from baton.control.state.limits import CoordinatorLimits
from baton.domain.commands import Delivery, RequestRecord
from baton.domain.errors import BatonError
from baton.domain.events import LegFailed
from baton.domain.fleet import ReplicaView
from baton.domain.handoff import HandoffMode, LegFailure, PlacementDecision, Route, RouteReason
from baton.domain.request import Phase
from baton.engine.vllm.frontend.app import VllmFrontend
from baton.engine.vllm.frontend.settings import FrontendSettings
from baton.policy.placement.port import NoRoute, PlacementContext, PlacementQuery
from baton.policy.placement.replica_cost import usable_tokens
from baton.policy.prefix_cache.index import IndexMode, IndexOptions
from baton.runtime.link.options import LinkOptions
from baton.runtime.process.clock import MonotonicClock
from tests.fakes.fleet_rig import FAST_LINK, Clients, Fleet
from tests.fakes.frontends import fleet_facts, open_hooks

MODEL = "tiny"
MAX_LEN_TOKENS = 2048
BLOCK_TOKENS = 32
OUTPUT_TOKENS = 8
BREAK_AFTER_TOKENS = 3
"""Tokens after which a stream loses its leg."""
PREFILL, DECODE = "p0", "d0"
WAIT_S = 60.0


class Api(StrEnum):
    """The APIs that say what a request used."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


class RequestPath(StrEnum):
    """The ways that a request can take through a fleet."""

    LOCAL = "local"
    HANDED_OFF = "handed off"
    EARLY = "handed off, first token from prefill"
    FETCHED = "prefix fetched"
    RESUMED = "resumed"
    MOVED = "handed off, then resumed"


def text(seed: str, words: int = 90) -> str:
    """A prompt that no other seed's has the beginning of."""
    random = Random(seed)
    return " ".join(f"w{random.randrange(100, 999)}" for _ in range(words))


def body(api: Api, prompt: str, *, stream: bool, n: int = 1) -> dict[str, Any]:
    """A greedy request of `OUTPUT_TOKENS`; a stream says its usage in the end."""
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "stream": stream}
    messages = [{"role": "user", "content": prompt}]
    match api:
        case Api.CHAT:
            fields |= {"messages": messages, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        case Api.COMPLETIONS:
            fields |= {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        case Api.RESPONSES:
            return fields | {"input": prompt, "max_output_tokens": OUTPUT_TOKENS}
        case Api.MESSAGES:
            return fields | {"messages": messages, "max_tokens": OUTPUT_TOKENS}
    if n > 1:
        fields |= {"n": n, "temperature": 1, "seed": 7}  # vLLM has one greedy answer
    return fields | ({"stream_options": {"include_usage": True}} if stream else {})


async def request_usage(
    http: httpx.AsyncClient, api: Api, prompt: str, *, stream: bool, n: int = 1
) -> list[dict[str, Any]]:
    """Each usage that a client of an API is told for a prompt, in order."""
    answer = await http.post(api, json=body(api, prompt, stream=stream, n=n))
    assert answer.status_code == 200, answer.text
    if not stream:
        return [answer.json()["usage"]]
    usages = []
    for line in answer.text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        places = (event, event.get("response") or {}, event.get("message") or {})
        usages += [place["usage"] for place in places if place.get("usage")]
    assert usages, answer.text
    return usages


class PromptUsage(NamedTuple):
    """What a usage says of a prompt; None: nothing."""

    prompt_tokens: int
    cached_tokens: int | None
    created_tokens: int | None


def parse_usage(api: Api, usage: Mapping[str, Any]) -> PromptUsage:
    """What a usage of an API says of its prompt."""
    if api is Api.MESSAGES:
        cache_read = usage.get("cache_read_input_tokens")
        created = usage.get("cache_creation_input_tokens")
        return PromptUsage(
            usage["input_tokens"] + (cache_read or 0) + (created or 0), cache_read, created
        )
    if api is Api.RESPONSES:
        details = usage["input_tokens_details"]
        cached, created = details["cached_tokens"], details["cache_write_tokens"]
        return PromptUsage(usage["input_tokens"], cached, created)
    details = usage["prompt_tokens_details"]
    return PromptUsage(
        usage["prompt_tokens"], details["cached_tokens"], details.get("created_cache_tokens")
    )


def expected_usage(api: Api, prompt_tokens: int, *, cached_tokens: int) -> PromptUsage:
    """What is told of a prompt by one engine that holds so many tokens of it."""
    hit_tokens = min(cached_tokens, prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    created = max(0, prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS - hit_tokens)
    # vLLM's completions do not say what was created.
    return PromptUsage(prompt_tokens, hit_tokens, None if api is Api.COMPLETIONS else created)


class FixedPathPlacer:
    """A placer that sends each request the way that a test has set."""

    def __init__(self) -> None:
        self.path = RequestPath.LOCAL
        self.local_replicas: tuple[str, ...] = (DECODE,)
        """Where those go in turn that stay on one replica."""
        self._placed = 0

    def place(
        self, query: PlacementQuery, context: PlacementContext
    ) -> PlacementDecision | NoRoute:
        route = self._route(query, context)
        return PlacementDecision(route=route, policy="chosen", at_s=0.0)

    def _route(self, query: PlacementQuery, around: PlacementContext) -> Route:
        if query.local_only or query.avoid or self.path in {RequestPath.LOCAL, RequestPath.RESUMED}:
            replica_id = self.local_replicas[self._placed % len(self.local_replicas)]
            self._placed += 1
            return Route(
                mode=HandoffMode.LOCAL,
                prefill_replica_id=None,
                decode_replica_id=PREFILL if replica_id in query.avoid else replica_id,
                reason=RouteReason.LOCAL_ONLY,
            )
        tokens, reason = None, RouteReason.DISAGGREGATED
        if self.path is RequestPath.FETCHED:
            hit, facts = query.hits.of(PREFILL), around.fleet.replicas[PREFILL].facts
            hit_tokens = usable_tokens(hit, query.prompt_tokens, facts.block_size_tokens)
            assert hit_tokens, "the holder is not known to hold anything"
            tokens, reason = hit_tokens + 1, RouteReason.PREFIX_FETCH
        return Route(
            mode=HandoffMode.PULL,
            prefill_replica_id=PREFILL,
            decode_replica_id=DECODE,
            reason=reason,
            prefill_tokens=tokens,
        )

    def place_decode(
        self, query: PlacementQuery, source: ReplicaView, context: PlacementContext
    ) -> str | None:
        return DECODE


class ApiClients(Clients):
    """Clients that ask through vLLM's API; streams lose their leg on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.frontend: VllmFrontend | None = None
        self.fleet: Fleet | None = None
        self.leg_to_break: str | None = None
        """Which leg of each request, if any."""
        self._broken_legs: set[str] = set()

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        assert self.frontend is not None
        super().deliver(deliveries)
        self.frontend.deliver(deliveries)
        for delivery in deliveries:
            request_id = delivery.request_id
            if self.leg_to_break and len(self.tokens[request_id]) >= BREAK_AFTER_TOKENS:
                self._break_leg(f"{request_id}~{self.leg_to_break}")

    def _break_leg(self, leg_id: str) -> None:
        if leg_id in self._broken_legs:
            return
        self._broken_legs.add(leg_id)
        assert self.fleet is not None
        failure = LegFailure.ENGINE_ERROR
        event = LegFailed(replica_id=DECODE, leg_id=leg_id, failure=failure, reason="a test")
        self.fleet.driver.on_event(event)

    def fail(self, request_id: str, error: BatonError) -> None:
        assert self.frontend is not None
        super().fail(request_id, error)
        self.frontend.fail(request_id, error)


class UsageIngress:
    """An ingress with vLLM's API before a fleet; whoever adds replicas to `fleet` starts them."""

    def __init__(
        self, model: Path, *, link: LinkOptions = FAST_LINK, log_stats: bool = False
    ) -> None:
        self.placer = FixedPathPlacer()
        self.limits = CoordinatorLimits(
            first_token_timeout_s=WAIT_S,
            transfer_deadline_s=WAIT_S,
            stall_timeout_s=WAIT_S,
            early_first_token=False,
        )
        coordinator = Coordinator(
            limits=self.limits, placer=self.placer, index=IndexOptions(mode=IndexMode.HYBRID)
        )
        self.clients = ApiClients()
        self.fleet = Fleet(coordinator, name="usage", link=link, clients=self.clients)
        self.clients.fleet = self.fleet
        facts = fleet_facts(MAX_LEN_TOKENS, block_size_tokens=BLOCK_TOKENS)
        hooks = open_hooks(self.fleet.driver.on_request, self.fleet.driver.on_abort)
        settings = FrontendSettings(
            model=str(model),
            served_model_name=MODEL,
            log_stats=log_stats,
            extra={"enable-prompt-tokens-details": True},
        )
        self.clients.frontend = VllmFrontend(settings, facts, hooks=hooks, clock=MonotonicClock())

    async def start(self) -> None:
        assert self.clients.frontend is not None
        app = await self.clients.frontend.start()
        transport = httpx.ASGITransport(app=app)
        self.http = httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", timeout=WAIT_S
        )

    async def close(self) -> None:
        assert self.clients.frontend is not None
        await self.http.aclose()
        await self.clients.frontend.close()
        await self.fleet.close()

    async def usage(
        self, api: Api, prompt: str, path: RequestPath, *, stream: bool, n: int = 1
    ) -> tuple[list[dict[str, Any]], list[RequestRecord]]:
        """What a client is told of a prompt that goes this way, and its stories as they ended."""
        self._set_path(path)
        earlier_records = set(self.clients.records)
        try:
            usages = await request_usage(self.http, api, prompt, stream=stream, n=n)
        finally:
            self._set_path(RequestPath.LOCAL)
        await self.clients.wait_ended(len(earlier_records) + n, WAIT_S)
        new_records = [
            record for name, record in self.clients.records.items() if name not in earlier_records
        ]
        for record in new_records:
            assert record.outcome is Phase.FINISHED, record.reason
            _check_path(record, path)
        return usages, new_records

    async def warm(self, api: Api, prompt: str, replica_id: str) -> None:
        """Have a replica hold a prompt, and the coordinator know it."""
        self.placer.local_replicas = (replica_id,)
        try:
            await self.usage(api, prompt, RequestPath.LOCAL, stream=False)
        finally:
            self.placer.local_replicas = (DECODE,)

    def _set_path(self, path: RequestPath) -> None:
        self.placer.path = path
        self.clients.leg_to_break = {RequestPath.RESUMED: "1", RequestPath.MOVED: "2"}.get(path)
        is_early = path is RequestPath.EARLY
        limits = CoordinatorLimits(
            first_token_timeout_s=WAIT_S,
            transfer_deadline_s=WAIT_S,
            stall_timeout_s=WAIT_S,
            early_first_token=is_early,
        )
        self.fleet.coordinator.reconfigure(limits=limits)


def _check_path(record: RequestRecord, path: RequestPath) -> None:
    """A request that took another way proves nothing."""
    kinds = [leg.kind.value for leg in record.legs]
    match path:
        case RequestPath.LOCAL:
            assert kinds == ["local"], record
        case RequestPath.RESUMED:
            assert kinds == ["local", "local"], record
            assert record.legs[0].output_tokens >= BREAK_AFTER_TOKENS
        case RequestPath.MOVED:
            assert kinds == ["prefill", "decode", "local"], record
            assert record.legs[1].output_tokens >= BREAK_AFTER_TOKENS
        case _:
            assert kinds == ["prefill", "decode"], record
            assert (record.legs[0].output_tokens > 0) == (path is RequestPath.EARLY)
            assert record.legs[1].fetched_tokens > 0
            is_whole_prompt = record.legs[0].prompt_tokens == record.prompt_tokens
            assert is_whole_prompt == (path is not RequestPath.FETCHED)
