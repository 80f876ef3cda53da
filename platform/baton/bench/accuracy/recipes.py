"""How published rows were measured: the client's lengths and requests, the engine's settings.

Rows say how many tokens and clients there were, not how the benchmark was run. The recipes here are
what the benchmarks' public scripts and the engines' documentation say; where there is neither, what
is assumed is said. They do not depend on what was measured.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from baton.bench.accuracy.measurements import MeasuredRow
from baton.perf.capacity.closed_loop import ClosedLoop, RequestLengths
from baton.perf.hardware.accelerators import Dtype
from baton.perf.model.known_models import dtype_hint, find_shape

_INFERENCE_X_LENGTHS = frozenset({(1024, 1024), (1024, 8192), (8192, 1024)})
"""The lengths of InferenceX. Source: InferenceMAX README, benchmark client configuration."""
_SEED = 0
_MAX_FRONTEND_BUSY_FRACTION = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way of measuring."""

    name: str
    is_published: bool
    """Whether how it was run is published, or partly assumed."""
    kv: Dtype
    min_length_fraction: float = 1.0
    """Lengths are uniform from this share of the nominal one to all of it."""
    requests_per_client: int = 10
    starts_warm: bool = False
    """Whether clients were at different points of their requests when measuring began, rather than
    all at the beginning of the first: the first two of each are then left out of the means, and the
    outputs of the very first are cut short, by anything."""
    max_batched_tokens: int = 8192
    reserved_slots: int = 0
    """Of as many places as there are clients, those that no request gets."""
    gather_steps: int = 0
    gather_tokens: int = 0
    frontend_requests_per_s: float = math.inf
    frontend_tokens_per_s: float = math.inf
    """Where the server in front of the engine comes to its end."""

    def is_engine_bound(self, row: MeasuredRow) -> bool:
        """Whether what was measured tells of the engine: the frontend was at most half busy."""
        request_s = row.ttft_s + (row.output_tokens - 1) * row.tpot_s
        requests_per_s = row.concurrency / request_s
        tokens_per_s = requests_per_s * row.output_tokens
        busy = requests_per_s / self.frontend_requests_per_s
        return max(busy, tokens_per_s / self.frontend_tokens_per_s) <= _MAX_FRONTEND_BUSY_FRACTION

    def draw_lengths(self, row: MeasuredRow) -> list[RequestLengths]:
        """What the clients ask, in order; the same for the same row."""
        rng = random.Random(_SEED)  # noqa: S311 - lengths, no secrets

        def draw(nominal: int) -> int:
            return rng.randint(max(2, int(nominal * self.min_length_fraction)), max(2, nominal))

        count = row.concurrency * self.requests_per_client
        lengths = [
            RequestLengths(draw(row.prompt_tokens), draw(row.output_tokens)) for _ in range(count)
        ]
        if self.starts_warm:
            for number, other in enumerate(lengths[: row.concurrency]):
                lengths[number] = RequestLengths(
                    other.prompt_tokens, rng.randint(2, other.output_tokens)
                )
        return lengths

    def closed_loop(self, row: MeasuredRow) -> ClosedLoop:
        """How the engine is loaded."""
        return ClosedLoop(
            clients=row.concurrency,
            max_running_requests=max(1, row.concurrency - self.reserved_slots),
            max_batched_tokens=self.max_batched_tokens,
            warm_up_requests=2 * row.concurrency if self.starts_warm else 0,
            max_prefill_delay_steps=self.gather_steps,
            prefill_batch_tokens=self.gather_tokens,
        )


def recipe_of(row: MeasuredRow) -> Recipe:
    """How this row was measured."""
    if (row.prompt_tokens, row.output_tokens) in _INFERENCE_X_LENGTHS:
        return _inference_x(row)
    return _fixed_lengths(row)


def _inference_x(row: MeasuredRow) -> Recipe:
    """Ten requests for each client, all clients at once, no warm-up, random lengths.

    vLLM keeps keys and values in FP8 with FP8 and FP4 weights, but not on H100; TensorRT-LLM does
    everywhere, and holds prompts of 1k/1k runs on fewer than eight devices for up to 20 steps.
    Source: InferenceMAX, benchmarks/70b_fp8_{h100_docker,h200_slurm,b200_slurm,h200_trt_slurm}.sh.
    """
    has_narrow_weights = row.weights in {Dtype.FP8, Dtype.FP4, Dtype.INT4, Dtype.INT8}
    if row.backend != "trtllm":
        has_16_bit_kv = not has_narrow_weights or row.system == "h100_sxm"
        kv = Dtype.BF16 if has_16_bit_kv else Dtype.FP8
        return Recipe(name="InferenceX", is_published=True, kv=kv, min_length_fraction=0.8)
    waits_for_batch = row.prompt_tokens == row.output_tokens and row.tp < 8  # noqa: PLR2004 - as above
    return Recipe(
        name="InferenceX, TensorRT-LLM",
        is_published=True,
        kv=Dtype.FP8 if has_narrow_weights else Dtype.BF16,
        min_length_fraction=0.8,
        max_batched_tokens=16384,
        gather_steps=20 if waits_for_batch else 0,
        gather_tokens=int(0.9 * 16384) if waits_for_batch else 0,
    )


def _fixed_lengths(row: MeasuredRow) -> Recipe:
    """Runs of AIConfigurator's own: fixed lengths; how many requests is not published.

    TensorRT-LLM's rows show no trace of all clients beginning at once, so a warm-up came before:
    engines that decode and compute prompts in the same step leave clients at different points of
    their requests, and all that do are taken to be measured like that. SGLang does not, unless told
    (`--enable-mixed-chunk`): who begins together ends together and begins together again. For it
    ten requests for each client are assumed, all clients at once.
    TensorRT-LLM's rows show one client waiting at any time where its batch has as many places as
    there are clients: one place is a dummy request's that pads CUDA graphs. On H100 they level off
    at 36 requests and 9,000 tokens a second on any number of devices.
    Keys and values as the engines keep them unless told: in FP8 where an NVIDIA checkpoint in FP8
    says so, else in 16 bits.
    """
    kv = Dtype.FP8 if row.weights is Dtype.FP8 and row.model.startswith("nvidia/") else Dtype.BF16
    if row.backend == "sglang":
        return Recipe(name="fixed lengths, SGLang", is_published=False, kv=kv)
    recipe = Recipe(
        name="fixed lengths",
        is_published=False,
        kv=kv,
        requests_per_client=6,
        starts_warm=True,
    )
    if row.backend != "trtllm":
        return recipe
    return replace(
        recipe,
        name="fixed lengths, TensorRT-LLM",
        frontend_requests_per_s=36,
        frontend_tokens_per_s=9000,
        reserved_slots=1,
    )


def weight_dtype(row: MeasuredRow) -> Dtype:
    """What most of its weights are stored in."""
    shape = find_shape(row.model)
    if shape.experts is not None and row.experts is not None:
        return row.experts
    return row.weights or dtype_hint(row.model) or Dtype.BF16
