"""Step times from published tables and polynomials, as their authors define them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from baton.perf.hardware.efficiency import DEFAULT_EFFICIENCY
from baton.perf.step_timing import StepBatch

T = TypeVar("T")

MIXED_FACTOR = 1.1
"""Cost of a step with prompts and decodes, relative to the same tokens as prompts. Source:
Splitwise's simulator (Mutinifni/splitwise-sim, MIT), performance model."""


class InterpolationCurve:
    """Linear between points, extrapolated from the last two; never below the lowest value."""

    __slots__ = ("_min", "_xs", "_ys")

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        sorted_points = sorted(dict(points).items())
        if not sorted_points:
            raise ValueError("a curve without points")
        self._xs = [x for x, _ in sorted_points]
        self._ys = [y for _, y in sorted_points]
        self._min = min(self._ys)

    def at(self, x: float) -> float:
        """The value at `x`."""
        xs, ys = self._xs, self._ys
        if len(xs) == 1:
            return ys[0]
        low = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
        share = (x - xs[low]) / (xs[low + 1] - xs[low])
        return max(self._min, ys[low] + share * (ys[low + 1] - ys[low]))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolynomialTiming:
    """DistServe's fits; a `StepTiming`. Milliseconds and tokens, as published.

    Prompts: a + b * tokens + c * sum of squares. Decodes: a + b * context + c * requests, with
    other coefficients for large batches. Each pipeline stage takes its share and one millisecond;
    the engine adds its own time once per step. A step with both omits the decodes' constant.

    Source: LLMServe/DistServe (Apache-2.0), simdistserve, time estimator and worker; paper
    (2401.09670) §3.
    """

    prefill: tuple[float, float, float]
    small_batch: tuple[float, float, float]
    large_batch: tuple[float, float, float]
    large_batch_requests: int = 95
    pipeline_stages: int = 1
    stage_ms: float = 1.0
    engine_ms: float = 2.0
    engine_token_ms: float = 1e-4

    def step_s(self, batch: StepBatch) -> float:
        """Through all stages."""
        computed_ms = self._prefill_ms(batch) + self._decode_ms(batch)
        context = batch.decode_context_tokens + batch.prefill_tokens + batch.prefill_context_tokens
        engine_ms = self.engine_ms + self.engine_token_ms * context
        stages_ms = self.pipeline_stages * self.stage_ms * self.pipeline_stages
        return (computed_ms + stages_ms + engine_ms) / 1e3

    def _prefill_ms(self, batch: StepBatch) -> float:
        if not batch.prefill_tokens:
            return 0.0
        fixed, per_token, per_square = self.prefill
        squares = 2 * batch.prefill_pairs - batch.prefill_tokens
        return fixed + per_token * batch.prefill_tokens + per_square * squares

    def _decode_ms(self, batch: StepBatch) -> float:
        if not batch.decode_requests:
            return 0.0
        is_large = batch.decode_requests >= self.large_batch_requests
        fixed, per_context, per_request = self.large_batch if is_large else self.small_batch
        fixed_ms = 0.0 if batch.prefill_tokens else fixed
        context_ms = per_context * batch.decode_context_tokens
        return fixed_ms + context_ms + per_request * batch.decode_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class InterpolatedTiming:
    """Splitwise's tables; a `StepTiming` that depends only on the tokens of a step."""

    prompt: InterpolationCurve
    """Seconds by prompt tokens in the batch."""
    token: InterpolationCurve
    """Seconds by decoding requests in the batch."""
    mixed_factor: float = MIXED_FACTOR

    def step_s(self, batch: StepBatch) -> float:
        """One step."""
        if not batch.prefill_tokens:
            return self.token.at(batch.decode_requests)
        prompt_s = self.prompt.at(batch.tokens)
        return prompt_s * self.mixed_factor if batch.decode_requests else prompt_s


class AttentionMeasurement(NamedTuple):
    """One measured attention kernel: a chunk after a context, beside decodes of equal context."""

    chunk: float
    context: float
    decodes: float
    decode_context: float
    seconds: float


class _Axis(Generic[T]):
    """Values at known points of one coordinate."""

    __slots__ = ("_values", "_xs")

    def __init__(self, values_by_x: Mapping[float, T]) -> None:
        self._xs = sorted(values_by_x)
        self._values = [values_by_x[x] for x in self._xs]

    def neighbors(self, x: float) -> Sequence[tuple[T, float]]:
        """The neighbours of `x`, or the last two before it, with their linear weights."""
        xs, values = self._xs, self._values
        low = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 1)
        if len(xs) == 1 or x <= xs[0] or x == xs[low]:
            return ((values[low], 1.0),)
        low = min(low, len(xs) - 2)
        share = (x - xs[low]) / (xs[low + 1] - xs[low])
        return ((values[low], 1.0 - share), (values[low + 1], share))


class AttentionGrid:
    """Attention of one layer by (chunk, context, decodes, decode context), linear in each.

    Each coordinate's neighbours are those that exist at the coordinates before it, so the grid may
    have holes.
    """

    __slots__ = ("_chunks",)

    def __init__(self, rows: Iterable[AttentionMeasurement]) -> None:
        nested: dict[float, dict[float, dict[float, dict[float, float]]]] = {}
        for row in rows:
            by_context = nested.setdefault(row.chunk, {}).setdefault(row.context, {})
            by_context.setdefault(row.decodes, {})[row.decode_context] = row.seconds
        if not nested:
            raise ValueError("a grid of attention without rows")
        self._chunks = _Axis(
            {
                chunk: _Axis(
                    {
                        context: _Axis(
                            {count: InterpolationCurve(c.items()) for count, c in counts.items()}
                        )
                        for context, counts in contexts.items()
                    }
                )
                for chunk, contexts in nested.items()
            }
        )

    def at(self, chunk: float, context: float, decodes: float, decode_context: float) -> float:
        """Seconds of one layer; never less than 0."""
        seconds = 0.0
        for contexts, chunk_weight in self._chunks.neighbors(chunk):
            for counts, context_weight in contexts.neighbors(context):
                for curve, decode_weight in counts.neighbors(decodes):
                    weight = chunk_weight * context_weight * decode_weight
                    seconds += weight * curve.at(decode_context)
        return max(0.0, seconds)


LAYER_MODULE_COUNTS = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
"""Runs of each part in a layer. Source: Llama's modules."""
MODEL_MODULE_COUNTS = {"embedding": 1, "final_layernorm": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """LLMServingSim's profiles of a model's parts on one device; a `StepTiming`.

    Source: casys-kaist/LLMServingSim (MIT), bench; `prof_*_{dense,attention,per_sequence}.csv`.
    """

    layers: int
    dense: Mapping[str, InterpolationCurve]
    """Seconds of one run of each part, by tokens."""
    attention: AttentionGrid
    per_sequence: Mapping[str, InterpolationCurve]
    """Seconds of the output layer and the sampler, by sequences."""
    step_overhead_s: float = DEFAULT_EFFICIENCY.step_s
    """Time outside all parts: scheduling, preparing inputs."""
    _dense_cache: dict[int, float] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        missing = [
            part for part in (*LAYER_MODULE_COUNTS, *MODEL_MODULE_COUNTS) if part not in self.dense
        ]
        if missing:
            raise ValueError(f"layer profile: no rows for {', '.join(missing)}")

    def step_s(self, batch: StepBatch) -> float:
        """One step."""
        dense_s = self._dense_cache.get(batch.tokens)
        if dense_s is None:
            dense_s = self._dense_cache[batch.tokens] = self._dense_s(batch.tokens)
        sampled = batch.finished_prefills + batch.decode_requests
        output_s = sum(c.at(sampled) for c in self.per_sequence.values()) if sampled else 0.0
        return self.step_overhead_s + dense_s + self.layers * self.attention_s(batch) + output_s

    def attention_s(self, batch: StepBatch) -> float:
        """Of one layer.

        Several chunks take the mean chunk's time each, less all launches but one. Decodes add as
        much as beside one chunk of all the tokens.
        """
        decodes = batch.decode_requests
        decode_context = batch.decode_context_tokens / decodes if decodes else 0.0
        count = batch.prefill_requests
        if not batch.prefill_tokens or not count:
            return self.attention.at(0, 0, decodes, decode_context)
        chunk, context = _mean_chunk(batch)
        if count == 1:
            return self.attention.at(chunk, context, decodes, decode_context)
        alone_s = self.attention.at(chunk, context, 0, 0)
        launch_s = min(alone_s, self.attention.at(1, 0, 0, 0))
        total_prefill_tokens = batch.prefill_tokens
        with_decodes_s = self.attention.at(total_prefill_tokens, context, decodes, decode_context)
        added_s = max(0.0, with_decodes_s - self.attention.at(total_prefill_tokens, context, 0, 0))
        return launch_s + count * (alone_s - launch_s) + added_s

    def _dense_s(self, tokens: int) -> float:
        layer_s = sum(
            times * self.dense[part].at(tokens) for part, times in LAYER_MODULE_COUNTS.items()
        )
        model_s = sum(
            times * self.dense[part].at(tokens) for part, times in MODEL_MODULE_COUNTS.items()
        )
        return self.layers * layer_s + model_s


def _mean_chunk(batch: StepBatch) -> tuple[float, float]:
    """Tokens of a mean chunk and tokens before it, from the total of pairs."""
    chunk = batch.prefill_tokens / batch.prefill_requests
    pairs = batch.prefill_pairs / batch.prefill_requests
    return chunk, max(0.0, (pairs - chunk * (chunk + 1) / 2) / chunk)
