"""Attainment of objectives, and on how many GPUs: autoscalers, roles, admission; all simulated.

Parts, each of which may be run by itself (`--part`, repeatable; others' last results are kept):

- `m_large`: two weeks of ServeGen's m-large rates as a fluid, under every autoscaler, with cold
  starts of 30, 60, 120 and 300 s;
- `azure_code`: Azure's code completions (gaps with a coefficient of variation of 13), request by
  request, likewise;
- `azure_code_fluid`: the same as a fluid, in seconds;
- `m_mid`, `azure_conversation_fluid`: likewise, of a fortnight and an hour that were not used
  while the policy was made;
- `mixes`: three days of m-large's rates with short and long prompts and outputs, and with lengths
  that drift from short to long and back each day; cold starts of 30 and 300 s;
- `moving_mix`: code, then conversation, then reasoning on a fixed number of GPUs;
- `overload`: twice the load that can be served;
- `check`: the same stretch of m-large through the fluid and through the detailed simulator.

A part in which the oracle attains too little ends with an error: it compares nothing.

Prints one JSON object as the last line of stdout and writes it, with every row, to
`benchmarks/results/slo.json`. Progress goes to stderr.

    python -m benchmarks.slo --data FOLDER [--part NAME]... [--policy NAME]... [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks import _slo_azure, _slo_azure_fluid, _slo_check, _slo_mix, _slo_servegen
from benchmarks._provenance import provenance
from benchmarks._slo_fleets import COLD_STARTS_S, VARIANTS, print_progress
from benchmarks._slo_overload import compute_metrics
from benchmarks._slo_table import check_oracle, headline, table
from benchmarks._statistics import round_floats

RESULTS = Path(__file__).parent / "results" / "slo.json"
HEADLINES = (
    "attainment_m_large",
    "attainment_azure_code",
    "gpu_hours_over_oracle_m_large",
    "gpu_hours_over_oracle_azure_code",
    "reversals_per_hour",
    "moving_mix_gain",
    "overload_goodput_fraction",
    "wasted_prefill_fraction",
    "premium_attainment",
)

Part = Callable[[argparse.Namespace], dict[str, object]]


def main() -> int:
    """Run what was asked for; returns the exit status."""
    options = _options()
    results = _read_results(options.out)
    parts = options.part or [name for name in PARTS if name not in _NEEDS_DATA or options.data]
    for name in PARTS:
        if name in _NEEDS_DATA and not options.data:
            print_progress(f"{name}: left out, it needs --data, the folder of the traces")
    for name in parts:
        began_s = time.monotonic()
        print_progress(f"{name} ...")
        part_metrics = PARTS[name](options)
        took_s = time.monotonic() - began_s
        results[name] = {key: round_floats(value) for key, value in part_metrics.items()}
        results[name] |= {"took_s": round(took_s, 1), "from": provenance()}
        _write(options.out, results)
    print(json.dumps(headline_metrics(results)))
    return 0


def headline_metrics(parts: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """The headline figures, and the others that are no tables; None for what has not been run."""
    metrics: dict[str, object] = {}
    for part in parts.values():
        metrics |= {key: value for key, value in part.items() if isinstance(value, int | float)}
    metrics.pop("took_s", None)
    reversals = [metrics.get(f"reversals_per_hour_{load}") for load in _TUNED_ON]
    metrics["reversals_per_hour"] = max(
        (reversal for reversal in reversals if isinstance(reversal, int | float)), default=None
    )
    return {key: metrics.get(key) for key in HEADLINES} | metrics | {"simulated": True}


MetricsFunction = Callable[[Path, str, float], dict[str, float]]
_SCALING_PARTS: Mapping[str, tuple[MetricsFunction, Path]] = {
    "m_large": (_slo_servegen.compute_metrics, _slo_servegen.M_LARGE),
    "azure_code_fluid": (_slo_azure_fluid.compute_metrics, _slo_azure.CODE_TRACE),
    "azure_code": (_slo_azure.compute_metrics, _slo_azure.CODE_TRACE),
    "m_mid": (_slo_servegen.compute_metrics, _slo_servegen.M_MID),
    "azure_conversation_fluid": (_slo_azure_fluid.compute_metrics, _slo_azure.CONVERSATION_TRACE),
}
_MIX_COLD_STARTS_S = (30.0, 300.0)
_MIN_ORACLE = 0.99
_MIN_DETAILED_ORACLE = 0.98
"""Request by request, the oracle knows means of 2 s and not each arrival: it attains 0.988 of the
code completions with a cold start of 30 s (S)."""
_TUNED_ON = ("m_large", "azure_code_fluid", "azure_code")
"""The others were first run when the policy was done."""


def _run_scaling_part(load: str, options: argparse.Namespace) -> dict[str, object]:
    compute_metrics, file = _SCALING_PARTS[load]
    rows = table(
        partial(compute_metrics, options.data / file),
        names=options.policy or tuple(VARIANTS),
        cold_starts_s=options.cold_start or COLD_STARTS_S,
    )
    least = _MIN_DETAILED_ORACLE if load == "azure_code" else _MIN_ORACLE
    check_oracle(rows, load, min_attainment=least)
    return {**headline(rows, load), "rows": rows}


def _compare_length_mixes(options: argparse.Namespace) -> dict[str, object]:
    """Every policy on every mix of lengths."""
    windows = _slo_servegen.read_windows(options.data / _slo_servegen.M_LARGE)
    metrics: dict[str, object] = {}
    all_rows: list[Mapping[str, float | str]] = []
    for mix, series in _slo_servegen.length_mixes(windows).items():
        print_progress(f"{mix} ...")
        rows = table(
            partial(_slo_servegen.series_metrics, series),
            names=options.policy or tuple(VARIANTS),
            cold_starts_s=options.cold_start or _MIX_COLD_STARTS_S,
        )
        check_oracle(rows, mix, min_attainment=_MIN_ORACLE)
        metrics |= headline(rows, mix)
        all_rows += [{"mix": mix, **row} for row in rows]
    return {**metrics, "rows": all_rows}


PARTS: Mapping[str, Part] = {
    **{load: partial(_run_scaling_part, load) for load in _SCALING_PARTS},
    "mixes": _compare_length_mixes,
    "moving_mix": lambda _: _slo_mix.compare_mix(),
    "overload": lambda _: dict(compute_metrics()),
    "check": lambda options: _slo_check.compare(options.data),
}
_NEEDS_DATA = frozenset({*_SCALING_PARTS, "mixes", "check"})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder in which traces/ lies")
    parser.add_argument("--part", action="append", choices=tuple(PARTS), default=[])
    parser.add_argument("--policy", action="append", choices=tuple(VARIANTS), default=[])
    parser.add_argument("--cold-start", action="append", type=float, default=[], metavar="S")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.data is None and any(part in _NEEDS_DATA for part in options.part):
        parser.error("--data is missing: the folder of the traces")
    return options


def _read_results(file: Path) -> dict[str, dict[str, object]]:
    """The parts' last results."""
    if not file.exists():
        return {}
    document = json.loads(file.read_text())
    return {name: part for name, part in document["parts"].items() if name in PARTS}


def _write(file: Path, parts: Mapping[str, Mapping[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    document = {"headline": headline_metrics(parts), "parts": parts}
    file.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
