"""`python -m baton.telemetry.reference --write FILE`: the page that lists every metric."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from baton.telemetry.catalogue import CATALOGUE, Component, Label, Metric

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
their process. A label has at most 256 values in one process; what is beyond is counted together as
`other`. [Edges of histograms](#edges-of-histograms) says what `edges` is for.
"""
_EDGES: Final = """\
## Edges of histograms

Every process has the same base edges. They are those that OpenTelemetry advises, and more up to a
day, the longest timeout that can be configured. A process adds an exact edge at each objective of
each class, and at each timeout that bounds the quantity. So the share of requests within either is
exact, and no quantile ends below a timeout. By histogram:

"""
_APPLY: Final = """\
Most of these keys can be applied without a restart. Then the buckets at old and new edges hold
different requests, and no quantile can be taken of their sum. So each set of edges has series of
its own. The label `edges` is a digest of the set:

- A process that is given other edges begins new series at zero. The old series stay as they are,
  until the process ends or its edges have changed twice more. No count ever falls.
- A process that is given earlier edges again goes on where it was.
- Ingresses with the same edges have the same value of `edges`, so they can be added up.

Add up by `edges` whenever you take a quantile, or a share of requests below an edge. Around an
apply that gives one result for the requests before it and one for those after it:

```promql
histogram_quantile(0.99, sum by (le, edges, job, slo_class, model)
  (rate(baton_time_to_first_token_seconds_bucket[5m])))
```

Rates of `_sum` and `_count`, and means, need no `edges`. A quantile without it is off by up to one
bucket while the window spans an apply. `baton apply --diff` names the histograms that would begin
new series, and ingresses log `histogram_edges_changed`. Dashboards and rules of baton add up so.
"""


def page() -> str:
    """The page in Markdown."""
    sections = (line for where in Component for line in _section(where))
    edges = (_edges_line(metric) for metric in CATALOGUE if Label.EDGES in metric.labels)
    return "\n".join((_HEAD, *sections, _EDGES + "\n".join(edges), "", _APPLY))


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


def _edges_line(metric: Metric) -> str:
    keys = [f"`{deadline}`" for deadline in metric.deadlines]
    if metric.objective is not None:
        keys.insert(0, f"each class's {metric.objective.upper()}")
    return f"- `{metric.name}`: {', '.join(keys)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m baton.telemetry.reference")
    parser.add_argument("--write", type=Path, required=True, metavar="FILE")
    given = parser.parse_args(arguments)
    given.write.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
