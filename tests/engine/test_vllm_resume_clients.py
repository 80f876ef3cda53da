"""Clients of vLLM's API over two real engines, whose streams break off and go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from baton.control.coordinator import Coordinator
from baton.control.state.limits import CoordinatorLimits
from baton.domain.commands import Delivery, RequestRecord
from baton.domain.errors import BatonError
from baton.domain.events import Event, LegFailed, ReplicaDraining
from baton.domain.fleet import Role
from baton.domain.handoff import Leg, LegFailure
from baton.domain.request import Phase
from baton.engine.vllm.frontend.app import VllmFrontend
from baton.engine.vllm.frontend.settings import FrontendSettings
from baton.policy.placement.port import Disaggregate
from baton.runtime.driver import Driver
from baton.runtime.link.client import LinkClient
from baton.runtime.link.options import LinkOptions
from baton.runtime.process.clock import MonotonicClock
from baton.runtime.replica_host import ReplicaHost
from tests.engine.vllm_engines import MAX_LEN_TOKENS, VllmEngine, engine_settings
from tests.fakes.frontends import fleet_facts, open_hooks
from tests.fakes.placers import placer
from tests.fakes.scripted_engine import Watch

pytestmark = [
    pytest.mark.real,
    pytest.mark.thorough,
    pytest.mark.timeout(420),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

MAX_TOKENS = 120
CUT = 12
"""Tokens after which streams break off."""
FEW = list(range(300, 316))
"""Tokens that repeat soon where nothing else is allowed."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 40}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}
OPEN = {"temperature": 1.5, "seed": 11, "allowed_token_ids": FEW}
"""Draws decide: the tiny model has no favourite among these."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": OPEN,
    "penalties": OPEN | {"presence_penalty": 1.0, "frequency_penalty": 1.5},
    "bad_words": OPEN,  # and some, see `bodies`
    "logprobs": OPEN | {"logprobs": 3},
    "min_tokens": OPEN | {"min_tokens": 60, "stop_token_ids": FEW[:8]},
    "several": OPEN | {"n": 2},
    "json_schema": {"temperature": 1.5, "seed": 5, "structured_outputs": {"json": SCHEMA}},
    "chosen": {"temperature": 0, "structured_outputs": {"regex": "([ab]{4}-){12}"}},
    "streamed": OPEN | {"stream": True, "logprobs": 2, "frequency_penalty": 1.0},
}
STREAMS = len(KINDS) + 1
"""One kind has two answers."""
LIMITS = CoordinatorLimits(stall_timeout_s=30.0, first_token_timeout_s=60.0, drain_timeout_s=0.1)
LINK = LinkOptions(heartbeat_interval_s=0.1, heartbeat_timeout_s=5.0)
WAIT_S = 60.0


def bodies(model: Path) -> dict[str, dict[str, Any]]:
    """What clients ask for."""
    words = Tokenizer.from_file(str(model / "tokenizer.json"))
    bad = [words.decode(FEW[:1]), words.decode(FEW[1:3])]
    return KINDS | {"bad_words": KINDS["bad_words"] | {"bad_words": bad}}


class Relay:
    """Between a driver and its frontend: counts, and breaks off what is to break off."""

    def __init__(self) -> None:
        self.frontend: VllmFrontend | None = None
        self.records: dict[str, RequestRecord] = {}
        self.errors: dict[str, BatonError] = {}
        self.tokens: defaultdict[str, int] = defaultdict(int)
        self.at_cut: Callable[[str], None] | None = None
        """Told once of each request that has `CUT` tokens."""
        self._watch = Watch()
        self._cut: set[str] = set()

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        assert self.frontend is not None
        self.frontend.deliver(deliveries)
        for delivery in deliveries:
            one = delivery.request_id
            self.tokens[one] += len(delivery.token_ids)
            if self.at_cut and self.tokens[one] >= CUT and one not in self._cut:
                self._cut.add(one)
                self.at_cut(one)
        self._watch.notify()

    def fail(self, request_id: str, error: BatonError) -> None:
        assert self.frontend is not None
        self.errors[request_id] = error
        self.frontend.fail(request_id, error)

    def record(self, record: RequestRecord) -> None:
        self.records[record.request_id] = record
        self._watch.notify()

    async def until(self, holds: Callable[[], bool]) -> None:
        await self._watch.wait_until(holds, WAIT_S)


class Link(LinkClient):
    """Remembers where the latest leg of each request was sent."""

    legs: dict[str, tuple[str, str]]

    def submit(self, replica_id: str, leg: Leg) -> LegFailure | None:
        self.legs[leg.request_id] = replica_id, leg.leg_id
        return super().submit(replica_id, leg)


class Ingress:
    """One ingress over engines that run already, and its clients."""

    def __init__(self, model: Path) -> None:
        self._bodies = bodies(model)
        self.relay = Relay()
        self.coordinator = Coordinator(limits=LIMITS, placer=placer(Disaggregate.NEVER))
        self.link = Link("ingress", self._on_event, options=LINK)
        self.link.legs = {}
        self.driver = Driver(
            self.coordinator,
            link=self.link,
            frontend=self.relay,
            recorder=self.relay,
            clock=MonotonicClock(),
        )
        facts = fleet_facts(MAX_LEN_TOKENS, block_size_tokens=32)
        hooks = open_hooks(self.driver.on_request, self.driver.on_abort)
        settings = FrontendSettings(model=str(model), served_model_name="tiny")
        self.relay.frontend = VllmFrontend(settings, facts, hooks=hooks, clock=MonotonicClock())

    def _on_event(self, event: Event) -> None:
        self.driver.on_event(event)

    async def start(self, hosts: dict[str, ReplicaHost]) -> None:
        assert self.relay.frontend is not None
        app = await self.relay.frontend.start()
        self._http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1", timeout=WAIT_S
        )
        for name, host in hosts.items():
            self.link.connect(name, host.address)
        async with asyncio.timeout(WAIT_S):
            while self.link.joined_ids != hosts.keys():  # noqa: ASYNC110 - the link tells nobody
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        assert self.relay.frontend is not None
        await self._http.aclose()
        await self.relay.frontend.close()
        self.driver.close()
        await self.link.close()

    async def ask(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """What a client gets for a body: its choices."""
        common = {"model": "tiny", "prompt": "def main(", "max_tokens": MAX_TOKENS}
        sent = common | {"ignore_eos": True, "return_token_ids": True} | body
        answer = await self._http.post("/v1/completions", json=sent)
        assert answer.status_code == 200, answer.text
        if not sent.get("stream"):
            choices: list[dict[str, Any]] = answer.json()["choices"]
            return [{key: c[key] for key in _TOLD if key in c} for c in choices]
        return _joined(answer.text)

    async def ask_all(self) -> dict[str, list[dict[str, Any]]]:
        """All kinds at once."""
        answers = await asyncio.gather(*(self.ask(body) for body in self._bodies.values()))
        return dict(zip(self._bodies, answers, strict=True))

    async def under_way(self) -> None:
        """Wait until every stream has given some of its tokens."""
        tokens = self.relay.tokens
        await self.relay.until(lambda: len(tokens) == STREAMS and min(tokens.values()) >= CUT)

    def resumed(self) -> dict[str, int]:
        """Of requests that were resumed: after how many tokens the first time."""
        ended = {name: record for name, record in self.relay.records.items() if record.resumes}
        return {name: record.legs[0].output_tokens for name, record in ended.items()}

    def check(self) -> None:
        assert not self.relay.errors
        # Cancelled are those whose stop string the API server found before the engine was done.
        ended = {record.outcome for record in self.relay.records.values()}
        assert ended <= {Phase.FINISHED, Phase.CANCELLED}
        self.coordinator.check_integrity()
        assert not self.coordinator.phases()


_TOLD = ("index", "text", "token_ids", "finish_reason", "stop_reason", "logprobs")


def _joined(text: str) -> list[dict[str, Any]]:
    """One choice out of the events of a stream."""
    whole: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": [], "finish_reason": None}
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        whole["text"] += choice["text"]
        whole["token_ids"] += choice["token_ids"]
        whole["logprobs"] += choice["logprobs"]["token_logprobs"]
        whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
    return [whole]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(model: Path) -> AsyncIterator[dict[str, VllmEngine]]:
    made = {}
    for name in ("e0", "e1"):
        settings = replace(engine_settings(model, Role.MIXED), replica_id=name, dtype="float32")
        made[name] = VllmEngine(replace(settings, nixl=None))
    yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosts(engines: dict[str, VllmEngine]) -> AsyncIterator[dict[str, ReplicaHost]]:
    made = {
        name: ReplicaHost(engine, bind="tcp://127.0.0.1:0", link=LINK)
        for name, engine in engines.items()
    }
    try:
        async with asyncio.TaskGroup() as group:
            for host in made.values():
                group.create_task(host.start())
        yield made
    finally:
        await asyncio.gather(*(host.close() for host in made.values()))


@asynccontextmanager
async def ingress_over(model: Path, hosts: dict[str, ReplicaHost]) -> AsyncIterator[Ingress]:
    made = Ingress(model)
    try:
        await made.start(hosts)
        yield made
        made.check()
    finally:
        await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unbroken(model: Path, hosts: dict[str, ReplicaHost]) -> dict[str, list[dict[str, Any]]]:
    """What clients get where nothing breaks."""
    async with ingress_over(model, hosts) as ingress:
        answers = await ingress.ask_all()
        assert not ingress.resumed()
    return answers


def breaking(ingress: Ingress) -> None:
    """Have each stream lose its leg when it has `CUT` tokens."""

    def lose(request_id: str) -> None:
        replica_id, leg_id = ingress.link.legs[request_id]
        ingress.driver.on_event(
            LegFailed(
                replica_id=replica_id,
                leg_id=leg_id,
                failure=LegFailure.ENGINE_ERROR,
                reason="a test",
            )
        )

    ingress.relay.at_cut = lose


def same(found: object, wanted: object) -> None:
    """Equal, but for the last digits of log probabilities."""
    if isinstance(wanted, dict):
        assert isinstance(found, dict)
        assert found.keys() == wanted.keys()
        for key in wanted:
            same(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert isinstance(found, list)
        assert len(found) == len(wanted)
        for key, other in zip(found, wanted, strict=True):
            same(key, other)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=1e-3)
    else:
        assert found == wanted


async def test_clients_do_not_see_that_legs_were_lost(
    model: Path, hosts: dict[str, ReplicaHost], unbroken: dict[str, list[dict[str, Any]]]
) -> None:
    async with ingress_over(model, hosts) as ingress:
        breaking(ingress)
        same(await ingress.ask_all(), unbroken)
        cuts = ingress.resumed()
        assert len(cuts) == STREAMS, "not every stream, and both of two, was broken"
        assert all(CUT <= cut < CUT + 4 for cut in cuts.values())


async def test_a_stop_string_is_found_across_a_break(
    model: Path, hosts: dict[str, ReplicaHost], unbroken: dict[str, list[dict[str, Any]]]
) -> None:
    async with ingress_over(model, hosts) as ingress:
        (whole,) = await ingress.ask(OPEN | {"logprobs": 0})
        begins, ends = (whole["logprobs"]["text_offset"][CUT + by] for by in (-3, 8))
        stop = whole["text"][begins:ends]
        assert whole["text"].find(stop) == begins
        assert whole["text"] == unbroken["seed"][0]["text"]
        breaking(ingress)
        (found,) = await ingress.ask(OPEN | {"stop": [stop]})
        assert (found["text"], found["finish_reason"]) == (whole["text"][:begins], "stop")
        assert found["stop_reason"] == stop
        # It is the API server that finds the string; the coordinator hears of it afterwards.
        await ingress.relay.until(lambda: len(ingress.relay.records) == len(ingress.relay.tokens))
        (cut,) = ingress.resumed().values()
        assert CUT - 3 < cut < CUT + 8, "the break was not within the stop string"


async def test_streams_are_moved_off_a_replica_that_drains(
    model: Path, hosts: dict[str, ReplicaHost], unbroken: dict[str, list[dict[str, Any]]]
) -> None:
    async with ingress_over(model, hosts) as ingress:
        asked = asyncio.ensure_future(ingress.ask_all())
        await ingress.under_way()
        ingress.driver.on_event(ReplicaDraining(replica_id="e0"))
        same(await asked, unbroken)
        assert ingress.resumed(), "nothing had to be moved"


async def test_clients_do_not_see_that_an_engine_was_killed(
    model: Path,
    engines: dict[str, VllmEngine],
    hosts: dict[str, ReplicaHost],
    unbroken: dict[str, list[dict[str, Any]]],
) -> None:
    async with ingress_over(model, hosts) as ingress:
        asked = asyncio.ensure_future(ingress.ask_all())
        await ingress.under_way()
        for pid in engines["e0"].process_ids():
            os.kill(pid, signal.SIGKILL)
        same(await asked, unbroken)
        assert ingress.resumed(), "the kill has hit nobody"
