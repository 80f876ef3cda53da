"""Durations of engines as a coordinator learns them: one fit per pool.

Theory of operation. Replicas of a pool have one shape, so their reports train one fit. Reports
carry totals since the replica's start. The fit learns from the difference to the replica's last
report, so lost reports do no harm. A first report, or totals that decrease (an engine restart),
only set the base. A pool keeps its prior for its first reports. For a pool with a model of its
hardware, only a factor on that model is learned. `of` must stay two dictionary look-ups: placement
calls it per candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp
from operator import sub
from typing import NamedTuple

from baton.domain.fleet import Load, ReplicaFacts, ReplicaView, StepTotals
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
"""Of `max_tokens`, before any request: clients allow more tokens than they expect,"""
_PRIOR_MAX_TOKENS = 512.0
"""up to this limit. Source: means of 200 to 500 output tokens in published chat traces (BurstGPT,
Azure LLM inference 2023)."""
_PRIOR_REQUESTS = 4
_MIN_SEEN_REQUESTS = 20
"""With these, five in six of the counted requests are real."""
_MEMORY_REQUESTS = 200
HORIZON_S = 3.0
"""About the life of a stream: 200 tokens of 15 ms each."""
_MAX_SHARE = 0.95
"""A replica that computes only prompts still decodes at a twentieth of its pace."""
_MEMORY_REPORTS = 128.0
_PRIOR_BUSY_S = 1.0
_MIN_FACTOR, _MAX_FACTOR = 0.25, 4.0
_CACHE_SIZE = 4096
"""Answers per method."""
_PROBE_TOKENS = 1024
"""Costs per token are differences between this number and twice it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingQuality:
    """Quality of a pool's timing."""

    pool: str
    costs: StepCosts
    reports: int
    """Differences that the fit learned from."""
    rejected_reports: int
    """Invalid reports; nothing was learned from these."""
    step_error: float
    """Usual relative error of a report's predicted busy time."""
    ttft_count: int
    """Requests whose actual and predicted TTFT were compared."""
    ttft_error: float
    """Mean of |predicted - actual| / actual, weighted towards recent requests; 0 before the first.
    """
    ttft_bias: float
    """Mean of (predicted - actual) / actual: above 0, predictions are too long."""


class EngineTimings:
    """Learned durations of all pools; `Timings` of placement."""

    def __init__(
        self,
        priors: Mapping[str, EngineTiming] | None = None,
        *,
        host_bytes_per_s: float = HOST_BYTES_PER_S,
    ) -> None:
        """Start with models of some pools, by name; pools of one model share its answers."""
        models = {id(prior): CachedTiming(prior) for prior in (priors or {}).values()}
        self._priors = {pool: models[id(prior)] for pool, prior in (priors or {}).items()}
        self._host_bytes_per_s = host_bytes_per_s
        self._pools: dict[str, _FittedPool | _ModelledPool] = {}
        self._last_totals: dict[str, StepTotals] = {}
        self._prefill_shares: dict[str, PrefillShare] = {}
        self._stream_contexts: dict[str, float] = {}
        """By replica: tokens that a stream attended to, between the last two reports with steps."""
        self._output_lengths = OutputLengths()

    # ---------------------------------------------------------------- asked by placement

    def of(self, view: ReplicaView) -> EngineTiming:
        """The timing of this replica's engine."""
        pool = self._pools.get(view.facts.pool)
        return (pool or self._pool(view.facts)).timing

    def has_prefill_estimate(self, pool: str) -> bool:
        """Whether prefill times of the pool are modelled or learned, not the default prior."""
        fitted_pool = self._pools.get(pool)
        return pool in self._priors if fitted_pool is None else fitted_pool.has_prefill_estimate

    def has_decode_estimate(self, pool: str) -> bool:
        """Whether decode times of the pool are modelled or learned, not the default prior."""
        fitted_pool = self._pools.get(pool)
        return pool in self._priors if fitted_pool is None else fitted_pool.has_decode_estimate

    def prefill_time_fraction(self, view: ReplicaView, now_s: float) -> float:
        """Share of its time that a replica spends on prompts while streams wait."""
        share = self._prefill_shares.get(view.facts.replica_id)
        return 0.0 if share is None else share.share(self.of(view), now_s)

    def stream_context(self, view: ReplicaView) -> float | None:
        """Recent tokens that each stream on this replica attended to; None: not reported."""
        return self._stream_contexts.get(view.facts.replica_id)

    def expected_output_tokens(self, max_tokens: int) -> float:
        """Mean output tokens of a request that may generate `max_tokens`."""
        return self._output_lengths.expected(max_tokens)

    def has_output_estimate(self, max_tokens: int) -> bool:
        """Whether that mean is learned rather than assumed."""
        return self._output_lengths.is_known(max_tokens)

    # ---------------------------------------------------------------- calls of the coordinator

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
        """Record that a request with a limit of `max_tokens` ended by itself after `tokens`."""
        self._output_lengths.observe(tokens, max_tokens)

    def observe_ttft(self, pool: str, *, predicted_s: float, actual_s: float) -> None:
        """Compare a request's predicted and actual TTFT."""
        if pool in self._pools:
            self._pools[pool].ttft_accuracy.observe(predicted_s, actual_s)

    def remove_replica(self, replica_id: str) -> None:
        """Forget a replica's totals; they restart at zero if it returns."""
        self._last_totals.pop(replica_id, None)
        self._prefill_shares.pop(replica_id, None)
        self._stream_contexts.pop(replica_id, None)

    # ---------------------------------------------------------------- asked by operators

    def quality(self) -> Iterator[TimingQuality]:
        """The quality of each pool's timing, by name."""
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
    """Accuracy of predicted TTFTs."""

    def __init__(self) -> None:
        self.count = 0
        self.error = 0.0
        self.bias = 0.0

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """Record one request's predicted and actual TTFT."""
        relative = (predicted_s - actual_s) / max(actual_s, _MIN_TTFT_S)
        if not abs(relative) < float("inf"):
            return
        self.count += 1
        weight = 1.0 / min(self.count, _TTFT_MEMORY)
        self.error += (abs(relative) - self.error) * weight
        self.bias += (relative - self.bias) * weight


class _ModelledPool:
    """A pool with a model, and the correction of it."""

    def __init__(self, model: CachedTiming) -> None:
        self._model = self.timing = model
        self.ttft_accuracy = _TtftAccuracy()
        self._correction = CorrectionFactor()
        self._rejected = 0

    @property
    def has_prefill_estimate(self) -> bool:
        """Always."""
        return True

    @property
    def has_decode_estimate(self) -> bool:
        """Always."""
        return True

    def update_shape(self, facts: ReplicaFacts, *, host_block_s: float) -> None:
        """The model already has the shape."""

    def observe(self, step_delta: StepTotals, now_s: float) -> None:
        """Learn from the work between two reports."""
        predicted_s = predicted_busy_s(self._model, step_delta)
        if self._correction.observe(step_delta.busy_s, predicted_s):
            self.timing = self._model.corrected(self._correction.factor)
        else:
            self._rejected += 1

    def quality(self, name: str) -> TimingQuality:
        """The quality of this pool's timing."""
        return TimingQuality(
            pool=name,
            costs=self.timing.costs(),
            reports=self._correction.reports,
            rejected_reports=self._rejected,
            step_error=self._correction.error,
            ttft_count=self.ttft_accuracy.count,
            ttft_error=self.ttft_accuracy.error,
            ttft_bias=self.ttft_accuracy.bias,
        )


class _FittedPool:
    """A pool's linear fit, and its accuracy."""

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
        """Whether enough reports contained prompts; a pool that only decodes has none."""
        return self._prompt_rows >= _MIN_ROWS

    @property
    def has_decode_estimate(self) -> bool:
        """Whether enough reports contained decodes."""
        return self._decode_rows >= _MIN_ROWS

    def update_shape(self, facts: ReplicaFacts, *, host_block_s: float) -> None:
        """Set the limits that a replica of the pool reports; the last replica counts."""
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
        """Learn from the work between two reports."""
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
        """The quality of this pool's timing."""
        return TimingQuality(
            pool=name,
            costs=self.timing.costs,
            reports=self._fit.rows,
            rejected_reports=self._fit.rejected_rows,
            step_error=self._fit.error,
            ttft_count=self.ttft_accuracy.count,
            ttft_error=self.ttft_accuracy.error,
            ttft_bias=self.ttft_accuracy.bias,
        )

    def _costs(self) -> StepCosts:
        costs = StepCosts(*self._fit.coefficients)
        # An engine that reports no context tokens has their cost in the other terms.
        omits_context = self._decode_rows > 0 and not self._context_reported
        return replace(costs, context_token_s=0.0) if omits_context else costs


class OutputLengths:
    """Moving averages of output lengths, by power of two of `max_tokens`.

    The prior counts as four requests; beyond two hundred, old requests fade.
    """

    def __init__(self) -> None:
        self._mean_and_count: dict[int, tuple[float, int]] = {}

    def observe(self, tokens: int, max_tokens: int) -> None:
        """Record that a request with a limit of `max_tokens` ended by itself after `tokens`."""
        if tokens < 0 or max_tokens < 1:
            return
        mean, count = self._statistics(max_tokens)
        weight = 1.0 / min(count + 1, _MEMORY_REQUESTS)
        new_mean = mean + (min(tokens, max_tokens) - mean) * weight
        self._mean_and_count[max_tokens.bit_length()] = (new_mean, count + 1)

    def expected(self, max_tokens: int) -> float:
        """The expected mean: at least one token, at most `max_tokens`."""
        mean, _ = self._statistics(max_tokens)
        return max(1.0, min(mean, max_tokens))

    def is_known(self, max_tokens: int) -> bool:
        """Whether the mean is learned rather than assumed."""
        return self._statistics(max_tokens)[1] >= _PRIOR_REQUESTS + _MIN_SEEN_REQUESTS

    def _statistics(self, max_tokens: int) -> tuple[float, int]:
        entry = self._mean_and_count.get(max_tokens.bit_length())
        if entry is not None:
            return entry
        return min(max_tokens * _PRIOR_FRACTION, _PRIOR_MAX_TOKENS), _PRIOR_REQUESTS


class PrefillShare:
    """Share of one replica's time that prefill takes.

    Theory of operation. Steps with prompts and their tokens, from differences of reports, are kept
    as sums that fade with `HORIZON_S`. Divided by it, they are rates: a replica with a prefill in
    every 10 ms comes to 100 steps/s. The timing gives the delay of each step, and is asked only for
    `share`.
    """

    __slots__ = ("_at_s", "_steps", "_tokens")

    def __init__(self) -> None:
        self._steps = 0.0
        self._tokens = 0.0
        self._at_s = 0.0

    def observe(self, step_delta: StepTotals, now_s: float) -> None:
        """Learn from the work between two reports."""
        if min(step_delta) < 0:  # the engine has started again
            return
        decay = self._decay(now_s)
        self._steps = self._steps * decay + step_delta.prefill_steps
        self._tokens = self._tokens * decay + step_delta.prefill_tokens
        self._at_s = max(now_s, self._at_s)

    def share(self, timing: EngineTiming, now_s: float) -> float:
        """Between 0 and 0.95: the fraction of each second that prompts take from decodes."""
        if not self._steps or not self._tokens:
            return 0.0
        chunk = max(1, round(self._tokens / self._steps))
        steps_per_s = self._steps * self._decay(now_s) / HORIZON_S
        return min(_MAX_SHARE, steps_per_s * decode_delay_s(timing, chunk))

    def _decay(self, now_s: float) -> float:
        return exp(-max(0.0, now_s - self._at_s) / HORIZON_S)


class _Answers(NamedTuple):
    """A model's methods with positional arguments, and with a cache."""

    prefill_s: Callable[[int, int, int], float]
    step_s: Callable[[int, int], float]
    request_s: Callable[[int], float]


def _cached_answers(model: EngineTiming) -> _Answers:
    cache = lru_cache(maxsize=_CACHE_SIZE)
    return _Answers(
        cache(
            lambda tokens, running, length_tokens: model.prefill_s(
                tokens, running=running, length_tokens=length_tokens
            )
        ),
        cache(
            lambda running, context_tokens: model.step_s(
                running=running, context_tokens=context_tokens
            )
        ),
        cache(lambda context_tokens: model.decode_request_s(context_tokens=context_tokens)),
    )


class CachedTiming:
    """An `EngineTiming` that multiplies another by `factor`, with a cache of the other's answers.

    Placement asks per candidate, and many questions depend on the request alone. Others are not
    cached (prefill beside decodes, a step of several): only one in a hundred of these repeats.
    """

    __slots__ = ("_answers", "_model", "_prefill_s", "_request_s", "_step_s", "factor")

    def __init__(
        self, model: EngineTiming, factor: float = 1.0, *, answers: _Answers | None = None
    ) -> None:
        self._model, self.factor = model, factor
        self._answers = _cached_answers(model) if answers is None else answers
        self._prefill_s, self._step_s, self._request_s = self._answers

    def corrected(self, factor: float) -> CachedTiming:
        """The same with another factor; both use one cache."""
        return CachedTiming(self._model, factor, answers=self._answers)

    def prefill_s(
        self, tokens: int, *, running: int = 0, context_tokens: int = 0, length_tokens: int = 0
    ) -> float:
        """As the model, corrected."""
        if not context_tokens:
            return self.factor * self._prefill_s(tokens, running, length_tokens)
        return self.factor * self._model.prefill_s(
            tokens, running=running, context_tokens=context_tokens, length_tokens=length_tokens
        )

    def step_s(self, *, running: int, context_tokens: int = 0) -> float:
        """As the model, corrected."""
        if running > 1:
            return self.factor * self._model.step_s(running=running, context_tokens=context_tokens)
        return self.factor * self._step_s(running, context_tokens)

    def decode_request_s(self, *, context_tokens: int = 0) -> float:
        """As the model, corrected."""
        return self.factor * self._request_s(context_tokens)

    def host_load_s(self, blocks: int) -> float:
        """As the model: the host's time, not the engine's."""
        return self._model.host_load_s(blocks)

    def costs(self) -> StepCosts:
        """Approximate coefficients of a linear model, for operators."""
        alone_s = self.step_s(running=1)
        request_s = self.decode_request_s()
        short_s, long_s = (self.prefill_s(n * _PROBE_TOKENS) for n in (1, 2))
        token_s = (long_s - short_s) / _PROBE_TOKENS
        context_s = self.decode_request_s(context_tokens=_PROBE_TOKENS) - request_s
        return StepCosts(
            decode_step_s=max(0.0, alone_s - request_s),
            prefill_step_s=max(0.0, short_s - _PROBE_TOKENS * token_s),
            prefill_token_s=token_s,
            decode_request_s=request_s,
            context_token_s=context_s / _PROBE_TOKENS,
        )


class CorrectionFactor:
    """Learned factor of one pool.

    Theory of operation. A model from hardware and shape has the right form and may have the wrong
    scale, because of kernels or clocks. One factor per pool is learned: reported over predicted
    busy seconds. Both are sums that fade by 1/128 per report and start with one second. The factor
    stays between a quarter and four; beyond these limits the model describes another system, and
    scaling does not improve placement.
    """

    def __init__(self) -> None:
        self._actual_s = self._predicted_s = _PRIOR_BUSY_S
        self.factor = 1.0
        """Actual over predicted seconds."""
        self.reports = 0
        self.error = 0.0
        """Mean of |actual - predicted| / actual per report, weighted towards recent reports."""

    def observe(self, actual_s: float, predicted_s: float) -> bool:
        """Learn from a report; False, and nothing is learned, when it is invalid."""
        if not (0 < actual_s < float("inf") and 0 < predicted_s < float("inf")):
            return False
        self.reports += 1
        relative_error = abs(actual_s - self.factor * predicted_s) / actual_s
        self.error += (relative_error - self.error) / min(self.reports, _MEMORY_REPORTS)
        decay = 1.0 - 1.0 / _MEMORY_REPORTS
        self._actual_s = decay * self._actual_s + actual_s
        self._predicted_s = decay * self._predicted_s + predicted_s
        self.factor = min(_MAX_FACTOR, max(_MIN_FACTOR, self._actual_s / self._predicted_s))
        return True


def predicted_busy_s(model: EngineTiming, totals: StepTotals) -> float:
    """A model's duration of these steps, taken as alike.

    Steps that both prefill and decode are the excess of the two counts over the steps.
    """
    mixed_steps = max(0, totals.prefill_steps + totals.decode_steps - totals.steps)
    running = round(totals.decode_tokens / totals.decode_steps) if totals.decode_steps else 0
    context = round(totals.context_tokens / totals.decode_steps) if totals.decode_steps else 0
    total_s = 0.0
    if decodes := totals.decode_steps - mixed_steps:
        total_s += decodes * model.step_s(running=running, context_tokens=context)
    if totals.prefill_steps:
        chunk = max(1, round(totals.prefill_tokens / totals.prefill_steps))
        total_s += (totals.prefill_steps - mixed_steps) * model.prefill_s(chunk)
        if mixed_steps:
            total_s += mixed_steps * model.prefill_s(chunk, running=running, context_tokens=context)
    return total_s
