"""`python -m baton.telemetry.reference --write FILE`: the page that lists every metric."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from baton.telemetry.catalogue import CATALOGUE, Component, Metric

_WHERE: Final = {
    Component.INGRESS: "Ingresses: what clients got, and why",
    Component.REPLICA: "Replicas: what engines did",
    Component.CONTROLLER: "The controller: pools, promises, money",
}
_HEAD: Final = """\
# Metrics

Every metric of baton, written by `python -m baton.telemetry.reference` from
`telemetry/catalogue.py`. How they are scraped, and what to look at first:
[observability](observability.md).

Prometheus adds to each target the labels `component`, `pool`, `replica`, `node` and `model`, as far
as they apply; metrics do not repeat them. Counters end in `_total` and start again from 0 with
their process. Histograms have, besides the edges that OpenTelemetry advises, an edge at each
objective of the configuration: so the share of requests within an objective is exact, and not
interpolated. A label has at most 256 values in one process; what is beyond is counted together as
`other`.
"""


def page() -> str:
    """The page in Markdown."""
    return "\n".join((_HEAD, *(line for where in Component for line in _section(where))))


def _section(where: Component) -> Iterator[str]:
    yield f"## {_WHERE[where]}"
    yield ""
    yield "| metric | kind | labels | what it says |"
    yield "|---|---|---|---|"
    yield from (_row(metric) for metric in CATALOGUE if metric.component is where)
    yield ""


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m baton.telemetry.reference")
    parser.add_argument("--write", type=Path, required=True, metavar="FILE")
    given = parser.parse_args(arguments)
    given.write.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
