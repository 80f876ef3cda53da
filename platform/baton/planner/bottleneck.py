"""What keeps a fleet from carrying more: read off the first rate that was too high."""

from __future__ import annotations

from baton.planner.rates.closed_form import Mix, prefill_s
from baton.planner.rates.trials import Trial
from baton.planner.result import Binding, Candidate, Constraint
from baton.planner.shapes.fleets import Kind, Pool

_BUSY = 0.6
"""From this share of its time on, a pool counts as busy: with bursts it cannot be much more."""
_FULL = 0.85


def binding(candidate: Candidate, mix: Mix) -> Binding:
    """The constraint of a candidate, at the lowest rate that it did not carry."""
    beyond = candidate.measured.beyond
    if beyond is None:
        return Binding(constraint=Constraint.NONE, why="no rate that was tried was too high")
    if full := _full(candidate, beyond, mix):
        return full
    if beyond.late_first >= beyond.late_stream:
        return _first_tokens(candidate, beyond, mix)
    late = f"at {beyond.rate_per_s * candidate.factor:.3g} requests/s {beyond.late_stream:.0%}"
    if candidate.fleet.kind is Kind.DISAGGREGATED:
        return Binding(
            constraint=Constraint.DECODE_BANDWIDTH,
            why=f"{late} of streams are too slow: steps of that many streams read too much",
        )
    return Binding(
        constraint=Constraint.SHARED_STEPS,
        why=f"{late} of streams are too slow: steps compute prompts beside them",
    )


def _first_tokens(candidate: Candidate, beyond: Trial, mix: Mix) -> Binding:
    # a hybrid's decode replicas compute prompts, too
    hybrid = candidate.fleet.kind is Kind.HYBRID
    pools = candidate.cell.pools if hybrid else candidate.cell.pools[:1]
    one_s = _prompt_s(pools[0], mix, beyond.cached_fraction)
    engines = sum(pool.replicas * pool.instance.settings.pipeline_stages for pool in pools)
    busy = beyond.rate_per_s * one_s / engines
    late = (
        f"at {beyond.rate_per_s * candidate.factor:.3g} requests/s {beyond.late_first:.0%} of first"
        f" tokens are late"
    )
    if network := _network_busy(candidate, beyond, mix):
        return Binding(constraint=Constraint.NETWORK, why=f"{late}: {network}")
    whose = "all" if hybrid else f"the {pools[0].role}"
    share = f"computing prompts alone takes {busy:.0%} of {whose} replicas' time"
    if busy >= _BUSY or candidate.fleet.kind is not Kind.DISAGGREGATED:
        return Binding(constraint=Constraint.PREFILL_COMPUTE, why=f"{late}: {share}")
    return Binding(constraint=Constraint.BURSTS, why=f"{late}, although {share}")


def _prompt_s(pool: Pool, mix: Mix, cached: float) -> float:
    """The mean prompt on one replica, alone."""
    settings = pool.instance.settings
    return prefill_s(
        settings.timing,
        max(1, round(mix.prompt_tokens)),
        cached_tokens=round(mix.prompt_tokens * cached),
        budget_tokens=settings.max_batched_tokens,
    )


def _network_busy(candidate: Candidate, beyond: Trial, mix: Mix) -> str | None:
    """That the prefill pool's interfaces are full; None when they are not."""
    if candidate.fleet.kind is Kind.COLOCATED:
        return None
    pool = candidate.cell.pools[0]
    settings = pool.instance.settings
    token_bytes = settings.kv_block_bytes / settings.block_size_tokens
    share = (
        beyond.rate_per_s
        * mix.prompt_tokens
        * token_bytes
        / (pool.replicas * settings.transfer_bytes_per_s)
    )
    if share < _FULL:
        return None
    return f"handing KV blocks over takes {share:.0%} of the prefill pool's network"


def _full(candidate: Candidate, beyond: Trial, mix: Mix) -> Binding | None:
    """That the decoding pool has no room for more streams; None when it has."""
    pool = candidate.cell.pools[-1]
    settings = pool.instance.settings
    streams = beyond.rate_per_s * mix.output_tokens * beyond.tpot.p50_s / pool.replicas
    tokens = settings.kv_blocks * settings.block_size_tokens
    kept = min(streams, settings.max_running_requests) * mix.context_tokens / tokens
    if kept >= _FULL:
        return Binding(
            constraint=Constraint.KV_MEMORY,
            why=f"{streams:.0f} streams on each {pool.role} replica fill {min(kept, 1):.0%} of"
            " its KV cache",
        )
    if streams >= _FULL * settings.max_running_requests:
        return Binding(
            constraint=Constraint.BATCH_LIMIT,
            why=f"{streams:.0f} streams on each {pool.role} replica, of at most"
            f" {settings.max_running_requests} (--max-num-seqs)",
        )
    return None
