"""Outcomes of requests and their summaries: latencies, attainment, goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.domain.tenant import DEFAULT_TENANT
from baton.policy.admission.slo_classes import DEFAULT_CLASS

FILLING_RESIDENCES = 3
"""Mean times of a request until a fleet is as full as it gets."""


class Outcome(NamedTuple):
    """One request, from its client's side. A NamedTuple: there may be millions."""

    arrived_at_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    """Delivered tokens."""
    ttft_s: float
    """Infinite without a token."""
    tpot_s: float
    """(last token - first token) / (output tokens - 1); 0 with fewer than two. Source: vLLM's
    benchmark_serving; GuideLLM defines it differently."""
    e2e_s: float
    ok: bool
    """Whether it finished."""
    max_itl_s: float = 0.0
    """The longest time between two of its tokens."""
    tenant: str = DEFAULT_TENANT
    slo_class: str = DEFAULT_CLASS
    """The class in which it was served."""
    slo_met: bool = True
    """Whether it met the objectives of that class, as the coordinator evaluated it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Objectives of a request; None for no objective."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def are_met(self, outcome: Outcome) -> bool:
        """Whether the request finished and met all of them."""
        limits = (
            (self.ttft_s, outcome.ttft_s),
            (self.tpot_s, outcome.tpot_s),
            (self.e2e_s, outcome.e2e_s),
        )
        return outcome.ok and all(limit is None or value <= limit for limit, value in limits)


def attainment(outcomes: Sequence[Outcome], objectives: Objectives) -> float:
    """The fraction of requests that met all objectives; 1 without requests."""
    if not outcomes:
        return 1.0
    return sum(objectives.are_met(outcome) for outcome in outcomes) / len(outcomes)


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, linear between neighbours; nan for no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    if ordered[low] == ordered[high]:  # also when both are infinite
        return ordered[low]
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def mean(values: Sequence[float]) -> float:
    """The mean; nan for no values."""
    return sum(values) / len(values) if values else float("nan")
