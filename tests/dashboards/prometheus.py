"""A real Prometheus that scrapes a running baton, and what it answers."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from ruamel.yaml import YAML

from tests.dashboards.pages import FOLDER, GET_TOOLS, TOOLS

PROMETHEUS: Final = TOOLS / "bin" / "prometheus"
SCRAPE_S: Final = 2
_READY_S: Final = 30.0
_ANSWER_S: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One series: the labels, and values by time."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def finite(self) -> tuple[tuple[float, float], ...]:
        """Those that are numbers."""
        return tuple(point for point in self.points if math.isfinite(point[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    """One that runs."""

    client: httpx.Client

    def query(self, expr: str, *, at_s: float | None = None) -> tuple[Series, ...]:
        """What an expression is at one time."""
        params: dict[str, Any] = {"query": expr} | ({} if at_s is None else {"time": at_s})
        rows = self._get("/api/v1/query", params)["data"]["result"]
        if rows and not isinstance(rows[0], dict):  # a scalar
            return (Series(labels={}, points=(_point(rows),)),)
        return tuple(Series(labels=row["metric"], points=(_point(row["value"]),)) for row in rows)

    def query_range(
        self, expr: str, *, from_s: float, to_s: float, step_s: float
    ) -> tuple[Series, ...]:
        """What an expression was over a time."""
        params = {"query": expr, "start": from_s, "end": to_s, "step": step_s}
        rows = self._get("/api/v1/query_range", params)["data"]["result"]
        return tuple(
            Series(labels=row["metric"], points=tuple(map(_point, row["values"]))) for row in rows
        )

    def targets(self) -> list[dict[str, Any]]:
        """Whom it asks, and how that goes."""
        targets: list[dict[str, Any]] = self._get("/api/v1/targets", {})["data"]["activeTargets"]
        return targets

    def metrics_since(self, from_s: float) -> frozenset[str]:
        """Names of all series that had a value since then."""
        body = self._get("/api/v1/label/__name__/values", {"start": from_s})
        return frozenset(body["data"])

    def clock_s(self) -> float:
        """What time it is for it."""
        return self.query("time()")[0].points[0][1]

    def _get(self, path: str, params: Mapping[str, Any]) -> dict[str, Any]:
        answer = self.client.get(path, params=dict(params))
        body: dict[str, Any] = answer.json()
        if body["status"] != "success":
            raise RuntimeError(f"prometheus: {body.get('error')} (query: {params.get('query')})")
        return body


def _point(pair: list[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])


@contextmanager
def running_prometheus(controller_url: str, folder: Path, *, port: int) -> Iterator[Prometheus]:
    """One with the configuration that baton ships, at its quickest; ended afterwards."""
    if not PROMETHEUS.exists():
        raise RuntimeError(f"prometheus is not here: {GET_TOOLS} prometheus")
    config = _config(controller_url, folder)
    command = [
        str(PROMETHEUS), f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    # One client: making one takes longer than most answers.
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_ANSWER_S, trust_env=False)
    server = Prometheus(client=client)
    try:
        _await_ready(server, process, folder / "prometheus.log")
        yield server
    finally:
        client.close()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def _config(controller_url: str, folder: Path) -> Path:
    """The shipped file, asking this observatory, and as often as a short run needs."""
    config = YAML(typ="safe").load(FOLDER / "prometheus.yml")
    interval = f"{SCRAPE_S}s"
    config["global"] |= {"scrape_interval": interval, "evaluation_interval": interval}
    config["rule_files"] = [str(FOLDER / "rules" / "*.yaml")]
    (job,) = config["scrape_configs"]
    job["http_sd_configs"] = [{"url": f"{controller_url}/sd", "refresh_interval": interval}]
    path = folder / "prometheus.json"
    path.write_text(json.dumps(config))
    return path


def _await_ready(server: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + _READY_S
    while True:
        try:
            if server.client.get("/-/ready").is_success:
                return
        except httpx.TransportError:
            pass
        output = log.read_text(errors="replace")
        assert process.poll() is None, f"prometheus ended:\n{output}"
        assert time.monotonic() < until_s, f"prometheus is not ready:\n{output}"
        time.sleep(0.1)
