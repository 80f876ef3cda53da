"""Counters against truth: clients keep their own count, and Prometheus' text says the same.

Coordinator and driver are the live ones; engines run in virtual time. A client knows when it sent a
request, when its tokens came, what it was refused with and when it left, and what its class
promises: from that alone it says whether it was good, by rules of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.config.schema.observability import ObservabilityConfig
from baton.control.coordinator import Coordinator
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.service_rules import ServiceRules
from baton.domain.commands import Delivery, RequestRecord
from baton.domain.errors import BatonError
from baton.domain.events import Event
from baton.domain.fleet import Role
from baton.domain.request import FinishReason, Request
from baton.domain.slo import Slo
from baton.domain.tenant import RateLimit, Tenant
from baton.domain.value import evolve
from baton.policy.admission.slo_classes import SloClasses
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.serving.http.metrics_endpoint import MetricsRenderer
from baton.serving.ingress.model_ingress import IngressTelemetry
from baton.simulator.fleet.fleet import VirtualFleet
from baton.simulator.fleet.replica import VirtualReplica
from baton.telemetry.catalogue import (
    ADMISSIONS,
    DURATION,
    ITL,
    OTHER,
    QUEUE_WAIT,
    REQUESTS,
    RESUMES,
    SLO_EXCLUDED,
    SLO_GOOD,
    SLO_REQUESTS,
    TOKENS,
    TPOT,
    TTFT,
)
from tests.fakes.virtual_driver import LiveIngress
from tests.simulator.scenes import ENGINE, trace

REQUESTS_SENT = 1200
ROUNDING_S = 1e-9
CHAT = Slo(name="default", ttft_s=0.45, tpot_s=0.0125)
CODE = Slo(name="code", ttft_s=0.3, itl_p99_s=0.03, priority=1)
BATCH = Slo(name="batch", ttft_s=3.0, priority=-1)
CLASSES = {other.name: other for other in (CHAT, CODE, BATCH)}
TENANTS = {
    "acme": Tenant(name="acme", slo="code"),
    "lab": Tenant(name="lab", slo="batch"),
    "free": Tenant(name="free"),
    "slow": Tenant(name="slow", rate=RateLimit(requests_per_s=1.0, burst_s=5.0)),
}
RULES = ServiceRules(slos=SloClasses(classes=CLASSES), tenants=TENANTS)
LIMITS = CoordinatorLimits(
    max_requests=120,
    max_queued_requests=30,
    max_prompt_tokens=580,
    queue_timeout_s=0.3,
    first_token_timeout_s=2.0,
    transfer_deadline_s=0.05,
    stall_timeout_s=0.4,
    total_timeout_s=2.5,
    retry_s=0.03,
    max_failures=2,
)
NO_SUCH_CLASS = "no-such-class"


@dataclass(slots=True)
class Client:
    """One request, as its client sees it."""

    slo: Slo
    sent_at_s: float
    tokens: int = 0
    first_at_s: float = 0.0
    last_at_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    slow_tokens: int = 0
    finished: bool = False
    left_at_s: float | None = None
    error: BatonError | None = None

    def record_delivery(self, delivery: Delivery, now_s: float) -> None:
        if delivery.token_ids:
            if self.tokens:
                self.gaps_s.append(now_s - self.last_at_s)
                tokens, bound_s = len(delivery.token_ids), self.slo.itl_p99_s
                if bound_s is not None and self.gaps_s[-1] / tokens > bound_s:
                    self.slow_tokens += tokens  # several at once are of even steps
            else:
                self.first_at_s = now_s
            self.last_at_s = now_s
            self.tokens += len(delivery.token_ids)
        self.finished = self.finished or delivery.finish not in {None, FinishReason.ABORT}

    @property
    def ended(self) -> bool:
        return self.finished or self.error is not None or self.left_at_s is not None

    def became(self) -> str:
        if self.error is not None:
            return "client_error" if self.error.is_client_error else "missed"
        if self.finished:
            return "good" if self.in_time and self.at_pace and self.even else "missed"
        assert self.left_at_s is not None
        if not self.tokens:
            waited_s = self.left_at_s - self.sent_at_s
            due = self.slo.ttft_s is not None and waited_s > self.slo.ttft_s + ROUNDING_S
            return "missed" if due else "excluded"
        owed = self.slo.tpot_s is not None and (
            self.left_at_s - self.first_at_s > self.tokens * self.slo.tpot_s + ROUNDING_S
        )
        return "missed" if owed or not (self.in_time and self.at_pace and self.even) else "good"

    @property
    def in_time(self) -> bool:
        bound_s = self.slo.ttft_s
        return bound_s is None or self.first_at_s - self.sent_at_s <= bound_s + ROUNDING_S

    @property
    def at_pace(self) -> bool:
        bound_s = self.slo.tpot_s
        if bound_s is None or self.tokens < 2:
            return True
        return (self.last_at_s - self.first_at_s) / (self.tokens - 1) <= bound_s + ROUNDING_S

    @property
    def even(self) -> bool:
        return self.slow_tokens <= 0.01 * max(0, self.tokens - 1)


def class_of(request: Request) -> Slo:
    """The class that it asks for if it may, or else its tenant's."""
    own = CLASSES[TENANTS[request.tenant].slo or "default"]
    asked = CLASSES.get(request.slo_class or "", own)
    return asked if asked.priority <= own.priority else own


class Clients(LiveIngress):
    """The live driver with metrics, and clients in front of it who keep count."""

    def __init__(self, coordinator: Coordinator, fleet: VirtualFleet) -> None:
        self.telemetry = IngressTelemetry(
            ObservabilityConfig(),
            coordinator,
            RULES,
            limits=LIMITS,
            now_s=lambda: fleet.timeline.now_s,
            count_unreachable=lambda: 0,
        )
        self.clients: dict[str, Client] = {}
        super().__init__(coordinator, fleet)

    def ask(self, request: Request) -> None:
        """As the gate has it: who is refused there is sent no further."""
        client = Client(class_of(request), self._timeline.now_s)
        self.clients[request.request_id] = client
        client.error = self.driver.check_admission(
            1, tenant=request.tenant, slo_class=request.slo_class
        )
        if client.error is None:
            self.driver.on_request(request)

    def leave(self, request_id: str) -> None:
        client = self.clients[request_id]
        if not client.ended:
            client.left_at_s = self._timeline.now_s
            self.driver.on_abort((request_id,))

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self.clients[delivery.request_id].record_delivery(delivery, self._timeline.now_s)

    def fail(self, request_id: str, error: BatonError) -> None:
        self.clients[request_id].error = error

    def record(self, record: RequestRecord) -> None:
        super().record(record)
        for recorder in self.telemetry.recorders:
            recorder.record(record)

    def on_replica_event(self, replica: VirtualReplica, event: Event) -> None:
        self.telemetry.on_event(event)
        super().on_replica_event(replica, event)


def sent() -> Iterable[Request]:
    """Requests of every tenant and class, some of which nobody would serve."""
    rng = random.Random(11)
    asked = trace(REQUESTS_SENT, rate_per_s=400, seed=7, groups=5).to_requests(start_s=1.0)
    for request in asked:
        tenant = rng.choices(list(TENANTS), [4, 2, 4, 1])[0]
        slo_class = rng.choices([None, "default", "batch", NO_SUCH_CLASS], [20, 3, 3, 1])[0]
        resumable = rng.random() < 0.7
        yield evolve(request, tenant=tenant, slo_class=slo_class, resumable=resumable)


def join(fleet: VirtualFleet, role: Role, number: int) -> None:
    fleet.add_replica(f"{role}-{number}", ENGINE, role=role, pool=str(role))


@cache
def after_the_storm() -> Clients:
    """Everything has happened, and every request has ended."""
    fleet = VirtualFleet()
    placer = PredictedPlacer(PredictedOptions(disaggregate=Disaggregate.AUTO))
    ingress = Clients(Coordinator(limits=LIMITS, placer=placer, rules=RULES), fleet)
    fleet.ingresses.append(ingress)  # type: ignore[arg-type]  # it is like one
    for role in (Role.PREFILL, Role.DECODE):
        for number in range(2):
            join(fleet, role, number)
    at, rng = fleet.timeline.call_at, random.Random(3)
    for request in sent():
        at(request.arrived_at_s, partial(ingress.ask, request))
        if rng.random() < 0.12:
            leaves_at_s = request.arrived_at_s + rng.choice([0.001, 0.05, 0.2, 0.5])
            at(leaves_at_s, partial(ingress.leave, request.request_id))
    for turn, at_s in enumerate((1.6, 2.4, 3.2, 4.0, 4.8)):
        role = (Role.DECODE, Role.PREFILL)[turn % 2]
        at(at_s, partial(fleet.kill, f"{role}-0"))
        at(at_s + 0.7, partial(join, fleet, role, 0))
    fleet.run(until_s=15.0)
    ingress.coordinator.check_integrity()
    assert all(client.ended for client in ingress.clients.values())
    return ingress


@cache
def exposed() -> tuple[Sample, ...]:
    """What Prometheus reads afterwards."""
    metrics = MetricsRenderer(after_the_storm().telemetry._collector.collect)
    text, _ = asyncio.run(metrics.render("application/openmetrics-text;version=1.0.0"))
    families = text_string_to_metric_families(text.decode())  # type: ignore[no-untyped-call]
    return tuple(sample for family in families for sample in family.samples)


def told(name: str, *by: str, **where: str) -> dict[object, float]:
    """A metric's samples of some labels, added up by others."""
    sums: Counter[object] = Counter()
    for sample in exposed():
        if sample.name == name and where.items() <= sample.labels.items():
            key = tuple(sample.labels[label] for label in by)
            sums[key[0] if len(by) == 1 else key] += sample.value  # type: ignore[assignment]
    return {key: value for key, value in sums.items() if value}


def counted(*became: str) -> dict[str, int]:
    """How many requests of each class became one of these, as their clients say."""
    clients = after_the_storm().clients.values()
    return dict(Counter(client.slo.name for client in clients if client.became() in became))


def test_there_are_many_of_every_kind() -> None:
    clients = after_the_storm().clients
    assert len(clients) == REQUESTS_SENT >= 1000
    became = Counter(client.became() for client in clients.values())
    kinds = ("good", "missed", "client_error", "excluded")
    assert min(became[kind] for kind in kinds) >= 15, became
    outcomes = told(REQUESTS.name, "outcome")
    ended = {"finished", "shed", "evicted", "failed", "cancelled", "client_error"}
    assert set(outcomes) == ended
    assert min(outcomes.values()) >= 5, outcomes
    late = sum(client.finished and client.became() == "missed" for client in clients.values())
    assert late >= 15
    unread = len(clients) - len(after_the_storm().records)
    assert unread >= 15, "nobody was refused at the gate"


def test_the_total_of_each_class_is_what_its_clients_count() -> None:
    assert told(SLO_REQUESTS.name, "slo_class") == counted("good", "missed")


def test_the_good_ones_of_each_class_are_those_that_its_clients_count() -> None:
    assert told(SLO_GOOD.name, "slo_class", objective="goodput") == counted("good")


def test_excluded_requests_and_client_errors_are_in_neither() -> None:
    assert told(SLO_EXCLUDED.name, "slo_class") == counted("excluded")
    assert told(REQUESTS.name, "outcome")["client_error"] == sum(counted("client_error").values())


def test_every_request_is_counted_once_however_it_ended() -> None:
    assert sum(told(REQUESTS.name, "outcome").values()) == REQUESTS_SENT
    assert sum(told(ADMISSIONS.name, "outcome").values()) == REQUESTS_SENT


def test_every_outcome_is_what_clients_have_seen() -> None:
    clients = after_the_storm().clients.values()
    outcomes = told(REQUESTS.name, "outcome")
    assert outcomes["finished"] == sum(client.finished for client in clients)
    assert outcomes["cancelled"] == sum(client.left_at_s is not None for client in clients)
    errors = sum(client.error is not None for client in clients)
    assert sum(outcomes[kind] for kind in ("shed", "evicted", "failed", "client_error")) == errors


def test_the_rejection_reason_is_the_one_that_clients_got() -> None:
    clients = after_the_storm().clients.values()
    never = Counter(
        str(client.error.cause)
        for client in clients
        if client.error is not None and not client.tokens
    )
    reasons = told(ADMISSIONS.name, "reason")
    causes = ("queue_full", "slo_unattainable", "rate_limited", "prompt_too_long", "not_allowed")
    for word in causes:
        assert reasons[word] == never[word] > 0, word


def test_the_share_of_first_tokens_in_time_can_be_read_off_the_histogram_exactly() -> None:
    for slo in CLASSES.values():
        served = [
            client
            for client in after_the_storm().clients.values()
            if client.slo is slo and client.tokens and client.became() != "client_error"
        ]
        edge = f"{slo.ttft_s:.10g}" if slo.ttft_s != 3.0 else "3.0"
        in_time = told(f"{TTFT.name}_bucket", "slo_class", le=edge)
        assert in_time[slo.name] == sum(client.in_time for client in served)
        assert told(f"{TTFT.name}_count", "slo_class")[slo.name] == len(served)


def test_latencies_are_told_by_the_model_and_the_pool_that_requests_are_counted_by() -> None:
    served = told(REQUESTS.name, "model", "pool", outcome="finished")
    assert told(f"{DURATION.name}_count", "model", "pool") == served
    assert served.keys() == {("sim", "decode"), ("sim", "prefill")}
    for metric in (TTFT, TPOT, QUEUE_WAIT):
        assert told(f"{metric.name}_count", "model", "pool").keys() == served.keys(), metric.name


def test_tokens_and_durations_are_those_that_clients_got() -> None:
    clients = after_the_storm().clients.values()
    assert told(TOKENS.name, "tokens")["output"] == sum(client.tokens for client in clients)
    finished = Counter(client.slo.name for client in clients if client.finished)
    assert told(f"{DURATION.name}_count", "slo_class") == dict(finished)


def test_gaps_between_tokens_are_those_that_clients_saw_but_for_pauses_of_resumed_streams() -> None:
    clients, records = after_the_storm().clients.values(), after_the_storm().records
    gaps_s = [gap_s for client in clients for gap_s in client.gaps_s]
    missing = len(gaps_s) - sum(told(f"{ITL.name}_count", "pool").values())
    assert 0 <= missing <= sum(record.resumes for record in records)
    for edge_s in (0.01, 0.025, 0.05, 0.1):
        observed = sum(told(f"{ITL.name}_bucket", "pool", le=str(edge_s)).values())
        seen = sum(gap_s <= edge_s + ROUNDING_S for gap_s in gaps_s)
        assert abs(observed - seen) <= 0.005 * len(gaps_s), edge_s


def test_streams_that_went_on_elsewhere_are_counted() -> None:
    [resumes] = (sample.value for sample in exposed() if sample.name == RESUMES.name)
    assert resumes == sum(record.resumes for record in after_the_storm().records) > 0


def test_every_tenant_is_told_by_its_configured_name() -> None:
    assert set(told(SLO_REQUESTS.name, "tenant")) <= {*TENANTS, OTHER}
