"""What keeps a fleet from carrying more: read off the first rate that was too high."""

from __future__ import annotations

from baton.planner.rates.closed_form import MeanRequest, prefill_s
from baton.planner.rates.trials import Trial
from baton.planner.result import Bottleneck, Candidate, Constraint
from baton.planner.shapes.fleets import FleetKind, PlannedPool

_BUSY_FRACTION = 0.6
"""From this share of its time on, a pool counts as busy: with bursts it cannot be much more."""
_FULL_FRACTION = 0.85


def find_bottleneck(candidate: Candidate, mix: MeanRequest) -> Bottleneck:
    """The constraint of a candidate, at the lowest rate that it did not carry."""
    failed_trial = candidate.search_result.lowest_failed_trial
    if failed_trial is None:
        return Bottleneck(constraint=Constraint.NONE, reason="no rate that was tried was too high")
    if capacity_limit := _capacity_bottleneck(candidate, failed_trial, mix):
        return capacity_limit
    if failed_trial.late_first_token_fraction >= failed_trial.slow_stream_fraction:
        return _first_token_bottleneck(candidate, failed_trial, mix)
    evidence = (
        f"at {failed_trial.rate_per_s * candidate.scale_factor:.3g} requests/s"
        f" {failed_trial.slow_stream_fraction:.0%}"
    )
    if candidate.fleet.kind is FleetKind.DISAGGREGATED:
        return Bottleneck(
            constraint=Constraint.DECODE_BANDWIDTH,
            reason=f"{evidence} of streams are too slow: steps of that many streams read too much",
        )
    return Bottleneck(
        constraint=Constraint.SHARED_STEPS,
        reason=f"{evidence} of streams are too slow: steps compute prompts beside them",
    )


def _first_token_bottleneck(
    candidate: Candidate, failed_trial: Trial, mix: MeanRequest
) -> Bottleneck:
    # a hybrid's decode replicas compute prompts, too
    is_hybrid = candidate.fleet.kind is FleetKind.HYBRID
    pools = candidate.simulated_fleet.pools if is_hybrid else candidate.simulated_fleet.pools[:1]
    prompt_s = _prompt_s(pools[0], mix, failed_trial.cached_fraction)
    engines = sum(pool.replicas * pool.engine_shape.settings.pipeline_stages for pool in pools)
    utilization = failed_trial.rate_per_s * prompt_s / engines
    evidence = (
        f"at {failed_trial.rate_per_s * candidate.scale_factor:.3g} requests/s"
        f" {failed_trial.late_first_token_fraction:.0%} of first"
        f" tokens are late"
    )
    if network := _network_bottleneck(candidate, failed_trial, mix):
        return Bottleneck(constraint=Constraint.NETWORK, reason=f"{evidence}: {network}")
    replicas_text = "all" if is_hybrid else f"the {pools[0].role}"
    share = f"computing prompts alone takes {utilization:.0%} of {replicas_text} replicas' time"
    if utilization >= _BUSY_FRACTION or candidate.fleet.kind is not FleetKind.DISAGGREGATED:
        return Bottleneck(constraint=Constraint.PREFILL_COMPUTE, reason=f"{evidence}: {share}")
    return Bottleneck(constraint=Constraint.BURSTS, reason=f"{evidence}, although {share}")


def _prompt_s(pool: PlannedPool, mix: MeanRequest, cached_fraction: float) -> float:
    """The mean prompt on one replica, alone."""
    settings = pool.engine_shape.settings
    return prefill_s(
        settings.timing,
        max(1, round(mix.prompt_tokens)),
        cached_tokens=round(mix.prompt_tokens * cached_fraction),
        budget_tokens=settings.max_batched_tokens,
    )


def _network_bottleneck(candidate: Candidate, failed_trial: Trial, mix: MeanRequest) -> str | None:
    """That the prefill pool's interfaces are full; None when they are not."""
    if candidate.fleet.kind is FleetKind.COLOCATED:
        return None
    pool = candidate.simulated_fleet.pools[0]
    settings = pool.engine_shape.settings
    token_bytes = settings.kv_block_bytes / settings.block_size_tokens
    utilization = (
        failed_trial.rate_per_s
        * mix.prompt_tokens
        * token_bytes
        / (pool.replicas * settings.transfer_bytes_per_s)
    )
    if utilization < _FULL_FRACTION:
        return None
    return f"handing KV blocks over takes {utilization:.0%} of the prefill pool's network"


def _capacity_bottleneck(
    candidate: Candidate, failed_trial: Trial, mix: MeanRequest
) -> Bottleneck | None:
    """That the decoding pool has no room for more streams; None when it has."""
    pool = candidate.simulated_fleet.pools[-1]
    settings = pool.engine_shape.settings
    streams = failed_trial.rate_per_s * mix.output_tokens * failed_trial.tpot.p50_s / pool.replicas
    tokens = settings.kv_blocks * settings.block_size_tokens
    kv_used_fraction = min(streams, settings.max_running_requests) * mix.context_tokens / tokens
    if kv_used_fraction >= _FULL_FRACTION:
        return Bottleneck(
            constraint=Constraint.KV_MEMORY,
            reason=f"{streams:.0f} streams on each {pool.role} replica fill"
            f" {min(kv_used_fraction, 1):.0%} of"
            " its KV cache",
        )
    if streams >= _FULL_FRACTION * settings.max_running_requests:
        return Bottleneck(
            constraint=Constraint.BATCH_LIMIT,
            reason=f"{streams:.0f} streams on each {pool.role} replica, of at most"
            f" {settings.max_running_requests} (--max-num-seqs)",
        )
    return None
