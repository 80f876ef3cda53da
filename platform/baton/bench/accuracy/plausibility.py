"""Whether a measured row can be at all: what it implies, against what its devices do at their best.

No prediction takes part. By Little's law so many clients with such latencies are so many requests a
second; each needs arithmetic, keys and values read and activations exchanged, which depend on each
other within a step and so cannot overlap. All of it at the best rates that data sheets and tables
of kernels show must fit into the time that there was. Where it does not, something was not
computed: most likely prompts, found in the prefix cache as benchmarks repeat their random prompts.
"""

from __future__ import annotations

from typing import NamedTuple

from baton.bench.accuracy.measurements import MeasuredRow
from baton.bench.accuracy.recipes import recipe_of, weight_dtype
from baton.perf.hardware.accelerators import DTYPE_BYTES, Accelerator, Dtype
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.model.known_models import find_shape
from baton.perf.model.shape import ModelShape
from baton.perf.steps.roofline import compute_dtype, is_narrow

_BEST_PRODUCTS = 0.97
_BEST_NARROW_PRODUCTS = 0.85
"""Most of the rated operations per second that any product reaches, of 16-bit and of narrower
inputs. Source: AIConfigurator's tables of vLLM 0.14 and 0.24 on A100, H100 (0.97, 0.81) and H200
(0.95, 0.85)."""
_BEST_ATTENTION = 0.80
"""The same of attention over prompts. Source: the same tables (H100, 16,384 tokens)."""
_REDUCED_BYTES = 2.0
"""Per number that devices of a group sum up, twice a layer; each sends it at least once, as where
the switch does the sum. Source: NVLink SHARP (NVIDIA, Hopper architecture)."""


class BusyFractions(NamedTuple):
    """Shares of the time, at the best rates there are."""

    products: float
    """Arithmetic, or reading the weights once a step if that is longer."""
    attention: float
    """Over prompts."""
    kv_reads: float
    """Reading keys and values for each token that is decoded."""
    links: float
    """Summing up over the devices of a group."""

    @property
    def total(self) -> float:
        """Above 1 is impossible."""
        return sum(self)


def implausible_reason(row: MeasuredRow) -> str | None:
    """What is wrong with a row; None if nothing can be said against it."""
    fractions = busy_fractions(row)
    if fractions.total <= 1.0:
        return None
    return (
        f"it implies more than its devices can compute: at their best they would be busy for"
        f" {fractions.total:.0%} of the time (products {fractions.products:.0%}, attention"
        f" {fractions.attention:.0%}, keys and values {fractions.kv_reads:.0%}, links"
        f" {fractions.links:.0%})"
    )


def busy_fractions(row: MeasuredRow) -> BusyFractions:
    """How busy a row's devices were at the least.

    Raises:
        BatonError: nothing is known of its model or its device.
    """
    shape, device = find_shape(row.model), find_accelerator(row.system)
    devices, mean_length_fraction = row.tp * row.pp, (1.0 + recipe_of(row).min_length_fraction) / 2
    prompt, output = (
        row.prompt_tokens * mean_length_fraction,
        row.output_tokens * mean_length_fraction,
    )
    requests_per_s = row.concurrency / (row.ttft_s + (output - 1) * row.tpot_s)
    tokens = prompt + output - 1
    read_bytes = output * shape.kv_bytes(int(prompt + output / 2), recipe_of(row).kv)
    all_reduce_bytes = 2 * shape.layers * tokens * shape.hidden * _REDUCED_BYTES
    return BusyFractions(
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
    # One token of each request a step: so many steps, and each reads what a token goes through.
    step_bytes = shape.active_layer_parameters * DTYPE_BYTES[weights]
    return max(compute_s, step_bytes / row.tpot_s / device.memory_bytes_per_s)


def _attention_s(shape: ModelShape, device: Accelerator, prompt_tokens: float) -> float:
    """Of one prompt on one device, at the rate of its narrowest type; windows not counted."""
    latent = shape.latent
    width = 2 * shape.head_dim
    if latent is not None:
        width = latent.nope_dim + latent.rope_dim + latent.value_dim
    layers = shape.layers - shape.windowed_layers
    pairs = layers * prompt_tokens * prompt_tokens / 2
    return 2 * shape.heads * width * pairs / (device.flops_of(Dtype.FP8) * _BEST_ATTENTION)
