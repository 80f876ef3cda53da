"""Seconds of an engine step, from a model's shape and a device's data sheet.

    step = fixed + requests * each + layers * (products + attention + small kernels + all-reduces)
         + output layer + sends between pipeline stages

Each product takes the time of its arithmetic or its bytes, with a rounded knee
(`hardware/efficiency.py`). Prefill attention counts pairs of tokens, decode attention bytes of keys
and values. With pipeline stages, the time covers all stages.

Source: Williams et al., Roofline (CACM 2009); formulas per product in Pope et al. (2211.05102) §2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from baton.perf.hardware.accelerators import DTYPE_BYTES, Accelerator, Dtype
from baton.perf.hardware.collectives import all_reduce, send_s
from baton.perf.hardware.efficiency import DEFAULT_EFFICIENCY, Efficiency, GemmCurve, gemm_curve
from baton.perf.model.layer_work import LayerKernels, Matrix, layer_kinds, per_device
from baton.perf.model.shape import ModelShape
from baton.perf.step_timing import StepBatch

_ALL_REDUCES = 2
"""Per layer: after attention and after the feed-forward."""
_ACTIVATION_BYTES = 2.0
"""Activations between products have 16 bits."""


class StepParts(NamedTuple):
    """Seconds of one step, by cause."""

    fixed_s: float
    requests_s: float
    gemm_s: float
    attention_s: float
    wire_s: float
    """The part of all-reduces that grows with their payload."""
    unscaled_s: float
    """Small kernels, launches of all-reduces, sends between stages; calibration does not scale
    these."""


class _TokenCosts(NamedTuple):
    gemm_s: float
    wire_s: float
    unscaled_s: float


_ZERO_COSTS = _TokenCosts(0.0, 0.0, 0.0)


class Roofline:
    """One engine of `tp` x `pp` devices; a `StepTiming`.

    Costs that depend only on the number of tokens are cached by that number.
    """

    __slots__ = (
        "_activations",
        "_attention_costs",
        "_attention_factor",
        "_attention_layers",
        "_decode_cache",
        "_device",
        "_efficiency",
        "_fixed_s",
        "_gemm_factor",
        "_layer_cache",
        "_layer_kinds",
        "_output_cache",
        "_pp",
        "_request_s",
        "_shape",
        "_tp",
        "_weights",
    )

    def __init__(  # noqa: PLR0913 - a layout has as many sides as that
        self,
        shape: ModelShape,
        accelerator: Accelerator,
        *,
        tp: int = 1,
        pp: int = 1,
        weights: Dtype = Dtype.BF16,
        kv: Dtype = Dtype.BF16,
        efficiency: Efficiency = DEFAULT_EFFICIENCY,
    ) -> None:
        if tp < 1 or pp < 1:
            raise ValueError(f"roofline of {shape.name}: tp {tp}, pp {pp}, expected 1 or more")
        self._shape = shape
        self._device = accelerator
        self._tp = tp
        self._pp = pp
        self._weights = weights
        self._activations = compute_dtype(weights, accelerator)
        self._efficiency = efficiency
        is_narrow_dtype = is_narrow(self._activations)
        self._gemm_factor = efficiency.gemm_narrow if is_narrow_dtype else efficiency.gemm
        self._layer_kinds = layer_kinds(shape, tp)
        self._attention_costs = _build_attention_costs(shape, accelerator, efficiency, tp=tp, kv=kv)
        self._fixed_s, self._request_s = efficiency.step_s, efficiency.request_s
        self._attention_factor = efficiency.attention
        launch_s = efficiency.attention_launch_s
        self._attention_layers = (
            shape.attention_layers,
            shape.windowed_layers,
            shape.window_tokens,
            launch_s,
        )
        self._layer_cache: dict[int, _TokenCosts] = {}
        self._decode_cache: dict[int, tuple[float, float, float, float]] = {}
        """By decoding requests: time before attention, launches of attention, wire, unscaled."""
        self._output_cache: dict[int, _TokenCosts] = {}

    def step_s(self, batch: StepBatch) -> float:
        """The sum of `parts`, added in their order.

        The sum is inlined: engines and placement call it about twenty times per request.
        """
        prefill_tokens, prefills = batch.prefill_tokens, batch.prefill_requests
        decodes, finished = batch.decode_requests, batch.finished_prefills
        if decodes and not (prefill_tokens or prefills or finished):
            return self._decode_step_s(decodes, batch.decode_context_tokens)
        layers = self._layer_cache.get(prefill_tokens + decodes)
        output = self._output_cache.get(finished + decodes)
        if layers is None or output is None:
            layers, output = self._layer_costs(batch.tokens), self._output_costs(finished + decodes)
        attention_s = 0.0
        if prefill_tokens:
            attention_s = self._prefill_attention_s(prefill_tokens, batch.prefill_pairs)
        if decodes:
            context = batch.decode_context_tokens
            attention_s += self._decode_attention_s(decodes, context, prefill_tokens=prefill_tokens)
        return (
            self._fixed_s
            + (prefills + decodes) * self._request_s
            + (layers.gemm_s + output.gemm_s)
            + self._attention_factor * attention_s
            + (layers.wire_s + output.wire_s)
            + (layers.unscaled_s + output.unscaled_s)
        )

    def _decode_step_s(self, requests: int, context: int) -> float:
        """`step_s` of a step that only decodes, as nine in ten steps do."""
        cached = self._decode_cache.get(requests)
        if cached is None:
            layers, output = self._layer_costs(requests), self._output_costs(requests)
            products_s = layers.gemm_s + output.gemm_s
            cached = self._decode_cache[requests] = (
                self._fixed_s + requests * self._request_s + products_s,
                self._decode_launches_s(requests, prefill_tokens=0),
                layers.wire_s + output.wire_s,
                layers.unscaled_s + output.unscaled_s,
            )
        before_attention_s, launches_s, wire_s, unscaled_s = cached
        attention_s = launches_s + self._kv_read_s(requests, context)
        return before_attention_s + self._attention_factor * attention_s + wire_s + unscaled_s

    def parts(self, batch: StepBatch) -> StepParts:
        """The terms of `step_s`, each with its factor."""
        sampled = batch.finished_prefills + batch.decode_requests
        layers, output = self._layer_costs(batch.tokens), self._output_costs(sampled)
        requests = batch.prefill_requests + batch.decode_requests
        return StepParts(
            fixed_s=self._fixed_s,
            requests_s=requests * self._request_s,
            gemm_s=layers.gemm_s + output.gemm_s,
            attention_s=self._attention_factor * self._attention_s(batch),
            wire_s=layers.wire_s + output.wire_s,
            unscaled_s=layers.unscaled_s + output.unscaled_s,
        )

    def _attention_s(self, batch: StepBatch) -> float:
        tokens, requests, seconds = batch.prefill_tokens, batch.decode_requests, 0.0
        if tokens:
            seconds = self._prefill_attention_s(tokens, batch.prefill_pairs)
        if requests:
            context = batch.decode_context_tokens
            seconds += self._decode_attention_s(requests, context, prefill_tokens=tokens)
        return seconds

    def _layer_costs(self, tokens: int) -> _TokenCosts:
        """Costs of all layers that depend only on the number of tokens."""
        cached = self._layer_cache.get(tokens)
        if cached is None:
            cached = self._layer_cache[tokens] = self._compute_layer_costs(tokens)
        return cached

    def _output_costs(self, sampled: int) -> _TokenCosts:
        cached = self._output_cache.get(sampled)
        if cached is None:
            cached = self._output_cache[sampled] = self._compute_output_costs(sampled)
        return cached

    def _compute_layer_costs(self, tokens: int) -> _TokenCosts:
        if not tokens:
            return _ZERO_COSTS
        efficiency, layers = self._efficiency, self._shape.layers
        payload_bytes = tokens * self._shape.hidden * _ACTIVATION_BYTES
        reduce_time = all_reduce(payload_bytes, self._tp, self._device)
        unscaled_s = self._small_kernels_s(tokens) + layers * _ALL_REDUCES * reduce_time.launch_s
        if self._pp > 1:
            devices = self._tp * self._pp
            unscaled_s += (self._pp - 1) * send_s(payload_bytes / self._tp, devices, self._device)
        return _TokenCosts(
            gemm_s=self._gemm_factor * self._gemm_s(tokens),
            wire_s=efficiency.communication * layers * _ALL_REDUCES * reduce_time.wire_s,
            unscaled_s=unscaled_s,
        )

    def _compute_output_costs(self, sampled: int) -> _TokenCosts:
        """The output layer, stored in 16 bits, and the gathering of its results."""
        if not sampled:
            return _ZERO_COSTS
        efficiency, vocab = self._efficiency, self._shape.vocab
        matrix = Matrix(inputs=self._shape.hidden, outputs=per_device(vocab, self._tp))
        seconds = gemm_s(self._device, matrix, sampled, weights=Dtype.BF16, inputs=Dtype.BF16)
        # A gather moves half of the bytes of an all-reduce.
        gather_time = all_reduce(sampled * vocab * _ACTIVATION_BYTES / 2, self._tp, self._device)
        return _TokenCosts(
            gemm_s=efficiency.gemm * seconds,
            wire_s=efficiency.communication * gather_time.wire_s,
            unscaled_s=gather_time.launch_s,
        )

    def _gemm_s(self, tokens: int) -> float:
        """Matrix products of all layers, without their factor."""
        return sum(kind.layers * self._layer_gemm_s(kind, tokens) for kind in self._layer_kinds)

    def _small_kernels_s(self, tokens: int) -> float:
        """Norms, rotation, activation, residuals of all layers."""
        efficiency, rate = self._efficiency, self._device.memory_bytes_per_s
        token_s = _ACTIVATION_BYTES / (rate * efficiency.elementwise)
        return sum(
            kind.layers * (efficiency.layer_s + tokens * kind.elements * token_s)
            for kind in self._layer_kinds
        )

    def _layer_gemm_s(self, kind: LayerKernels, tokens: int) -> float:
        seconds = sum(self._matrix_s(matrix, tokens) for matrix in kind.matrices)
        if kind.expert_matrices:
            seconds += self._experts_s(kind.expert_matrices, tokens)
        return seconds

    def _experts_s(self, expert: tuple[Matrix, ...], tokens: int) -> float:
        """Grouped products: one launch for all chosen experts.

        Of E experts with k chosen per token, B tokens touch E * (1 - (1 - k/E)^B) when choices are
        even. Source: linearity of expectation.
        """
        experts = self._shape.experts
        if experts is None:
            return 0.0
        untouched_fraction = (1 - experts.active / experts.count) ** tokens
        touched_experts = max(float(experts.active), experts.count * (1 - untouched_fraction))
        rows = tokens * experts.active / touched_experts
        return sum(self._matrix_s(matrix, rows, copies=touched_experts) for matrix in expert)

    def _matrix_s(self, matrix: Matrix, rows: float, *, copies: float = 1.0) -> float:
        return gemm_s(
            self._device,
            matrix,
            rows,
            weights=self._weights,
            inputs=self._activations,
            matrices=copies,
        )

    def _prefill_attention_s(self, tokens: int, pairs: float) -> float:
        costs = self._attention_costs
        layers, windowed, window, launch_s = self._attention_layers
        windowed_pairs = pairs if window is None else min(pairs, tokens * window)
        layer_pairs = (layers - windowed) * pairs + windowed * windowed_pairs
        layer_pairs += layers * tokens * costs.extra_pairs
        return layers * launch_s + layer_pairs * costs.pair_s

    def _decode_attention_s(self, requests: int, context: int, *, prefill_tokens: int) -> float:
        """A step with `prefill_tokens` has launched attention already."""
        launches_s = self._decode_launches_s(requests, prefill_tokens=prefill_tokens)
        return launches_s + self._kv_read_s(requests, context)

    def _decode_launches_s(self, requests: int, *, prefill_tokens: int) -> float:
        layers, _, _, launch_s = self._attention_layers
        return layers * (
            (0.0 if prefill_tokens else launch_s) + requests * self._attention_costs.request_s
        )

    def _kv_read_s(self, requests: int, context: int) -> float:
        """Reading keys and values of all attended tokens."""
        layers, windowed, window, _ = self._attention_layers
        windowed_context = context if window is None else min(context, requests * window)
        return (
            (layers - windowed) * context + windowed * windowed_context
        ) * self._attention_costs.token_s


class _AttentionCosts(NamedTuple):
    """Unit costs of one layer's attention."""

    pair_s: float
    """Prefill: a pair of tokens, two products of a head's width."""
    extra_pairs: float
    """Prefill: fixed cost of each token, as a number of pairs."""
    token_s: float
    """Decode: an attended token, by bytes of keys and values or by tiles of queries, whichever is
    slower."""
    request_s: float
    """Decode: a request."""


def _build_attention_costs(
    shape: ModelShape, device: Accelerator, efficiency: Efficiency, *, tp: int, kv: Dtype
) -> _AttentionCosts:
    heads, width = per_device(shape.heads, tp), DTYPE_BYTES[kv]
    narrow = width < _ACTIVATION_BYTES
    if shape.latent is None:
        kv_heads = per_device(shape.kv_heads, tp)
        pair_width = 2 * shape.head_dim
        token_bytes = 2 * kv_heads * shape.head_dim * width
        group = max(efficiency.decode_tile, -(-shape.heads // shape.kv_heads))
        token_flops = 4 * kv_heads * group * shape.head_dim
    else:
        latent = shape.latent
        kv_heads, rank = 1, latent.kv_rank + latent.rope_dim
        pair_width = latent.nope_dim + latent.rope_dim + latent.value_dim
        token_bytes = rank * width
        token_flops = 2 * max(efficiency.decode_tile, heads) * (rank + latent.kv_rank)
    rate = device.flops_of(Dtype.BF16)
    return _AttentionCosts(
        pair_s=2 * heads * pair_width / (rate * efficiency.prefill_attention),
        extra_pairs=efficiency.prefill_extra_pairs_fp8
        if narrow
        else efficiency.prefill_extra_pairs,
        token_s=max(
            token_bytes / (device.memory_bytes_per_s * efficiency.decode_memory),
            token_flops / (rate * efficiency.decode_compute),
        ),
        request_s=kv_heads * efficiency.attention_pair_s,
    )


def compute_dtype(weights: Dtype, accelerator: Accelerator) -> Dtype:
    """The arithmetic type of products: the weights' type where the device supports it.

    Other 4-bit and 8-bit weights are unpacked to 16 bits. Source: vLLM's Marlin kernels for
    weight-only quantisation.
    """
    match weights:
        case Dtype.FP32 | Dtype.BF16 | Dtype.FP16:
            return weights
        case Dtype.FP8 | Dtype.INT8 | Dtype.FP4:
            return weights if weights in accelerator.flops_by_dtype else Dtype.BF16
        case Dtype.INT4:
            return Dtype.BF16


def is_narrow(inputs: Dtype) -> bool:
    """Whether products with such inputs use the curve for fewer than 16 bits."""
    return DTYPE_BYTES[inputs] < _ACTIVATION_BYTES


def gemm_s(
    device: Accelerator,
    matrix: Matrix,
    rows: float,
    *,
    weights: Dtype,
    inputs: Dtype,
    matrices: float = 1.0,
) -> float:
    """One matrix product by the curves, or `matrices` products with other weights in one launch."""
    curve = gemm_curve(inputs)
    weight_count = matrix.inputs * matrix.outputs * matrices
    arithmetic_s = 2 * rows * weight_count / (device.flops_of(inputs) * curve.compute_fraction)
    reading_s = (
        weight_count * DTYPE_BYTES[weights] / (device.memory_bytes_per_s * curve.memory_fraction)
    )
    moved_bytes = rows * matrices * _moved_bytes(matrix, curve)
    quantized_elements = rows * matrices * matrix.inputs
    return (
        curve.launch_s
        + curve.depth_s * matrix.inputs
        + moved_bytes / (device.memory_bytes_per_s * curve.io_fraction)
        + quantized_elements * curve.quantization_ops / device.flops_of(inputs)
        + _smooth_max(arithmetic_s, reading_s, curve.norm_exponent)
    )


def _moved_bytes(matrix: Matrix, curve: GemmCurve) -> float:
    return matrix.inputs * curve.activation_bytes + matrix.outputs * _ACTIVATION_BYTES


def _smooth_max(first: float, second: float, knee: float) -> float:
    low, high = sorted((first, second))
    if not high:
        return 0.0
    return high * math.pow(1.0 + math.pow(low / high, knee), 1.0 / knee)
