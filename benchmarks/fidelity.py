"""How far the performance model and the simulator are from what others have measured.

Parts, each against published measurements: `silicon` (TTFT and TPOT of GPUs), `vllm_log` (one
engine's request log). All figures are simulated (S); `benchmarks/README.md` says what each means.

Prints a line `name value` for each figure, and one JSON object as the last line of stdout; writes
`benchmarks/results/fidelity.json`, which keeps what it has of parts that did not run. Progress goes
to stderr. A part that fails is named under `failed`, costs its own figures only, and makes the exit
status 1.

    python -m benchmarks.fidelity --data FOLDER [--part NAME]... [--out FILE]

FOLDER holds `perf/` and `traces/`; without `--data` it is what BATON_TRACES names.
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

PARTS = ("silicon", "vllm_log")
DATA = "BATON_TRACES"

Figures = dict[str, float]
Part = Callable[[Path], Figures]


class Run(NamedTuple):
    """What became of a part."""

    figures: Figures
    failed: str | None
    """Why it has no figures; None when it has."""
    took_s: float


def main() -> int:
    """Run the parts; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--part", action="append", choices=PARTS, default=[])
    parser.add_argument("--out", type=Path, default=RESULTS / "fidelity.json")
    options = parser.parse_args()
    folder = data_folder(options.data, os.environ)
    if folder is None:
        parser.error(f"no data: --data or {DATA} must name a folder with perf/ and traces/")
    names = options.part or list(PARTS)
    runs = run_all({name: part_of(name) for name in names}, folder)
    keep(options.out, runs)
    figures = {name: value for run in runs.values() for name, value in run.figures.items()}
    failed = {name: run.failed for name, run in runs.items() if run.failed is not None}
    for name, value in figures.items():
        print(f"{name} {value:.6g}")
    quote(figures | {"failed": failed})
    return 1 if failed else 0


def data_folder(given: Path | None, environment: Mapping[str, str]) -> Path | None:
    """The folder that holds `perf/` and `traces/`: the one named, or the one it lies in."""
    named = given or (Path(environment[DATA]) if environment.get(DATA) else None)
    if named is None:
        return None
    return next((one for one in (named, named.parent) if (one / "perf").is_dir()), None)


def part_of(name: str) -> Part:
    """What computes a part's figures; what it needs is imported when it is called."""

    def figures(folder: Path) -> Figures:
        module = importlib.import_module(f"benchmarks._fidelity_{name}")
        found: Figures = module.figures(folder)
        return found

    return figures


def run_all(parts: Mapping[str, Part], folder: Path) -> dict[str, Run]:
    """Each part in turn."""
    runs = {}
    for name, part in parts.items():
        say(f"{name} ...")
        runs[name] = run = run_one(part, folder)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        ended = "" if run.failed is None else f"FAILED: {run.failed}; "
        say(f"{name}: {ended}{run.took_s:.1f} s, {peak_mib:.0f} MiB at most so far")
    return runs


def run_one(part: Part, folder: Path) -> Run:
    """A part's figures, or why there are none."""
    began_s = time.monotonic()
    try:
        figures = part(folder)
    except Exception as error:  # noqa: BLE001 - one part must not hide the others
        say(traceback.format_exc())
        return Run({}, f"{type(error).__name__}: {error}", time.monotonic() - began_s)
    return Run(figures, None, time.monotonic() - began_s)


def keep(file: Path, runs: Mapping[str, Run]) -> None:
    """Write what the parts found; parts that did not run keep what the file has of them."""
    old = json.loads(file.read_text())["parts"] if file.exists() else {}
    origin = provenance()
    new = {name: run._asdict() | origin for name, run in runs.items()}
    write(file, {"parts": old | new})


if __name__ == "__main__":
    sys.exit(main())
