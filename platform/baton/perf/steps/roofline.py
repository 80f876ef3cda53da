"""Seconds of an engine step, from a model's shape and the kernels of a device.

    step = fixed + requests * each + prefill + layers * (products + experts + attention
         + small kernels + all-reduces) + output layer + sends between pipeline stages

With pipeline stages, the time covers all stages.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from baton.perf.hardware.accelerators import DTYPE_BYTES, Accelerator, Dtype
from baton.perf.hardware.collectives import CollectiveTime, send_s
from baton.perf.hardware.efficiency import DEFAULT_EFFICIENCY, Efficiency
from baton.perf.model.layer_work import Matrix, layer_kinds, per_device
from baton.perf.model.layers import Attention, Experts, StateMixer
from baton.perf.model.shape import ModelShape
from baton.perf.step_timing import StepBatch
from baton.perf.steps.attention import DecodeCurve, context_s
from baton.perf.steps.kernels import EngineKernels, is_narrow

_ALL_REDUCES = 2
"""Per layer: after attention and after the feed-forward."""
_ACTIVATION_BYTES = 2.0
"""Activations between products have 16 bits."""
_MAX_PREFILLS = 4096
"""Prompts whose attention is kept: more than are under way at a time."""


class StepParts(NamedTuple):
    """Seconds of one step, by cause."""

    fixed_s: float
    requests_s: float
    """Host time of a rank's requests; each rank has a process of its own."""
    prefill_s: float
    """Host time of a step that prefills, beside that of any step."""
    gemm_s: float
    experts_s: float
    attention_s: float
    wire_s: float
    """The part of all-reduces that grows with their payload."""
    unscaled_s: float
    """Small kernels, launches of all-reduces, sends between stages; calibration does not scale
    these."""


class _TokenCosts(NamedTuple):
    gemm_s: float
    experts_s: float
    wire_s: float
    unscaled_s: float


_ZERO_COSTS = _TokenCosts(0.0, 0.0, 0.0, 0.0)


class _DecodeCosts(NamedTuple):
    """Of a number of decoding requests."""

    full: DecodeCurve
    """All layers that attend to everything, together; empty: none does."""
    windowed: tuple[tuple[int, int, DecodeCurve], ...]
    """Layers, tokens of their window, and their attention."""
    states_s: float
    """Layers with states."""


class Roofline:
    """One engine of `tp` x `dp` x `pp` devices; a `StepTiming`.

    With `dp`, ranks attend for their own requests and share the experts, in `ep` groups. With
    `fuses_quantization`, kernels before a product write its inputs in FP8. Costs that depend only
    on the number of tokens are cached by that number.
    """

    __slots__ = (
        "_attention_factor",
        "_attentions",
        "_decode_cache",
        "_decode_launch_s",
        "_decode_step_cache",
        "_device",
        "_dp",
        "_efficiency",
        "_experts",
        "_fixed_s",
        "_gemm_factor",
        "_kernels",
        "_layer_cache",
        "_layer_kinds",
        "_output_cache",
        "_pp",
        "_prefill_attentions",
        "_prefill_cache",
        "_prefill_step_s",
        "_request_s",
        "_shape",
        "_states",
        "_tp",
    )

    def __init__(  # noqa: PLR0913 - a layout has as many sides as that
        self,
        shape: ModelShape,
        accelerator: Accelerator,
        *,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        ep: int = 1,
        weights: Dtype = Dtype.BF16,
        experts: Dtype | None = None,
        kv: Dtype = Dtype.BF16,
        engine: str = "vllm",
        fuses_quantization: bool = False,
        efficiency: Efficiency = DEFAULT_EFFICIENCY,
    ) -> None:
        if min(tp, pp, dp, ep) < 1 or (tp * dp) % ep:
            raise ValueError(
                f"roofline of {shape.name}: got tp {tp}, pp {pp}, dp {dp}, ep {ep}, expected 1 or"
                " more, and an ep that divides tp x dp"
            )
        self._shape = shape
        self._device = accelerator
        self._tp, self._pp, self._dp = tp, pp, dp
        self._efficiency = efficiency
        self._kernels = EngineKernels(
            accelerator,
            efficiency,
            engine=engine,
            tp=tp,
            dp=dp,
            ep=ep,
            weights=_product_dtype(shape, weights),
            experts=experts or weights,
            kv=kv,
            fuses_quantization=fuses_quantization,
        )
        is_narrow_dtype = is_narrow(self._kernels.inputs)
        self._gemm_factor = efficiency.gemm_narrow if is_narrow_dtype else efficiency.gemm
        self._layer_kinds = layer_kinds(shape, tp)
        self._attentions: Counter[Attention] = Counter()
        self._states: Counter[StateMixer] = Counter()
        self._experts: Counter[Experts] = Counter()
        for layer, count in shape.layer_counts().items():
            if layer.attention is not None:
                self._attentions[layer.attention] += count
            if layer.state is not None:
                self._states[layer.state] += count
            if layer.experts is not None:
                self._experts[layer.experts] += count
        self._prefill_attentions = [
            (count, self._kernels.prefill_attention(attention))
            for attention, count in self._attentions.items()
        ]
        self._prefill_cache: dict[tuple[int, float, int], float] = {}
        """By tokens, pairs and ranks: attention's seconds."""
        self._fixed_s, self._request_s = efficiency.step_s, efficiency.request_s
        self._prefill_step_s = efficiency.prefill_layer_s * shape.layers
        self._attention_factor = efficiency.attention
        self._layer_cache: dict[int, _TokenCosts] = {}
        self._decode_cache: dict[int, _DecodeCosts] = {}
        self._decode_step_cache: dict[int, tuple[float, _DecodeCosts]] = {}
        """By decoding requests: the time without attention, and attention."""
        self._output_cache: dict[int, _TokenCosts] = {}
        self._decode_launch_s = self._decode_attention_s(1, 1)

    def step_s(self, batch: StepBatch) -> float:
        """The sum of `parts`, added in their order.

        The sum is inlined: engines and placement call it about twenty times per request.
        """
        if self._dp > 1:
            return sum(self.parts(batch))
        prefill_tokens, prefills = batch.prefill_tokens, batch.prefill_requests
        decodes, finished = batch.decode_requests, batch.finished_prefills
        if decodes and not (prefill_tokens or prefills or finished):
            return self._decode_step_s(decodes, batch.decode_context_tokens)
        layers = self._layer_cache.get(prefill_tokens + decodes)
        output = self._output_cache.get(finished + decodes)
        if layers is None or output is None:
            layers, output = self._layer_costs(batch.tokens), self._output_costs(finished + decodes)
        return (
            self._fixed_s
            + (prefills + decodes) * self._request_s
            + (self._prefill_step_s if prefill_tokens else 0.0)
            + (layers.gemm_s + output.gemm_s)
            + layers.experts_s
            + self._attention_factor * self._attention_s(batch)
            + (layers.wire_s + output.wire_s)
            + (layers.unscaled_s + output.unscaled_s)
        )

    def _decode_step_s(self, requests: int, context: int) -> float:
        """`step_s` of a step that only decodes, as nine in ten steps do."""
        cached = self._decode_step_cache.get(requests)
        if cached is None:
            cached = self._decode_step_cache[requests] = self._compute_decode_step(requests)
        other_s, decodes = cached
        return other_s + self._attention_factor * _attention_at(decodes, context / requests)

    def _compute_decode_step(self, requests: int) -> tuple[float, _DecodeCosts]:
        """Time without attention, and the costs of attention."""
        layers, output = self._layer_costs(requests), self._output_costs(requests)
        other_s = (
            self._fixed_s
            + requests * self._request_s
            + (layers.gemm_s + output.gemm_s)
            + layers.experts_s
            + (layers.wire_s + output.wire_s)
            + (layers.unscaled_s + output.unscaled_s)
        )
        return other_s, self._decode_costs(requests)

    def parts(self, batch: StepBatch) -> StepParts:
        """The terms of `step_s`, each with its factor."""
        sampled = batch.finished_prefills + batch.decode_requests
        requests = batch.prefill_requests + batch.decode_requests
        layers = self._layer_costs(batch.tokens, min(self._dp, max(1, requests)))
        output = self._output_costs(sampled)
        return StepParts(
            fixed_s=self._fixed_s,
            requests_s=-(-requests // self._dp) * self._request_s,
            prefill_s=self._prefill_step_s if batch.prefill_tokens else 0.0,
            gemm_s=layers.gemm_s + output.gemm_s,
            experts_s=layers.experts_s,
            attention_s=self._attention_factor * self._attention_s(batch),
            wire_s=layers.wire_s + output.wire_s,
            unscaled_s=layers.unscaled_s + output.unscaled_s,
        )

    def _attention_s(self, batch: StepBatch) -> float:
        """Prompts' and decodes' attention, in one launch where there are both."""
        tokens, requests, seconds = batch.prefill_tokens, batch.decode_requests, 0.0
        if tokens:
            ranks = 1 if self._dp == 1 else min(self._dp, max(1, batch.prefill_requests))
            seconds = self._prefill_attention_s(tokens, batch.prefill_pairs, ranks)
        if requests:
            decode_s = self._decode_attention_s(requests, batch.decode_context_tokens)
            if tokens:
                decode_s -= self._decode_launch_s
            if decode_s > 0:
                seconds += decode_s
        return seconds

    def _layer_costs(self, tokens: int, ranks: int = 1) -> _TokenCosts:
        """Costs of all layers that depend only on the number of tokens, and of ranks with any."""
        key = tokens * self._dp + ranks - 1
        cached = self._layer_cache.get(key)
        if cached is None:
            cached = self._layer_cache[key] = self._compute_layer_costs(tokens, ranks)
        return cached

    def _output_costs(self, sampled: int) -> _TokenCosts:
        cached = self._output_cache.get(sampled)
        if cached is None:
            cached = self._output_cache[sampled] = self._compute_output_costs(sampled)
        return cached

    def _compute_layer_costs(self, tokens: int, ranks: int) -> _TokenCosts:
        if not tokens:
            return _ZERO_COSTS
        efficiency, kernels, rows = self._efficiency, self._kernels, -(-tokens // ranks)
        products_s = sum(
            kind.layers * kernels.gemm_s(matrix, rows)
            for kind in self._layer_kinds
            for matrix in kind.matrices
        )
        experts_s = sum(
            count * kernels.experts_s(experts, self._shape.hidden, tokens)
            for experts, count in self._experts.items()
        )
        payload_bytes = rows * self._shape.hidden * _ACTIVATION_BYTES
        reduce_time = self._layer_reduce_time(rows)
        unscaled_s = self._small_kernels_s(rows) + reduce_time.launch_s
        if self._pp > 1:
            devices = self._tp * self._dp * self._pp
            unscaled_s += (self._pp - 1) * send_s(payload_bytes / self._tp, devices, self._device)
        return _TokenCosts(
            gemm_s=self._gemm_factor * products_s,
            experts_s=efficiency.experts * experts_s,
            wire_s=efficiency.communication * reduce_time.wire_s,
            unscaled_s=unscaled_s,
        )

    def _layer_reduce_time(self, rows: int) -> CollectiveTime:
        """Sums after attention and after the feed-forward of all layers.

        Ranks that share experts gather all tokens before these and scatter their sums after, which
        moves as much as summing all tokens. Source: vLLM's `AgRsAll2AllManager`. Ranks with experts
        of their own send tokens only to these, where that is faster.
        """
        payload_bytes = rows * self._shape.hidden * _ACTIVATION_BYTES
        within = self._kernels.reduce_time(payload_bytes, self._tp)
        shared = sum(self._experts.values()) if self._dp > 1 else 0
        counts = _ALL_REDUCES * self._shape.layers - shared
        total = CollectiveTime(counts * within.launch_s, counts * within.wire_s)
        if not shared:
            return total
        over_all = self._kernels.reduce_time(payload_bytes * self._dp, self._tp * self._dp)
        for experts, count in self._experts.items():
            shared_time = over_all
            if self._kernels.dispatches:
                tokens = rows / self._tp
                sent = self._kernels.dispatch_time(experts, self._shape.hidden, tokens)
                shared_time = min(over_all, sent or over_all, key=sum)
            total = CollectiveTime(
                total.launch_s + count * shared_time.launch_s,
                total.wire_s + count * shared_time.wire_s,
            )
        return total

    def _compute_output_costs(self, sampled: int) -> _TokenCosts:
        """The output layer, stored in 16 bits, and the gathering of its results."""
        if not sampled:
            return _ZERO_COSTS
        efficiency, vocab, rows = self._efficiency, self._shape.vocab, -(-sampled // self._dp)
        matrix = Matrix(inputs=self._shape.hidden, outputs=per_device(vocab, self._tp))
        # A gather moves half of the bytes of an all-reduce.
        gather_time = self._kernels.reduce_time(rows * vocab * _ACTIVATION_BYTES / 2, self._tp)
        return _TokenCosts(
            gemm_s=efficiency.gemm * self._kernels.output_s(matrix, rows),
            experts_s=0.0,
            wire_s=efficiency.communication * gather_time.wire_s,
            unscaled_s=gather_time.launch_s,
        )

    def _small_kernels_s(self, tokens: int) -> float:
        """Norms, rotation, activation, residuals of all layers."""
        efficiency, rate = self._efficiency, self._device.memory_bytes_per_s
        token_s = _ACTIVATION_BYTES / (rate * efficiency.elementwise)
        return sum(
            kind.layers * (efficiency.layer_s + tokens * kind.elements * token_s)
            for kind in self._layer_kinds
        )

    def _prefill_attention_s(self, tokens: int, pairs: float, ranks: int) -> float:
        """Of all layers; placement asks of one prompt several times, and its engine later."""
        cached = self._prefill_cache.get((tokens, pairs, ranks))
        if cached is not None:
            return cached
        seconds = 0.0
        for count, attention in self._prefill_attentions:
            seconds += count * attention.seconds(tokens, pairs, ranks)
        if self._states:
            seconds += sum(
                count * self._kernels.state_prefill_s(state, tokens, pairs, ranks=ranks)
                for state, count in self._states.items()
            )
        if len(self._prefill_cache) >= _MAX_PREFILLS:
            self._prefill_cache.clear()
        self._prefill_cache[tokens, pairs, ranks] = seconds
        return seconds

    def _decode_attention_s(self, requests: int, context: int) -> float:
        """Reading keys, values and states; the context is the sum of all requests."""
        return _attention_at(self._decode_costs(requests), context / requests)

    def _decode_costs(self, requests: int) -> _DecodeCosts:
        cached = self._decode_cache.get(requests)
        if cached is None:
            cached = self._decode_cache[requests] = self._compute_decode_costs(requests)
        return cached

    def _compute_decode_costs(self, requests: int) -> _DecodeCosts:
        kernels, full, windowed = self._kernels, [], []
        for attention, count in self._attentions.items():
            curve = kernels.decode_curve(attention, requests)
            if attention.window_tokens is None:
                full.append([count * seconds for seconds in curve])
            else:
                windowed.append((count, attention.window_tokens, curve))
        states_s = sum(
            count * kernels.state_decode_s(state, requests) for state, count in self._states.items()
        )
        summed = tuple([sum(seconds) for seconds in zip(*full, strict=True)])
        return _DecodeCosts(summed, tuple(windowed), states_s)


def _attention_at(costs: _DecodeCosts, mean_context: float) -> float:
    full, windowed, seconds = costs
    if full:
        seconds += context_s(full, mean_context)
    for count, window, curve in windowed:
        seconds += count * context_s(curve, min(mean_context, window))
    return seconds


def _product_dtype(shape: ModelShape, weights: Dtype) -> Dtype:
    """The type of all products but the experts'.

    Checkpoints in 4 bits of models with experts store only these so. Source: gpt-oss-120b,
    Kimi-K2.5 and DeepSeek-R1-0528-FP4, config.json.
    """
    is_packed = DTYPE_BYTES[weights] < 1
    return Dtype.BF16 if is_packed and shape.experts is not None else weights
