"""An ingress' metrics over HTTP, and what its gate refuses: all of it is in the counts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.config import DeploymentConfig
from baton.domain.commands import Delivery
from baton.domain.errors import BatonError
from baton.domain.events import ReplicaJoined
from baton.domain.request import Request
from baton.engine.vllm.gate.errors import Dialect, Problem
from baton.engine.vllm.gate.gate import CURRENT_EXCHANGE, Gate, send_problem
from baton.policy.scaling.ingresses import IngressBounds
from baton.runtime.keys.api_keys import mint
from baton.runtime.keys.key_files import edit_key_file
from baton.runtime.link.options import LinkOptions
from baton.runtime.process.log_events import FIELDS
from baton.serving.controller.ingress_scaler import IngressScaler, IngressUsage
from baton.serving.ingress.deployment import Ingress, MultiModelIngress
from baton.serving.ingress.model_ingress import ModelIngress
from baton.serving.scaling.ports import TickInputs
from baton.telemetry.catalogue import (
    ADMISSIONS,
    INGRESS_GENERATION,
    REQUESTS,
    SLO_GOOD,
    SLO_REQUESTS,
    UNREACHABLE_REPLICAS,
    Metric,
)
from tests.fakes.facts import replica_facts
from tests.serving.configs import simulated
from tests.serving.scaled_fleet import Clock

PATH = "/v1/completions"


class Handlers:
    """What vLLM's handlers do with a request, as far as it matters: it is served, or fails."""

    def __init__(self, body: ModelIngress) -> None:
        self._body = body
        self._waiting: dict[str, asyncio.Future[BatonError | None]] = {}
        body._frontend = self  # type: ignore[assignment]  # it delivers and fails like one

    async def __call__(self, _scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401
        asked = json.loads((await receive())["body"])
        exchange = CURRENT_EXCHANGE.get()
        assert exchange is not None
        ended = self._waiting[asked["id"]] = asyncio.get_running_loop().create_future()
        self._body._hooks().on_request(
            Request(
                request_id=asked["id"],
                prompt_token_ids=(1, 2, 3),
                max_tokens=4,
                arrived_at_s=self._body._clock.now_s(),
                tenant=exchange.caller.tenant,
                slo_class=exchange.caller.slo_class,
            )
        )
        error = await ended
        problem = Problem(status=200, message="") if error is None else Problem.from_error(error)
        await send_problem(send, problem, Dialect.OPENAI)

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        raise AssertionError(f"no replica is there, and yet: {deliveries}")

    def fail(self, request_id: str, error: BatonError) -> None:
        self._waiting[request_id].set_result(error)


def gate(body: ModelIngress) -> Gate:
    return Gate(
        Handlers(body),
        routes=["completions"],
        healthy=lambda: True,
        admit=body._hooks().admit,
        access=body._auth.access(body._config),
    )


@asynccontextmanager
async def an_ingress(*sets: str) -> AsyncIterator[ModelIngress]:
    """With its metrics, and without vLLM, Ray or any replica."""
    body = ModelIngress(simulated(*sets), app="app", coordinator_id="c", link=LinkOptions())
    await body.telemetry.start("127.0.0.1")
    try:
        yield body
    finally:
        body._driver.close()
        await body._link.close()
        await body.telemetry.close()


async def scraped(body: ModelIngress) -> Callable[..., dict[str, float]]:
    """What Prometheus reads: a metric's samples added up by one of its labels."""
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"http://{body.telemetry.address}/metrics")).text
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]

    def told(metric: Metric, by: str = "") -> dict[str, float]:
        sums: Counter[str] = Counter()
        for sample in samples:
            if sample.name == metric.name:
                sums[sample.labels.get(by, "")] += sample.value  # type: ignore[assignment]
        return {label: value for label, value in sums.items() if value}

    return told


async def post(http: httpx.AsyncClient, number: int, slo_class: str) -> int:
    headers = {"x-slo-class": slo_class}
    return (await http.post(PATH, json={"id": f"r{number}"}, headers=headers)).status_code


async def test_rejections_of_the_gate_are_counted_with_timeouts_in_the_queue() -> None:
    sets = (
        "admission.max_queued_requests=3",
        "admission.queue_timeout=50ms",
        "slo.classes.batch.ttft=9s",
    )
    async with an_ingress(*sets) as body:
        transport = httpx.ASGITransport(app=gate(body))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            asked = [post(http, n, ("default", "batch")[n % 2]) for n in range(20)]
            statuses = Counter(await asyncio.gather(*asked))
        told = await scraped(body)
    assert statuses == {503: 3, 429: 17}
    assert told(REQUESTS, "outcome") == {"shed": 17, "evicted": 3}
    assert told(SLO_REQUESTS, "slo_class") == {"default": 10, "batch": 10}
    assert told(SLO_GOOD, "objective")["ttft"] == 20, "nobody waited for long"
    assert "goodput" not in told(SLO_GOOD, "objective")
    assert told(ADMISSIONS, "reason") == {"queue_full": 17, "no_capacity": 3}


async def test_an_ingress_reports_unreachable_replicas_and_its_generation() -> None:
    async with an_ingress() as body:
        body.telemetry.generation = lambda: 7
        body._link.connect("decode-1", "tcp://127.0.0.1:1")
        told = await scraped(body)
    assert told(UNREACHABLE_REPLICAS) == {"": 1}
    assert told(INGRESS_GENERATION) == {"": 7}


async def test_another_configuration_changes_edges_and_names_without_a_restart(
    tmp_path: Path,
) -> None:
    path = tmp_path / "acme.keys"
    with edit_key_file(path, create=True) as document:
        document.add(mint("acme", now=datetime.now(UTC))[0])
    async with an_ingress() as body:
        assert 0.123 not in body.telemetry._metrics._ttft._edges
        live = simulated("slo.default.ttft=123ms", f"tenants.acme.keys_file={path}")
        switch = await asyncio.to_thread(body.prepare_switch, live)
        assert 0.123 not in body.telemetry._metrics._ttft._edges, (
            "nothing changes before it is time"
        )
        await switch()
        assert 0.123 in body.telemetry._metrics._ttft._edges
        assert "acme" in body.telemetry._collector._tenants


async def test_an_apply_that_changes_edges_logs_the_histograms_that_restart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "baton")
    async with an_ingress() as body:
        for sets in (["admission.timeouts.stall=7s"], ["admission.timeouts.stall=7s"] * 2):
            await (await asyncio.to_thread(body.prepare_switch, simulated(*sets)))()
    told = [record for record in caplog.records if record.msg == "histogram_edges_changed"]
    assert [getattr(log, FIELDS)["histograms"] for log in told] == [
        "baton_time_per_output_token_seconds: +7 s; baton_worst_token_gap_seconds: +7 s;"
        " baton_inter_token_seconds: +7 s"
    ]


def _the_one(body: ModelIngress, _model: str, _part: DeploymentConfig) -> ModelIngress:
    return body


async def test_an_ingress_tells_serve_its_process_and_where_its_metrics_are() -> None:
    async with an_ingress() as body:
        bodies = MultiModelIngress(simulated(), partial(_the_one, body))
        served: Any = SimpleNamespace(_require_models=lambda: bodies)
        told = Ingress.record_replica_metadata(served)
        assert told == {"metrics": body.telemetry.address, "pid": os.getpid()}


async def test_without_metrics_nothing_listens_and_only_outcomes_are_kept() -> None:
    async with an_ingress("observability.metrics.enabled=false") as body:
        assert body.telemetry.address is None
        assert body.telemetry.recorders == (body.telemetry.outcomes,), "which rollouts go by"
        body.telemetry.on_event(ReplicaJoined(facts=replica_facts("m")))
        assert not body.telemetry._metrics._streams


async def test_metrics_ask_for_the_token_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("sesame\n")
    path.chmod(0o600)
    async with (
        an_ingress(f"observability.token_file={path}") as body,
        httpx.AsyncClient(base_url=f"http://{body.telemetry.address}") as http,
    ):
        assert (await http.get("/metrics")).status_code == 401
        headers = {"authorization": "Bearer sesame"}
        assert (await http.get("/metrics", headers=headers)).status_code == 200


async def test_a_measurement_that_fails_is_logged_once_and_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with an_ingress() as body:
        body.telemetry._metrics._streams = SimpleNamespace()  # type: ignore[assignment]
        for _ in range(3):
            body._on_link_event(ReplicaJoined(facts=replace(replica_facts("m"), pool="p")))
        assert list(body._driver.fleet().replicas) == ["m"]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.message for record in errors] == ["a ReplicaJoined could not be measured"]


# -------------------------------------------------------------------- how many ingresses there are


@dataclass
class Doors:
    """Ingresses that use as much as is said."""

    clock: Clock
    busy: dict[str, float]
    cores: float = 1.0
    silent: int = 0
    target: int | None = 1
    ordered: list[int] = field(default_factory=list)
    used_s: dict[str, float] = field(default_factory=dict)

    def passes(self, seconds: float) -> None:
        self.clock.at_s += seconds
        for name, busy in self.busy.items():
            self.used_s[name] = self.used_s.get(name, 0.0) + busy * self.cores * seconds

    async def used(self) -> tuple[tuple[IngressUsage, ...], int]:
        now_s = self.clock.now_s()
        told = (IngressUsage(n, self.used_s.get(n, 0.0), now_s, self.cores) for n in self.busy)
        return tuple(told), self.silent

    async def seen(self) -> int | None:
        return self.target

    async def scale(self, replicas: int) -> None:
        self.ordered.append(replicas)
        self.target = replicas

    def scaler(self, most: int = 4) -> IngressScaler:
        bounds = IngressBounds(min=1, max=most)
        return IngressScaler(
            bounds, usage=self.used, target=self.seen, scale=self.scale, clock=self.clock
        )


async def test_a_second_one_comes_when_the_first_has_little_left() -> None:
    doors = Doors(Clock(), {"a": 0.9})
    desk = doors.scaler()
    await desk.on_tick(TickInputs())
    assert doors.ordered == [], "nobody knows yet how busy it is"
    doors.passes(2.0)
    await desk.on_tick(TickInputs())
    assert doors.ordered == [2]
    doors.passes(2.0)
    await desk.on_tick(TickInputs())
    assert doors.ordered == [2], "the second one has not come yet"


async def test_only_usable_cores_count() -> None:
    doors = Doors(Clock(), {"a": 0.5}, cores=4.0)
    desk = doors.scaler()
    await desk.on_tick(TickInputs())
    doors.passes(2.0)
    await desk.on_tick(TickInputs())
    assert doors.ordered == []


async def test_nothing_is_decided_while_an_ingress_or_serve_is_unresponsive() -> None:
    doors = Doors(Clock(), {"a": 0.9})
    desk = doors.scaler()
    await desk.on_tick(TickInputs())
    for silent, target in ((1, 1), (0, None)):
        doors.silent, doors.target = silent, target
        doors.passes(2.0)
        await desk.on_tick(TickInputs())
    assert doors.ordered == []


async def test_one_goes_when_there_is_little_to_do() -> None:
    doors = Doors(Clock(), {"a": 0.1, "b": 0.1}, target=2)
    desk = doors.scaler()
    for _ in range(33):
        await desk.on_tick(TickInputs())
        doors.passes(2.0)
    assert doors.ordered == [1]


async def test_where_their_number_is_fixed_no_ingress_is_asked() -> None:
    doors = Doors(Clock(), {"a": 0.9})
    desk = doors.scaler(most=1)
    for _ in range(3):
        doors.passes(2.0)
        await desk.on_tick(TickInputs())
    assert doors.ordered == []
