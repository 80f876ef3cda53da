"""What DistServe published that its engines can be simulated from: lengths, step times, capacities.

Lengths decide attainment more than anything else does, so they are taken from what was served, not
from the data sets as they lie: DistServe joins 1 to k messages of a conversation into a prompt,
answers with the next one (a person's as often as a model's, hence the many short outputs) and drops
whatever is 2,048 tokens or longer in all.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from baton.perf.tables import PolynomialTiming
from baton.simulator.workloads.trace import TraceRequest

Lengths = Callable[[random.Random], tuple[int, int]]
"""Draws a prompt's and an output's tokens."""

LONGEST_TOKENS = 2048
"""Of prompt and output. Source: DistServe, evaluation/2-benchmark-serving/0-prepare-dataset.py."""

SHAREGPT_PROMPTS = (
    *(2, 30, 90, 166, 253, 334, 383, 458, 549, 608, 723),
    *(796, 863, 968, 1025, 1147, 1308, 1421, 1512, 1696, 2003),
)
SHAREGPT_OUTPUTS = (
    *(2, 6, 9, 11, 14, 18, 23, 32, 36, 52, 81),
    *(119, 163, 201, 239, 291, 351, 400, 477, 561, 1085),
)
"""Each twentieth quantile of the 400 requests of one of DistServe's own runs (prompts 763 on
average, outputs 176; correlation -0.09, which the bound on their sum brings about by itself).
Source: LLMServe/DistServe, simdistserve/benchmarks/alignment/data-ground-truth/
opt-13b-sharegpt-workload/vllm-400-4.exp."""

HUMANEVAL_PROMPT = (171.3, 0.49)
HUMANEVAL_OUTPUT = (98.2, 0.80)
"""Mean tokens and the sigma of a log-normal distribution. The means are those of DistServe's paper;
each sigma spans the shortest and the longest of the data set's 164 problems (115 to 1,360
characters of prompt, mean 451; 16 to 864 of solution, mean 181), which lie 2.5 sigma from the
median. Source: DistServe (OSDI'24) §6.1; openai_humaneval as its data set viewer shows it."""


def sharegpt(rng: random.Random) -> tuple[int, int]:
    """A request of DistServe's ShareGPT."""
    while True:
        prompt = round(at_quantile(SHAREGPT_PROMPTS, rng.random()))
        output = round(at_quantile(SHAREGPT_OUTPUTS, rng.random()))
        if prompt + output < LONGEST_TOKENS:
            return prompt, output


def humaneval(rng: random.Random) -> tuple[int, int]:
    """A request of DistServe's HumanEval."""
    return _lognormal(rng, *HUMANEVAL_PROMPT), _lognormal(rng, *HUMANEVAL_OUTPUT)


def at_quantile(quantiles: tuple[int, ...], q: float) -> float:
    """The q-quantile of what has these evenly spaced quantiles, linear between them."""
    place = q * (len(quantiles) - 1)
    below = min(int(place), len(quantiles) - 2)
    return quantiles[below] + (place - below) * (quantiles[below + 1] - quantiles[below])


def poisson(
    lengths: Lengths, rate_per_s: float, *, requests: int, seed: int
) -> tuple[TraceRequest, ...]:
    """Requests that arrive independently. The same seed draws the same lengths at any rate."""
    rng = random.Random(f"lengths/{seed}")  # noqa: S311 - a load, not a secret
    gaps = random.Random(f"gaps/{seed}")  # noqa: S311
    arrived_at_s, drawn = 0.0, []
    for _ in range(requests):
        arrived_at_s += gaps.expovariate(1.0) / rate_per_s
        drawn.append(TraceRequest(arrived_at_s, *lengths(rng)))
    return tuple(drawn)


def capacity_tokens(folder: Path, model: str, *, tp: int, pp: int) -> int:
    """Tokens of KV cache that DistServe found room for.

    Raises:
        KeyError: it did not look.
    """
    with (folder / "perf/distserve/max_num_tokens.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["model"], int(row["tp"]), int(row["pp"])) == (model, tp, pp):
                return int(row["max_num_tokens"])
    raise KeyError(f"no KV capacity of {model} with tp {tp}, pp {pp} in max_num_tokens.csv")


def timing(
    folder: Path, engine: str, model: str, *, tp: int, pp: int, overhead: bool
) -> PolynomialTiming:
    """Step times of an engine, `vllm` or `distserve`, on A100-80G, as fitted.

    With `overhead` each step takes what DistServe's simulator adds for its own engine: 2 ms and
    0.1 us a token for Ray, and 1 ms a stage. Its published logs (vllm-100-1.exp and
    distserve-c21d11-300-3.exp, beside the lengths) say who needs that: prompts that hardly waited
    took vLLM 0.94 times what the fit alone says, and DistServe 7 ms more than it (medians).

    Raises:
        KeyError: it was not fitted.
    """
    text = (folder / f"perf/distserve/profiler-a100-80g.{engine}.json").read_text()
    fitted = json.loads(text)[model][str(tp)]
    plain = PolynomialTiming(
        prefill=tuple(fitted["prefill"]),
        small=tuple(fitted["decoding_smallbs"]),
        large=tuple(fitted["decoding_largebs"]),
        large_from=fitted["decoding_large_small_bs_threshold"],
        pipeline_stages=pp,
    )
    return plain if overhead else replace(plain, stage_ms=0.0, engine_ms=0.0, engine_token_ms=0.0)


def _lognormal(rng: random.Random, mean: float, sigma: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))
