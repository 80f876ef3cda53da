"""The seconds of an engine step, from a model's shape and a device's data sheet.

    step = fixed + requests * each + layers * (products + attention + small kernels + all-reduces)
         + output layer + sends between pipeline stages

Each product takes as long as its arithmetic or its bytes need, rounded where both are alike
(`perf.efficiency`); attention over prompts counts pairs of tokens, attention of decodes the bytes
of their keys and values. With pipeline stages the time is that through all of them.

Source: Williams et al., Roofline (CACM 2009); formulas per product in Pope et al. (2211.05102) §2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from baton.perf.hardware.accelerators import BYTES, Accelerator, Dtype
from baton.perf.hardware.collectives import all_reduce, send_s
from baton.perf.hardware.efficiency import DEFAULT, Efficiency, GemmCurve, gemm_curve
from baton.perf.model.layer_work import Kernels, Matrix, layer_kinds, per_device
from baton.perf.model.shape import ModelShape
from baton.perf.step_timing import StepBatch

_ALL_REDUCES = 2
"""Per layer: behind attention and behind the feed-forward."""
_ACTIVATION_BYTES = 2.0
"""Between products, numbers are 16 bits wide."""


class StepParts(NamedTuple):
    """The seconds of one step, by what they are spent on."""

    step_s: float
    """Fixed."""
    requests_s: float
    products_s: float
    attention_s: float
    wire_s: float
    """Of all-reduces, what grows with their payload."""
    rest_s: float
    """Small kernels, launches of all-reduces, sends between stages: nothing scales these."""


class _ByTokens(NamedTuple):
    products_s: float
    wire_s: float
    rest_s: float


_NOTHING = _ByTokens(0.0, 0.0, 0.0)


class Roofline:
    """One engine of `tp` x `pp` devices; a `StepTiming`.

    What depends on the number of tokens alone is computed once for each number.
    """

    __slots__ = (
        "_activations",
        "_attended",
        "_attention_factor",
        "_by_decodes",
        "_by_sampled",
        "_by_tokens",
        "_costs",
        "_device",
        "_efficiency",
        "_fixed_s",
        "_gemm",
        "_kinds",
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
        efficiency: Efficiency = DEFAULT,
    ) -> None:
        if tp < 1 or pp < 1:
            raise ValueError(f"roofline of {shape.name}: tp {tp}, pp {pp}, wanted 1 or more")
        self._shape = shape
        self._device = accelerator
        self._tp = tp
        self._pp = pp
        self._weights = weights
        self._activations = activations_of(weights, accelerator)
        self._efficiency = efficiency
        narrow = is_narrow(self._activations)
        self._gemm = efficiency.gemm_narrow if narrow else efficiency.gemm
        self._kinds = layer_kinds(shape, tp)
        self._costs = _attention(shape, accelerator, efficiency, tp=tp, kv=kv)
        self._fixed_s, self._request_s = efficiency.step_s, efficiency.request_s
        self._attention_factor = efficiency.attention
        launch_s = efficiency.attention_launch_s
        self._attended = (shape.layers, shape.windowed_layers, shape.window_tokens, launch_s)
        self._by_tokens: dict[int, _ByTokens] = {}
        self._by_decodes: dict[int, tuple[float, float, float, float]] = {}
        """Of steps that only decode for so many: what comes before attention, launches of
        attention, and what comes behind it: the wire, the rest."""
        self._by_sampled: dict[int, _ByTokens] = {}

    @property
    def efficiency(self) -> Efficiency:
        """What it was made with."""
        return self._efficiency

    def step_s(self, batch: StepBatch) -> float:
        """From the batch being chosen to its tokens being there: the sum of `parts`.

        Added up here, in their order: engines and placement ask twenty times for each request.
        """
        prefill_tokens, prefills = batch.prefill_tokens, batch.prefill_requests
        decodes, finished = batch.decode_requests, batch.finished_prefills
        if decodes and not (prefill_tokens or prefills or finished):
            return self._decodes_s(decodes, batch.decode_context_tokens)
        layers = self._by_tokens.get(prefill_tokens + decodes)
        output = self._by_sampled.get(finished + decodes)
        if layers is None or output is None:
            layers, output = self._layers(batch.tokens), self._output(finished + decodes)
        attention_s = 0.0
        if prefill_tokens:
            attention_s = self._prefill_attention_s(prefill_tokens, batch.prefill_pairs)
        if decodes:
            context = batch.decode_context_tokens
            attention_s += self._decode_attention_s(decodes, context, beside=prefill_tokens)
        return (
            self._fixed_s
            + (prefills + decodes) * self._request_s
            + (layers.products_s + output.products_s)
            + self._attention_factor * attention_s
            + (layers.wire_s + output.wire_s)
            + (layers.rest_s + output.rest_s)
        )

    def _decodes_s(self, requests: int, context: int) -> float:
        """The same for a step that only decodes: of nine in ten steps."""
        known = self._by_decodes.get(requests)
        if known is None:
            layers, output = self._layers(requests), self._output(requests)
            products_s = layers.products_s + output.products_s
            known = self._by_decodes[requests] = (
                self._fixed_s + requests * self._request_s + products_s,
                self._decode_launches_s(requests, beside=0),
                layers.wire_s + output.wire_s,
                layers.rest_s + output.rest_s,
            )
        before_s, launches_s, wire_s, rest_s = known
        attention_s = launches_s + self._reading_s(requests, context)
        return before_s + self._attention_factor * attention_s + wire_s + rest_s

    def parts(self, batch: StepBatch) -> StepParts:
        """What `step_s` is the sum of, each with its factor."""
        sampled = batch.finished_prefills + batch.decode_requests
        layers, output = self._layers(batch.tokens), self._output(sampled)
        requests = batch.prefill_requests + batch.decode_requests
        return StepParts(
            self._fixed_s,
            requests * self._request_s,
            layers.products_s + output.products_s,
            self._attention_factor * self._attention_s(batch),
            layers.wire_s + output.wire_s,
            layers.rest_s + output.rest_s,
        )

    def _attention_s(self, batch: StepBatch) -> float:
        tokens, requests, seconds = batch.prefill_tokens, batch.decode_requests, 0.0
        if tokens:
            seconds = self._prefill_attention_s(tokens, batch.prefill_pairs)
        if requests:
            context = batch.decode_context_tokens
            seconds += self._decode_attention_s(requests, context, beside=tokens)
        return seconds

    def _layers(self, tokens: int) -> _ByTokens:
        """Of all layers, what the number of tokens alone decides."""
        known = self._by_tokens.get(tokens)
        if known is None:
            known = self._by_tokens[tokens] = self._layers_anew(tokens)
        return known

    def _output(self, sampled: int) -> _ByTokens:
        known = self._by_sampled.get(sampled)
        if known is None:
            known = self._by_sampled[sampled] = self._output_anew(sampled)
        return known

    def _layers_anew(self, tokens: int) -> _ByTokens:
        if not tokens:
            return _NOTHING
        efficiency, layers = self._efficiency, self._shape.layers
        payload = tokens * self._shape.hidden * _ACTIVATION_BYTES
        exchange = all_reduce(payload, self._tp, self._device)
        rest_s = self._small_kernels_s(tokens) + layers * _ALL_REDUCES * exchange.launch_s
        if self._pp > 1:
            devices = self._tp * self._pp
            rest_s += (self._pp - 1) * send_s(payload / self._tp, devices, self._device)
        return _ByTokens(
            self._gemm * self._products_s(tokens),
            efficiency.communication * layers * _ALL_REDUCES * exchange.wire_s,
            rest_s,
        )

    def _output_anew(self, sampled: int) -> _ByTokens:
        """The output layer, kept in 16 bits, and gathering its results."""
        if not sampled:
            return _NOTHING
        efficiency, vocab = self._efficiency, self._shape.vocab
        matrix = Matrix(inputs=self._shape.hidden, outputs=per_device(vocab, self._tp))
        seconds = product_s(self._device, matrix, sampled, weights=Dtype.BF16, inputs=Dtype.BF16)
        # A gather moves half of what an all-reduce of as many bytes does.
        exchange = all_reduce(sampled * vocab * _ACTIVATION_BYTES / 2, self._tp, self._device)
        return _ByTokens(
            efficiency.gemm * seconds,
            efficiency.communication * exchange.wire_s,
            exchange.launch_s,
        )

    def _products_s(self, tokens: int) -> float:
        """The matrix products of all layers, without their factor."""
        return sum(kind.layers * self._layer_products_s(kind, tokens) for kind in self._kinds)

    def _small_kernels_s(self, tokens: int) -> float:
        """Norms, rotation, activation, residuals of all layers."""
        efficiency, rate = self._efficiency, self._device.memory_bytes_per_s
        token_s = _ACTIVATION_BYTES / (rate * efficiency.elementwise)
        return sum(
            kind.layers * (efficiency.layer_s + tokens * kind.elements * token_s)
            for kind in self._kinds
        )

    def _layer_products_s(self, kind: Kernels, tokens: int) -> float:
        seconds = sum(self._product_s(matrix, tokens) for matrix in kind.matrices)
        if kind.expert:
            seconds += self._experts_s(kind.expert, tokens)
        return seconds

    def _experts_s(self, expert: tuple[Matrix, ...], tokens: int) -> float:
        """Grouped products: one launch for all experts that anyone chose.

        Of E experts with k chosen per token, B tokens touch E * (1 - (1 - k/E)^B) when choices are
        even. Source: linearity of expectation.
        """
        experts = self._shape.experts
        if experts is None:
            return 0.0
        missed = (1 - experts.active / experts.count) ** tokens
        touched = max(float(experts.active), experts.count * (1 - missed))
        rows = tokens * experts.active / touched
        return sum(self._product_s(matrix, rows, copies=touched) for matrix in expert)

    def _product_s(self, matrix: Matrix, rows: float, *, copies: float = 1.0) -> float:
        return product_s(
            self._device,
            matrix,
            rows,
            weights=self._weights,
            inputs=self._activations,
            copies=copies,
        )

    def _prefill_attention_s(self, tokens: int, pairs: float) -> float:
        costs = self._costs
        layers, windowed, window, launch_s = self._attended
        seen = pairs if window is None else min(pairs, tokens * window)
        layered = (layers - windowed) * pairs + windowed * seen
        layered += layers * tokens * costs.extra_pairs
        return layers * launch_s + layered * costs.pair_s

    def _decode_attention_s(self, requests: int, context: int, *, beside: int) -> float:
        """`beside` so many tokens of prompts, whose launches it shares."""
        launches_s = self._decode_launches_s(requests, beside=beside)
        return launches_s + self._reading_s(requests, context)

    def _decode_launches_s(self, requests: int, *, beside: int) -> float:
        layers, _, _, launch_s = self._attended
        return layers * ((0.0 if beside else launch_s) + requests * self._costs.request_s)

    def _reading_s(self, requests: int, context: int) -> float:
        """Of what is attended to."""
        layers, windowed, window, _ = self._attended
        seen = context if window is None else min(context, requests * window)
        return ((layers - windowed) * context + windowed * seen) * self._costs.token_s


class _Attention(NamedTuple):
    """What attention of one layer takes, per thing that it counts."""

    pair_s: float
    """Prompts: a pair of tokens, two products of a head's width."""
    extra_pairs: float
    """Prompts: what each token takes besides, as so many pairs."""
    token_s: float
    """Decodes: a token attended to, by the bytes of its keys and values, or by tiles of queries
    where those are slower."""
    request_s: float
    """Decodes: a request."""


def _attention(
    shape: ModelShape, device: Accelerator, efficiency: Efficiency, *, tp: int, kv: Dtype
) -> _Attention:
    heads, width = per_device(shape.heads, tp), BYTES[kv]
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
    return _Attention(
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


def activations_of(weights: Dtype, accelerator: Accelerator) -> Dtype:
    """What products with such weights compute in: the weights' type where the device has it.

    4-bit weights without such arithmetic, and 8-bit ones on devices before it, are unpacked.
    Source: vLLM's Marlin kernels for weight-only quantisation.
    """
    match weights:
        case Dtype.FP32 | Dtype.BF16 | Dtype.FP16:
            return weights
        case Dtype.FP8 | Dtype.INT8 | Dtype.FP4:
            return weights if weights in accelerator.flops else Dtype.BF16
        case Dtype.INT4:
            return Dtype.BF16


def is_narrow(inputs: Dtype) -> bool:
    """Whether products with such inputs are not those of 16 bits, but of the other curve."""
    return BYTES[inputs] < _ACTIVATION_BYTES


def product_s(
    device: Accelerator,
    matrix: Matrix,
    rows: float,
    *,
    weights: Dtype,
    inputs: Dtype,
    copies: float = 1.0,
) -> float:
    """One matrix product by the curves, or `copies` of it with other weights in one launch."""
    curve = gemm_curve(inputs)
    size = matrix.inputs * matrix.outputs * copies
    arithmetic_s = 2 * rows * size / (device.flops_of(inputs) * curve.compute)
    reading_s = size * BYTES[weights] / (device.memory_bytes_per_s * curve.memory)
    moved = rows * copies * _moved_bytes(matrix, curve)
    quantised = rows * copies * matrix.inputs
    return (
        curve.launch_s
        + curve.depth_s * matrix.inputs
        + moved / (device.memory_bytes_per_s * curve.io)
        + quantised * curve.quantising / device.flops_of(inputs)
        + _rounded_max(arithmetic_s, reading_s, curve.knee)
    )


def _moved_bytes(matrix: Matrix, curve: GemmCurve) -> float:
    return matrix.inputs * curve.activation_bytes + matrix.outputs * _ACTIVATION_BYTES


def _rounded_max(one: float, other: float, knee: float) -> float:
    low, high = sorted((one, other))
    if not high:
        return 0.0
    return high * math.pow(1.0 + math.pow(low / high, knee), 1.0 / knee)
