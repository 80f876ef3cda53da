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
from baton.policy.resilience.circuit_breakers import Circuit
from baton.telemetry import catalogue as c
from baton.telemetry.families import Families
from baton.telemetry.metrics.ingress import IngressMetrics

_UNDER_WAY = (Phase.QUEUED, Phase.PREFILL, Phase.TRANSFER, Phase.DECODE)


class IngressFacts(NamedTuple):
    """What is read of an ingress besides its coordinator, each time it is asked."""

    now_s: Callable[[], float]
    unjoined: Callable[[], int]
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
        self._broken = BrokenByTarget()
        self.know(tenants)

    def know(self, tenants: Iterable[str]) -> None:
        """Tell these tenants by name from now on, and all others that were told before."""
        for name in tenants:
            if len(self._tenants) < c.MOST_VALUES:
                self._tenants.add(name)

    def collect(self) -> Iterator[Family]:
        """Every metric of an ingress, as it is now."""
        found, now_s = Families(), self._facts.now_s()
        report = self._coordinator.report("", now_s)
        for row in self._coordinator.admissions():
            found.add(c.ADMISSIONS, row.requests, row.slo_class, row.outcome, row.reason)
        self._add_present(found, report)
        self._add_recovery(found, now_s)
        self._add_knowledge(found, now_s)
        self._add_links(found, now_s)
        found.add(c.UNJOINED, self._facts.unjoined())
        found.add(c.INGRESS_GENERATION, self._facts.generation())
        return chain(self._of_tallies(report.tallies), found.collect(), self._metrics.families())

    # ------------------------------------------------------------------ what clients got

    def _of_tallies(self, tallies: Iterable[Tally]) -> Iterator[Family]:
        found = Families()
        for tally in tallies:
            tenant = tally.tenant if tally.tenant in self._tenants else c.OTHER
            whose = tally.slo_class, tenant, tally.model, tally.pool
            for outcome, count in _outcomes(tally):
                found.add(c.REQUESTS, count, *whose, outcome)
            found.add(c.SLO_REQUESTS, tally.judged, *whose)
            found.add(c.SLO_GOOD, tally.good, *whose, c.Objective.GOODPUT)
            found.add(c.SLO_GOOD, tally.ttft_met, *whose, c.Objective.TTFT)
            found.add(c.SLO_GOOD, tally.tpot_met, *whose, c.Objective.TPOT)
            found.add(c.SLO_GOOD, tally.itl_met, *whose, c.Objective.ITL)
            found.add(c.SLO_EXCUSED, tally.excused, *whose)
            found.add(c.TOKENS, tally.prompt_tokens, *whose, c.TokenKind.PROMPT)
            found.add(c.TOKENS, tally.cached_tokens, *whose, c.TokenKind.CACHED)
            found.add(c.TOKENS, tally.output_tokens, *whose, c.TokenKind.OUTPUT)
        yield from found.collect()

    # ------------------------------------------------------------------ what is now

    def _add_present(self, found: Families, report: CoordinatorReport) -> None:
        phases = Counter(self._coordinator.phases().values())
        for phase in _UNDER_WAY:
            found.add(c.IN_FLIGHT, phases[phase], phase)
        found.add(c.HELD_REQUESTS, report.held)
        found.add(c.SLACK, report.slack_s)

    def _add_recovery(self, found: Families, now_s: float) -> None:
        recoveries = self._coordinator.recoveries()
        for trouble, tries in recoveries.second_tries:
            found.add(c.SECOND_TRIES, tries, trouble)
        found.add(c.SECOND_TRIES_REFUSED, recoveries.refused)
        replicas, circuits = self._coordinator.fleet(now_s).replicas, Counter[tuple[str, str]]()
        for replica_id, circuit in self._coordinator.circuits(now_s).items():
            circuits[replicas[replica_id].facts.pool, circuit] += 1
        for pool in {view.facts.pool for view in replicas.values()}:
            for state in Circuit:
                found.add(c.CIRCUITS, circuits[pool, state], pool, state)

    def _add_knowledge(self, found: Families, now_s: float) -> None:
        knowledge = self._coordinator.knowledge
        for quality in knowledge.timings.quality():
            found.add(c.STEP_ERROR, quality.step_error, quality.pool)
        leases = self._coordinator.leases()
        for replica_id, view in self._coordinator.fleet(now_s).replicas.items():
            found.add(c.LEASES, leases.get(replica_id, 0), view.facts.pool)
            if (cache := knowledge.index.state(replica_id, now_s)) is not None:
                reported = cache.gpu_blocks + cache.host_blocks
                found.add(c.INDEX_BLOCKS, reported, HitSource.REPORTED)
                found.add(c.INDEX_BLOCKS, cache.predicted_blocks, HitSource.PREDICTED)

    # ------------------------------------------------------------------ links

    def _add_links(self, found: Families, now_s: float) -> None:
        links = self._coordinator.knowledge.links
        counts = tuple(links.counts())
        states = Counter(link.state for link in counts)
        for state in LinkState:
            found.add(c.LINK_PAIRS, states[state], state)
        for target_id, broken in self._broken.totals(counts):
            found.add(c.BROKEN_HANDOFFS, broken, target_id)
        for target_id in nsmallest(c.MOST_VALUES, self._coordinator.broken_agents()):
            found.add(c.AGENT_BROKEN, 1, target_id)
        told = {one[:2] for one in nlargest(c.MOST_VALUES, counts, key=_noteworthy)}
        for row in links.rows(now_s, told):
            pair = row.source_id, row.target_id
            found.add(c.LINK_BANDWIDTH, row.bytes_per_s, *pair, row.transport)
            found.add(c.LINK_SETUP, row.setup_s, *pair)
            found.add(c.LINK_QUARANTINED, row.state is LinkState.QUARANTINED, *pair)


class BrokenByTarget:
    """Handoffs that did not arrive, by target: totals that do not go down, whoever leaves.

    The first so many targets are told by name for as long as they are there. Whoever comes while
    there is no room is one of the others until it leaves, and what it has added stays theirs.
    """

    def __init__(self, most_named: int = c.MOST_VALUES) -> None:
        self._most_named = most_named
        self._named: dict[str, int] = {}
        self._nameless: set[str] = set()
        self._others: int | None = None
        self._seen: dict[tuple[str, str], int] = {}

    def totals(self, counts: Iterable[LinkCounts]) -> Iterator[tuple[str, int]]:
        """The total of each target that is there, and last that of all others, if ever any were."""
        counts = tuple(counts)
        self._know({link.target_id for link in counts})
        seen, self._seen = self._seen, {}
        for link in counts:
            pair, broken = link[:2], link.broken_handoffs
            before = seen.get(pair, 0)
            self._add(link.target_id, broken - before if broken >= before else broken)
            self._seen[pair] = broken
        yield from self._named.items()
        if self._others is not None:
            yield c.OTHER, self._others

    def _know(self, present: set[str]) -> None:
        self._named = {one: total for one, total in self._named.items() if one in present}
        self._nameless &= present
        for target_id in sorted(present - self._named.keys() - self._nameless):
            if len(self._named) < self._most_named:
                self._named[target_id] = 0
            else:
                self._nameless.add(target_id)

    def _add(self, target_id: str, broken: int) -> None:
        if target_id in self._named:
            self._named[target_id] += broken
        else:
            self._others = (self._others or 0) + broken


def _noteworthy(link: LinkCounts) -> tuple[bool, int]:
    return link.state is LinkState.QUARANTINED, link.moved_bytes


def _outcomes(tally: Tally) -> Iterator[tuple[str, int]]:
    """How the requests of a row have ended; all of them, so that rare ones do not begin at 1."""
    unserved = tally.shed + tally.evicted + tally.failed + tally.cancelled
    yield Phase.FINISHED, tally.judged + tally.excused - unserved
    yield Phase.SHED, tally.shed
    yield Phase.EVICTED, tally.evicted
    yield Phase.FAILED, tally.failed
    yield Phase.CANCELLED, tally.cancelled
    yield AdmissionOutcome.BARRED, tally.barred
