"""Seconds of kernels on one device: measured where there are tables, else by data sheets.

Measured times come from `hardware/kernel_fits.py`. A GPU that was not measured has its relative's
times, multiplied with the ratio of both by data sheets. A device without a relative has the times
by data sheets: each product takes the time of its arithmetic or its bytes, with a rounded knee
(`hardware/efficiency.py`). Prefill attention counts pairs of tokens, decode attention bytes of keys
and values.

Source: Williams et al., Roofline (CACM 2009); formulas per product in Pope et al. (2211.05102) §2.
"""

from __future__ import annotations

import math
from typing import Final

from baton.perf.hardware.accelerators import DTYPE_BYTES, Accelerator, Dtype
from baton.perf.hardware.catalogue import CATALOGUE
from baton.perf.hardware.collectives import (
    NO_COLLECTIVE,
    CollectiveTime,
    all_reduce,
    is_over_pcie,
    network_dispatch_s,
    other_devices,
)
from baton.perf.hardware.efficiency import Efficiency, GemmCurve, gemm_curve
from baton.perf.hardware.kernel_fits import (
    WIDE_EXPERTS,
    ExpertWidths,
    KernelFits,
    LogGrid,
    attention_system,
    kernel_fits,
    measured_system,
)
from baton.perf.model.layer_work import Matrix, per_device
from baton.perf.model.layers import Attention, Experts, StateMixer
from baton.perf.steps.attention import (
    CHOSEN_TOKENS,
    CONTEXTS,
    AttentionCosts,
    DecodeCurve,
    PrefillAttention,
    attention_costs,
    has_chosen_latents,
)

_ACTIVATION_BYTES: Final = 2.0
"""Activations between products have 16 bits."""
_MEASURED_RANKS: Final = 8
_LAUNCH_BYTES: Final = 256
_LOW_LATENCY_TOKENS: Final = 1024
"""Of a device: DeepEP's mode for low latency has no room for more."""
_STATE_NUMBERS: Final = 128 * 128
"""Of a head's state in the tables, which has 32 bits."""
_QUANTIZATION_LAUNCH_S: Final = 2.3e-6
"""Source: AIConfigurator's tables of vLLM 0.24 on H100. Products of 128 x 128 take 2.3 us more in
FP8 than in 16 bits; `scale_matrix` of few rows takes 1.9 to 2.6 us."""
_STATE_COMPUTE: Final = 0.13
"""Share of the rated operations per second of a prompt's pass through a state. Source:
AIConfigurator's `gdn` table of vLLM 0.24 on H100, Qwen3.5-27B, 8,192 tokens."""
_STATE_OPS: Final = 8
"""Per token and number of the state: decay, update, read and the chunk's products, a multiply-add
each. An assumption; `_STATE_COMPUTE` is relative to it."""
_EXPERT_TABLES: Final = {
    Dtype.FP32: ("bf16",),
    Dtype.BF16: ("bf16",),
    Dtype.FP16: ("bf16",),
    Dtype.FP8: ("fp8_block", "fp8"),
    Dtype.INT8: ("fp8_block", "fp8"),
    Dtype.FP4: ("fp4", "mxfp4"),
    Dtype.INT4: ("int4",),
}
"""Products with 4-bit integers unpack these to 16 bits, by Marlin kernels."""
_GEMM_TABLES: Final = {
    Dtype.BF16: "bf16",
    Dtype.FP16: "bf16",
    Dtype.FP8: "fp8",
    Dtype.INT8: "fp8",
    Dtype.FP4: "fp4",
}


class EngineKernels:
    """Kernels of one layout on one device; `weights` are those of all products but the experts'.

    Of `tp` x `dp` devices, each rank of `tp` attends for its own requests, and all of them share
    the experts, in `ep` groups.
    """

    def __init__(  # noqa: PLR0913 - a layout has as many sides as that
        self,
        device: Accelerator,
        efficiency: Efficiency,
        *,
        engine: str,
        tp: int,
        dp: int,
        ep: int,
        weights: Dtype,
        experts: Dtype,
        kv: Dtype,
        fuses_quantization: bool = False,
    ) -> None:
        self._device = device
        self._efficiency = efficiency
        self._tp, self._dp, self._ep = tp, dp, ep
        self._weights, self._experts, self._kv = weights, experts, kv
        self.dispatches = dp > 1 and ep > 1
        """Whether ranks can send tokens to the devices of their experts only."""
        self.inputs = compute_dtype(weights, device)
        """Arithmetic type of products."""
        self._fits = kernel_fits(device.name, engine)
        relative = CATALOGUE.get(measured_system(device.name) or "")
        self._relative = None if relative is None or relative.name == device.name else relative
        """The device whose tables stand for it."""
        other = attention_system(device.name)
        self._attention_source = (
            None if other is None else (kernel_fits(other, engine), CATALOGUE[other])
        )
        """Of attention to heads, where its kernels are those of another device."""
        table = _GEMM_TABLES.get(weights)
        is_packed = table == "fp4" and Dtype.FP4 not in device.flops_by_dtype
        self._gemm_grid = self._grid(None if is_packed else table)
        self._output_grid = self._grid("bf16")
        self._fuses_quantization = (
            fuses_quantization and self._gemm_grid is not None and is_narrow(self.inputs)
        )
        self._costs: dict[tuple[str, Attention], AttentionCosts] = {}
        self._expert_tables: dict[ExpertWidths, tuple[ExpertWidths, LogGrid] | None] = {}
        self._reads_by_bytes = efficiency.decode_tile == 1
        """Whether decode attention is limited by bytes on any device (XQA kernels)."""

    def _grid(self, table: str | None) -> LogGrid | None:
        return None if self._fits is None or table is None else self._fits.gemm(table)

    # ------------------------------------------------------------------ products

    def gemm_s(self, matrix: Matrix, rows: float) -> float:
        """One product of a layer."""
        seconds = self._product_s(self._gemm_grid, matrix, rows, self._weights, self.inputs)
        if self._fuses_quantization:
            seconds = max(seconds / 2, seconds - self._quantization_s(matrix, rows))
        return seconds

    def _quantization_s(self, matrix: Matrix, rows: float) -> float:
        """The pass over a product's inputs to FP8, which the tables of products contain."""
        moved_bytes = rows * matrix.inputs * (_ACTIVATION_BYTES + DTYPE_BYTES[self.inputs])
        rate = self._device.memory_bytes_per_s * self._efficiency.elementwise
        return _QUANTIZATION_LAUNCH_S + moved_bytes / rate

    def output_s(self, matrix: Matrix, rows: float) -> float:
        """The output layer, stored in 16 bits."""
        return self._product_s(self._output_grid, matrix, rows, Dtype.BF16, Dtype.BF16)

    def _product_s(
        self, grid: LogGrid | None, matrix: Matrix, rows: float, weights: Dtype, inputs: Dtype
    ) -> float:
        if grid is None:
            return gemm_s(self._device, matrix, rows, weights=weights, inputs=inputs)
        seconds = grid.at(rows, matrix.outputs, matrix.inputs)
        if self._relative is None:
            return seconds
        own_s, relative_s = (
            gemm_s(device, matrix, rows, weights=weights, inputs=compute_dtype(weights, device))
            for device in (self._device, self._relative)
        )
        return seconds * own_s / relative_s

    # ------------------------------------------------------------------ experts

    def experts_s(self, experts: Experts, hidden: int, tokens: float) -> float:
        """One layer's routed experts: grouped products, one launch for all chosen experts.

        The tables have the time of the busiest device. Ranks that dispatch tokens over more than a
        node have copies of busy experts, and tables of their own.
        """
        widths = ExpertWidths(
            experts.latent or hidden,
            experts.width,
            experts.active,
            experts.count,
            max(1, self._tp * self._dp // self._ep),
            self._ep,
        )
        seconds = self._experts_s(widths, tokens)
        wide = None if self._fits is None else self._fits.wide_experts()
        if wide is None or not self.dispatches or self._ep <= _MEASURED_RANKS:
            return seconds
        own_s = self._sheet_experts_s(self._device, widths, tokens, self._experts)
        device, measured = self._relative or self._device, WIDE_EXPERTS._replace(ep=self._ep)
        ratio = own_s / self._sheet_experts_s(device, measured, tokens, Dtype.FP8)
        # The table begins at a token for each device.
        return min(seconds, ratio * wide.at(tokens / (self._tp * self._dp), self._ep))

    def _experts_s(self, widths: ExpertWidths, tokens: float) -> float:
        if widths not in self._expert_tables:
            self._expert_tables[widths] = self._nearest_experts(widths)
        nearest = self._expert_tables[widths]
        if nearest is None:
            return self._sheet_experts_s(self._device, widths, tokens, self._experts)
        measured, grid = nearest
        seconds = grid.at(tokens)
        if measured == widths and self._relative is None:
            return seconds
        own_s, measured_s = (
            self._sheet_experts_s(device, some, tokens, self._experts)
            for device, some in (
                (self._device, widths),
                (self._relative or self._device, measured),
            )
        )
        return seconds * own_s / measured_s

    def _nearest_experts(self, widths: ExpertWidths) -> tuple[ExpertWidths, LogGrid] | None:
        if self._fits is None:
            return None
        names = _EXPERT_TABLES[self._experts]
        if self._experts is Dtype.FP4 and Dtype.FP4 not in self._device.flops_by_dtype:
            names = names[::-1]
        tables = (self._fits.experts(name) for name in names)
        found = [table.nearest(widths) for table in tables if table is not None]
        # Another format stands in for other experts only: with eight devices, experts of 1,536 are
        # not in blocks of 128, and those with one scale take five times as long.
        alike = (item for item in found if item[0][:4] == widths[:4])
        nearest = min(found, key=lambda item: item[0].distance(widths), default=None)
        return next(alike, nearest)

    def _sheet_experts_s(
        self, device: Accelerator, widths: ExpertWidths, tokens: float, dtype: Dtype
    ) -> float:
        """By curves.

        Of E experts with k chosen per token, B tokens touch E * (1 - (1 - k/E)^B) when choices are
        even. Source: linearity of expectation.
        """
        active, count = widths.active, widths.experts
        touched = max(float(active), count * (1 - (1 - active / count) ** tokens)) / widths.ep
        rows = tokens * active / widths.ep / touched
        width = max(1, -(-widths.width // widths.tp))
        matrices = (
            Matrix(inputs=widths.hidden, outputs=2 * width),
            Matrix(inputs=width, outputs=widths.hidden),
        )
        return sum(
            gemm_s(
                device,
                matrix,
                rows,
                weights=dtype,
                inputs=compute_dtype(dtype, device),
                matrices=touched,
            )
            for matrix in matrices
        )

    # ------------------------------------------------------------------ attention

    def prefill_attention_s(
        self, attention: Attention, tokens: int, pairs: float, *, ranks: int = 1
    ) -> float:
        """One layer's, of prompts with these tokens and pairs in all; taken as alike.

        The prompts are spread over `ranks`.
        """
        return self.prefill_attention(attention).seconds(tokens, pairs, ranks)

    def prefill_attention(self, attention: Attention) -> PrefillAttention:
        """The grid and the costs of an attention, looked up once for all prompts."""
        fits, relative = self._attention_fits(attention)
        grid, scale = self._measured_prefill(fits, attention) or (None, 1.0)
        is_sparse = has_chosen_latents(attention)
        return PrefillAttention(
            grid=grid,
            scale=scale,
            is_sparse=is_sparse,
            has_indexer=attention.indexer is not None,
            heads=per_device(attention.heads, self._tp),
            window_tokens=attention.window_tokens,
            launch_s=self._efficiency.attention_launch_s,
            own=self._attention_costs(self._device, attention),
            relative=None if relative is None else self._attention_costs(relative, attention),
        )

    def _attention_fits(self, attention: Attention) -> tuple[KernelFits | None, Accelerator | None]:
        """The tables of an attention, and the device that they were measured on, if another."""
        if attention.latent is None and self._attention_source is not None:
            fits, device = self._attention_source
            if fits is not None and fits.decode_attention(attention.head_dim, self._kv):
                return fits, device
        return self._fits, self._relative

    def _measured_prefill(
        self, fits: KernelFits | None, attention: Attention
    ) -> tuple[LogGrid, float] | None:
        if fits is None:
            return None
        if attention.latent is None:
            return fits.prefill_attention(attention.head_dim, self._kv)
        is_sparse = has_chosen_latents(attention)
        grid = fits.sparse_prefill(self._kv) if is_sparse else fits.latent_prefill(self._kv)
        return None if grid is None else (grid, 1.0)

    def decode_curve(self, attention: Attention, requests: int) -> DecodeCurve:
        """One layer's decode attention for some requests of equal contexts; see `context_s`."""
        local = -(-requests // self._dp)
        fits, device = self._attention_fits(attention)
        measured = self._measured_decode(fits, attention, local)
        if measured is None:
            return self._sheet_decode_curve(self._device, attention, local)
        if device is None:
            return measured
        own = self._sheet_decode_curve(self._device, attention, local)
        relative = self._sheet_decode_curve(device, attention, local)
        return tuple(
            seconds * own_s / relative_s
            for seconds, own_s, relative_s in zip(measured, own, relative, strict=True)
        )

    def _sheet_decode_curve(
        self, device: Accelerator, attention: Attention, requests: int
    ) -> DecodeCurve:
        costs = self._attention_costs(device, attention)
        launch_s = self._efficiency.attention_launch_s
        most = CHOSEN_TOKENS if has_chosen_latents(attention) else CONTEXTS[-1]
        return tuple(
            launch_s
            + requests
            * (costs.request_s + min(context, most) * costs.token_s + context * costs.index_s)
            for context in CONTEXTS
        )

    def _attention_costs(self, device: Accelerator, attention: Attention) -> AttentionCosts:
        key = (device.name, attention)
        costs = self._costs.get(key)
        if costs is None:
            costs = self._costs[key] = attention_costs(
                device, attention, self._efficiency, tp=self._tp, kv=self._kv
            )
        return costs

    def _measured_decode(
        self, fits: KernelFits | None, attention: Attention, requests: int
    ) -> DecodeCurve | None:
        if fits is None:
            return None
        heads = per_device(attention.heads, self._tp)
        if attention.latent is not None:
            is_sparse = has_chosen_latents(attention)
            grid = fits.sparse_decode(self._kv) if is_sparse else fits.latent_decode(self._kv)
            if grid is None:
                return None
            most = CONTEXTS[-1]
            if is_sparse and attention.indexer is None:
                most = CHOSEN_TOKENS
            return tuple(grid.at(requests, min(context, most), heads) for context in CONTEXTS)
        found = fits.decode_attention(attention.head_dim, self._kv)
        if found is None or self._reads_by_bytes:
            return None
        grid, scale = found
        kv_heads = per_device(attention.kv_heads, self._tp)
        return tuple(
            scale * grid.at(requests * kv_heads, context, max(1.0, heads / kv_heads))
            for context in CONTEXTS
        )

    def state_prefill_s(
        self, state: StateMixer, tokens: int, pairs: float, *, ranks: int = 1
    ) -> float:
        """One layer's pass of prompts through their states, beside its products.

        Prompts have these tokens and pairs in all, and are taken as alike. The tables are those of
        gated delta nets. Their heads stand for as many numbers of other states.
        """
        numbers = per_device(state.heads, self._tp) * state.key_dim * state.value_dim
        seconds = self._sheet_state_prefill_s(self._device, numbers * tokens / ranks)
        grid = None if self._fits is None else self._fits.state_prefill()
        if grid is None or not numbers:
            return seconds
        length = min(tokens, max(1.0, 2 * pairs / tokens - 1))
        measured_s = grid.at(length, numbers / _STATE_NUMBERS * tokens / ranks / length)
        if self._relative is None:
            return measured_s
        relative_s = self._sheet_state_prefill_s(self._relative, numbers * tokens / ranks)
        return measured_s * seconds / relative_s

    def _sheet_state_prefill_s(self, device: Accelerator, numbers: float) -> float:
        rate = device.flops_of(Dtype.BF16) * _STATE_COMPUTE
        return self._efficiency.attention_launch_s + _STATE_OPS * numbers / rate

    def state_decode_s(self, state: StateMixer, requests: int) -> float:
        """One layer's states of decoding requests: each is read and written."""
        state_bytes = state.state_bytes / self._tp * requests / self._dp
        seconds = self._sheet_state_decode_s(self._device, state_bytes)
        grid = None if self._fits is None else self._fits.state_decode()
        if grid is None:
            return seconds
        measured_s = grid.at(state_bytes / (DTYPE_BYTES[Dtype.FP32] * _STATE_NUMBERS))
        if self._relative is None:
            return measured_s
        return measured_s * seconds / self._sheet_state_decode_s(self._relative, state_bytes)

    def _sheet_state_decode_s(self, device: Accelerator, state_bytes: float) -> float:
        rate = device.memory_bytes_per_s * self._efficiency.elementwise
        return self._efficiency.attention_launch_s + 2 * state_bytes / rate

    # ------------------------------------------------------------------ communication

    def reduce_time(self, payload_bytes: float, ranks: int) -> CollectiveTime:
        """To sum `payload_bytes` over `ranks` devices."""
        if ranks <= 1:
            return NO_COLLECTIVE
        grid = None if self._fits is None else self._fits.all_reduce()
        sheet = all_reduce(payload_bytes, ranks, self._device)
        if grid is None or is_over_pcie(ranks, self._device):
            return sheet
        known = min(ranks, _MEASURED_RANKS)
        launch_s = grid.at(known, _LAUNCH_BYTES)
        wire_s = max(0.0, grid.at(known, max(_LAUNCH_BYTES, payload_bytes)) - launch_s)
        if self._relative is None and ranks == known:
            return CollectiveTime(launch_s, wire_s)
        other = all_reduce(payload_bytes, known, self._relative or self._device)
        return CollectiveTime(
            launch_s * sheet.launch_s / other.launch_s,
            wire_s * sheet.wire_s / other.wire_s if other.wire_s else sheet.wire_s,
        )

    def dispatch_time(self, experts: Experts, hidden: int, tokens: float) -> CollectiveTime | None:
        """To send a device's tokens to the devices of their experts and back; None: not known.

        The faster of DeepEP's modes: copies for each expert, or for each device (of other nodes for
        each node). The tables end at one node of 8; in larger NVLink domains, copies leave a device
        at the same rate. The network carries the rest at the same time. Engines other than SGLang
        have kernels that move as many bytes.
        """
        ranks = self._tp * self._dp
        node = min(ranks, self._device.devices_per_node)
        nodes, active = max(1.0, ranks / node), experts.active
        width = experts.latent or hidden
        modes = (
            ("low_latency", active * (node - 1) / ranks, active * (1 - node / ranks)),
            ("normal", other_devices(node, active), other_devices(round(nodes), active)),
        )
        times = []
        for mode, near, far in modes:
            grid = None if self._fits is None else self._fits.dispatch(mode)
            if grid is None or (mode == "low_latency" and tokens > _LOW_LATENCY_TOKENS):
                continue
            start_s = grid.at(1.0)
            wire_s = grid.at(tokens * near * width) - start_s
            if self._relative is not None:
                wire_s *= self._relative.peer_bytes_per_s / self._device.peer_bytes_per_s
            far_s = network_dispatch_s(tokens * far, width, self._device)
            times.append(CollectiveTime(start_s, max(0.0, wire_s, far_s)))
        return min(times, key=sum, default=None)


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
