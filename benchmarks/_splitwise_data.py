"""What Splitwise published: step times by tokens in a batch, its load, its nine objectives."""

from __future__ import annotations

import csv
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from baton.perf.step_timing import StepBatch
from baton.perf.tables import Curve, InterpolatedTiming
from baton.simulator.outcome import Outcome, quantile
from baton.simulator.workloads import azure
from baton.simulator.workloads.trace import Trace, TraceRequest

MODEL = "llama2-70b"
"""The published counts are of this model, though the text does not say so: BLOOM-176B would keep
40.6 DGX-H100 busy with the prompts of 130 requests/s alone, and the published 33 serve them."""
TENSOR_PARALLEL = 8
QUANTILES = (0.5, 0.9, 0.99)
SLOWDOWNS: Mapping[str, tuple[float, float, float]] = {
    "ttft": (2.0, 3.0, 6.0),
    "tbt": (1.25, 1.5, 5.0),
    "e2e": (1.25, 1.5, 5.0),
}
"""At most so many times what one request alone takes on a DGX-A100, at each of `QUANTILES`.
Source: Splitwise (ISCA'24) Table VI; splitwise-sim notebooks/plots.ipynb `get_slo`."""


@dataclass(frozen=True, slots=True)
class InChunks:
    """A machine whose prompts are computed in chunks beside decodes; a `StepTiming`.

    A chunk takes what it adds to its prompt's whole on the curve, so that together they take what
    the prompt takes at once; beside decodes 1.1 times that.
    """

    machine: InterpolatedTiming

    def step_s(self, batch: StepBatch) -> float:
        """One step."""
        if not batch.prefill_tokens:
            return self.machine.step_s(batch)
        prompt, before = self.machine.prompt, batch.prefill_context_tokens
        added_s = prompt.at(before + batch.tokens) - (prompt.at(before) if before else 0.0)
        added_s = max(added_s, self.machine.token.at(batch.tokens))
        return added_s * self.machine.mixed_factor if batch.decode_requests else added_s


def machine(folder: Path, hardware: str, *, model: str = MODEL) -> InterpolatedTiming:
    """A machine's curves: medians of its rows with the same number of tokens in the batch.

    Raises:
        KeyError: nothing of this model was measured on this hardware.
    """
    with (folder / "perf/splitwise/perf_model.csv").open(newline="") as file:
        return curves(csv.DictReader(file), hardware, model=model)


def curves(rows: Iterable[Mapping[str, str]], hardware: str, *, model: str) -> InterpolatedTiming:
    """The same, from rows of `perf_model.csv`.

    Raises:
        KeyError: there are fewer than two of them.
    """
    prompt: dict[int, list[float]] = defaultdict(list)
    token: dict[int, list[float]] = defaultdict(list)
    wanted = (model, hardware, str(TENSOR_PARALLEL))
    for row in rows:
        if (row["model"], row["hardware"], row["tensor_parallel"]) == wanted:
            tokens = int(row["prompt_size"]) * int(row["batch_size"])
            prompt[tokens].append(float(row["prompt_time"]) / 1e3)
            token[tokens].append(float(row["token_time"]) / 1e3)
    if len(prompt) <= 1:
        raise KeyError(f"perf_model.csv has {len(prompt)} sizes of {wanted}, wanted more")
    return InterpolatedTiming(prompt=_curve(prompt), token=_curve(token))


def code_load(folder: Path, *, rate_per_s: float, requests: int, seed: int = 0) -> Trace:
    """Poisson arrivals; prompts and outputs drawn one apart from the other out of the code trace.

    Source: splitwise-sim generate_trace.py.
    """
    with (folder / "traces/azure/AzureLLMInferenceTrace_code.csv").open() as file:
        seen = azure.read(file, "code").requests
    return drawn_apart(seen, rate_per_s=rate_per_s, requests=requests, seed=seed)


def drawn_apart(
    seen: Sequence[TraceRequest], *, rate_per_s: float, requests: int, seed: int
) -> Trace:
    """Requests whose prompts and outputs were each seen, but not together."""
    rng = random.Random(seed)  # noqa: S311 - a load, not a secret
    arrived_at_s, drawn = 0.0, []
    for _ in range(requests):
        arrived_at_s += rng.expovariate(rate_per_s)
        prompt, output = rng.choice(seen).prompt_tokens, rng.choice(seen).output_tokens
        drawn.append(TraceRequest(arrived_at_s, prompt, output))
    return Trace(name=f"code at {rate_per_s:g}/s", requests=tuple(drawn))


def slowdowns(outcomes: Iterable[Outcome], alone: InterpolatedTiming) -> dict[str, list[float]]:
    """How many times as long as alone each request took, by what is bounded.

    Time between tokens is all time after the first token over all tokens, the first among them; a
    request alone decodes at its prompt's place on the token curve.
    Source: splitwise-sim scheduler.py `get_results`, notebooks/perf_model.py `add_baseline_perf`.
    """
    found: dict[str, list[float]] = {name: [] for name in SLOWDOWNS}
    for one in outcomes:
        ttft_s, tbt_s = alone.prompt.at(one.prompt_tokens), alone.token.at(one.prompt_tokens)
        if not one.ok:
            for ratios in found.values():
                ratios.append(float("inf"))
            continue
        found["ttft"].append(one.ttft_s / ttft_s)
        found["tbt"].append((one.e2e_s - one.ttft_s) / one.output_tokens / tbt_s)
        found["e2e"].append(one.e2e_s / (ttft_s + tbt_s * (one.output_tokens - 1)))
    return found


def worst_of(ratios: Mapping[str, Sequence[float]]) -> tuple[float, str]:
    """How far the worst of the nine slowdowns is over its bound, as a ratio, and which it is."""
    return max(
        (quantile(ratios[name], q) / bound, f"{name}_p{q * 100:.0f}")
        for name, bounds in SLOWDOWNS.items()
        for q, bound in zip(QUANTILES, bounds, strict=True)
    )


def _curve(by_tokens: Mapping[int, Sequence[float]]) -> Curve:
    return Curve((tokens, median(seconds)) for tokens, seconds in by_tokens.items())
