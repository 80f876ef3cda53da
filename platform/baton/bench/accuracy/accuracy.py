"""Compares measured rows with the performance model's predictions.

Rows tell tokens and clients only. Recipes say how they were measured: from public scripts of
benchmarks and documentation of engines, with named assumptions, independent of measured values.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from baton.bench.accuracy.measurements import MeasuredPools, MeasuredRow, WorkerLayout
from baton.domain.errors import BatonError
from baton.perf.capacity import closed_loop
from baton.perf.capacity.closed_loop import ClosedLoop, RequestLengths
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
from baton.perf.model import memory
from baton.perf.model.known_models import dtype_hint, find_shape
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
_BLOCK_SIZE_TOKENS = 16
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
_INFERENCE_X_LENGTHS = frozenset({(1024, 1024), (1024, 8192), (8192, 1024)})
"""Source: InferenceMAX README, benchmark client configuration."""
_OWN_RUN_MARK = "_epnone"
"""In names of AIConfigurator's own runs, some of which have the same lengths. Those of InferenceX
begin with a date, or end with a number of its database."""
_NO_CLIENTS = "it does not say how many clients there were"
_OVERLAPPED_SINCE = [0, 14]
_SYNCHRONOUS = " (synchronous)"
_MODELS_WITH_A_WAITING_CLIENT = frozenset({"meta-llama/Llama-3.1-8B-Instruct"})
_DATASET_PROMPTS = 100
"""Source: AIPerf, `--num-dataset-entries`, its default."""
_SEED = 0
_UNBOUNDED = 1 << 40
_UTILIZATION = 0.9
"""Of memory; the default of vLLM."""
_MAX_SIMULATED_CLIENTS = 256
"""More clients take the closed loop, which costs a fifth to a twentieth of the simulated engine's
time and gives the same latencies while memory suffices."""
_POOL_ROUNDS = 8
"""Of the number of decoding requests and the wait for prefill, which depend on each other."""
_MAX_BUSY_FRACTION = 0.99
_MAX_FRONTEND_BUSY_FRACTION = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """One way of measuring."""

    name: str
    is_published: bool
    kv: Dtype
    experts: Dtype | None = None
    """The type whose kernels compute the experts, where it is not the row's."""
    fuses_quantization: bool = False
    """Whether scales of activations are in the checkpoint, so that other kernels quantize."""
    min_length_fraction: float = 1.0
    """Lengths are uniform from this share of the nominal length to all of it."""
    requests_per_client: int = 10
    max_batched_tokens: int = 8192
    reserved_slots: int = 0
    """Slots of the batch, one per client, that no request gets."""
    mixes_steps: bool = True
    distinct_prompts: int | None = None
    """Later prompts repeat these, so the prefix cache has them; None: all differ."""
    gather_steps: int = 0
    gather_tokens: int = 0
    receive_interval_steps: int = 1
    kv_fraction: float = 1.0
    """Of the memory beside weights, for an engine that takes such a share."""
    frontend_requests_per_s: float = math.inf
    frontend_tokens_per_s: float = math.inf
    """Both are the limits of the server in front of the engine."""

    def is_engine_bound(self, row: MeasuredRow) -> bool:
        """Whether the frontend was at most half busy, so that the row describes the engine."""
        request_s = row.ttft_s + (row.output_tokens - 1) * row.tpot_s
        requests_per_s = row.concurrency / request_s
        tokens_per_s = requests_per_s * row.output_tokens
        busy = requests_per_s / self.frontend_requests_per_s
        return max(busy, tokens_per_s / self.frontend_tokens_per_s) <= _MAX_FRONTEND_BUSY_FRACTION

    def draw_lengths(self, row: MeasuredRow) -> list[RequestLengths]:
        """Lengths of the clients' requests, in order; equal for equal rows."""
        rng = random.Random(_SEED)  # noqa: S311 - lengths, no secrets

        def draw(nominal: int) -> int:
            return rng.randint(max(2, int(nominal * self.min_length_fraction)), max(2, nominal))

        count = row.concurrency * self.requests_per_client
        lengths = [
            RequestLengths(draw(row.prompt_tokens), draw(row.output_tokens)) for _ in range(count)
        ]
        if (first_repeated := self.distinct_prompts) is None:
            return lengths
        cached_tokens = max(0, row.prompt_tokens - _BLOCK_SIZE_TOKENS)
        return [
            each._replace(cached_tokens=cached_tokens if number >= first_repeated else 0)
            for number, each in enumerate(lengths)
        ]

    def closed_loop(self, row: MeasuredRow, *, room: int = _UNBOUNDED) -> ClosedLoop:
        """The load on the engine, whose KV cache has `room` for that many requests."""
        return ClosedLoop(
            clients=row.concurrency,
            max_running_requests=max(1, min(row.concurrency - self.reserved_slots, room)),
            max_batched_tokens=self.max_batched_tokens * row.dp,
            max_prefill_delay_steps=self.gather_steps,
            prefill_batch_tokens=self.gather_tokens,
            mixes_steps=self.mixes_steps,
            receive_interval_steps=self.receive_interval_steps,
        )


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


def calibration_of(engine: str, calibrations: Calibrations) -> Calibration | None:
    """The calibration of an engine; None: it has none."""
    return calibrations.get(engine) or calibrations.get(engine + _SYNCHRONOUS)


def unfit_reason(row: MeasuredRow) -> str | None:
    """Why calibration leaves a row out; None if it is used."""
    if row.disaggregated or not row.concurrency:
        return "it measured separate pools" if row.disaggregated else _NO_CLIENTS
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
    if not row.concurrency:
        raise ValueError(_NO_CLIENTS)
    calibration = (
        calibrations.get(host_of(row))
        or calibration_of(row.backend, calibrations)
        or calibration_of("vllm", calibrations)
    )
    default_efficiency = engine_efficiency(row.backend)
    efficiency, extrapolated = default_efficiency, tuple[str, ...]()
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
    clients that Little's law gives. A prompt waits behind the others that began with it, and as in
    a queue with random arrivals later, never for more than all clients' prompts. Keys and values
    cross the network, and the decode pool's first step gives the first token.

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
    alone = replace(recipe.closed_loop(row), clients=1, think_time_s=0.0)
    prompt_s = sum(
        closed_loop.simulate_closed_loop(
            prefill, [RequestLengths(each.prompt_tokens, 1) for each in lengths[:10]], alone
        ).ttft
    )
    clients = max(1.0, row.concurrency / (pools.prefill_workers * pools.prefill.dp))
    first_wait_s = (clients - 1) / 2 * prompt_s / recipe.requests_per_client
    decoding, ttft_s, tpot_s = float(row.concurrency), prompt_s, 0.0
    for _ in range(_POOL_ROUNDS):
        streams = max(1, round(decoding / pools.decode_workers))
        context_tokens = round(streams * (prompt + output / 2))
        tpot_s = decode.step_s(
            StepBatch(decode_requests=streams, decode_context_tokens=context_tokens)
        )
        decode_s = (output - 1) * tpot_s
        busy = min(_MAX_BUSY_FRACTION, clients * prompt_s / (ttft_s + decode_s))
        wait_s = min(first_wait_s + prompt_s * busy / (2 * (1 - busy)), (clients - 1) * prompt_s)
        prefilled_s = max(prompt_s + wait_s, clients * prompt_s - decode_s)
        ttft_s = prefilled_s + transfer_s + tpot_s
        decoding = row.concurrency * decode_s / (decode_s + ttft_s)
    return ttft_s, tpot_s


def _predict_simulated(row: MeasuredRow, efficiency: Efficiency) -> tuple[float, float]:
    """Mean latencies of the simulated engine, which schedules and fills memory as vLLM does."""
    recipe, shape = recipe_of(row), find_shape(row.model)
    loop = recipe.closed_loop(row)
    block_tokens = shape.block_tokens(_BLOCK_SIZE_TOKENS, recipe.kv, row.tp)
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


def _room(row: MeasuredRow) -> int:
    """Requests that the engine's KV cache holds at once; unbounded where its memory is not known.

    vLLM admits a request by its prompt, so that each holds half of its output on average.
    TensorRT-LLM reserves all of it (`GUARANTEED_NO_EVICT`), in its share of the other memory.
    """
    recipe = recipe_of(row)
    reserves_all = row.backend == "trtllm" and recipe.is_published
    is_known = row.backend == "vllm" or reserves_all
    if recipe.distinct_prompts is not None or not is_known:
        return _UNBOUNDED
    memory_fit = _memory_fit(row, utilization=1.0 if reserves_all else _UTILIZATION)
    mean_length_fraction = (1.0 + recipe.min_length_fraction) / 2
    output_tokens = row.output_tokens if reserves_all else row.output_tokens / 2
    held_tokens = round(mean_length_fraction * (row.prompt_tokens + output_tokens))
    return max(1, int(recipe.kv_fraction * memory_fit.concurrent_requests(held_tokens)))


def _memory_fit(row: MeasuredRow, *, utilization: float = _UTILIZATION) -> memory.MemoryFit:
    recipe = recipe_of(row)
    loop = recipe.closed_loop(row)
    return memory.fit(
        find_shape(row.model),
        find_accelerator(row.system),
        tp=row.tp,
        pp=row.pp,
        dp=row.dp,
        ep=row.ep > 1,
        weights=weight_dtype(row),
        kv=recipe.kv,
        utilization=utilization,
        max_batched_tokens=loop.max_batched_tokens,
        max_running_requests=loop.max_running_requests,
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
        weights=weight_dtype(row),
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


def recipe_of(row: MeasuredRow) -> _Recipe:
    """The recipe of a row."""
    lengths = (row.prompt_tokens, row.output_tokens)
    if lengths in _INFERENCE_X_LENGTHS and _OWN_RUN_MARK not in row.run_id:
        return _inference_x(row)
    return _fixed_lengths(row)


def _inference_x(row: MeasuredRow) -> _Recipe:
    """Ten requests for each client, all clients at once, random lengths.

    Settings are those of the scripts that started the engines, by model, type and generation of
    the GPU. Disaggregated runs are taken to use the same.

    Source: SemiAnalysisAI/InferenceX, `benchmarks/` and `benchmarks/single_node/`, early 2026.
    """
    match row.backend:
        case "sglang":
            return _inference_x_sglang(row)
        case "trtllm":
            return _inference_x_trtllm(row)
        case _:
            return _inference_x_vllm(row)


def _inference_x_vllm(row: MeasuredRow) -> _Recipe:
    """Keys and values in FP8 with FP8 and FP4 weights; experts keep them in 16 bits on Hopper.

    MiniMax on Blackwell has a budget of two prompts. Hopper unpacks FP4 experts by Marlin kernels.
    """
    is_hopper, dtype = row.system in _HOPPER, weight_dtype(row)
    has_experts = find_shape(row.model).experts is not None
    is_16_bit = dtype not in {Dtype.FP8, Dtype.FP4, Dtype.INT8} or (
        is_hopper if has_experts else row.system == "h100_sxm"
    )
    takes_two_prompts = "minimax" in row.model.lower() and not is_hopper
    return _Recipe(
        name="InferenceX",
        is_published=True,
        kv=Dtype.BF16 if is_16_bit else Dtype.FP8,
        experts=Dtype.INT4 if is_hopper and dtype is Dtype.FP4 else None,
        min_length_fraction=0.8,
        max_batched_tokens=2 * row.prompt_tokens if takes_two_prompts else 8192,
    )


class _SglangLaunch(NamedTuple):
    """Options of SGLang's server."""

    chunk_tokens: int
    few: int = 1
    """Decode steps between looks for new requests, with few clients;"""
    many: int = 1
    """with 16 and more."""
    kv: Dtype = Dtype.FP8


_HOPPER = frozenset({"h100_sxm", "h200_sxm"})
_SGLANG_LAUNCHES = {
    ("deepseek", Dtype.FP8, True): _SglangLaunch(32768, kv=Dtype.BF16),
    ("deepseek", Dtype.FP8, False): _SglangLaunch(32768, 10, 30),
    ("deepseek", Dtype.FP4, False): _SglangLaunch(16384, 10, 30),
    ("glm-5", Dtype.FP8, True): _SglangLaunch(8192, kv=Dtype.BF16),
    ("glm-5", Dtype.FP8, False): _SglangLaunch(32768),
    ("glm-5", Dtype.FP4, False): _SglangLaunch(32768, 10, 10),
    ("qwen3.5", Dtype.BF16, False): _SglangLaunch(32768, 10, 30, Dtype.BF16),
    ("qwen3.5", Dtype.FP8, False): _SglangLaunch(32768, 10, 30),
    ("qwen3.5", Dtype.FP8, True): _SglangLaunch(16384),
    ("qwen3.5", Dtype.FP4, False): _SglangLaunch(16384, 10, 30),
}
"""By family, type of the weights, and whether the GPU is of the Hopper generation."""
_MANY_CLIENTS = 16


def _inference_x_sglang(row: MeasuredRow) -> _Recipe:
    """Steps with prompts have no decodes, as is SGLang's default."""
    is_hopper, dtype, name = row.system in _HOPPER, weight_dtype(row), row.model.lower()
    family = next((key[0] for key in _SGLANG_LAUNCHES if key[0] in name), "")
    default = _SglangLaunch(8192, kv=Dtype.BF16 if is_hopper else Dtype.FP8)
    launch = _SGLANG_LAUNCHES.get((family, dtype, is_hopper), default)
    return _Recipe(
        name="InferenceX, SGLang",
        is_published=True,
        kv=launch.kv,
        min_length_fraction=0.8,
        max_batched_tokens=launch.chunk_tokens,
        mixes_steps=False,
        receive_interval_steps=launch.many if row.concurrency >= _MANY_CLIENTS else launch.few,
    )


def _inference_x_trtllm(row: MeasuredRow) -> _Recipe:
    """Keys and values in FP8, but gpt-oss on Hopper.

    Sums, norms and activations quantize for dense models in FP8, whose scales are in the
    checkpoints (`AllReduceFusionOp.RESIDUAL_RMS_NORM_QUANT_FP8`).

    Prompts of 1k/1k runs wait for a batch. Those of dense models on fewer than eight devices wait
    for up to 20 steps. Those of DeepSeek in FP8 on Blackwell with 64 to 255 clients for up to 40.
    """
    name, is_hopper, dtype = row.model.lower(), row.system in _HOPPER, weight_dtype(row)
    recipe = _Recipe(
        name="InferenceX, TensorRT-LLM",
        is_published=True,
        kv=Dtype.BF16 if dtype in {Dtype.BF16, Dtype.FP16} else Dtype.FP8,
        fuses_quantization=dtype is Dtype.FP8 and find_shape(row.model).experts is None,
        min_length_fraction=0.8,
        max_batched_tokens=16384,
        kv_fraction=0.9,
    )
    is_even = row.prompt_tokens == row.output_tokens
    if "gpt-oss" in name:
        kv = Dtype.BF16 if is_hopper else Dtype.FP8
        return replace(recipe, kv=kv, max_batched_tokens=20000, kv_fraction=0.85)
    if "deepseek" in name:
        tokens = max(8192, row.prompt_tokens + row.concurrency + 64)
        waits = is_even and dtype is Dtype.FP8 and not is_hopper and 64 <= row.concurrency < 256  # noqa: PLR2004 - as above
        return replace(
            recipe,
            max_batched_tokens=tokens,
            kv_fraction=0.75 if is_hopper else 0.8,
            gather_steps=40 if waits else 0,
            gather_tokens=int(0.8 * tokens) if waits else 0,
        )
    waits = is_even and row.tp < 8  # noqa: PLR2004 - as above
    return replace(
        recipe,
        gather_steps=20 if waits else 0,
        gather_tokens=int(0.9 * recipe.max_batched_tokens) if waits else 0,
    )


def _fixed_lengths(row: MeasuredRow) -> _Recipe:
    """Runs of AIConfigurator: fixed lengths; how they were run is not published.

    Rows on H100 are as if all clients began at once with ten requests each: with equal lengths,
    they stay close together. vLLM's and TensorRT-LLM's steps hold about one or two prompts.
    SGLang computes prompts in steps without decodes by default (`--enable-mixed-chunk`). Sweeps
    over multiples of 1,000 tokens were run later, with the engines' default budgets. Their prompts
    seem to repeat: vLLM and TensorRT-LLM hardly compute any. TensorRT-LLM does not reuse blocks of
    models with windows.

    TensorRT-LLM's rows of one model show one waiting client, as if the batch had a slot for each
    and one slot were a dummy request's that pads CUDA graphs. On H100 they level off at 36 requests
    and 9,000 tokens a second on any number of devices.

    Keys and values have the engines' default type: FP8 if an NVIDIA checkpoint in FP8 says so, else
    16 bits.
    """
    recipe = _Recipe(
        name=f"fixed lengths, {row.backend}",
        is_published=False,
        kv=Dtype.FP8
        if row.weights is Dtype.FP8 and row.model.startswith("nvidia/")
        else Dtype.BF16,
    )
    if row.prompt_tokens % 1000 == 0:
        repeats = row.backend != "sglang" and not find_shape(row.model).windowed_layers
        return replace(recipe, distinct_prompts=_DATASET_PROMPTS if repeats else None)
    match row.backend:
        case "sglang":
            return replace(recipe, mixes_steps=False)
        case "trtllm":
            return replace(
                recipe,
                max_batched_tokens=max(2048, 2 * row.prompt_tokens) + row.concurrency,
                frontend_requests_per_s=36,
                frontend_tokens_per_s=9000,
                reserved_slots=int(row.model in _MODELS_WITH_A_WAITING_CLIENT),
            )
        case _:
            return replace(recipe, max_batched_tokens=row.prompt_tokens + row.concurrency)


def weight_dtype(row: MeasuredRow) -> Dtype:
    """The type of most of its weights."""
    shape = find_shape(row.model)
    if shape.experts is not None and row.experts is not None:
        return row.experts
    return row.weights or dtype_hint(row.model) or Dtype.BF16
