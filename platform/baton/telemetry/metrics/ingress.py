"""Metrics of an ingress: observed as requests and engine steps end, or read during a scrape.

*Theory of operation.* For a step, one gap is observed for all its streams: the time since the
replica's last step with output for this ingress. That is too short only for a stream that was
preempted in between. Tokens of one step count as one. A stream's first tokens on a replica have no
gap before them: pauses while a stream moves are only in `baton_worst_token_gap_seconds`.

`IngressCollector.collect` reads everything at once, on the event loop that also carries tokens.
Slower work runs while its result is iterated, which may be in a thread. Reading takes time in
proportion to replicas, requests in flight and accounts. All pairs of replicas are counted; only
quarantined pairs and those that moved the most are described. Former tenants keep their name: their
counters would otherwise jump into `other`. Failed handoffs of a replica that leaves between two
scrapes may be missed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import nlargest, nsmallest
from itertools import chain
from typing import NamedTuple

from prometheus_client.metrics_core import Metric as Family

from baton.control.coordinator import Coordinator
from baton.control.state.limits import CoordinatorLimits
from baton.domain.commands import RequestRecord
from baton.domain.demand import AdmissionOutcome, CoordinatorReport, Tally
from baton.domain.events import Event, ReplicaJoined, ReplicaLost, StepCompleted
from baton.domain.handoff import HandoffMode, HitSource, LegKind, LegOutput, RouteReason
from baton.domain.leg_record import LegRecord
from baton.domain.request import Phase
from baton.domain.slo import Slo
from baton.domain.tenant import DEFAULT_TENANT
from baton.policy.admission.slo_evaluation import tpot_s
from baton.policy.links.estimates import LinkCounts, LinkState
from baton.policy.resilience.circuit_breakers import CircuitState
from baton.runtime.keys.api_keys import TenantKeys
from baton.telemetry import catalogue as c
from baton.telemetry.families import Families
from baton.telemetry.histograms import ChangedEdges, Histogram, all_edges, changed_edges
from baton.telemetry.requests.error_budget import ttft_parts

_LIMITS = CoordinatorLimits()
_IN_FLIGHT = (Phase.QUEUED, Phase.PREFILL, Phase.TRANSFER, Phase.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessFacts:
    """The valid keys of an ingress, and the requests without one."""

    keys: Mapping[str, TenantKeys] = field(default_factory=dict)
    """By tenant."""
    tls_expires_s: float | None = None
    """Until the certificate expires; None if no certificate can be read here."""
    unauthorized: Mapping[str, int] = field(default_factory=dict)
    """Requests with status 401, by cause."""


class IngressFacts(NamedTuple):
    """Values of an ingress outside its coordinator, read in each scrape."""

    now_s: Callable[[], float]
    unreachable: Callable[[], int]
    """Replicas that Ray lists and that the ingress cannot reach."""
    generation: Callable[[], int]
    access: Callable[[], AccessFacts] = AccessFacts


@dataclass(slots=True)
class _ReplicaStreams:
    """The streams of one replica, for the gaps between their tokens."""

    pool: str
    last_step_at_s: float | None


class IngressMetrics:
    """Counts and histograms of one ingress. Satisfies `ports.Recorder`."""

    def __init__(
        self,
        classes: Iterable[Slo],
        limits: CoordinatorLimits = _LIMITS,
        *,
        now_s: Callable[[], float],
    ) -> None:
        self._now_s = now_s
        self._edges = all_edges(classes, limits)
        self._histograms = {
            metric: Histogram(metric, edges) for metric, edges in self._edges.items()
        }
        # Attributes, because they are used once a step or once a request.
        self._ttft = self._histograms[c.TTFT]
        self._tpot = self._histograms[c.TPOT]
        self._max_itl = self._histograms[c.MAX_ITL]
        self._itl = self._histograms[c.ITL]
        self._duration = self._histograms[c.DURATION]
        self._queue_wait = self._histograms[c.QUEUE_WAIT]
        self._handoff_gap = self._histograms[c.HANDOFF_GAP]
        self._ttft_ratio = self._histograms[c.TTFT_RATIO]
        self._ttft_parts_s: defaultdict[tuple[str, str, str, str], float] = defaultdict(float)
        self._placements: Counter[tuple[HandoffMode, RouteReason]] = Counter()
        self._resumes = 0
        self._hit_tokens = 0
        self._streams: dict[str, _ReplicaStreams] = {}

    def set_edges(
        self, classes: Iterable[Slo], limits: CoordinatorLimits = _LIMITS
    ) -> tuple[ChangedEdges, ...]:
        """Use an edge at each of these objectives and timeouts; returns the changed histograms."""
        old_edges, self._edges = self._edges, all_edges(classes, limits)
        for metric, edges in self._edges.items():
            self._histograms[metric].set_edges(edges)
        return changed_edges(old_edges, self._edges)

    # ------------------------------------------------------------------ once a request

    def record(self, record: RequestRecord) -> None:
        """Observe an ended request."""
        labels = record.slo.name, record.model, record.pool
        if record.first_token_at_s is not None:
            self._observe_first_token(record, record.first_token_at_s)
        if (took_s := tpot_s(record)) is not None:
            self._tpot.observe(took_s, *labels)
            self._max_itl.observe(record.max_itl_s, *labels)
        if record.outcome is Phase.FINISHED:
            self._duration.observe(record.ended_at_s - record.arrived_at_s, *labels)
        if record.routes:
            self._queue_wait.observe(record.queue_wait_s, *labels)
        for route in record.routes:
            self._placements[route.mode, route.reason] += 1
        for decision in record.decisions:
            option = decision.chosen
            self._hit_tokens += 0 if option is None else option.hit_tokens
        self._resumes += record.resumes

    def _observe_first_token(self, record: RequestRecord, at_s: float) -> None:
        """Observe TTFT, its parts and the error of its prediction."""
        labels = record.slo.name, record.model, record.pool
        self._ttft.observe(at_s - record.arrived_at_s, *labels)
        for name, part_s in (ttft_parts(record) or {}).items():
            self._ttft_parts_s[(*labels, name.removesuffix("_s"))] += part_s
        leg = next((leg for leg in record.legs if _gave_first_token(leg, at_s)), None)
        if leg is None:
            return
        if (gap_s := _handoff_gap_s(record, leg.route_index)) is not None:
            self._handoff_gap.observe(gap_s, *labels)
        if leg.route_index < len(record.decisions):
            decision = record.decisions[leg.route_index]
            option, took_s = decision.chosen, at_s - decision.at_s
            if option is not None and took_s > 0:
                self._ttft_ratio.observe(option.ttft_s / took_s, option.mode, record.model)

    # ------------------------------------------------------------------ once a step

    def on_event(self, event: Event) -> None:
        """Observe an event, before any other consumer acts on it."""
        match event:
            case StepCompleted():
                self._observe_step(event.replica_id, event.outputs)
            case ReplicaJoined(facts=facts):
                self._streams[facts.replica_id] = _ReplicaStreams(facts.pool, None)
            case ReplicaLost(replica_id=replica_id):
                self._streams.pop(replica_id, None)
            case _:
                pass

    def _observe_step(self, replica_id: str, outputs: tuple[LegOutput, ...]) -> None:
        streams = self._streams.get(replica_id)
        if streams is None:
            return
        started = continued = 0
        for _, token_ids, finish, _, kv_handle, cached_tokens, _, times, _ in outputs:
            if token_ids and kv_handle is None:
                # A leg has times in its first output, and some in its last. A leg that resumes a
                # stream does not report its cached tokens.
                if cached_tokens is None and (times is None or finish is not None):
                    continued += 1
                else:
                    started += 1
        if not (started or continued):
            return
        now_s = self._now_s()
        if continued and streams.last_step_at_s is not None:
            self._itl.observe(now_s - streams.last_step_at_s, streams.pool, weight=continued)
        streams.last_step_at_s = now_s

    # ------------------------------------------------------------------ when asked

    def families(self) -> Iterator[Family]:
        """A snapshot, as families that are built while the result is iterated."""
        families = Families()
        for labels, total_s in self._ttft_parts_s.items():
            families.add(c.TTFT_PARTS, total_s, *labels)
        for (mode, reason), count in self._placements.items():
            families.add(c.PLACEMENTS, count, mode, reason)
        families.add(c.RESUMES, self._resumes)
        families.add(c.PREDICTED_HIT_TOKENS, self._hit_tokens)
        snapshots = [histogram.copy() for histogram in self._histograms.values()]
        return chain(families.collect(), (histogram.family() for histogram in snapshots))


def _gave_first_token(leg: LegRecord, at_s: float) -> bool:
    return leg.output_tokens > 0 and leg.first_output_at_s == at_s


def _handoff_gap_s(record: RequestRecord, placement: int) -> float | None:
    """From the end of a placement's prefill leg to its decode leg's first token, or None."""
    legs = {leg.kind: leg for leg in record.legs if leg.route_index == placement}
    prefill, decode = legs.get(LegKind.PREFILL), legs.get(LegKind.DECODE)
    if prefill is None or decode is None or decode.first_output_at_s is None:
        return None
    return decode.first_output_at_s - prefill.ended_at_s


class IngressCollector:
    """Every metric of an ingress; see the module."""

    def __init__(
        self,
        coordinator: Coordinator,
        metrics: IngressMetrics,
        facts: IngressFacts,
        *,
        tenants: Iterable[str] = (),
    ) -> None:
        self._coordinator = coordinator
        self._metrics = metrics
        self._facts = facts
        self._tenants = {DEFAULT_TENANT}
        self._handoff_failures = HandoffFailuresByTarget()
        self.add_tenants(tenants)

    def add_tenants(self, tenants: Iterable[str]) -> None:
        """Export these tenants by name, too."""
        for name in tenants:
            if len(self._tenants) < c.MAX_LABEL_VALUES:
                self._tenants.add(name)

    def collect(self) -> Iterator[Family]:
        """Every metric of an ingress, now."""
        families, now_s = Families(), self._facts.now_s()
        report = self._coordinator.report("", now_s)
        for row in self._coordinator.admissions():
            families.add(c.ADMISSIONS, row.requests, row.slo_class, row.outcome, row.reason)
        self._add_in_flight(families, report)
        self._add_retries(families, now_s)
        self._add_fleet_model(families, now_s)
        self._add_links(families, now_s)
        families.add(c.UNREACHABLE_REPLICAS, self._facts.unreachable())
        families.add(c.INGRESS_GENERATION, self._facts.generation())
        self._add_access(families, self._facts.access())
        return chain(
            self._tally_families(report.tallies), families.collect(), self._metrics.families()
        )

    # ------------------------------------------------------------------ what clients got

    def _tally_families(self, tallies: Iterable[Tally]) -> Iterator[Family]:
        families = Families()
        for tally in tallies:
            tenant = tally.tenant if tally.tenant in self._tenants else c.OTHER
            labels = tally.slo_class, tenant, tally.model, tally.pool
            for outcome, count in _outcomes(tally):
                families.add(c.REQUESTS, count, *labels, outcome)
            families.add(c.SLO_REQUESTS, tally.evaluated, *labels)
            families.add(c.SLO_GOOD, tally.good, *labels, c.Objective.GOODPUT)
            families.add(c.SLO_GOOD, tally.ttft_met, *labels, c.Objective.TTFT)
            families.add(c.SLO_GOOD, tally.tpot_met, *labels, c.Objective.TPOT)
            families.add(c.SLO_GOOD, tally.itl_met, *labels, c.Objective.ITL)
            families.add(c.SLO_EXCLUDED, tally.excluded, *labels)
            families.add(c.TOKENS, tally.prompt_tokens, *labels, c.TokenKind.PROMPT)
            families.add(c.TOKENS, tally.cached_tokens, *labels, c.TokenKind.CACHED)
            families.add(c.TOKENS, tally.output_tokens, *labels, c.TokenKind.OUTPUT)
        yield from families.collect()

    # ------------------------------------------------------------------ what is now

    def _add_in_flight(self, families: Families, report: CoordinatorReport) -> None:
        phases = Counter(self._coordinator.phases().values())
        for phase in _IN_FLIGHT:
            families.add(c.IN_FLIGHT, phases[phase], phase)
        families.add(c.QUEUED_REQUESTS, report.queued)
        families.add(c.SLACK, report.slack_s)

    def _add_access(self, families: Families, access: AccessFacts) -> None:
        families.add(c.TLS_EXPIRES, access.tls_expires_s)
        for tenant, keys in access.keys.items():
            families.add(c.VALID_KEYS, keys.valid, tenant)
            # Not summed up: of tenants beyond the limit nothing is exported.
            if tenant in self._tenants:
                families.add(c.KEYS_EXPIRE, keys.expires_s, tenant)
        for cause, requests in access.unauthorized.items():
            families.add(c.UNAUTHORIZED, requests, cause)

    def _add_retries(self, families: Families, now_s: float) -> None:
        totals = self._coordinator.retry_totals()
        for reason, retries in totals.retries:
            families.add(c.RETRIES, retries, reason)
        families.add(c.RETRIES_DENIED, totals.denied)
        replicas, circuits = self._coordinator.fleet(now_s).replicas, Counter[tuple[str, str]]()
        for replica_id, circuit in self._coordinator.circuits(now_s).items():
            circuits[replicas[replica_id].facts.pool, circuit] += 1
        for pool in {view.facts.pool for view in replicas.values()}:
            for state in CircuitState:
                families.add(c.CIRCUIT_BREAKERS, circuits[pool, state], pool, state)

    def _add_fleet_model(self, families: Families, now_s: float) -> None:
        fleet_model = self._coordinator.fleet_model
        for quality in fleet_model.timings.quality():
            families.add(c.STEP_ERROR, quality.step_error, quality.pool)
        leases = self._coordinator.lease_counts()
        for replica_id, view in self._coordinator.fleet(now_s).replicas.items():
            families.add(c.INGRESS_KV_LEASES, leases.get(replica_id, 0), view.facts.pool)
            if (cache := fleet_model.index.replica_state(replica_id, now_s)) is not None:
                reported = cache.gpu_blocks + cache.host_blocks
                families.add(c.INDEX_BLOCKS, reported, HitSource.REPORTED)
                families.add(c.INDEX_BLOCKS, cache.predicted_blocks, HitSource.PREDICTED)

    # ------------------------------------------------------------------ links

    def _add_links(self, families: Families, now_s: float) -> None:
        links = self._coordinator.fleet_model.links
        counts = tuple(links.counts())
        states = Counter(link.state for link in counts)
        for state in LinkState:
            families.add(c.LINK_PAIRS, states[state], state)
        for target_id, failures in self._handoff_failures.totals(counts):
            families.add(c.HANDOFF_FAILURES, failures, target_id)
        for target_id in nsmallest(c.MAX_LABEL_VALUES, self._coordinator.failed_agents()):
            families.add(c.AGENT_FAILED, 1, target_id)
        exported_pairs = {
            link[:2] for link in nlargest(c.MAX_LABEL_VALUES, counts, key=_export_priority)
        }
        for row in links.rows(now_s, exported_pairs):
            pair = row.source_id, row.target_id
            families.add(c.LINK_BANDWIDTH, row.bytes_per_s, *pair, row.transport)
            families.add(c.LINK_SETUP, row.setup_s, *pair)
            families.add(c.LINK_QUARANTINED, row.state is LinkState.QUARANTINED, *pair)


class HandoffFailuresByTarget:
    """Failed handoffs by target, as totals that never go down.

    The first `max_named` targets have their own total while they exist. A target that joins later
    counts as `other` until it leaves, and its failures stay there.
    """

    def __init__(self, max_named: int = c.MAX_LABEL_VALUES) -> None:
        self._max_named = max_named
        self._named: dict[str, int] = {}
        self._unnamed: set[str] = set()
        self._other_total: int | None = None
        self._last_counts: dict[tuple[str, str], int] = {}

    def totals(self, counts: Iterable[LinkCounts]) -> Iterator[tuple[str, int]]:
        """The total of each present target, then of all others if there ever were any."""
        counts = tuple(counts)
        self._update_targets({link.target_id for link in counts})
        last_counts, self._last_counts = self._last_counts, {}
        for link in counts:
            pair, failures = link[:2], link.handoff_failures
            last = last_counts.get(pair, 0)
            self._add(link.target_id, failures - last if failures >= last else failures)
            self._last_counts[pair] = failures
        yield from self._named.items()
        if self._other_total is not None:
            yield c.OTHER, self._other_total

    def _update_targets(self, present: set[str]) -> None:
        self._named = {
            known_id: total for known_id, total in self._named.items() if known_id in present
        }
        self._unnamed &= present
        for target_id in sorted(present - self._named.keys() - self._unnamed):
            if len(self._named) < self._max_named:
                self._named[target_id] = 0
            else:
                self._unnamed.add(target_id)

    def _add(self, target_id: str, failures: int) -> None:
        if target_id in self._named:
            self._named[target_id] += failures
        else:
            self._other_total = (self._other_total or 0) + failures


def _export_priority(link: LinkCounts) -> tuple[bool, int]:
    return link.state is LinkState.QUARANTINED, link.moved_bytes


def _outcomes(tally: Tally) -> Iterator[tuple[str, int]]:
    """Ended requests of a row by outcome, with zeros, so that no counter begins at 1."""
    unserved = tally.shed + tally.evicted + tally.failed + tally.cancelled
    yield Phase.FINISHED, tally.evaluated + tally.excluded - unserved
    yield Phase.SHED, tally.shed
    yield Phase.EVICTED, tally.evicted
    yield Phase.FAILED, tally.failed
    yield Phase.CANCELLED, tally.cancelled
    yield AdmissionOutcome.CLIENT_ERROR, tally.client_errors
