"""From every run's figures to those that are quoted: medians, ratios within a repeat, spreads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from baton.simulator.engine.settings import SimSettings
from benchmarks._statistics import RepeatSpread
from benchmarks.rivals.load import LoadPoint
from benchmarks.rivals.measurement import FRONTEND_GROUPS, Metrics

Runs = Mapping[str, Sequence[Mapping[str, Metrics] | None]]
"""By contender, then repeat, then point; None where a visit failed."""

SINGLE_STREAM, STREAMS_64 = (
    LoadPoint(concurrency=1, prompt_tokens=512),
    LoadPoint(concurrency=64, prompt_tokens=512),
)

RATIOS = {
    "rust_gate_over_rust_tokens_per_core": ("baton_rust_gate", "baton_rust"),
    "rust_over_dynamo_fast_tokens_per_core": ("baton_rust", "dynamo_fast"),
    "rust_gate_over_dynamo_fast_tokens_per_core": ("baton_rust_gate", "dynamo_fast"),
    "rust_over_dynamo_tokens_per_core": ("baton_rust", "dynamo"),
    "rust_over_smg_zmq_tokens_per_core": ("baton_rust", "smg_zmq"),
    "rust_over_vllm_rs_tokens_per_core": ("baton_rust", "vllm_rs"),
    "rust_over_smg_before_vllm_tokens_per_core": ("baton_rust", "smg_vllm"),
    "rust_over_vllm_router_before_vllm_tokens_per_core": ("baton_rust", "vllm_router_vllm"),
    "rust_pd_over_dynamo_fast_pd_tokens_per_core": ("baton_rust_pd", "dynamo_fast_pd"),
    "python_over_vllm_tokens_per_core": ("baton_python", "vllm"),
    "python_over_dynamo_fast_tokens_per_core": ("baton_python", "dynamo_fast"),
    "over_ray_llm_pd_tokens_per_core": ("baton_python_pd", "ray_llm_pd"),
    "rust_over_ray_llm_pd_tokens_per_core": ("baton_rust_pd", "ray_llm_pd"),
}
"""At 64 streams; above 1 is ours doing more with a core."""

_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "requests_per_s": ("requests_per_s",),
    "tokens_per_s": ("tokens_per_s",),
    "cpu_ms_per_request": ("cpu_ms_per_request",),
    "cpu_us_per_token": ("cpu_us_per_token",),
    "tokens_per_core_s": ("tokens_per_core_s",),
    "idle_cores": ("idle_cores",),
    "ttft_p50_s": ("ttft_s", "p50"),
    "ttft_p99_s": ("ttft_s", "p99"),
    "gap_max_p50_s": ("gap_max_s", "p50"),
    "gap_max_s": ("gap_max_s", "max"),
}


def metric(metrics: Metrics, *path: str) -> float | None:
    """One figure of a run, None where it has none."""
    value: object = metrics
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, float | int) else None


def rss_mib(metrics: Metrics) -> float:
    """Memory of everything between client and engine."""
    return sum(metric(metrics, "rss_mib", group) or 0.0 for group in FRONTEND_GROUPS)


def medians(runs: Runs) -> dict[str, dict[str, dict[str, float]]]:
    """By contender and point, the median of each figure over the repeats."""
    medians_by_contender: dict[str, dict[str, dict[str, float]]] = {}
    for name, repeats in runs.items():
        visits = [visit for visit in repeats if visit is not None]
        for point in dict.fromkeys(point for visit in visits for point in visit):
            rows = [visit[point] for visit in visits if point in visit]
            columns = {
                column: [v for row in rows if (v := metric(row, *path)) is not None]
                for column, path in _COLUMNS.items()
            } | {"rss_mib": [rss_mib(row) for row in rows]}
            medians_by_contender.setdefault(name, {})[point] = {
                column: RepeatSpread.from_values(values).median
                for column, values in columns.items()
                if values
            }
    return medians_by_contender


def compare(
    runs: Runs,
    ours: str,
    theirs: str,
    point: LoadPoint,
    combine: Callable[[float, float], float],
    *path: str,
) -> list[float]:
    """Two contenders' figures put together, repeat by repeat: the machine changes its mood."""
    values = []
    for entry, other in zip(runs.get(ours, ()), runs.get(theirs, ()), strict=False):
        if entry is None or other is None or point.name not in entry or point.name not in other:
            continue
        a, b = metric(entry[point.name], *path), metric(other[point.name], *path)
        if a is not None and b is not None:
            values.append(combine(a, b))
    return values


def headline(runs: Runs, engine: SimSettings) -> dict[str, object]:
    """The figures that are quoted; null where a contender was not there."""
    values = {
        name: compare(runs, ours, theirs, STREAMS_64, lambda a, b: a / b, "tokens_per_core_s")
        for name, (ours, theirs) in RATIOS.items()
    }
    for frontend in ("python", "rust"):
        for quantile in ("p50", "p99"):
            path = ("ttft_s", quantile)
            added = f"added_ttft_{{}}_{frontend}_{quantile}_s"
            values[added.format("local")] = compare(
                runs, f"baton_{frontend}", "vllm", SINGLE_STREAM, lambda a, b: a - b, *path
            )
            # Nothing of the handoff is left out: it comes after the first token (`rivals-pd.yaml`).
            values[added.format("pd")] = compare(
                runs, f"baton_{frontend}_pd", "vllm", SINGLE_STREAM, lambda a, b: a - b, *path
            )
    for name in runs:
        values[f"ttft_over_engine_{name}_s"] = [
            ttft - own
            for visit in runs[name]
            if visit is not None and SINGLE_STREAM.name in visit
            if (ttft := metric(visit[SINGLE_STREAM.name], "ttft_s", "p50")) is not None
            if (own := engine_ttft_s(name, engine)) is not None
        ]
    spreads = {
        name: RepeatSpread.from_values(found) if found else None for name, found in values.items()
    }
    medians_by_name = {
        name: None if spread is None else spread.median for name, spread in spreads.items()
    }
    medians_by_name["added_ttft_local_s"] = medians_by_name["added_ttft_local_python_p50_s"]
    medians_by_name["added_ttft_pd_s"] = medians_by_name["added_ttft_pd_python_p50_s"]
    spread = {name: asdict(other) for name, other in spreads.items() if other is not None}
    return medians_by_name | {"spread": spread}


def engine_ttft_s(name: str, engine: SimSettings) -> float | None:
    """What the engine itself needs for the first token of one prompt; None where not known."""
    tokens = SINGLE_STREAM.prompt_tokens
    # Real engines; and a mocker whose handoff takes 50 ms that its documents do not explain.
    if name in {"ray_llm_pd", "dynamo_fast_pd"}:
        return None
    if not name.startswith("dynamo"):
        prefill_s = engine.step_s(prefill_tokens=tokens, decode_requests=0)
        # Mocks hand over a prompt, and transfer nothing; baton's first token comes before that.
        return prefill_s + engine.step_overhead_s if name.endswith("_mock_pd") else prefill_s
    # Source: its mocker's polynomial, in ms; prefill runs ten times as fast here.
    prefill_ms = 4.209989e-7 * tokens**2 + 1.518344e-2 * tokens + 16.50142
    return prefill_ms / 10 / 1e3


def table(runs: Runs, failure_reasons: Mapping[str, str]) -> str:
    """All medians, for people."""
    lines = [
        f"{'':22}{'point':>9}{'req/s':>8}{'tok/s':>8}{'ms/req':>8}{'us/tok':>8}{'tok/core s':>11}"
        f"{'TTFT p50':>10}{'p99 ms':>9}{'gap ms':>8}{'RSS MiB':>9}"
    ]
    for name, points in medians(runs).items():
        for point, row in points.items():
            lines.append(
                f"{name:22}{point:>9}{row['requests_per_s']:8.1f}{row['tokens_per_s']:8.0f}"
                f"{row['cpu_ms_per_request']:8.2f}{row['cpu_us_per_token']:8.1f}"
                f"{row.get('tokens_per_core_s', 0):11.0f}{row['ttft_p50_s'] * 1e3:10.2f}"
                f"{row['ttft_p99_s'] * 1e3:9.2f}{row['gap_max_s'] * 1e3:8.1f}{row['rss_mib']:9.0f}"
            )
    lines += [f"{name:22} not measured: {reason}" for name, reason in failure_reasons.items()]
    return "\n".join(lines)
