"""What an ingress measures as it happens: once for each request that has ended, once for each step.

*Theory of operation.* `record` takes the story of a request apart. `step` is told of each engine
step's outputs and observes one gap for all of the step's streams: the time since the replica's last
step that had any of ours. That is each stream's own gap but where a stream was left out of a step
(it was preempted there) and came back in a later one: that gap is told too short. Tokens that come
together are one. A stream's first tokens on a replica have no gap before them, so a pause while a
stream moves is not among these; it is in `baton_worst_token_gap_seconds`, which is exact.

Nothing here looks at the tokens of a request one by one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from prometheus_client.metrics_core import Metric as Family

from baton.control.state.limits import CoordinatorLimits
from baton.domain.commands import RequestRecord
from baton.domain.events import Event, ReplicaJoined, ReplicaLost, StepCompleted
from baton.domain.handoff import HandoffMode, LegKind, LegOutput, RouteReason
from baton.domain.leg_record import LegRecord
from baton.domain.request import Phase
from baton.domain.slo import Slo
from baton.policy.admission.slo_evaluation import tpot_s
from baton.telemetry import catalogue as c
from baton.telemetry.edges import ChangedEdges, all_edges, changed_edges
from baton.telemetry.families import Families
from baton.telemetry.histograms import Histogram
from baton.telemetry.requests.error_budget import ttft_parts

_LIMITS = CoordinatorLimits()


@dataclass(slots=True)
class _ReplicaStreams:
    """One replica's, for the time between their tokens."""

    pool: str
    last_step_at_s: float | None
    """When it last had tokens for any of them."""


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
        # Named, for they are observed once a step or once a request.
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
        """Have an edge at each objective and timeout of these; which histograms that changes."""
        old_edges, self._edges = self._edges, all_edges(classes, limits)
        for metric, edges in self._edges.items():
            self._histograms[metric].set_edges(edges)
        return changed_edges(old_edges, self._edges)

    # ------------------------------------------------------------------ once a request

    def record(self, record: RequestRecord) -> None:
        """A request has ended."""
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
        """How long it took, where that time went, and what was predicted of it."""
        labels = record.slo.name, record.model, record.pool
        self._ttft.observe(at_s - record.arrived_at_s, *labels)
        for name, part_s in (ttft_parts(record) or {}).items():
            self._ttft_parts_s[(*labels, name.removesuffix("_s"))] += part_s
        leg = next((other for other in record.legs if _gave_first_token(other, at_s)), None)
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
        """See what replicas say; to be told before anybody acts on it."""
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
        for _, token_ids, finish, _, ticket, cached_tokens, _, times, _ in outputs:
            if token_ids and ticket is None:
                # A leg tells its times with its first output, and some again with the last; one
                # that goes on after another's tokens does not say how many were cached.
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
        """All of it, as it is now; put together as the result is iterated."""
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
    """Whether a request's first token, which came then, is of this leg."""
    return leg.output_tokens > 0 and leg.first_output_at_s == at_s


def _handoff_gap_s(record: RequestRecord, placement: int) -> float | None:
    """From the end of a placement's prefill leg to its decode leg's first token; None without."""
    legs = {leg.kind: leg for leg in record.legs if leg.route_index == placement}
    prefill, decode = legs.get(LegKind.PREFILL), legs.get(LegKind.DECODE)
    if prefill is None or decode is None or decode.first_output_at_s is None:
        return None
    return decode.first_output_at_s - prefill.ended_at_s
