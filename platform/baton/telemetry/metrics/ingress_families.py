"""What an ingress is asked when Prometheus asks it: totals that are kept anyway, and what is now.

*Theory of operation.* `collect` reads everything at once, on the event loop that also carries
tokens; what takes longer is done as its result is iterated, which may be in a thread. Reading takes
time proportional to replicas, requests in flight and rows of the scoreboard. Of pairs of replicas,
of which there are many more, all are counted and only those are described that are quarantined or
have moved most. Values of labels are those of the configuration; tenants that
were never in it are counted as `other`, and those that have left it keep their name, or else what
they have used would be added to `other` at once.

Handoffs that broke are counted as links are forgotten: a few may be missed of a replica that leaves
between two scrapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from heapq import nlargest, nsmallest
from itertools import chain
from typing import NamedTuple

from prometheus_client.metrics_core import Metric as Family

from baton.control.coordinator import Coordinator
from baton.domain.demand import AdmissionOutcome, CoordinatorReport, Tally
from baton.domain.handoff import HitSource
from baton.domain.request import Phase
from baton.domain.tenant import DEFAULT_TENANT
from baton.policy.links.estimates import LinkCounts, LinkState
from baton.policy.resilience.circuit_breakers import CircuitState
from baton.telemetry import catalogue as c
from baton.telemetry.families import Families
from baton.telemetry.metrics.ingress import IngressMetrics

_IN_FLIGHT = (Phase.QUEUED, Phase.PREFILL, Phase.TRANSFER, Phase.DECODE)


class IngressFacts(NamedTuple):
    """What is read of an ingress besides its coordinator, each time it is asked."""

    now_s: Callable[[], float]
    unreachable: Callable[[], int]
    """Replicas that Ray knows and that cannot be reached."""
    generation: Callable[[], int]
    """Of the configuration that it goes by."""


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
        """Tell these tenants by name from now on, and all others that were told before."""
        for name in tenants:
            if len(self._tenants) < c.MAX_LABEL_VALUES:
                self._tenants.add(name)

    def collect(self) -> Iterator[Family]:
        """Every metric of an ingress, as it is now."""
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
            other[:2] for other in nlargest(c.MAX_LABEL_VALUES, counts, key=_export_priority)
        }
        for row in links.rows(now_s, exported_pairs):
            pair = row.source_id, row.target_id
            families.add(c.LINK_BANDWIDTH, row.bytes_per_s, *pair, row.transport)
            families.add(c.LINK_SETUP, row.setup_s, *pair)
            families.add(c.LINK_QUARANTINED, row.state is LinkState.QUARANTINED, *pair)


class HandoffFailuresByTarget:
    """Handoffs that did not arrive, by target: totals that do not go down, whoever leaves.

    The first so many targets are told by name for as long as they are there. Whoever comes while
    there is no room is one of the others until it leaves, and what it has added stays theirs.
    """

    def __init__(self, max_named: int = c.MAX_LABEL_VALUES) -> None:
        self._max_named = max_named
        self._named: dict[str, int] = {}
        self._unnamed: set[str] = set()
        self._other_total: int | None = None
        self._last_counts: dict[tuple[str, str], int] = {}

    def totals(self, counts: Iterable[LinkCounts]) -> Iterator[tuple[str, int]]:
        """The total of each target that is there, and last that of all others, if ever any were."""
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
    """How the requests of a row have ended; all of them, so that rare ones do not begin at 1."""
    unserved = tally.shed + tally.evicted + tally.failed + tally.cancelled
    yield Phase.FINISHED, tally.evaluated + tally.excluded - unserved
    yield Phase.SHED, tally.shed
    yield Phase.EVICTED, tally.evicted
    yield Phase.FAILED, tally.failed
    yield Phase.CANCELLED, tally.cancelled
    yield AdmissionOutcome.CLIENT_ERROR, tally.client_errors
