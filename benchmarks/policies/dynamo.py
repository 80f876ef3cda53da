"""NVIDIA Dynamo's KV-aware cost: blocks to prefill, less what is cached, plus blocks in use.

Source: Dynamo 1.6.1, lib/kv-router/src/scheduling/selector/default.rs; defaults from its binding.
With block size B, for each worker w:

    raw_prefill = (active_prefill_tokens(w) + prompt_tokens) / B
    decay       = 1 / (1 + D * (active_prefill(w) - min active_prefill) / B / request_blocks)
    credit      = C * decay * device_overlap + 0.75 * host_overlap
    prefill     = max(0, raw_prefill - credit)
    decode      = distinct active blocks on w once the prompt's are added
    cost        = S * prefill + decode + A * active_requests(w)      (linear)
                = prefill * (decode + 1)                             (lmetric)

The lowest cost wins, equals are drawn. In a prefill pool decode blocks are not tracked (decode =
0). In a decode pool no prefill and no reuse is: the cost is decode + A * active_requests(w).

Approximations: a router of Dynamo's books blocks and tokens of every request it sends; here they
are the replica's report and what was sent since (`terms`). Which of a prompt's blocks are active
there already is not known, so all are added, to every worker alike; blocks of generated tokens, not
tracked by default there, are in what replicas report. There are no disk and shared tiers here.

    router: {policy: "benchmarks.policies.dynamo:DynamoKvCost", index: events}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from baton.domain.handoff import LegKind
from baton.policy.placement.chooser import Candidate
from baton.policy.placement.port import PlacementQuery
from benchmarks.policies.terms import (
    active_blocks,
    active_requests,
    lowest,
    pending_prefill_tokens,
)


class DynamoFormula(StrEnum):
    """How the parts make up the cost."""

    LINEAR = "linear"
    LMETRIC = "lmetric"


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoParameters:
    """As shipped."""

    formula: DynamoFormula = DynamoFormula.LINEAR
    overlap_score_credit: float = 1.0
    """C"""
    overlap_score_credit_decay: float = 0.0
    """D"""
    host_credit: float = 0.75
    prefill_load_scale: float = 1.0
    """S"""
    decode_active_request_weight: float = 0.0
    """A"""
    temperature: float = 0.0
    """0: the lowest cost; more: a draw."""


class DynamoKvCost:
    """Chooses by Dynamo's cost."""

    def __init__(self, parameters: DynamoParameters | None = None) -> None:
        self._parameters = parameters or DynamoParameters()

    def __call__(
        self,
        query: PlacementQuery,
        kind: LegKind,
        candidates: Sequence[Candidate],
        rng: Random,
    ) -> int:
        """The candidate of the lowest cost."""
        costs = self.costs(query, kind, candidates)
        return softmin(costs, self._parameters.temperature, rng)

    def costs(
        self, query: PlacementQuery, kind: LegKind, candidates: Sequence[Candidate]
    ) -> list[float]:
        """What each candidate costs, in blocks (of `lmetric`, blocks squared)."""
        if kind is LegKind.DECODE:
            return [self._decode_cost(query, candidate) for candidate in candidates]
        calmest = min(pending_prefill_tokens(candidate.view) for candidate in candidates)
        return [self._cost(query, kind, candidate, calmest) for candidate in candidates]

    def _cost(
        self, query: PlacementQuery, kind: LegKind, one: Candidate, calmest_tokens: int
    ) -> float:
        parameters, block = self._parameters, one.view.facts.block_size_tokens
        pending = pending_prefill_tokens(one.view)
        backlog = (pending - calmest_tokens) / block / _request_blocks(query, one)
        decay = 1 / (1 + parameters.overlap_score_credit_decay * backlog)
        raw = (pending + query.prompt_tokens) / block
        prefill = max(0.0, raw - self._credit(one, decay))
        decode = 0.0 if kind is LegKind.PREFILL else _decode_blocks(query, one)
        if parameters.formula is DynamoFormula.LMETRIC:
            return prefill * (decode + 1)
        requests = parameters.decode_active_request_weight * active_requests(one.view)
        return parameters.prefill_load_scale * prefill + decode + requests

    def _decode_cost(self, query: PlacementQuery, one: Candidate) -> float:
        requests = self._parameters.decode_active_request_weight * active_requests(one.view)
        return _decode_blocks(query, one) + requests

    def _credit(self, one: Candidate, decay: float) -> float:
        on_device = one.hit.blocks - one.hit.host_blocks
        parameters = self._parameters
        return (
            parameters.overlap_score_credit * decay * on_device
            + parameters.host_credit * one.hit.host_blocks
        )


def softmin(costs: Sequence[float], temperature: float, rng: Random) -> int:
    """Index drawn with weight exp(-(cost - min) / ((max - min) * temperature)).

    At temperature 0 it is the lowest cost.
    """
    low, spread = min(costs), max(costs) - min(costs)
    if temperature <= 0 or spread <= 0:
        return lowest(costs, rng)
    weights = [math.exp(-(cost - low) / (spread * temperature)) for cost in costs]
    return rng.choices(range(len(costs)), weights)[0]


def _request_blocks(query: PlacementQuery, one: Candidate) -> int:
    return max(1, -(-query.prompt_tokens // one.view.facts.block_size_tokens))


def _decode_blocks(query: PlacementQuery, one: Candidate) -> float:
    return active_blocks(one.view) + _request_blocks(query, one)
