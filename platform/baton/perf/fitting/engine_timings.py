"""What coordinators have learned of how long engines take: one fit for each pool.

Theory of operation. Replicas of a pool are of one shape, so their reports teach one fit. Reports
carry totals since the replica started; what is learned from is the difference to the replica's last
report, so lost reports do no harm, a first report only sets the base, and totals that went back
(the engine restarted) set it anew. Until a pool has been seen for a few reports its prior stands.
`of` is two dictionary look-ups, for placement asks it for every candidate. A pool with a prior of
its own (a model of its hardware) keeps that, and only a factor on top of it is learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import exp
from operator import sub

from baton.domain.fleet import Load, ReplicaFacts, ReplicaView, StepTotals
from baton.perf.fitting.corrected_timing import (
    CachedTiming,
    CorrectedTiming,
    CorrectionFactor,
    predicted_busy_s,
)
from baton.perf.fitting.least_squares import CoefficientPrior, LeastSquares
from baton.perf.steps.step_costs import HOST_BYTES_PER_S, PRIOR_COSTS, FittedTiming, StepCosts
from baton.perf.timing import EngineTiming, decode_delay_s

_MIN_ROWS = 8
_STEP_BOUNDS_S = (1e-6, 10.0)
_PREFILL_TOKEN_BOUNDS_S = (1e-8, 0.1)
_DECODE_REQUEST_BOUNDS_S = (1e-9, 0.1)
_CONTEXT_TOKEN_BOUNDS_S = (1e-12, 1e-4)
"""From faster than any hardware to a large model on a slow CPU."""
_TTFT_MEMORY = 100
_MIN_TTFT_S = 1e-3
_PRIOR_FRACTION = 0.5
"""Of `max_tokens`, before anything was seen: clients allow for more than they expect."""
_PRIOR_MAX_TOKENS = 512.0
"""... but a limit of a hundred thousand says nothing. Source: means of 200 to 500 output tokens in
published chat traces (BurstGPT, Azure LLM inference 2023)."""
_PRIOR_REQUESTS = 4
_MIN_SEEN_REQUESTS = 20
"""By then five in six of what counts was seen."""
_MEMORY_REQUESTS = 200
HORIZON_S = 3.0
"""About the life of a stream: 200 tokens of 15 ms each."""
_MAX_SHARE = 0.95
"""Who computes nothing but prompts decodes at a twentieth of its pace, rather than never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingQuality:
    """How well a pool's timing is known."""

    pool: str
    costs: StepCosts
    reports: int
    """Differences learned from."""
    clipped_reports: int
    """Those among them that were too far off to be believed as they were."""
    rejected_reports: int
    """Meaningless ones; nothing was learned from them."""
    step_error: float
    """The usual relative error of a report's predicted busy time."""
    ttft_count: int
    """Requests whose time to first token was compared with what was predicted."""
    ttft_error: float
    """Mean of |predicted - actual| / actual, recent ones weighing more; 0 before the first."""
    ttft_bias: float
    """Mean of (predicted - actual) / actual: above 0, predictions are too long."""


class EngineTimings:
    """What is known of how long engines take; `Timings` of placement."""

    def __init__(
        self,
        priors: Mapping[str, EngineTiming] | None = None,
        *,
        host_bytes_per_s: float = HOST_BYTES_PER_S,
    ) -> None:
        """Begin with what is believed of some pools, by name."""
        self._priors = dict(priors or {})
        self._host_bytes_per_s = host_bytes_per_s
        self._pools: dict[str, _FittedPool | _ModelledPool] = {}
        self._last_totals: dict[str, StepTotals] = {}
        self._prefill_shares: dict[str, PrefillShare] = {}
        self._stream_contexts: dict[str, float] = {}
        """By replica: tokens that a stream attended to, between its last two reports of any."""
        self._output_lengths = OutputLengths()

    # ---------------------------------------------------------------- asked by placement

    def of(self, view: ReplicaView) -> EngineTiming:
        """How long this replica takes."""
        pool = self._pools.get(view.facts.pool)
        return (pool or self._pool(view.facts)).timing

    def has_prefill_estimate(self, pool: str) -> bool:
        """Whether what prompts take there is more than a round figure: modelled, or seen."""
        fitted_pool = self._pools.get(pool)
        return pool in self._priors if fitted_pool is None else fitted_pool.has_prefill_estimate

    def has_decode_estimate(self, pool: str) -> bool:
        """Whether what decoding takes there is more than a round figure: modelled, or seen."""
        fitted_pool = self._pools.get(pool)
        return pool in self._priors if fitted_pool is None else fitted_pool.has_decode_estimate

    def prefill_time_fraction(self, view: ReplicaView, now_s: float) -> float:
        """What share of its time a replica spends on prompts, while streams wait for it."""
        share = self._prefill_shares.get(view.facts.replica_id)
        return 0.0 if share is None else share.share(self.of(view), now_s)

    def stream_context(self, view: ReplicaView) -> float | None:
        """How many tokens each stream on this replica attended to of late; None: it does not say.

        Engines that know it say it of every step.
        """
        return self._stream_contexts.get(view.facts.replica_id)

    def expected_output_tokens(self, max_tokens: int) -> float:
        """How many tokens a request that may generate `max_tokens` will generate, on average."""
        return self._output_lengths.expected(max_tokens)

    def has_output_estimate(self, max_tokens: int) -> bool:
        """Whether that was learned, rather than assumed."""
        return self._output_lengths.is_known(max_tokens)

    # ---------------------------------------------------------------- told by the coordinator

    def observe(self, facts: ReplicaFacts, load: Load, now_s: float) -> None:
        """Learn from a replica's load report."""
        steps, last_totals = load.steps, self._last_totals.get(facts.replica_id)
        self._last_totals[facts.replica_id] = steps
        if last_totals is None or steps.steps == last_totals.steps:
            return
        step_delta = StepTotals(*map(sub, steps, last_totals))
        if min(step_delta) < 0:  # the engine has started again
            return
        share = self._prefill_shares.get(facts.replica_id)
        if share is None:
            share = self._prefill_shares[facts.replica_id] = PrefillShare()
        share.observe(step_delta, now_s)
        if step_delta.decode_tokens and step_delta.context_tokens:
            self._stream_contexts[facts.replica_id] = (
                step_delta.context_tokens / step_delta.decode_tokens
            )
        self._pool(facts).observe(step_delta, now_s)

    def observe_output(self, tokens: int, max_tokens: int) -> None:
        """A request that was allowed `max_tokens` ended by itself after `tokens`."""
        self._output_lengths.observe(tokens, max_tokens)

    def observe_ttft(self, pool: str, *, predicted_s: float, actual_s: float) -> None:
        """Compare what was predicted for a request on `pool` with what came."""
        if pool in self._pools:
            self._pools[pool].ttft_accuracy.observe(predicted_s, actual_s)

    def remove_replica(self, replica_id: str) -> None:
        """Forget a replica's totals: if it comes back, it counts from zero."""
        self._last_totals.pop(replica_id, None)
        self._prefill_shares.pop(replica_id, None)
        self._stream_contexts.pop(replica_id, None)

    # ---------------------------------------------------------------- asked by operators

    def quality(self) -> Iterator[TimingQuality]:
        """How well each pool is known, by name."""
        for name in sorted(self._pools):
            yield self._pools[name].quality(name)

    def _pool(self, facts: ReplicaFacts) -> _FittedPool | _ModelledPool:
        pool = self._pools.get(facts.pool)
        if pool is None:
            prior = self._priors.get(facts.pool)
            pool = self._pools[facts.pool] = (
                _FittedPool() if prior is None else _ModelledPool(prior)
            )
        block_s = facts.kv_block_bytes / self._host_bytes_per_s
        pool.update_shape(facts, host_block_s=block_s)
        return pool


class _TtftAccuracy:
    """How well times to first token were predicted."""

    def __init__(self) -> None:
        self.count = 0
        self.error = 0.0
        self.bias = 0.0

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """Take in one request's predicted and actual time to first token."""
        relative = (predicted_s - actual_s) / max(actual_s, _MIN_TTFT_S)
        if not abs(relative) < float("inf"):
            return
        self.count += 1
        weight = 1.0 / min(self.count, _TTFT_MEMORY)
        self.error += (abs(relative) - self.error) * weight
        self.bias += (relative - self.bias) * weight


class _ModelledPool:
    """One pool with a model of its own, and how much it is off."""

    def __init__(self, prior: EngineTiming) -> None:
        self.timing = CorrectedTiming(CachedTiming(prior))
        self.ttft_accuracy = _TtftAccuracy()
        self._correction = CorrectionFactor()
        self._rejected = 0

    @property
    def has_prefill_estimate(self) -> bool:
        """It does, from the start."""
        return True

    @property
    def has_decode_estimate(self) -> bool:
        """It does, from the start."""
        return True

    def update_shape(self, facts: ReplicaFacts, *, host_block_s: float) -> None:
        """The model knows its shape."""

    def observe(self, step_delta: StepTotals, now_s: float) -> None:
        """Take in what was computed between two reports."""
        model = self.timing.model
        if self._correction.observe(step_delta.busy_s, predicted_busy_s(model, step_delta)):
            self.timing = CorrectedTiming(model, self._correction.factor)
        else:
            self._rejected += 1

    def quality(self, name: str) -> TimingQuality:
        """How well this pool is known."""
        return TimingQuality(
            pool=name,
            costs=self.timing.costs(),
            reports=self._correction.reports,
            clipped_reports=0,
            rejected_reports=self._rejected,
            step_error=self._correction.error,
            ttft_count=self.ttft_accuracy.count,
            ttft_error=self.ttft_accuracy.error,
            ttft_bias=self.ttft_accuracy.bias,
        )


class _FittedPool:
    """One pool's fit, and how good it has been."""

    def __init__(self) -> None:
        prior = PRIOR_COSTS
        self._fit = LeastSquares(
            (
                CoefficientPrior(prior.decode_step_s, *_STEP_BOUNDS_S),
                CoefficientPrior(prior.prefill_step_s, *_STEP_BOUNDS_S),
                CoefficientPrior(prior.prefill_token_s, *_PREFILL_TOKEN_BOUNDS_S),
                CoefficientPrior(prior.decode_request_s, *_DECODE_REQUEST_BOUNDS_S),
                CoefficientPrior(prior.context_token_s, *_CONTEXT_TOKEN_BOUNDS_S),
            )
        )
        self._decode_rows = 0
        self._prompt_rows = 0
        self._context_reported = False
        self.ttft_accuracy = _TtftAccuracy()
        self.timing = FittedTiming(costs=prior, max_batched_tokens=1, host_block_s=0.0)

    @property
    def has_prefill_estimate(self) -> bool:
        """Whether enough reports spoke of prompts; those of a pool that only decodes do not."""
        return self._prompt_rows >= _MIN_ROWS

    @property
    def has_decode_estimate(self) -> bool:
        """Whether enough reports spoke of decoding."""
        return self._decode_rows >= _MIN_ROWS

    def update_shape(self, facts: ReplicaFacts, *, host_block_s: float) -> None:
        """Take over what a replica of the pool says of its shape; the last one counts."""
        timing = self.timing
        shape = (facts.max_batched_tokens, facts.max_batched_tokens_while_decoding, host_block_s)
        if (
            timing.max_batched_tokens,
            timing.max_batched_tokens_while_decoding,
            timing.host_block_s,
        ) != shape:
            self.timing = replace(
                timing,
                max_batched_tokens=facts.max_batched_tokens,
                max_batched_tokens_while_decoding=facts.max_batched_tokens_while_decoding,
                host_block_s=host_block_s,
            )

    def observe(self, step_delta: StepTotals, now_s: float) -> None:
        """Take in what was computed between two reports."""
        row = (
            step_delta.decode_steps,
            step_delta.prefill_steps,
            step_delta.prefill_tokens,
            step_delta.decode_tokens,
            step_delta.context_tokens,
        )
        if not self._fit.observe(row, step_delta.busy_s, now_s):
            return
        self._decode_rows += step_delta.decode_tokens > 0
        self._prompt_rows += step_delta.prefill_tokens > 0
        self._context_reported |= step_delta.context_tokens > 0
        if self._fit.rows >= _MIN_ROWS:
            self.timing = replace(self.timing, costs=self._costs())

    def quality(self, name: str) -> TimingQuality:
        """How well this pool is known."""
        return TimingQuality(
            pool=name,
            costs=self.timing.costs,
            reports=self._fit.rows,
            clipped_reports=self._fit.clipped_rows,
            rejected_reports=self._fit.rejected_rows,
            step_error=self._fit.error,
            ttft_count=self.ttft_accuracy.count,
            ttft_error=self.ttft_accuracy.error,
            ttft_bias=self.ttft_accuracy.bias,
        )

    def _costs(self) -> StepCosts:
        costs = StepCosts(*self._fit.coefficients)
        # An engine that decodes and never says of how much context has it in the other terms.
        omits_context = self._decode_rows > 0 and not self._context_reported
        return replace(costs, context_token_s=0.0) if omits_context else costs


class OutputLengths:
    """A moving average for each class of `max_tokens`; a class is a power of two.

    The prior counts as four requests, and after two hundred the oldest fade.
    """

    def __init__(self) -> None:
        self._mean_and_count: dict[int, tuple[float, int]] = {}

    def observe(self, tokens: int, max_tokens: int) -> None:
        """A request that was allowed `max_tokens` ended by itself after `tokens`."""
        if tokens < 0 or max_tokens < 1:
            return
        mean, count = self._statistics(max_tokens)
        weight = 1.0 / min(count + 1, _MEMORY_REQUESTS)
        new_mean = mean + (min(tokens, max_tokens) - mean) * weight
        self._mean_and_count[max_tokens.bit_length()] = (new_mean, count + 1)

    def expected(self, max_tokens: int) -> float:
        """The mean to expect: at least one token, at most `max_tokens`."""
        mean, _ = self._statistics(max_tokens)
        return max(1.0, min(mean, max_tokens))

    def is_known(self, max_tokens: int) -> bool:
        """Whether what to expect was seen, rather than assumed."""
        return self._statistics(max_tokens)[1] >= _PRIOR_REQUESTS + _MIN_SEEN_REQUESTS

    def _statistics(self, max_tokens: int) -> tuple[float, int]:
        entry = self._mean_and_count.get(max_tokens.bit_length())
        if entry is not None:
            return entry
        return min(max_tokens * _PRIOR_FRACTION, _PRIOR_MAX_TOKENS), _PRIOR_REQUESTS


class PrefillShare:
    """One replica's, from what it reports.

    Theory of operation. Reports carry totals since a replica started; the difference of two says
    how many steps computed prompts, and how many tokens. Both are kept as sums that fade with
    `HORIZON_S`, so divided by it they are rates: of a replica that computed prompts in one step of
    every ten milliseconds, for long enough, 100 steps a second are kept. How long a step is held up
    by its part of a prompt is the timing's to say, and asked only when somebody wants to know the
    share.
    """

    __slots__ = ("_at_s", "_steps", "_tokens")

    def __init__(self) -> None:
        self._steps = 0.0
        self._tokens = 0.0
        self._at_s = 0.0

    def observe(self, step_delta: StepTotals, now_s: float) -> None:
        """Take in what was computed between two reports."""
        if min(step_delta) < 0:  # the engine has started again
            return
        decay = self._decay(now_s)
        self._steps = self._steps * decay + step_delta.prefill_steps
        self._tokens = self._tokens * decay + step_delta.prefill_tokens
        self._at_s = max(now_s, self._at_s)

    def share(self, timing: EngineTiming, now_s: float) -> float:
        """Between 0 and 0.95: of each second, what prompts take from those who decode."""
        if not self._steps or not self._tokens:
            return 0.0
        chunk = max(1, round(self._tokens / self._steps))
        steps_per_s = self._steps * self._decay(now_s) / HORIZON_S
        return min(_MAX_SHARE, steps_per_s * decode_delay_s(timing, chunk))

    def _decay(self, now_s: float) -> float:
        return exp(-max(0.0, now_s - self._at_s) / HORIZON_S)
