"""llm-d's scheduler with its chart's default scorers: prefix 3, queue 2, KV utilization 2.

Source: llm-d-router pkg/epp (prefix-cache-scorer, queue-scorer, kv-cache-utilization-scorer,
max-score-picker) and config/charts/routerlib/templates/_config.yaml. Each scorer is in [0, 1]:

    prefix = w * min(1, matched / 8192)^2 + (1 - w) * matched / prompt,  w = 0
    queue  = (max_queue - queue) / (max_queue - min_queue), 1 when all are equal
    kv     = 1 - share of the KV cache in use

The highest weighted sum wins, equals are drawn. Prefill and decode profiles use the same scorers.

Approximations: `matched` is in blocks of the engine, from the prefix index; with the approximate
producer (the default) that index is fed by routing decisions, mode `predicted`. Loads are the
replicas' last reports only, as there; what was sent since does not count.

    router: {policy: "benchmarks.policies.llmd:LlmdScorers", index: predicted}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from baton.domain.handoff import LegKind
from baton.policy.placement.chooser import Candidate
from baton.policy.placement.port import PlacementQuery
from benchmarks.policies.terms import lowest, uncached_tokens

_LONG_MATCH_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmdParameters:
    """Weights of the chart."""

    prefix_weight: float = 3.0
    queue_weight: float = 2.0
    kv_weight: float = 2.0
    long_match_weight: float = 0.0
    """w: how much of the prefix score is for the length of the match, not its share."""


class LlmdScorers:
    """Chooses by llm-d's weighted scores."""

    def __init__(self, parameters: LlmdParameters | None = None) -> None:
        self._parameters = parameters or LlmdParameters()

    def __call__(
        self,
        query: PlacementQuery,
        kind: LegKind,
        candidates: Sequence[Candidate],
        rng: Random,
    ) -> int:
        """The candidate of the highest score."""
        del kind
        return lowest([-score for score in self.scores(query, candidates)], rng)

    def scores(self, query: PlacementQuery, candidates: Sequence[Candidate]) -> list[float]:
        """Each candidate's weighted sum."""
        parameters = self._parameters
        queues = queue_scores([candidate.view.load.queued_requests for candidate in candidates])
        return [
            parameters.prefix_weight * self._prefix(query, candidate)
            + parameters.queue_weight * queue
            + parameters.kv_weight * (1 - candidate.view.load.kv_used_fraction)
            for candidate, queue in zip(candidates, queues, strict=True)
        ]

    def _prefix(self, query: PlacementQuery, one: Candidate) -> float:
        matched = query.prompt_tokens - uncached_tokens(query, one)
        share = matched / query.prompt_tokens if query.prompt_tokens else 0.0
        long = min(1.0, matched / _LONG_MATCH_TOKENS) ** 2
        weight = self._parameters.long_match_weight
        return weight * long + (1 - weight) * share


def queue_scores(queues: Sequence[int]) -> list[float]:
    """Each queue's place between the longest, 0, and the shortest, 1."""
    low, high = min(queues), max(queues)
    if low == high:
        return [1.0] * len(queues)
    return [(high - queue) / (high - low) for queue in queues]
