"""How far the performance model and the simulator are from what others have measured.

Parts: `models` and `architectures` (parameters, weights and KV cache, against modules that
transformers builds), and against published measurements: `silicon` (TTFT and TPOT of GPUs),
`leave_out` (the same on H100, each model calibrated without it), `vllm_log` (one engine's request
log). All figures are simulated (S); `benchmarks/README.md` says what each means.

Prints a line `name value` for each figure, and one JSON object as the last line of stdout; writes
`benchmarks/results/fidelity.json`, which keeps what it has of parts that did not run. Progress goes
to stderr. A part that fails is named under `failed`, costs its own figures only, and makes the exit
status 1.

    python -m benchmarks.fidelity --data FOLDER [--part NAME]... [--out FILE]

FOLDER holds `perf/`, `models/` and `traces/`; without `--data` it is what BATON_TRACES names.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks._program import RESULTS, quote, say, write
from benchmarks._provenance import provenance

PARTS = ("models", "architectures", "silicon", "leave_out", "vllm_log")
DATA_VARIABLE = "BATON_TRACES"

Metrics = dict[str, float]
Part = Callable[[Path], Metrics]


class PartResult(NamedTuple):
    """What became of a part."""

    metrics: Metrics
    failure: str | None
    """Why it has no figures; None when it has."""
    duration_s: float


def main() -> int:
    """Run the parts; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--part", action="append", choices=PARTS, default=[])
    parser.add_argument("--out", type=Path, default=RESULTS / "fidelity.json")
    options = parser.parse_args()
    folder = find_data_folder(options.data, os.environ)
    if folder is None:
        parser.error(
            f"no data: --data or {DATA_VARIABLE} must name a folder with perf/ and traces/"
        )
    names = options.part or list(PARTS)
    runs = run_parts({name: load_part(name) for name in names}, folder)
    write_results(options.out, runs)
    figures = {name: value for run in runs.values() for name, value in run.metrics.items()}
    failed = {name: run.failure for name, run in runs.items() if run.failure is not None}
    for name, value in figures.items():
        print(f"{name} {value:.6g}")
    quote(figures | {"failed": failed})
    return 1 if failed else 0


def find_data_folder(argument: Path | None, environment: Mapping[str, str]) -> Path | None:
    """The folder that holds `perf/` and `traces/`: the one named, or the one it lies in."""
    candidate = argument or (
        Path(environment[DATA_VARIABLE]) if environment.get(DATA_VARIABLE) else None
    )
    if candidate is None:
        return None
    return next((path for path in (candidate, candidate.parent) if (path / "perf").is_dir()), None)


def load_part(name: str) -> Part:
    """What computes a part's figures; what it needs is imported when it is called."""

    def run_part(folder: Path) -> Metrics:
        module = importlib.import_module(f"benchmarks._fidelity_{name}")
        found: Metrics = module.compute_metrics(folder)
        return found

    return run_part


def run_parts(parts: Mapping[str, Part], folder: Path) -> dict[str, PartResult]:
    """Each part in turn."""
    runs = {}
    for name, part in parts.items():
        say(f"{name} ...")
        runs[name] = run = run_part_safely(part, folder)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        ended = "" if run.failure is None else f"FAILED: {run.failure}; "
        say(f"{name}: {ended}{run.duration_s:.1f} s, {peak_mib:.0f} MiB at most so far")
    return runs


def run_part_safely(part: Part, folder: Path) -> PartResult:
    """A part's figures, or why there are none."""
    began_s = time.monotonic()
    try:
        figures = part(folder)
    except Exception as error:  # noqa: BLE001 - one part must not hide the others
        say(traceback.format_exc())
        return PartResult({}, f"{type(error).__name__}: {error}", time.monotonic() - began_s)
    return PartResult(figures, None, time.monotonic() - began_s)


def write_results(file: Path, runs: Mapping[str, PartResult]) -> None:
    """Write what the parts found; parts that did not run keep what the file has of them."""
    old = json.loads(file.read_text())["parts"] if file.exists() else {}
    origin = provenance()
    new = {name: run._asdict() | origin for name, run in runs.items()}
    write(file, {"parts": old | new})


if __name__ == "__main__":
    sys.exit(main())
