"""Compares measured rows with the performance model's predictions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from baton.bench.accuracy.measurements import MeasuredPools, MeasuredRow, WorkerLayout
from baton.bench.accuracy.recipes import (
    BLOCK_SIZE_TOKENS,
    product_dtype,
    recipe_of,
    stored_shape,
    weight_dtype,
)
from baton.domain.errors import BatonError, InsufficientMemory
from baton.perf.capacity import closed_loop
from baton.perf.capacity.closed_loop import RequestLengths
from baton.perf.fitting.calibration import (
    Calibration,
    Conditions,
    ErrorStats,
    Measurement,
    MeasurementKind,
    Residual,
    calibrate_jointly,
    error_stats,
)
from baton.perf.hardware.accelerators import DTYPE_BYTES, Accelerator, Dtype
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.hardware.efficiency import Efficiency, engine_efficiency
from baton.perf.hardware.kernel_fits import kernels_stand_in
from baton.perf.model import memory
from baton.perf.model.known_models import find_shape
from baton.perf.model.shape import ModelShape
from baton.perf.step_timing import StepBatch
from baton.perf.steps.kernels import compute_dtype, is_narrow
from baton.perf.steps.roofline import Roofline
from baton.simulator.outcome import mean
from baton.simulator.single_engine import simulate_engine
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads.trace import TraceRequest

SATURATED_TTFT_S = 4.0
"""A longer TTFT is dominated by queueing for memory, not by the engine's speed."""
_BEST_PRODUCTS = 0.97
_BEST_NARROW_PRODUCTS = 0.85
"""Shares of the rated operations per second that the best product reaches, with 16-bit and narrower
inputs. Source: AIConfigurator's tables of vLLM 0.14 and 0.24 on A100, H100 (0.97, 0.81) and H200
(0.95, 0.85)."""
_BEST_ATTENTION = 0.80
"""The same for attention over prompts. Source: the same tables (H100, 16,384 tokens)."""
_REDUCED_BYTES = 2.0
"""Per number that devices of a group sum up, twice a layer; each sends it at least once, if the
switch sums. Source: NVLink SHARP (NVIDIA, Hopper architecture)."""
_OVERLAPPED_SINCE = [0, 14]
_SYNCHRONOUS = " (synchronous)"
_WAITING_REQUEST_S = 20e-6
"""By which a step is longer per request if host code waits for it. Source: vLLM's issue 10634 and
pull request 11133, 5 to 6 ms between steps of 256 requests, and 0.16 ms with overlap."""
_UTILIZATION = 0.9
"""Of memory; the default of vLLM."""
_MAX_SIMULATED_CLIENTS = 256
"""More clients take the closed loop, which costs a fifth to a twentieth of the simulated engine's
time and gives the same latencies while memory suffices."""
_POOL_ROUNDS = 8
"""Of the number of decoding requests and the wait for prefill, which depend on each other."""
_MAX_BUSY_FRACTION = 0.99
_MEAN_PROMPTS = 10
"""Of random lengths, whose mean time is a prompt's."""


class _BusyFractions(NamedTuple):
    """Shares of the time, at the best rates."""

    products: float
    """Arithmetic, or reads of the weights once a step if those take longer."""
    attention: float
    kv_reads: float
    """For each decoded token."""
    links: float

    @property
    def total(self) -> float:
        """Above 1 is impossible."""
        return sum(self)


class EvaluatedRow(NamedTuple):
    """A row and its predictions."""

    row: MeasuredRow
    ttft: Residual
    tpot: Residual
    is_simulated: bool
    """By the simulated engine; else by the closed loop of the calibration."""
    extrapolated: tuple[str, ...] = ()
    """Conditions more than twice beyond those of the calibration."""
    implausible_reason: str | None = None
    """Why no engine can have measured this; see `implausible_reason`."""

    @property
    def is_saturated(self) -> bool:
        """Whether summaries leave it out."""
        return self.row.ttft_s >= SATURATED_TTFT_S


class SkippedRow(NamedTuple):
    """A row without a prediction."""

    row: MeasuredRow
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All rows: each is in one of the two."""

    evaluated: tuple[EvaluatedRow, ...]
    skipped: tuple[SkippedRow, ...]

    @property
    def unsaturated(self) -> tuple[EvaluatedRow, ...]:
        """The rows that are not saturated."""
        return tuple(row for row in self.evaluated if not row.is_saturated)

    @property
    def plausible(self) -> tuple[EvaluatedRow, ...]:
        """The unsaturated rows that are plausible."""
        return tuple(row for row in self.unsaturated if row.implausible_reason is None)

    def plausible_in_suspect_sweeps(self) -> tuple[EvaluatedRow, ...]:
        """Plausible rows of sweeps with implausible rows, which the same cause may affect.

        A sweep is the rows of one engine, version, model and device.
        """
        suspect_sweeps = {
            _sweep_key(row.row) for row in self.unsaturated if row.implausible_reason is not None
        }
        return tuple(row for row in self.plausible if _sweep_key(row.row) in suspect_sweeps)

    def stand_ins(self) -> tuple[str, ...]:
        """Engines and devices whose kernels were not measured, and whose stand for them."""
        pairs = {(row.row.backend, row.row.system) for row in self.evaluated}
        named = ((pair, kernels_stand_in(pair[1], pair[0])) for pair in sorted(pairs))
        return tuple(f"{' on '.join(pair)}: {name}" for pair, name in named if name)

    def errors(self, rows: Iterable[EvaluatedRow] | None = None) -> tuple[ErrorStats, ErrorStats]:
        """Errors of TTFT and TPOT, by default of all unsaturated rows."""
        evaluated = self.unsaturated if rows is None else list(rows)
        return error_stats([row.ttft for row in evaluated]), error_stats(
            [row.tpot for row in evaluated]
        )

    def groups(self) -> dict[tuple[str, str, str], tuple[EvaluatedRow, ...]]:
        """The unsaturated rows by engine, model and device."""
        grouped: dict[tuple[str, str, str], list[EvaluatedRow]] = defaultdict(list)
        for evaluated in self.unsaturated:
            row = evaluated.row
            engine = f"{row.backend} {row.version}".strip()
            grouped[engine, row.model, f"{row.system} tp{row.tp}"].append(evaluated)
        return {key: tuple(rows) for key, rows in sorted(grouped.items())}


def _sweep_key(row: MeasuredRow) -> tuple[str, str, str, str]:
    return row.backend, row.version, row.model, row.system


Calibrations = Mapping[str, Calibration]
"""By host ("vllm", "vllm (synchronous)"); kernels are alike in all of them."""


def calibrate_engines(rows: Sequence[MeasuredRow]) -> dict[str, Calibration]:
    """A calibration for each host with usable rows, fitted together."""
    usable = [row for row in rows if unfit_reason(row) is None]
    engines = {host_of(row): row.backend for row in usable}
    if not engines:
        return {}
    return calibrate_jointly(
        partial(_build_observations, usable),
        {host: engine_efficiency(engine) for host, engine in sorted(engines.items())},
    )


def host_of(row: MeasuredRow) -> str:
    """A row's backend, and whether its host code waits for each step before it prepares another.

    Since 0.14, vLLM prepares a step while the last one computes; InferenceX asked for that before.

    Source: vLLM's release notes, 0.14.0; InferenceMAX, benchmarks/70b_fp8_h100_slurm.sh.
    """
    release = [int(part) for part in row.version.split(".")[:2] if part.isdigit()]
    is_synchronous = bool(release) and release < _OVERLAPPED_SINCE
    if row.backend != "vllm" or not is_synchronous or recipe_of(row).is_published:
        return row.backend
    return row.backend + _SYNCHRONOUS


def calibration_of(host: str, calibrations: Calibrations) -> Calibration | None:
    """The calibration of a host, or of its other mode without the difference; None: neither."""
    own = calibrations.get(host)
    if own is not None:
        return own
    waits = host.endswith(_SYNCHRONOUS)
    other = calibrations.get(host.removesuffix(_SYNCHRONOUS) if waits else host + _SYNCHRONOUS)
    if other is None:
        return None
    shift_s = _WAITING_REQUEST_S if waits else -_WAITING_REQUEST_S
    return replace(other, efficiency=_shift_requests(other.efficiency, shift_s))


def _shift_requests(efficiency: Efficiency, shift_s: float) -> Efficiency:
    return replace(efficiency, request_s=max(0.0, efficiency.request_s + shift_s))


def unfit_reason(row: MeasuredRow) -> str | None:
    """Why calibration leaves a row out; None if it is used."""
    if row.disaggregated or row.problem:
        return row.problem or "it measured separate pools"
    if row.ttft_s >= SATURATED_TTFT_S:
        return f"its time to first token of {row.ttft_s:.1f} s is a queue's"
    try:
        if implausible_reason(row) is not None:
            return "it implies more than its devices can compute"
    except BatonError as error:
        return str(error)
    if not recipe_of(row).is_engine_bound(row):
        return "the server in front of the engine was more than half busy"
    return None


def evaluate_rows(
    rows: Sequence[MeasuredRow],
    *,
    calibrations: Calibrations | None = None,
) -> Evaluation:
    """Predict every row; an engine without a calibration uses vLLM's.

    Rows far from the conditions of the calibration are predicted, too, and marked: each has its
    measured value beside it.
    """
    evaluated, skipped = [], []
    for row in rows:
        try:
            evaluated.append(_evaluate_row(row, calibrations or {}))
        except (BatonError, ValueError) as error:
            skipped.append(SkippedRow(row, str(error)))
    return Evaluation(evaluated=tuple(evaluated), skipped=tuple(skipped))


def _evaluate_row(row: MeasuredRow, calibrations: Calibrations) -> EvaluatedRow:
    if row.disaggregated and row.pools is None:
        raise ValueError("it measured separate pools, and does not say how many workers")
    if row.problem:
        raise ValueError(row.problem)
    host = host_of(row)
    calibration = calibration_of(host, calibrations) or calibration_of("vllm", calibrations)
    default_efficiency = engine_efficiency(row.backend)
    efficiency, extrapolated = default_efficiency, tuple[str, ...]()
    if host.endswith(_SYNCHRONOUS):
        efficiency = _shift_requests(efficiency, _WAITING_REQUEST_S)
    if calibration is not None:
        efficiency = replace(calibration.efficiency, decode_tile=default_efficiency.decode_tile)
        extrapolated = calibration.beyond(_conditions(row))
    is_simulated = (
        row.backend == "vllm"
        and not row.disaggregated
        and row.dp == 1
        and row.concurrency <= _MAX_SIMULATED_CLIENTS
        and recipe_of(row).distinct_prompts is None
    )
    if row.pools is not None:
        ttft_s, tpot_s = _predict_pools(row, row.pools, efficiency)
    else:
        predict = _predict_simulated if is_simulated else _predict_closed_loop
        ttft_s, tpot_s = predict(row, efficiency)
    return EvaluatedRow(
        row=row,
        ttft=Residual(
            name=row.name,
            kind=MeasurementKind.FIRST_TOKEN,
            measured_s=row.ttft_s,
            predicted_s=ttft_s + efficiency.first_token_s,
        ),
        tpot=Residual(
            name=row.name,
            kind=MeasurementKind.OUTPUT_TOKEN,
            measured_s=row.tpot_s,
            predicted_s=tpot_s,
        ),
        is_simulated=is_simulated,
        extrapolated=extrapolated,
        implausible_reason=None if row.disaggregated else implausible_reason(row),
    )


def _predict_pools(
    row: MeasuredRow, pools: MeasuredPools, efficiency: Efficiency
) -> tuple[float, float]:
    """Mean latencies of two pools: clients that wait, are prefilled, and are decoded.

    Clients are spread evenly over workers and their ranks. Decoding requests are the share of the
    clients that Little's law gives; more than memory holds wait for their first token. A prompt
    waits behind the others that began with it, and as in a queue with random arrivals later, never
    for more than all clients' prompts. Ranks that compute prompts at once share the experts. Keys
    and values cross the network, and the decode pool's first step gives the first token.

    Source: Pollaczek-Khinchine for an M/D/1 queue.
    """
    recipe, shape = recipe_of(row), find_shape(row.model)
    prefill, decode = (
        _roofline(row, efficiency, layout) for layout in (pools.prefill, pools.decode)
    )
    lengths = recipe.draw_lengths(row)
    prompt, output = (mean([each[side] for each in lengths]) for side in (0, 1))
    sent_bytes = shape.kv_bytes(round(prompt), recipe.kv)
    links = 1 if shape.latent is not None else pools.prefill.tp
    transfer_s = sent_bytes / (find_accelerator(row.system).network_bytes_per_s * links)
    prompts_s = cache(partial(_prompts_s, prefill, lengths, recipe.closed_loop(row)))
    group_clients = row.concurrency / pools.prefill_workers
    clients = max(1.0, group_clients / pools.prefill.dp)
    most_decoding = _decoding_room(row, pools, round(prompt + output / 2))
    decoding, prompt_s, tpot_s = min(row.concurrency, most_decoding), prompts_s(1), 0.0
    ttft_s = prompt_s
    for _ in range(_POOL_ROUNDS):
        streams = max(1, round(decoding / pools.decode_workers))
        context_tokens = round(streams * (prompt + output / 2))
        tpot_s = decode.step_s(
            StepBatch(decode_requests=streams, decode_context_tokens=context_tokens)
        )
        decode_s = (output - 1) * tpot_s
        busy_ranks = group_clients * prompt_s / (ttft_s + decode_s)
        prompt_s = prompts_s(max(1, min(pools.prefill.dp, round(busy_ranks))))
        first_wait_s = (clients - 1) / 2 * prompt_s / recipe.requests_per_client
        busy = min(_MAX_BUSY_FRACTION, clients * prompt_s / (ttft_s + decode_s))
        wait_s = min(first_wait_s + prompt_s * busy / (2 * (1 - busy)), (clients - 1) * prompt_s)
        prefilled_s = max(prompt_s + wait_s, clients * prompt_s - decode_s)
        full_s = decode_s * (row.concurrency / most_decoding - 1)
        ttft_s = max(prefilled_s + transfer_s, full_s) + tpot_s
        decoding = row.concurrency * decode_s / (decode_s + ttft_s)
    return ttft_s, tpot_s


def _decoding_room(row: MeasuredRow, pools: MeasuredPools, held_tokens: int) -> float:
    """Requests that the memory of the decode pool holds beside the weights.

    A measured pool had room. Where weights alone seem too large, the limit is not known.
    """
    try:
        worker = _worker_fit(row, pools.decode)
    except InsufficientMemory:
        return math.inf
    return pools.decode_workers * worker.concurrent_requests(held_tokens)


def _prompts_s(
    prefill: Roofline, lengths: Sequence[RequestLengths], loop: closed_loop.ClosedLoop, ranks: int
) -> float:
    """Mean time of a prompt while this number of ranks computes one each."""
    prompts = [RequestLengths(each.prompt_tokens, 1) for each in lengths[:_MEAN_PROMPTS]]
    together = replace(
        loop, clients=ranks, max_running_requests=ranks, think_time_s=0.0, max_prefill_delay_steps=0
    )
    return sum(
        sum(closed_loop.simulate_closed_loop(prefill, [prompt] * ranks, together).ttft)
        for prompt in prompts
    ) / len(prompts)


def _predict_simulated(row: MeasuredRow, efficiency: Efficiency) -> tuple[float, float]:
    """Mean latencies of the simulated engine, which schedules and fills memory as vLLM does."""
    recipe, shape = recipe_of(row), find_shape(row.model)
    loop = recipe.closed_loop(row)
    block_tokens = shape.block_tokens(BLOCK_SIZE_TOKENS, recipe.kv, row.tp)
    settings = V1Settings(
        timing=_roofline(row, efficiency),
        kv_blocks=_memory_fit(row).kv_blocks(block_tokens),
        kv_block_bytes=max(1, round(shape.kv_bytes(block_tokens, recipe.kv))),
        block_size_tokens=block_tokens,
        request_blocks=shape.request_blocks(block_tokens, recipe.kv),
        max_running_requests=loop.max_running_requests,
        max_batched_tokens=loop.max_batched_tokens,
        prefix_caching=False,
        pipeline_stages=row.pp,
    )
    requests = [TraceRequest(0.0, *lengths[:2]) for lengths in recipe.draw_lengths(row)]
    outcomes = simulate_engine(settings, requests, clients=loop.clients, think_s=loop.think_time_s)
    ttft_s = mean([outcome.ttft_s for outcome in outcomes]) + loop.think_time_s
    return ttft_s, mean([outcome.tpot_s for outcome in outcomes])


def _predict_closed_loop(row: MeasuredRow, efficiency: Efficiency) -> tuple[float, float]:
    latencies = _run_closed_loop(row, efficiency)
    return sum(latencies.ttft), sum(latencies.tpot)


def _run_closed_loop(row: MeasuredRow, efficiency: Efficiency) -> closed_loop.MeanLatencies:
    recipe = recipe_of(row)
    loop = recipe.closed_loop(row, room=_room(row))
    return closed_loop.simulate_closed_loop(
        _roofline(row, efficiency), recipe.draw_lengths(row), loop
    )


def _room(row: MeasuredRow) -> int | None:
    """Requests that the engine's KV cache holds at once; None where its memory is not known.

    vLLM and SGLang admit a request by its prompt, so that each holds half of its output on average.
    TensorRT-LLM reserves all of it (`GUARANTEED_NO_EVICT`), in its share of the other memory.
    SGLang's share of all memory is of weights and KV (`--mem-fraction-static`), not of activations.
    """
    recipe = recipe_of(row)
    reserves_all = recipe.kv_fraction is not None
    share = recipe.static_fraction
    is_known = row.backend == "vllm" or reserves_all or share is not None
    if recipe.distinct_prompts is not None or not is_known:
        return None
    takes_share = reserves_all or share is not None
    memory_fit = _memory_fit(row, utilization=1.0 if takes_share else _UTILIZATION)
    mean_length_fraction = (1.0 + recipe.min_length_fraction) / 2
    output_tokens = row.output_tokens if reserves_all else row.output_tokens / 2
    held_tokens = round(mean_length_fraction * (row.prompt_tokens + output_tokens))
    kv_fraction = recipe.kv_fraction or 1.0
    if share is not None:
        static_bytes = share * memory_fit.usable_bytes
        kv_fraction = (static_bytes - memory_fit.weights_bytes) / memory_fit.kv_bytes
    return max(1, int(kv_fraction * memory_fit.concurrent_requests(held_tokens)))


def _memory_fit(row: MeasuredRow, *, utilization: float = _UTILIZATION) -> memory.MemoryFit:
    """Use of the memory by a rank.

    A measured engine had room. If activations leave none, they were smaller than estimated, and
    the engine took as much memory as there is.

    Raises:
        InsufficientMemory: its weights alone are too large.
    """
    recipe = recipe_of(row)
    loop = recipe.closed_loop(row)
    try:
        return _worker_fit(
            row,
            row.layout,
            utilization=utilization,
            max_batched_tokens=recipe.max_batched_tokens,
            max_running_requests=-(-loop.max_running_requests // row.dp),
        )
    except InsufficientMemory:
        return _worker_fit(row, row.layout)


def _worker_fit(
    row: MeasuredRow,
    layout: WorkerLayout,
    *,
    utilization: float = 1.0,
    max_batched_tokens: int = 1,
    max_running_requests: int = 1,
) -> memory.MemoryFit:
    """Use of a worker's memory; by default all but the weights is for keys and values."""
    return memory.fit(
        stored_shape(row),
        find_accelerator(row.system),
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        ep=layout.ep > 1,
        weights=weight_dtype(row),
        kv=recipe_of(row).kv,
        utilization=utilization,
        max_batched_tokens=max_batched_tokens,
        max_running_requests=max_running_requests,
    )


def _build_observations(
    rows: Sequence[MeasuredRow], efficiencies: Mapping[str, Efficiency]
) -> list[Measurement]:
    observations = []
    for row in rows:
        latencies, conditions = _run_closed_loop(row, efficiencies[host_of(row)]), _conditions(row)
        narrow = is_narrow(compute_dtype(weight_dtype(row), find_accelerator(row.system)))
        for kind, measured_s, parts in (
            (MeasurementKind.FIRST_TOKEN, row.ttft_s, latencies.ttft),
            (MeasurementKind.OUTPUT_TOKEN, row.tpot_s, latencies.tpot),
        ):
            observations.append(
                Measurement(
                    name=row.name,
                    kind=kind,
                    measured_s=measured_s,
                    parts=parts,
                    conditions=conditions,
                    host=host_of(row),
                    engine=row.backend,
                    narrow=narrow,
                )
            )
    return observations


def _conditions(row: MeasuredRow) -> Conditions:
    return Conditions(
        prompt_tokens=row.prompt_tokens,
        context_tokens=row.prompt_tokens + row.output_tokens,
        requests=row.concurrency,
        devices=row.layout.devices,
    )


def _roofline(
    row: MeasuredRow, efficiency: Efficiency, layout: WorkerLayout | None = None
) -> Roofline:
    return Roofline(
        find_shape(row.model),
        find_accelerator(row.system),
        **(layout or row.layout)._asdict(),
        weights=product_dtype(row),
        kv=recipe_of(row).kv,
        efficiency=efficiency,
        engine=row.backend,
        fuses_quantization=recipe_of(row).fuses_quantization,
        experts=recipe_of(row).experts or row.experts or weight_dtype(row),
    )


def implausible_reason(row: MeasuredRow) -> str | None:
    """Why a row is impossible; None if it may be possible.

    No prediction takes part. By Little's law, the clients and latencies imply a rate of requests.
    Each request needs arithmetic, reads of keys and values, and exchanges of activations. These
    depend on each other within a step and cannot overlap. At the best rates of data sheets and
    kernel tables, all of it must fit into the time. If it does not, something was not computed:
    most likely repeated random prompts that were in the prefix cache.
    """
    fractions = busy_fractions(row)
    if fractions.total <= 1.0:
        return None
    return (
        f"it implies more than its devices can compute: at their best they would be busy for"
        f" {fractions.total:.0%} of the time (products {fractions.products:.0%}, attention"
        f" {fractions.attention:.0%}, keys and values {fractions.kv_reads:.0%}, links"
        f" {fractions.links:.0%})"
    )


def busy_fractions(row: MeasuredRow) -> _BusyFractions:
    """The least utilization of a row's devices.

    Raises:
        BatonError: its model or device is unknown.
    """
    shape, device = find_shape(row.model), find_accelerator(row.system)
    devices, mean_length_fraction = (
        row.layout.devices,
        (1.0 + recipe_of(row).min_length_fraction) / 2,
    )
    prompt, output = (
        row.prompt_tokens * mean_length_fraction,
        row.output_tokens * mean_length_fraction,
    )
    requests_per_s = row.concurrency / (row.ttft_s + (output - 1) * row.tpot_s)
    tokens = prompt + output - 1
    read_bytes = output * shape.kv_bytes(int(prompt + output / 2), recipe_of(row).kv)
    all_reduce_bytes = 2 * shape.layers * tokens * shape.hidden * _REDUCED_BYTES
    return _BusyFractions(
        products=_products_fraction(row, requests_per_s * tokens, requests_per_s * output)
        / devices,
        attention=requests_per_s * _attention_s(shape, device, prompt) / devices,
        kv_reads=requests_per_s * read_bytes / (devices * device.memory_bytes_per_s),
        links=requests_per_s * all_reduce_bytes / device.peer_bytes_per_s if row.tp > 1 else 0.0,
    )


def _products_fraction(row: MeasuredRow, tokens_per_s: float, sampled_per_s: float) -> float:
    """Device seconds a second."""
    shape, device, weights = find_shape(row.model), find_accelerator(row.system), weight_dtype(row)
    inputs = compute_dtype(weights, device)
    best_efficiency = _BEST_NARROW_PRODUCTS if is_narrow(inputs) else _BEST_PRODUCTS
    layers_s = (
        2
        * tokens_per_s
        * shape.active_layer_parameters
        / (device.flops_of(inputs) * best_efficiency)
    )
    rate = device.flops_of(Dtype.BF16) * _BEST_PRODUCTS
    compute_s = layers_s + 2 * sampled_per_s * shape.output_parameters / rate
    # Each step gives one token of each request, and reads the active weights.
    step_bytes = shape.active_layer_parameters * DTYPE_BYTES[weights]
    return max(compute_s, step_bytes / row.tpot_s / device.memory_bytes_per_s)


def _attention_s(shape: ModelShape, device: Accelerator, prompt_tokens: float) -> float:
    """Of one prompt on one device, at the rate of its narrowest type, without windowed layers."""
    latent = shape.latent
    width = 2 * shape.head_dim
    if latent is not None:
        width = latent.nope_dim + latent.rope_dim + latent.value_dim
    layers = shape.layers - shape.windowed_layers
    pairs = layers * prompt_tokens * prompt_tokens / 2
    return 2 * shape.heads * width * pairs / (device.flops_of(Dtype.FP8) * _BEST_ATTENTION)
