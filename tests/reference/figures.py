"""Figures of documents that come from result files: each sentence and table, and its keys.

A template is a document's text with `{}` for each figure; blanks match any white space. A table is
written whole. `python -m tests.reference` writes the figures anew; a test compares them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.cli.invoked import run_baton

ROOT = Path(__file__).resolve().parents[2]
_RESULTS = ROOT / "benchmarks" / "results"
_FIGURE = r"([-+]?[\d,]*\.?\d+)"

RIVALS, SIZING, FAQ = "docs/rivals.md", "docs/sizing.md", "docs/faq.md"
BENCHMARKS = "benchmarks/README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """A piece of a document's text with figures."""

    document: str
    template: str
    figures: Callable[[], Sequence[str]]

    def __str__(self) -> str:
        return f"{self.document}: {self.template[:60]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a table of a document."""

    document: str
    header: str
    rows: Callable[[], Sequence[str]]

    def __str__(self) -> str:
        return f"{self.document}: {self.header[:60]}"


class FigureUnbound(ValueError):
    """A document no longer has the text of a template."""


def render(text: str, binding: Sentence | Rows) -> str:
    """The document's text with the figures of the result files.

    Raises:
        FigureUnbound: the template's text is not there exactly once, or has other figures.
    """
    if isinstance(binding, Rows):
        return _render_rows(text, binding)
    match, figures = sentence_match(text, binding), binding.figures()
    if len(figures) != len(match.groups()):
        raise FigureUnbound(f"{binding}: got {len(figures)} figures, expected {match.groups()}")
    for number in reversed(range(len(figures))):
        start, end = match.span(number + 1)
        text = text[:start] + figures[number] + text[end:]
    return text


def _render_rows(text: str, binding: Rows) -> str:
    start, end = rows_span(text, binding)
    return text[:start] + "\n".join(binding.rows()) + text[end:]


def sentence_match(text: str, binding: Sentence) -> re.Match[str]:
    """The place of a sentence; a group for each figure.

    Raises:
        FigureUnbound: it is not there exactly once.
    """
    pattern = _FIGURE.join(
        r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in binding.template.split("{}")
    )
    matches = list(re.finditer(pattern, text))
    if len(matches) != 1:
        raise FigureUnbound(
            f"{binding}: got {len(matches)} places, expected one; update figures.py"
        )
    return matches[0]


def rows_span(text: str, binding: Rows) -> tuple[int, int]:
    """Start and end of a table's rows.

    Raises:
        FigureUnbound: the header is not there exactly once.
    """
    header_at = text.find(binding.header)
    if header_at < 0 or text.find(binding.header, header_at + 1) >= 0:
        raise FigureUnbound(f"{binding}: expected this header once; update figures.py")
    ruler_at = text.index("\n", header_at) + 1
    start = text.index("\n", ruler_at) + 1
    end = text.find("\n\n", start)
    return start, len(text.rstrip("\n")) if end < 0 else end


def pages() -> Mapping[str, Callable[[], str]]:
    """By document: its text with the figures of the result files."""
    names = dict.fromkeys(binding.document for binding in BINDINGS)
    return {name: lambda name=name: _page(name) for name in names}  # type: ignore[misc]


def _page(name: str) -> str:
    text = (ROOT / name).read_text()
    for binding in BINDINGS:
        if binding.document == name:
            text = render(text, binding)
    return text


# ------------------------------------------------------------------ figures of result files


@cache
def result(name: str) -> Any:  # noqa: ANN401 - JSON
    """A result file."""
    return json.loads((_RESULTS / f"{name}.json").read_text())


def ms(seconds: float, digits: int = 0) -> str:
    """Milliseconds."""
    return f"{seconds * 1e3:,.{digits}f}"


def percent(fraction: float, digits: int = 0) -> str:
    """A percentage, without its sign."""
    return f"{fraction * 100:.{digits}f}"


def signed_percent(fraction: float) -> str:
    """A percentage with its sign; 0 has none."""
    whole = round(fraction * 100)
    return f"{whole:+d}" if whole else "0"


def _routing(policy: str) -> list[str]:
    """Mean TTFT in ms: grouped, heavy, single turns."""
    routing = result("routing")
    parts = (routing, routing["heavy"], routing["single_turn"])
    return [ms(part[policy]["ttft_mean_s"]) for part in parts]


def _readme_routing() -> list[str]:
    policies = ("baton", "sglang", "llmd", "mooncake", "dynamo")
    return [figure for policy in policies for figure in _routing(policy)]


def _scaling(part: str, policy: str) -> list[str]:
    """Attainment in per cent and GPU-hours over an oracle's, means over cold starts."""
    attainment = _mean_over_cold_starts(part, policy, "attainment")
    return [percent(attainment, 1), f"{_mean_over_cold_starts(part, policy, 'over_oracle'):.2f}"]


def _mean_over_cold_starts(part: str, policy: str, key: str) -> float:
    rows = result("slo")["parts"][part]["rows"]
    return fmean(row[key] for row in rows if row["policy"] == policy)


def _wva_on_m_large() -> list[str]:
    """How many GPU-hours fewer than baton's, in per cent, and how many times the misses."""
    hours_ratio, misses_ratio = (
        _mean_over_cold_starts("m_large", "wva", "over_oracle")
        / _mean_over_cold_starts("m_large", "baton", "over_oracle"),
        (1 - _mean_over_cold_starts("m_large", "wva", "attainment"))
        / (1 - _mean_over_cold_starts("m_large", "baton", "attainment")),
    )
    return [percent(1 - hours_ratio), f"{misses_ratio:.1f}"]


def _fluid_error_on_bursts() -> list[str]:
    """The largest difference of a policy's attainment, request by request and as a fluid."""
    policies = {row["policy"] for row in result("slo")["parts"]["azure_code"]["rows"]}
    errors = (
        _mean_over_cold_starts("azure_code", policy, "attainment")
        - _mean_over_cold_starts("azure_code_fluid", policy, "attainment")
        for policy in policies
    )
    return [percent(max(map(abs, errors)))]


def _readme_scaling() -> list[str]:
    parts = ("m_large", "azure_code")
    policies = ("baton", "wva", "hpa", "dynamo")
    return [figure for policy in policies for part in parts for figure in _scaling(part, policy)]


def _slo(*keys: str, digits: int = 2) -> list[str]:
    return [f"{result('slo')['headline'][key]:.{digits}f}" for key in keys]


def _silicon_metric(key: str) -> float:
    return float(result("fidelity")["parts"]["silicon"]["metrics"][key])


def _silicon(*keys: str) -> list[str]:
    metrics = result("fidelity")["parts"]["silicon"]["metrics"]
    return [str(metrics[key]) if key.endswith("rows") else percent(metrics[key]) for key in keys]


def _fidelity_row(prefix: str, suffix: str = "") -> list[str]:
    """Error and bias of TPOT, then of TTFT, in per cent."""
    metrics = result("fidelity")["parts"]["silicon"]["metrics"]
    cells = []
    for kind in ("tpot", "ttft"):
        error, bias = (metrics[f"{prefix}_{kind}_{key}{suffix}"] for key in ("mape", "bias"))
        cells += [percent(error), signed_percent(bias)]
    return cells


def _vllm_0_12() -> list[str]:
    """Rows of vLLM that the published ones leave out: errors are of the sum's remainder."""
    metrics = result("fidelity")["parts"]["silicon"]["metrics"]
    all_rows, published = metrics["h200_vllm_rows"], metrics["h200_vllm_published_rows"]
    rest = all_rows - published
    cells = [str(rest), str(all_rows - metrics["h200_vllm_rows_plausible"])]
    for kind in ("tpot", "ttft"):
        for key, show in (("mape", percent), ("bias", signed_percent)):
            whole = metrics[f"h200_vllm_{kind}_{key}"] * all_rows
            part = metrics[f"h200_vllm_published_{kind}_{key}"] * published
            cells.append(show((whole - part) / rest))
    return cells


def _fidelity_part_rows() -> Iterator[str]:
    parts = {name: part["metrics"] for name, part in result("fidelity")["parts"].items()}
    models, classes = parts["models"], parts["architectures"]
    files = models["models_answered"] + models["models_refused"]
    yield (
        f"| `models` | modules of {files} published files | "
        f"{models['models_answered']} answered, "
        f"{percent(models['models_weights_worst_error'], 1)} % off |"
    )
    yield (
        "| `architectures` | modules of transformers' classes | "
        f"{classes['architectures_weights_right']} right, "
        f"{classes['architectures_weights_refused']} refused, "
        f"{classes['architectures_weights_wrong']} wrong |"
    )
    silicon, left_out = parts["silicon"], parts["leave_out"]
    kinds = ("tpot", "ttft")
    all_rows, published = (
        [percent(silicon[f"h200_{which}{kind}_mape"]) for kind in kinds]
        for which in ("", "published_")
    )
    yield (
        "| `silicon` | TTFT and TPOT on H200; fitted to H100 only | "
        f"`h200_tpot_mape` {all_rows[0]} %, `h200_ttft_mape` {all_rows[1]} %; "
        f"rows with published recipes {published[0]} %, {published[1]} % |"
    )
    spans = []
    for kind in reversed(kinds):
        errors = [
            left_out.get(f"{name}_usable", error)
            for name, error in left_out.items()
            if name.endswith(f"{kind}_mape")
        ]
        spans.append(f"{kind.upper()} {percent(min(errors))} to {percent(max(errors))} %")
    yield (
        "| `leave_out` | the same on H100, each model calibrated without it; usable rows | "
        f"{', '.join(spans)} |"
    )
    tpot, ttft = (parts["vllm_log"][f"vllm_log_{kind}_mean_error"] for kind in kinds)
    yield (
        "| `vllm_log` | one vLLM log | "
        f"mean TPOT {tpot * 100:+.1f} %, mean TTFT {ttft * 100:+.1f} % |"
    )


def _vllm_log() -> list[str]:
    metrics = result("fidelity")["parts"]["vllm_log"]["metrics"]
    return [percent(metrics[f"vllm_log_{kind}_mean_error"], 1) for kind in ("tpot", "ttft")]


# ------------------------------------------------------------------ rivals


_RIVALS = (
    *("vllm_rs", "smg_zmq", "dynamo_fast", "baton_rust_gate", "dynamo_fast_pd", "dynamo"),
    *("baton_rust", "baton_rust_pd", "baton_python", "baton_python_pd", "vllm", "smg_vllm"),
    *("vllm_router_vllm", "ray_llm_pd"),
)


def _rival_rows() -> Iterator[str]:
    rivals = result("rivals")
    medians = rivals["medians"]
    for name in sorted(_RIVALS, key=lambda name: medians[name]["64x512"]["cpu_us_per_token"]):
        alone, loaded = medians[name]["1x512"], medians[name]["64x512"]
        cpu = [run["64x512"]["cpu_us_per_token"] for run in rivals["runs"][name] if run]
        yield (
            f"| `{name}` | {loaded['cpu_us_per_token']:.0f} ({min(cpu):.0f}–{max(cpu):.0f}) |"  # noqa: RUF001
            f" {ms(alone['ttft_p50_s'], 1)}/{ms(alone['ttft_p99_s'])} |"
            f" {ms(loaded['gap_max_p50_s'])} | {loaded['rss_mib']:.0f} |"
        )


_RATIOS = (
    "rust_over_dynamo_fast",
    "rust_gate_over_dynamo_fast",
    "rust_over_smg_zmq",
    "rust_over_vllm_rs",
    "rust_over_smg_before_vllm",
    "rust_over_vllm_router_before_vllm",
    "python_over_vllm",
    "python_over_dynamo_fast",
)


def _ratio_rows() -> Iterator[str]:
    for name in _RATIOS:
        key = f"{name}_tokens_per_core"
        yield f"| `{key}` | {result('rivals')[key]:.2f} |"


def _added(*keys: str) -> list[str]:
    """Milliseconds of TTFT beside vLLM's server in Python, more or less."""
    return [ms(abs(result("rivals")[f"added_ttft_{key}_s"]), 1) for key in keys]


def _core_ratio(*names: str) -> list[str]:
    return [f"{result('rivals')[f'{name}_tokens_per_core']:.2f}" for name in names]


def _cpu(name: str) -> str:
    return f"{result('rivals')['medians'][name]['64x512']['cpu_us_per_token']:.0f}"


def _router_mocks() -> list[str]:
    medians = result("rivals")["medians"]
    found = sorted(
        medians[name]["64x512"]["cpu_us_per_token"] for name in ("smg_mock", "vllm_router_mock")
    )
    return [f"{figure:.0f}" for figure in found]


def _gaps_at_256() -> list[str]:
    medians = result("rivals_256_streams")["medians"]
    names = ("baton_python", "vllm")
    return [ms(medians[name]["256x512"]["gap_max_p50_s"]) for name in names]


def _step_at_256() -> list[str]:
    engine = result("rivals_256_streams")["engine"]
    step_s = engine["decode_step_s"] + 256 * engine["decode_request_s"] + engine["step_overhead_s"]
    return [ms(step_s)]


def _handoff_gaps() -> list[str]:
    """Milliseconds that a handoff adds to the longest gap, for both API servers."""
    medians = result("rivals")["medians"]
    added = sorted(
        medians[f"{name}_pd"]["64x512"]["gap_max_p50_s"] - medians[name]["64x512"]["gap_max_p50_s"]
        for name in ("baton_python", "baton_rust")
    )
    return [ms(gap_s) for gap_s in added]


def _memory() -> list[str]:
    """Least and most MiB: of baton, then of Dynamo's frontend."""
    medians = result("rivals")["medians"]
    figures = []
    for system in ("baton", "dynamo"):
        sizes = [medians[name]["64x512"]["rss_mib"] for name in _RIVALS if name.startswith(system)]
        figures += [f"{min(sizes):.0f}", f"{max(sizes):.0f}"]
    return figures


_REAL = {
    "vllm": "`vllm serve`, one",
    "baton_colocated": "baton, one replica",
    "vllm_proxy": "P/D: `vllm serve` and a proxy",
    "vllm_router": "P/D: `vllm serve` and vllm-router",
    "baton_pd": "P/D: baton, `early_first_token`",
    "ray_llm": "P/D: Ray Serve LLM",
}


def _real_rows() -> Iterator[str]:
    for name, label in _REAL.items():
        cells = []
        for load in ("alone", "poisson"):
            figures = result("real_engines")["medians"][name][load]
            cells.append("/".join(ms(figures[f"ttft_{at}_s"]) for at in ("p50", "p90", "p99")))
            p50, p99 = (figures[f"tpot_{at}_s"] * 1e3 for at in ("p50", "p99"))
            cells.append(f"{p50:.1f}/{p99:.{0 if p99 >= 10 else 1}f}")
        yield f"| {label} | {' | '.join(cells)} |"


def _alone_overhead() -> list[str]:
    overhead = result("real_engines")["colocated_overhead_percent"]["alone"]
    return [f"{overhead['whole_each']['median']:.0f}"]


def _over_proxy(load: str, *keys: str, digits: int) -> list[str]:
    ratios = result("real_engines")["ratios"]["pd"]["baton_pd_over_vllm_proxy"][load]
    return [f"{ratios[key]['median']:.{digits}f}" for key in keys]


def _loaded_ttft_over_proxy() -> list[str]:
    ratios = result("real_engines")["ratios"]["pd"]["baton_pd_over_vllm_proxy"]["poisson"]
    found = sorted(ratios[f"ttft_{at}"]["median"] for at in ("p50", "p90", "p99"))
    return [f"{found[0]:.1f}", f"{found[-1]:.1f}"]


# ------------------------------------------------------------------ others


def _growth(*replicas: int) -> list[str]:
    growth = result("ingress")["growth_python"]
    return [f"{growth[f'us_per_token_{count}']:.0f}" for count in replicas]


def _ingress_cost() -> list[str]:
    return [_cpu("baton_python"), *_growth(1000)]


def _ingress_rows() -> Iterator[str]:
    parts = result("ingress")
    python, rust = (parts[f"chunks_{name}"]["us_per_token"][0] for name in ("python", "rust"))
    yield f"| `chunks` | us per token: `python`, `rust` | {python:.0f}, {rust:.0f} (target 15) |"
    few, many = _growth(10, 1000)
    yield (
        f"| `growth` | us per token with 10 and 1,000 replicas | {few}, {many}:"
        f" {parts['growth_python']['growth']:.1f} times (target 1.5) |"
    )
    python, rust = (parts[f"open_{name}"]["kib_per_stream"] for name in ("python", "rust"))
    yield f"| `open` | KiB per stream: `python`, `rust` | {python:.0f}, {rust:.0f} |"
    leak = parts["leak_python"]["bytes_per_request"]
    yield f"| `leak` | bytes per request over 100,000 requests | {leak:.0f} |"
    fraction = parts["metrics_python"]["direct_cpu_fraction"]
    yield (
        "| `metrics` | `direct_cpu_fraction`: CPU in hooks and for scrapes |"
        f" {percent(fraction, 1)} % |"
    )


def _hybrid() -> list[str]:
    hybrid = result("hybrid")
    return [
        percent(1 - hybrid["hybrid_worst_ratio"]),
        percent(hybrid["no_admission_share_a_fifth_over"]),
        percent(hybrid["share_a_fifth_over"]),
    ]


def _hybrid_rows() -> Iterator[str]:
    hybrid = result("hybrid")
    yield f"| `hybrid_worst_ratio` over the best other | {hybrid['hybrid_worst_ratio']:.2f} |"
    yield f"| `hybrid_median_ratio` | {hybrid['hybrid_median_ratio']:.1f} |"
    cells = hybrid["cells_that_somebody_serves"]
    share = percent(hybrid["share_a_fifth_over"])
    yield f"| `share_a_fifth_over` (1.2 times or more) | {share} % of {cells} cells |"
    share = percent(hybrid["no_admission_share_a_fifth_over"])
    yield f"| `no_admission_share_a_fifth_over` | {share} % |"


@cache
def _size_of_8b() -> Any:  # noqa: ANN401 - JSON
    """What `baton size` says of Llama-3.1-8B on an H100, for prompts of 2,000 tokens."""
    model = ("meta-llama/Llama-3.1-8B", "--gpu", "H100")
    return json.loads(run_baton("size", *model, "--context", "2000", "-o", "json").stdout)


def _handoff() -> list[str]:
    """Bytes of a token and of a prompt; milliseconds at 10, 100 and 400 Gb/s."""
    token_bytes = _size_of_8b()["kv_token_bytes"]
    prompt_bytes = 2_000 * token_bytes
    times_s = [prompt_bytes * 8 / (gigabits * 1e9) for gigabits in (10, 100, 400)]
    ten, hundred, most = (ms(time_s, 1 if time_s < 0.01 else 0) for time_s in times_s)
    return [f"{token_bytes:,}", f"{prompt_bytes / 1e6:.0f}", ten, hundred, most]


def _federation(size: str, arm: str) -> list[str]:
    figures = result("federation")["sizes"][size]["arms"][arm]
    p50, p99 = (ms(figures[f"ttft_{at}_s"]) for at in ("p50", "p99"))
    return [f"{percent(figures['hit_share'], 1)} %", f"{p50}, {p99}"]


def _federation_rows() -> Iterator[str]:
    arms = {
        "1000": ("one exact", "federated", "one home"),
        "10000": ("one exact", "federated", "one home", "soonest"),
    }
    for size, names in arms.items():
        label = f"{int(size):,}, {result('federation')['sizes'][size]['clusters']}"
        for name in names:
            cached, ttft = _federation(size, name)
            yield f"| {label} | `{name}` | {cached} | {ttft} |"
            label = ""


def _federation_events() -> Iterator[str]:
    events = {
        "one of four clusters fails": "federated, a cluster lost",
        "a region's demand exceeds its capacity by half": "federated, a region surges",
        "the same without spill-over": "near only, a region surges",
    }
    for label, arm in events.items():
        cached, ttft = _federation("1000", arm)
        yield f"| {label} | {cached} | {ttft} |"


def _transfer_rows() -> Iterator[str]:
    """Speed as a multiple of NIXL's alone and of memcpy's."""
    transfer = result("transfer")
    keys = ("ratio_to_bare_nixl", "ratio_to_memcpy")
    for size in ("1", "4"):
        ratios = [f"{transfer['spread'][key][size]['median']:.2f}" for key in keys]
        yield f"| {size} MiB | {' | '.join(ratios)} |"
    yield f"| worst from 16 MiB on | {' | '.join(f'{transfer[key]:.2f}' for key in keys)} |"


def _router_cost_rows() -> Iterator[str]:
    costs = result("router_cost")

    def us(key: str) -> str:
        return f"{costs[f'{key}_s_1000_1m_{tokens}'] * 1e6:.0f} us"

    tokens = 512
    yield f"| decision, 512 tokens, p50 and p99 | {us('p50')}, {us('p99')} |"
    tokens = 8192
    yield f"| decision, 8,192 tokens, p50 | {us('p50')} |"
    yield f"| 1,000 over 10 replicas | {costs['growth_10_to_1000_512']:.2f} times |"
    entry, churned = (costs[f"bytes_per_entry{when}_1000_1m"] for when in ("", "_after_churn"))
    yield f"| bytes per entry; after churn | {entry:.0f}; {churned:.0f} |"


def _routing_rows() -> Iterator[str]:
    grouped, heavy = result("routing"), result("routing")["heavy"]
    for name in ("baton", "dynamo", "sglang", "llmd", "mooncake", "random"):
        yield (
            f"| `{name}` | {grouped[name]['cached_fraction']:.3f},"
            f" {ms(grouped[name]['ttft_p50_s'])} ms | {ms(heavy[name]['ttft_p50_s'])} ms |"
        )


def _scaling_rows() -> Iterator[str]:
    loads = {
        "m_large": "14 days of ServeGen",
        "azure_code": f"bursts, request by request; oracle {_oracle_of('azure_code')} %",
        "azure_code_fluid": f"bursts; oracle {_oracle_of('azure_code_fluid')} %",
        "m_mid": "not used for tuning",
        "azure_conversation_fluid": "not used for tuning",
    }
    for part, load in loads.items():
        attained, over_oracle = _scaling_figures(part)
        yield f"| `{part}` | {load} | {attained} % | {over_oracle} |"
    mixes = ("short_short", "long_short", "short_long", "long_long", "drifting")
    columns = zip(*(_scaling_figures(mix) for mix in mixes), strict=True)
    attained, over_oracle = (", ".join(column) for column in columns)
    labels = ", ".join(f"`{mix}`" for mix in mixes)
    yield f"| `mixes` | {labels} | {attained} % | {over_oracle} |"


def _oracle_of(part: str) -> str:
    """The least attainment of the oracle, in per cent."""
    rows = result("slo")["parts"][part]["rows"]
    return percent(min(row["attainment"] for row in rows if row["policy"] == "oracle"), 1)


def _scaling_figures(part: str) -> tuple[str, str]:
    """Attainment in per cent, and GPU-hours over the oracle's."""
    headline = result("slo")["headline"]
    attainment = headline[f"attainment_{part}"]
    over_oracle = headline[f"gpu_hours_over_oracle_{part}"]
    return percent(attainment, 2 if attainment > 0.999 else 1), f"{over_oracle:.2f}"


def _long_prompt_rows() -> Iterator[str]:
    prompts = {"follow_up": "follow-up turn, 14,600 tokens", "new_400kb": "new, 400 KB"}
    for key, label in prompts.items():
        quoted = {
            name: result("long_prompts")["quoted"][f"{key}_{name}"]["median"]
            for name in ("added_ttft_ms", "cpu_ms_per_request", "bare_cpu_ms_per_request")
        }
        added = f"{quoted['added_ttft_ms']:.3g}"
        ours, theirs = quoted["cpu_ms_per_request"], quoted["bare_cpu_ms_per_request"]
        yield f"| {label} | {added} ms | {ours:.0f} / {theirs:.0f} ms |"


def _simulator_rows() -> Iterator[str]:
    labels = {
        "mooncake": "`mooncake`, 12,031 requests, 16 replicas",
        "fleet": "`fleet`, 1,000 replicas, one hour",
    }
    for name, label in labels.items():
        case = result("simulator_speed")["cases"][name]
        yield f"| {label} | {case['cpu_s']:.0f} s | {case['peak_bytes'] / 1e6:.0f} MB |"


BINDINGS: tuple[Sentence | Rows, ...] = (
    Sentence(
        document="README.md",
        template="prompts four times as long / nothing shared (S) | {} / {} / {} |"
        " `sglang` {} / {} / {}, `llmd` {} / {} / {}, `mooncake` {} / {} / {}, `dynamo` (default"
        " weights) {} / {} / {} |",
        figures=_readme_routing,
    ),
    Sentence(
        document="README.md",
        template="14 days / an hour of bursts (S) | {} % at {} / {} % at {} | `wva` {} % at {} /"
        " {} % at {}, `hpa` {} % at {} / {} % at {}, `dynamo` {} % at {} / {} % at {} |",
        figures=_readme_scaling,
    ),
    Sentence(
        document="README.md",
        template="load at 95 % attainment / goodput at equal load, changing mix, one run of older"
        " code (S) | {} / {} times | the best static split",
        figures=lambda: _slo("moving_mix_slo_capacity_gain", "moving_mix_gain"),
    ),
    Sentence(
        document="README.md",
        template="| TPOT {} %, TTFT {} % | {} measured rows of H200 (M) |",
        figures=lambda: _silicon("h200_tpot_mape", "h200_ttft_mape", "h200_rows"),
    ),
    Rows(
        document=RIVALS,
        header="| contender | CPU us/token (min",
        rows=lambda: list(_rival_rows()),
    ),
    Sentence(
        document=RIVALS,
        template="before a mock without vLLM's API server take {} to {} us.",
        figures=_router_mocks,
    ),
    Rows(document=RIVALS, header="| ratio | median |", rows=lambda: list(_ratio_rows())),
    Sentence(
        document=RIVALS,
        template="it adds {} ms at p50 (target 1.0) and {} ms at p99. Another run"
        " (`rivals_first_tokens.json`): {} ms.",
        figures=lambda: [
            *_added("local_python_p50", "local_python_p99"),
            ms(result("rivals_first_tokens")["added_ttft_local_python_p50_s"], 1),
        ],
    ),
    Sentence(
        document=RIVALS,
        template="{} times Dynamo's throughput per core, with the gate {} (target 1.3). Its TTFT"
        " p50 is {} ms below `vllm`'s",
        figures=lambda: [
            *_core_ratio("rust_over_dynamo_fast", "rust_gate_over_dynamo_fast"),
            *_added("local_rust_p50"),
        ],
    ),
    Sentence(
        document=RIVALS,
        template="`python`'s longest gap is {} ms, `vllm`'s {}.",
        figures=_gaps_at_256,
    ),
    Sentence(document=RIVALS, template="The target was two steps of {} ms.", figures=_step_at_256),
    Sentence(
        document=RIVALS,
        template="lengthens the longest gap by {} to {} ms.",
        figures=_handoff_gaps,
    ),
    Sentence(
        document=RIVALS,
        template="{} to {} MiB, mostly imported vLLM. Dynamo's frontend takes {} to {}.",
        figures=_memory,
    ),
    Sentence(
        document=RIVALS,
        template="Loaded means {} arrivals a second.",
        figures=lambda: [f"{result('real_engines')['rate_per_s']:.1f}"],
    ),
    Rows(
        document=RIVALS,
        header="| system | TTFT alone | TPOT alone | TTFT loaded | TPOT loaded |",
        rows=lambda: list(_real_rows()),
    ),
    Sentence(
        document=RIVALS,
        template="a lone request takes {} % longer than with `vllm serve` (target 2 %).",
        figures=_alone_overhead,
    ),
    Sentence(
        document=RIVALS,
        template="baton's TTFT p50 is {} times the proxy's,",
        figures=lambda: _over_proxy("alone", "ttft_p50", digits=2),
    ),
    Sentence(
        document=RIVALS,
        template="its TPOT {} times.",
        figures=lambda: _over_proxy("alone", "tpot_p50", digits=1),
    ),
    Sentence(
        document=RIVALS,
        template="TTFT is {} to {} times the proxy's,",
        figures=_loaded_ttft_over_proxy,
    ),
    Sentence(
        document=RIVALS,
        template="TPOT p50 {} times (target",
        figures=lambda: _over_proxy("poisson", "tpot_p50", digits=1),
    ),
    Sentence(
        document=FAQ,
        template="| first token, single request | {} ms later | {} ms sooner |",
        figures=lambda: _added("local_python_p50", "local_rust_p50"),
    ),
    Sentence(
        document=FAQ,
        template="`transfer.early_first_token` | {} ms later | {} ms later |",
        figures=lambda: _added("pd_python_p50", "pd_rust_p50"),
    ),
    Sentence(
        document=FAQ,
        template="| tokens per core second | {} times | {} times that of vLLM's Rust server |",
        figures=lambda: _core_ratio("python_over_vllm", "rust_over_vllm_rs"),
    ),
    Sentence(
        document=FAQ,
        template="| real engines (`make bench-real-engines`), single request | {} % longer |",
        figures=_alone_overhead,
    ),
    Sentence(
        document="docs/migrate/from-vllm-serve.md",
        template="{} ms of TTFT ([M](../rivals.md), simulated engines). With real engines on two"
        " cores, a request takes {} % longer.",
        figures=lambda: [*_added("local_python_p50"), *_alone_overhead()],
    ),
    Sentence(
        document=SIZING,
        template="| {} us of CPU a token, so about 10,000 tokens/s each; with 1,000 replicas {} us",
        figures=_ingress_cost,
    ),
    Sentence(
        document=SIZING,
        template="at most {} % below the better alternative. Its ratio is at least 1.2 in {} % of"
        " the cells, and in {} % with admission.",
        figures=_hybrid,
    ),
    Sentence(
        document=SIZING,
        template="| Llama-3.1-8B, bf16 | {} | {} MB | {} ms | {} ms | {} ms |",
        figures=_handoff,
    ),
    Sentence(
        document=SIZING,
        template="An H100 computes these tokens in {} ms (S: `baton size meta-llama/Llama-3.1-8B"
        " --gpu H100 --context 2000`)",
        figures=lambda: [ms(_size_of_8b()["seconds"]["prefill_s"])],
    ),
    Rows(
        document="docs/scale.md",
        header="| replicas, clusters | policy | cached | TTFT p50, p99, ms |",
        rows=lambda: list(_federation_rows()),
    ),
    Rows(
        document="docs/scale.md",
        header="| event (S), 1,000 replicas | cached | TTFT p50, p99, ms |",
        rows=lambda: list(_federation_events()),
    ),
    Rows(
        document="docs/operations/transfer.md",
        header="| size | NIXL alone | memcpy |",
        rows=lambda: list(_transfer_rows()),
    ),
    Sentence(
        document="docs/operations/simulate.md",
        template="H200, {} rows | {} %, {} % | {} %, {} % | | SGLang",
        figures=lambda: [
            *_silicon("h200_vllm_published_rows"),
            *_fidelity_row("h200_vllm_published"),
        ],
    ),
    Sentence(
        document="docs/operations/simulate.md",
        template="H200, {} rows (recipe assumed) | {} %, {} % | {} %, {} % |",
        figures=lambda: [*_silicon("h200_sglang_rows"), *_fidelity_row("h200_sglang")],
    ),
    Sentence(
        document="docs/operations/simulate.md",
        template="H200, {} rows, {} implausible | {} %, {} % | {} %, {} % |",
        figures=_vllm_0_12,
    ),
    Sentence(
        document="docs/operations/simulate.md",
        template="RTX PRO 6000, one log | mean {} % | mean {} % |",
        figures=_vllm_log,
    ),
    Rows(
        document=BENCHMARKS,
        header="| part (S) | compared with (M) | result |",
        rows=lambda: list(_fidelity_part_rows()),
    ),
    Sentence(
        document=BENCHMARKS,
        template="TTFT of SGLang is off by {} %.",
        figures=lambda: [percent(_silicon_metric("h200_sglang_ttft_mape"))],
    ),
    Rows(
        document=BENCHMARKS,
        header="| part | figure (M) | value |\n|---|---|---|\n| `chunks`",
        rows=lambda: list(_ingress_rows()),
    ),
    Rows(
        document=BENCHMARKS,
        header="| figure (S) | value |\n|---|---|\n| `hybrid_worst_ratio`",
        rows=lambda: list(_hybrid_rows()),
    ),
    Rows(
        document=BENCHMARKS,
        header="| figure, 1,000 replicas and 1M entries (M) | value |",
        rows=lambda: list(_router_cost_rows()),
    ),
    Rows(
        document=BENCHMARKS,
        header="| policy (S) | `grouped`: cached fraction, TTFT p50 | `heavy`: TTFT p50 |",
        rows=lambda: list(_routing_rows()),
    ),
    Rows(
        document=BENCHMARKS,
        header="| part (S) | load | attainment | GPU-hours over oracle |",
        rows=lambda: list(_scaling_rows()),
    ),
    Rows(
        document=BENCHMARKS,
        header="| prompt (M) | added TTFT | CPU per request, baton / vLLM |",
        rows=lambda: list(_long_prompt_rows()),
    ),
    Rows(
        document=BENCHMARKS,
        header="| case (M) | CPU | peak memory |",
        rows=lambda: list(_simulator_rows()),
    ),
    Sentence(
        document=BENCHMARKS,
        template="| `moving_mix_slo_capacity_gain` over the best static split; `moving_mix_gain`;"
        " older code | {}; {} |",
        figures=lambda: _slo("moving_mix_slo_capacity_gain", "moving_mix_gain"),
    ),
    Sentence(
        document=BENCHMARKS,
        template="**Loses**: `wva` needs {} % fewer GPU-hours on `m_large`, with {} times the"
        " misses.",
        figures=_wva_on_m_large,
    ),
    Sentence(
        document=BENCHMARKS,
        template="On bursts the fluid model is up to {} points wrong.",
        figures=_fluid_error_on_bursts,
    ),
    Sentence(
        document=BENCHMARKS,
        template="over the plateau; in tokens; without admission | {}; {}; {} |",
        figures=lambda: _slo(
            "overload_goodput_fraction",
            "overload_good_tokens_fraction",
            "overload_goodput_fraction_off",
        ),
    ),
    Sentence(
        document=BENCHMARKS,
        template="| `premium_attainment`; `free_attainment` | {} %; {} % |",
        figures=lambda: [
            percent(result("slo")["headline"][f"{tenant}_attainment"])
            for tenant in ("premium", "free")
        ],
    ),
)
