"""A deployment that is not there: every metric of the catalogue, with values that move.

    python -m tests.dashboards.fake 9400

Prometheus finds it at /sd, as it finds a baton. For trying dashboards without engines.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from baton.domain.fleet import Role
from baton.domain.handoff import HandoffMode, RouteReason
from baton.domain.request import Phase
from baton.policy.admission import Reason
from baton.policy.links import LinkState
from baton.policy.scaling.wants import ScalingReason
from baton.telemetry.catalogue import (
    CATALOGUE,
    Component,
    Kind,
    Label,
    Metric,
    Objective,
    TokenKind,
)
from baton.telemetry.label_values import (
    EnginePhase,
    Frame,
    PoolBound,
    PoolCount,
    ScalingAct,
    TurnOutcome,
    Window,
)
from baton.telemetry.waterfall import Part

_REPLICAS: Final = ("prefill-0", "decode-0")
_VALUES: Final[Mapping[Label, Iterable[str]]] = {
    Label.SLO_CLASS: ("default", "batch"),
    Label.TENANT: ("acme", "lab"),
    Label.MODEL: ("tiny",),
    Label.POOL: ("prefill", "decode"),
    Label.OUTCOME: (Phase.FINISHED, Phase.SHED, "barred"),
    Label.OBJECTIVE: tuple(Objective),
    Label.PART: tuple(Part),
    Label.REASON: (RouteReason.DISAGGREGATED, ScalingReason.DEMAND, Reason.IN_TIME),
    Label.MODE: tuple(HandoffMode),
    Label.PHASE: (Phase.QUEUED, *EnginePhase),
    Label.TOKENS: tuple(TokenKind),
    Label.SOURCE: _REPLICAS,
    Label.TARGET: _REPLICAS,
    Label.TRANSPORT: ("tcp",),
    Label.STATE: (*PoolCount, *Frame, *LinkState),
    Label.ROLE: tuple(Role),
    Label.BOUND: tuple(PoolBound),
    Label.INPUT: ("need_now", "prompt_tokens_per_s", "output_tokens_per_s_later"),
    Label.ACTION: tuple(ScalingAct),
    Label.WINDOW: tuple(Window),
    Label.VERSION: ("0",),
    Label.ENGINE: ("sim",),
    Label.EDGES: ("0a1b2c3d",),
}
_TURNS: Final = "baton_scaling_turns_total"
_PERIOD_S: Final = 60.0


def exposition(component: Component, at_s: float, *, without: str = "") -> str:
    """What a process of this kind would expose after so long; `without` leaves a metric out."""
    metrics = [one for one in CATALOGUE if one.component is component and one.name != without]
    return "".join(line for metric in metrics for line in _lines(metric, at_s))


def _lines(metric: Metric, at_s: float) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n"
    for values in itertools.product(*(_values(metric, label) for label in metric.labels)):
        labels = dict(zip(map(str, metric.labels), values, strict=True))
        # Other series, other values; the same ones each time.
        size = 1 + zlib.crc32(repr((metric.name, values)).encode()) % 50
        if metric.kind is Kind.HISTOGRAM:
            yield from _histogram(metric, labels, size * at_s)
        elif metric.kind is Kind.COUNTER:
            yield f"{metric.name}{_braced(labels)} {size * at_s:.3f}\n"
        else:
            value = size * (1.2 + math.sin(size + 2 * math.pi * at_s / _PERIOD_S))
            yield f"{metric.name}{_braced(labels)} {value:.3f}\n"


def _values(metric: Metric, label: Label) -> Iterable[str]:
    return tuple(TurnOutcome) if metric.name == _TURNS else _VALUES[label]


def _histogram(metric: Metric, labels: Mapping[str, str], count: float) -> Iterator[str]:
    edges = [*map(str, metric.edges), "+Inf"]
    for n, edge in enumerate(edges, start=1):
        below = count * n / len(edges)
        yield f"{metric.name}_bucket{_braced({**labels, 'le': edge})} {below:.3f}\n"
    middle = metric.edges[len(metric.edges) // 2]
    yield f"{metric.name}_sum{_braced(labels)} {count * middle:.3f}\n"
    yield f"{metric.name}_count{_braced(labels)} {count:.3f}\n"


def _braced(labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


@contextmanager
def fake_baton(*, port: int = 0, without: str = "") -> Iterator[str]:
    """Its address, while it is there."""
    started_s = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        """Answers /sd, and each component's metrics under its name."""

        def do_GET(self) -> None:
            path = self.path.strip("/").split("/")
            if path[0] == "sd":
                self._answer(json.dumps(_targets(self.headers["Host"])), "application/json")
            else:
                at_s = 1.0 + time.monotonic() - started_s
                text = exposition(Component(path[0]), at_s, without=without)
                self._answer(text, "text/plain; version=0.0.4")

        def _answer(self, text: str, kind: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def _targets(host: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for component in (Component.CONTROLLER, Component.INGRESS):
        labels = {"__metrics_path__": f"/{component}", "component": str(component)}
        found.append({"targets": [host], "labels": labels | {"replica": f"{component}-0"}})
    for replica in _REPLICAS:
        path = f"/{Component.REPLICA}/{replica}"
        labels = {"__metrics_path__": path, "component": str(Component.REPLICA)}
        labels |= {"pool": replica.split("-", maxsplit=1)[0], "replica": replica}
        found.append({"targets": [host], "labels": labels})
    return found


def main() -> int:
    """Until Ctrl-C."""
    with fake_baton(port=int(sys.argv[1]) if len(sys.argv) > 1 else 0) as url:
        sys.stderr.write(f"{url}/sd\n")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
