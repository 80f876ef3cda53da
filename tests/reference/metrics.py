"""Every metric as a page, from the catalogue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from baton.telemetry.catalogue import CATALOGUE, Component, Kind, Metric

_WHERE: Final = {
    Component.INGRESS: "Ingress metrics",
    Component.REPLICA: "Replica metrics",
    Component.CONTROLLER: "Controller metrics",
}
_HEAD: Final = """\
# Metrics

This page lists every metric of baton for engineers who write queries, dashboards and alerts. See
[observability](observability.md) for scraping. `scripts/render-reference` writes this page.

- Names with `_total` are counters, which restart at 0 with their process. [Histograms](#histograms)
  have their own table. All others are gauges.
- Prometheus adds the target labels `component`, `pool`, `replica`, `node` and `model`.
- A label has at most 256 values per process; further values count as `other`.
"""
_HISTOGRAMS: Final = """## Histograms

Histograms belong to ingresses.

| metric and labels | meaning
|---|---
"""
_DEPRECATED: Final = """## Deprecated names

These metrics are exported by both names until the next release. Rules and dashboards use the new
ones.

| deprecated | now
|---|---
"""
_EDGES: Final = """## Edges of histograms

All processes share base edges up to one day. They add exact edges at objectives and timeouts, so
shares of requests within these are exact.

An apply can change edges without a restart. The label `edges` is a digest of them:

- New edges start new series at zero. Old series end when the edges change twice more.
- Ingresses with the same edges have the same label value.

Keep `edges` in the aggregation for quantiles and shares:

```promql
histogram_quantile(0.99, sum by (le, edges, job, slo_class, model)
  (rate(baton_time_to_first_token_seconds_bucket[5m])))
```

Otherwise, a quantile can be wrong by one bucket around an apply. Rates and means need no `edges`.
`baton apply --diff` names the histograms that start new series; ingresses log
`histogram_edges_changed`.
"""


def page() -> str:
    """The page in Markdown."""
    sections = (line for where in Component for line in _section(where))
    histograms = (_row(metric) for metric in CATALOGUE if metric.kind is Kind.HISTOGRAM)
    deprecated = (
        f"| `{metric.deprecated_name}` | `{metric.name}`"
        for metric in CATALOGUE
        if metric.deprecated_name is not None
    )
    return "\n".join(
        (
            _HEAD,
            *sections,
            _HISTOGRAMS + "\n".join(histograms),
            "",
            _DEPRECATED + "\n".join(deprecated),
            "",
            _EDGES,
        )
    )


def _section(where: Component) -> Iterator[str]:
    yield f"## {_WHERE[where]}"
    yield ""
    yield "| metric and labels | meaning"
    yield "|---|---"
    for metric in CATALOGUE:
        if metric.component is where and metric.kind is not Kind.HISTOGRAM:
            yield _row(metric)
    yield ""


def _row(metric: Metric) -> str:
    labels = f" `{{{','.join(metric.labels)}}}`" if metric.labels else ""
    return f"| `{metric.name}`{labels} | {metric.help}"
