"""The load of a vLLM engine, from what its scheduler says after each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.metrics.stats import SchedulerStats

from baton.domain.fleet import Load, StepTotals, TransferTotals
from baton.engine.vllm.core.links import FAILURE_KEYS, nixl_statistics
from baton.engine.vllm.wire.transfer_keys import INVALIDATED_SOURCES_KEY

_SMOOTHING = 0.1
"""Weight of the newest step in the moving average: the last 20 steps or so count."""


class LoadMeter:
    """Adds up what steps report.

    Pulling is what the scheduler defers, which for our requests means: waits for its KV blocks, or
    for its turn to fetch them where there are more than may fetch at a time. The latter are queued.
    Queued is every other live leg that the scheduler does not run, wherever it waits: on its way or
    in the scheduler's queue. `queued_tokens` are prompt tokens that legs which have produced
    nothing yet must compute: those that they pull, or that are expected to be cached, are not among
    them. vLLM does not say how much of a prompt a chunked prefill has done, so the rest counts in
    full until the first token.

    Every step that computed something is in the step totals, whether it produced outputs or not. A
    step's time is how long vLLM waited for its result; where vLLM prepares the next step meanwhile
    (asynchronous scheduling), the times of a busy engine's steps leave out what that hid.
    """

    def __init__(self, *, max_pulls: int | None = None) -> None:
        self._max_pulls = max_pulls
        self._queued_tokens = 0
        self._running_requests = 0
        self._pulling_requests = 0
        self._kv_used_fraction = 0.0
        self._step_s = 0.0
        self._transfers = TransferTotals()
        self._steps = StepTotals()

    def on_leg_submitted(self, prompt_tokens: int) -> None:
        """A leg was handed to the engine."""
        self._queued_tokens += prompt_tokens

    def on_leg_started(self, prompt_tokens: int) -> None:
        """A leg produced its first output, or ended without any."""
        self._queued_tokens -= prompt_tokens

    def on_step(self, stats: SchedulerStats, *, context_tokens: int = 0) -> None:
        """Take in one step; `context_tokens` is what those it decoded for attended to."""
        self._running_requests = stats.num_running_reqs
        self._pulling_requests = stats.num_skipped_waiting_reqs
        if self._max_pulls is not None:
            self._pulling_requests = min(self._pulling_requests, self._max_pulls)
        self._kv_used_fraction = stats.kv_cache_usage
        details = stats.iteration_details
        if details is not None and not details.is_dummy:
            step_s = details.elapsed_ms / 1000
            has_average = self._step_s > 0
            self._step_s += (step_s - self._step_s) * (_SMOOTHING if has_average else 1)
            self._steps = StepTotals(
                steps=self._steps.steps + 1,
                busy_s=self._steps.busy_s + step_s,
                prefill_tokens=self._steps.prefill_tokens + details.num_ctx_tokens,
                decode_tokens=self._steps.decode_tokens + details.num_generation_requests,
                context_tokens=self._steps.context_tokens + context_tokens,
                prefill_steps=self._steps.prefill_steps + (details.num_ctx_tokens > 0),
                decode_steps=self._steps.decode_steps + (details.num_generation_requests > 0),
            )
        if stats.kv_connector_stats:
            nixl = nixl_statistics(stats.kv_connector_stats)
            self._transfers = add_transfers(self._transfers, nixl)

    def load(self, *, live_legs: int) -> Load:
        """The load now. `live_legs` bounds counts that were true at the last step only."""
        running = min(self._running_requests, live_legs)
        pulling = min(self._pulling_requests, live_legs - running)
        return Load(
            queued_requests=live_legs - running - pulling,
            pulling_requests=pulling,
            running_requests=running,
            queued_tokens=self._queued_tokens,
            kv_used_fraction=self._kv_used_fraction,
            step_s=self._step_s,
            transfers=self._transfers,
            steps=self._steps,
        )


def add_transfers(totals: TransferTotals, statistics: Mapping[str, Any]) -> TransferTotals:
    """`totals` with one step's NIXL connector statistics added: lists, one entry an occurrence."""

    def entries(name: str) -> Sequence[float]:
        values: Sequence[float] = statistics.get(name) or ()
        return values

    return TransferTotals(
        pulls=totals.pulls + len(entries("bytes_transferred")),
        moved_bytes=totals.moved_bytes + int(sum(entries("bytes_transferred"))),
        busy_s=totals.busy_s + sum(entries("transfer_duration")),
        failures=totals.failures + sum(len(entries(name)) for name in FAILURE_KEYS),
        expired_leases=totals.expired_leases + len(entries("num_kv_expired_reqs")),
        invalidated_pulls=totals.invalidated_pulls + len(entries(INVALIDATED_SOURCES_KEY)),
    )
