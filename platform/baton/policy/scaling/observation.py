"""The input of a scaling decision: demand, SLO results, and every pool, over one window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.domain.fleet import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Demand per second, of all arrived requests: also of rejected requests."""

    requests_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    """Prompt tokens that had to be computed, without cached tokens."""
    output_tokens_per_s: float = 0.0
    """Generated, and the expected output of rejected requests, as far as it is known."""
    mean_prompt_tokens: float = 0.0
    """Of a request, cached tokens among them."""
    mean_uncached_tokens: float = 0.0
    mean_output_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevel:
    """SLO results of requests that ended in the window; None where none did."""

    attainment: float | None = None
    """The share of them that met every objective; rejected requests are misses."""
    ttft_mean_s: float | None = None
    ttft_p90_s: float | None = None
    tpot_mean_s: float | None = None
    tpot_p90_s: float | None = None
    rejected_per_s: float = 0.0
    in_flight: int = 0
    queued_requests: int = 0
    """Requests that wait at a coordinator."""
    min_ttft_slack_s: float | None = None
    """How much of its TTFT objective the request has left that is worst off: objective minus what
    it has waited and is predicted to wait yet. Negative: it is late. None: none waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolObservation:
    """One pool."""

    name: str
    role: Role
    """The role in which its replicas start."""
    prefill: int = 0
    """Replicas that take work, by their present role."""
    decode: int = 0
    mixed: int = 0
    starting: int = 0
    draining: int = 0
    gpus_per_replica: float = 1.0
    cold_start_s: float = 60.0
    """From being asked for to taking work: measured where any was seen to start."""
    is_cold_start_measured: bool = False
    """Whether it was."""
    oldest_start_age_s: float | None = None
    """How long ago the first of the starting replicas was requested; None: none starts, or the time
    is unknown."""
    prefill_tokens_per_s: float | None = None
    """Prompt tokens that one replica computes, doing nothing else; None: not known."""
    decode_tokens_per_s: float | None = None
    """Tokens that one replica generates with the most streams that still meet the strictest TPOT
    objective and fit, prefilling nothing."""
    decode_streams: float | None = None
    """How many streams those are; None: not known."""
    utilization_fraction: float | None = None
    """Of the window, spent in engine steps, on average over the replicas that take work."""
    running_requests: float = 0.0
    """Of one replica that takes work, on average."""
    queued_requests: float = 0.0
    """Likewise, and so are the two that follow."""
    queued_tokens: float = 0.0
    kv_used_fraction: float = 0.0

    @property
    def ready_replicas(self) -> int:
        """Replicas that take work."""
        return self.prefill + self.decode + self.mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The input of one tick."""

    at_s: float
    window_s: float
    """Over which rates are taken."""
    demand: Demand = Demand()
    service: ServiceLevel = ServiceLevel()
    pools: Mapping[str, PoolObservation] = field(default_factory=dict)
    ttft_s: float | None = None
    """The objectives to plan for: the strictest of the classes in use."""
    tpot_s: float | None = None
    attainment_target: float = 0.99
    """Of those classes: the share of requests that are to meet them."""
    missing_inputs: tuple[str, ...] = ()
    """Missing inputs, in words; a tick that misses any changes nothing."""
    models: Mapping[str, Observation] = field(default_factory=dict)
    """Where there are several: the same of each one's own requests and pools, by its name."""
