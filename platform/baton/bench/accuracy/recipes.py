"""How measured rows were measured.

Rows tell tokens and clients only. Recipes come from public scripts of benchmarks and documentation
of engines, with named assumptions, independent of measured values.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import NamedTuple

from baton.bench.accuracy.measurements import MeasuredRow
from baton.perf.capacity.closed_loop import ClosedLoop, RequestLengths
from baton.perf.hardware.accelerators import DTYPE_BYTES, Dtype
from baton.perf.model.known_models import dtype_hint, find_shape
from baton.perf.model.quantization import experts_only_weights
from baton.perf.model.shape import ModelShape
from baton.perf.model.weight_formats import MX_GROUP, integers, nvfp4

_INFERENCE_X_LENGTHS = frozenset({(1024, 1024), (1024, 8192), (8192, 1024)})
"""Source: InferenceMAX README, benchmark client configuration."""
_OWN_RUN_MARK = "_epnone"
"""In names of AIConfigurator's own runs, some of which have the same lengths. Those of InferenceX
begin with a date, or end with a number of its database."""
_MODELS_WITH_A_WAITING_CLIENT = frozenset({"meta-llama/Llama-3.1-8B-Instruct"})
_DATASET_PROMPTS = 100
"""Source: AIPerf, `--num-dataset-entries`, its default."""
_TRTLLM_TOKEN_S = 80e-6
_SGLANG_TOKEN_S = 48e-6
_SEED = 0
BLOCK_SIZE_TOKENS = 16
_MAX_FRONTEND_BUSY_FRACTION = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
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
    """Of a step of one rank."""
    reserved_slots: int = 0
    """Slots of the batch, one per client, that no request gets."""
    mixes_steps: bool = True
    distinct_prompts: int | None = None
    """Later prompts repeat these, so the prefix cache has them; None: all differ."""
    warm_up_requests_per_client: int = 0
    """Sent before those that are measured, and with the first of the prompts."""
    gather_steps: int = 0
    gather_tokens: int = 0
    receive_interval_steps: int = 1
    prepares_ahead: bool = False
    kv_fraction: float | None = None
    """Of the memory beside weights, for an engine that takes such a share; None: not known."""
    static_fraction: float | None = None
    """Of all memory, for weights, keys and values, for an engine that takes such a share."""
    frontend_requests_per_s: float = math.inf
    """Limit of the server in front of the engine, which is not modelled."""
    frontend_token_s: float = 0.0
    """Time of that server for each output token."""

    def is_engine_bound(self, row: MeasuredRow) -> bool:
        """Whether the frontend was at most half busy, so that the row describes the engine."""
        request_s = row.ttft_s + (row.output_tokens - 1) * row.tpot_s
        requests_per_s = row.concurrency / request_s
        tokens_per_s = requests_per_s * row.output_tokens
        busy = requests_per_s / self.frontend_requests_per_s
        return max(busy, tokens_per_s * self.frontend_token_s) <= _MAX_FRONTEND_BUSY_FRACTION

    def draw_lengths(self, row: MeasuredRow) -> list[RequestLengths]:
        """Lengths of the clients' requests, in order; equal for equal rows."""
        rng = random.Random(_SEED)  # noqa: S311 - lengths, no secrets

        def draw(nominal: int) -> int:
            return rng.randint(max(2, int(nominal * self.min_length_fraction)), max(2, nominal))

        count = row.concurrency * self.requests_per_client
        lengths = [
            RequestLengths(draw(row.prompt_tokens), draw(row.output_tokens)) for _ in range(count)
        ]
        if self.distinct_prompts is None:
            return lengths
        warm_up_count = row.concurrency * self.warm_up_requests_per_client
        first_repeated = self.distinct_prompts - warm_up_count
        cached_tokens = max(0, row.prompt_tokens - BLOCK_SIZE_TOKENS)
        return [
            each._replace(cached_tokens=cached_tokens if number >= first_repeated else 0)
            for number, each in enumerate(lengths)
        ]

    def closed_loop(self, row: MeasuredRow, *, room: int | None = None) -> ClosedLoop:
        """The load on the engine, whose KV cache has room for `room` requests; None: for all."""
        most = row.concurrency if room is None else room
        return ClosedLoop(
            clients=row.concurrency,
            max_running_requests=max(1, min(row.concurrency - self.reserved_slots, most)),
            max_batched_tokens=self.max_batched_tokens * row.dp,
            max_prefill_delay_steps=self.gather_steps,
            prefill_batch_tokens=self.gather_tokens,
            mixes_steps=self.mixes_steps,
            receive_interval_steps=self.receive_interval_steps,
            prepares_ahead=self.prepares_ahead,
            frontend_token_s=self.frontend_token_s,
        )


def recipe_of(row: MeasuredRow) -> Recipe:
    """The recipe of a row."""
    lengths = (row.prompt_tokens, row.output_tokens)
    if lengths in _INFERENCE_X_LENGTHS and _OWN_RUN_MARK not in row.run_id:
        return _inference_x(row)
    return _fixed_lengths(row)


def _inference_x(row: MeasuredRow) -> Recipe:
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


def _inference_x_vllm(row: MeasuredRow) -> Recipe:
    """Keys and values in FP8 with FP8 and FP4 weights; experts keep them in 16 bits on Hopper.

    MiniMax on Blackwell has a budget of two prompts. Hopper unpacks FP4 experts by Marlin kernels.
    """
    is_hopper, dtype = row.system in _HOPPER, weight_dtype(row)
    has_experts = find_shape(row.model).experts is not None
    is_16_bit = dtype not in {Dtype.FP8, Dtype.FP4, Dtype.INT8} or (
        is_hopper if has_experts else row.system == "h100_sxm"
    )
    takes_two_prompts = "minimax" in row.model.lower() and not is_hopper
    return Recipe(
        name="InferenceX",
        is_published=True,
        kv=Dtype.BF16 if is_16_bit else Dtype.FP8,
        experts=Dtype.INT4 if is_hopper and dtype is Dtype.FP4 else None,
        min_length_fraction=0.8,
        max_batched_tokens=2 * row.prompt_tokens if takes_two_prompts else 8192,
    )


_SGLANG_MEMORY = 0.85
"""About the default on GPUs of 80 to 192 GB. Source: SGLang 0.5, `ServerArgs`."""


class _SglangLaunch(NamedTuple):
    """Options of SGLang's server."""

    chunk_tokens: int
    few: int = 1
    """Decode steps between looks for new requests, with few clients;"""
    many: int = 1
    """with 16 and more."""
    kv: Dtype = Dtype.FP8
    memory: float = _SGLANG_MEMORY
    """Share of weights, keys and values (`--mem-fraction-static`)."""
    requests: int = 10
    """Of each client."""


_HOPPER = frozenset({"h100_sxm", "h200_sxm"})
_SGLANG_LAUNCHES = {
    ("deepseek", Dtype.FP8, True): _SglangLaunch(32768, kv=Dtype.BF16, memory=0.82),
    ("deepseek", Dtype.FP8, False): _SglangLaunch(32768, 10, 30, memory=0.82),
    ("deepseek", Dtype.FP4, False): _SglangLaunch(16384, 10, 30),
    ("glm-5", Dtype.FP8, True): _SglangLaunch(8192, kv=Dtype.BF16, requests=5),
    ("glm-5", Dtype.FP8, False): _SglangLaunch(32768),
    ("glm-5", Dtype.FP4, False): _SglangLaunch(32768, 10, 10, memory=0.9),
    ("qwen3.5", Dtype.BF16, False): _SglangLaunch(32768, 10, 30, Dtype.BF16, memory=0.82),
    ("qwen3.5", Dtype.FP8, False): _SglangLaunch(32768, 10, 30, memory=0.82),
    ("qwen3.5", Dtype.FP8, True): _SglangLaunch(16384, memory=0.8),
    ("qwen3.5", Dtype.FP4, False): _SglangLaunch(16384, 10, 30),
}
"""By family, type of the weights, and whether the GPU is of the Hopper generation."""
_DEEPSEEK_ON_FOUR_B200 = _SglangLaunch(8192, 10, 10, memory=0.95)
_MANY_CLIENTS = 16


def _inference_x_sglang(row: MeasuredRow) -> Recipe:
    """Steps with prompts have no decodes, as is SGLang's default.

    DeepSeek in FP8 has settings of its own on four Blackwell GPUs.
    """
    is_hopper, dtype, name = row.system in _HOPPER, weight_dtype(row), row.model.lower()
    family = next((key[0] for key in _SGLANG_LAUNCHES if key[0] in name), "")
    default = _SglangLaunch(8192, kv=Dtype.BF16 if is_hopper else Dtype.FP8)
    launch = _SGLANG_LAUNCHES.get((family, dtype, is_hopper), default)
    if (family, dtype, is_hopper, row.tp) == ("deepseek", Dtype.FP8, False, 4):
        launch = _DEEPSEEK_ON_FOUR_B200
    return Recipe(
        name="InferenceX, SGLang",
        is_published=True,
        kv=launch.kv,
        min_length_fraction=0.8,
        requests_per_client=launch.requests,
        static_fraction=launch.memory,
        max_batched_tokens=_rank_chunk_tokens(launch.chunk_tokens, row),
        mixes_steps=False,
        prepares_ahead=True,
        receive_interval_steps=launch.many if row.concurrency >= _MANY_CLIENTS else launch.few,
    )


_EXPERT_FORMATS = {
    Dtype.FP4: nvfp4(None),
    Dtype.INT4: integers(4, MX_GROUP, zero_point=False),
}
"""Of experts in a checkpoint of 4 bits."""


def _rank_chunk_tokens(chunk_tokens: int, row: MeasuredRow) -> int:
    """Of one rank: SGLang's ranks share `--chunked-prefill-size`.

    Source: SGLang 0.5, `ServerArgs._handle_data_parallelism`.
    """
    return max(1, chunk_tokens // row.dp)


def _inference_x_trtllm(row: MeasuredRow) -> Recipe:
    """Keys and values in FP8, but gpt-oss on Hopper.

    Sums, norms and activations quantize for dense models in FP8, whose scales are in the
    checkpoints (`AllReduceFusionOp.RESIDUAL_RMS_NORM_QUANT_FP8`).

    Prompts of 1k/1k runs wait for a batch. Those of dense models on fewer than eight devices wait
    for up to 20 steps. Those of DeepSeek in FP8 on Blackwell with 64 to 255 clients for up to 40.
    """
    name, is_hopper, dtype = row.model.lower(), row.system in _HOPPER, weight_dtype(row)
    recipe = Recipe(
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
    is_dense = find_shape(row.model).experts is None
    waits = is_even and is_dense and row.tp < 8  # noqa: PLR2004 - as above
    return replace(
        recipe,
        gather_steps=20 if waits else 0,
        gather_tokens=int(0.9 * recipe.max_batched_tokens) if waits else 0,
    )


def _fixed_lengths(row: MeasuredRow) -> Recipe:
    """Runs of AIConfigurator: fixed lengths, as far as its scripts tell how they were run.

    All clients begin at once with ten requests each; with equal lengths they stay close together.
    vLLM's and TensorRT-LLM's steps hold about one or two prompts. SGLang computes prompts in steps
    without decodes by default (`--enable-mixed-chunk`).

    Sweeps over multiples of 1,000 tokens were run later, with the engines' default budgets. A
    hundred prompts repeat, except for SGLang and for models with windows. Two requests of each
    client that are not measured warm up vLLM's prefix cache. Rows of TensorRT-LLM on H100 show no
    such warm-up, and keys and values in FP8 beside weights in FP8. The warm-up, and SGLang's step
    that is prepared ahead, were chosen with these sweeps on H200 in sight, which cannot judge them.

    Source: ai-dynamo/aiconfigurator, `eval/benchmarks/genai_perf_runner.py` (two and ten requests
    for each client, all different). The later benchmark script of its `generator` has two, too,
    and no number of prompts, of which AIPerf makes 100.

    TensorRT-LLM's rows of one model show one waiting client, as if the batch had a slot for each
    and one slot were a dummy request's that pads CUDA graphs. On H100 they level off at 36 requests
    and 9,000 tokens a second on any number of devices. A frontend that takes 80 us a token is
    nearest to those rows; the later sweeps of TensorRT-LLM refute it. SGLang's 48 us are a guess
    with H200's rows in sight, which level off at 18,000 tokens a second. No row of H100 comes near
    that. Python's lock bounds the tokens of all clients (ai-dynamo/dynamo, pull requests 6437 and
    10609).

    Keys and values have 16 bits, but FP8 beside weights in FP8 of TensorRT-LLM, and of NVIDIA's
    checkpoints. With 16 bits, 64 requests of 4,608 tokens would not fit beside Qwen3-32B on an
    H100, and its rows show hardly a wait. TensorRT-LLM took 0.8 of the memory beside weights, by
    the `generator`'s templates of its version.
    """
    keeps_fp8 = row.backend == "trtllm" or row.model.startswith("nvidia/")
    recipe = Recipe(
        name=f"fixed lengths, {row.backend}",
        is_published=False,
        kv=Dtype.FP8 if row.weights is Dtype.FP8 and keeps_fp8 else Dtype.BF16,
    )
    if row.backend == "sglang":
        chunk_tokens = _rank_chunk_tokens(recipe.max_batched_tokens, row)
        recipe = replace(
            recipe,
            max_batched_tokens=chunk_tokens,
            prepares_ahead=True,
            frontend_token_s=_SGLANG_TOKEN_S,
        )
    if row.prompt_tokens % 1000 == 0:
        return _later_sweep(row, recipe)
    match row.backend:
        case "sglang":
            return replace(recipe, mixes_steps=False, static_fraction=_SGLANG_MEMORY)
        case "trtllm":
            return replace(
                recipe,
                kv_fraction=0.8,
                max_batched_tokens=max(2048, 2 * row.prompt_tokens) + row.concurrency,
                frontend_requests_per_s=36,
                frontend_token_s=_TRTLLM_TOKEN_S,
                reserved_slots=int(row.model in _MODELS_WITH_A_WAITING_CLIENT),
            )
        case _:
            return replace(recipe, max_batched_tokens=row.prompt_tokens + row.concurrency)


def _later_sweep(row: MeasuredRow, recipe: Recipe) -> Recipe:
    if row.backend == "sglang" or find_shape(row.model).windowed_layers:
        return recipe
    recipe = replace(recipe, distinct_prompts=_DATASET_PROMPTS)
    return replace(recipe, warm_up_requests_per_client=0 if row.backend == "trtllm" else 2)


def weight_dtype(row: MeasuredRow) -> Dtype:
    """The type of most of its weights."""
    shape = find_shape(row.model)
    if shape.experts is not None and row.experts is not None:
        return row.experts
    return row.weights or dtype_hint(row.model) or Dtype.BF16


def product_dtype(row: MeasuredRow) -> Dtype:
    """The type of all products but the experts'.

    It is that of the row where it is not packed. Packed weights are the experts' only.
    """
    is_packed = row.weights is not None and DTYPE_BYTES[row.weights] < 1
    return weight_dtype(row) if row.weights is None or is_packed else row.weights


def stored_shape(row: MeasuredRow) -> ModelShape:
    """The shape of a row's model, with its weights as stored.

    Models with experts in 4 bits that are named after another type store only the experts so, as
    those that are named after theirs.
    """
    shape, dtype = find_shape(row.model), weight_dtype(row)
    is_named_so = shape.stored is not None and shape.stored.dtype is dtype
    if shape.experts is None or is_named_so or dtype not in _EXPERT_FORMATS:
        return shape
    return replace(shape, stored=experts_only_weights(_EXPERT_FORMATS[dtype], shape))
