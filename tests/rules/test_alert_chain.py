"""A running baton, a real Prometheus and Alertmanager, and somebody who is called: all decode dies.

Run it with `scripts/check-alerts`, which gets what it needs, and shows how long each step took.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest

from tests.e2e.deployments import Deployment, running_deployment
from tests.fakes.free_ports import free_port
from tests.rules.rule_files import ROOT, RULES

_TOOLS = {name: ROOT / ".tools/bin" / name for name in ("prometheus", "alertmanager")}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(
        not all(path.exists() for path in _TOOLS.values()),
        reason="no Prometheus or Alertmanager: get them with scripts/tools prometheus alertmanager",
    ),
]
_PAGED_WITHIN_S = 60.0
_ALERT = "BatonNoDecode"
Told = Mapping[str, Any]


class Pager:
    """Where Alertmanager calls somebody; remembers when, and what was said."""

    def __init__(self) -> None:
        self._heard: list[tuple[float, str, Told]] = []
        self._changed = threading.Condition()
        pager = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()
                pager.hear(self.path, told)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port

    def hear(self, path: str, told: Told) -> None:
        with self._changed:
            self._heard += [(time.monotonic(), path, alert) for alert in told["alerts"]]
            self._changed.notify_all()

    def calls(self, path: str) -> list[str]:
        """What was told at a path until now, by name of alert."""
        with self._changed:
            return [alert["labels"]["alertname"] for _, at, alert in self._heard if at == path]

    def wait_for(self, path: str, alert: str, status: str, timeout_s: float) -> tuple[float, Told]:
        """When an alert with this status was first told there, and all that was said of it."""

        def told() -> tuple[float, Told] | None:
            for at_s, where, entry in self._heard:
                if (where, entry["labels"]["alertname"], entry["status"]) == (path, alert, status):
                    return at_s, entry
            return None

        with self._changed:
            assert self._changed.wait_for(lambda: told() is not None, timeout_s), self._heard
            found = told()
        assert found is not None
        return found

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def program(folder: Path, name: str, *arguments: str) -> Iterator[None]:
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [str(_TOOLS[name]), *arguments], stdout=log, stderr=log, cwd=folder
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(20)


def written(folder: Path, name: str, changes: Mapping[str, str]) -> str:
    """A file of `dashboards/` with these places changed, each of which must be there."""
    text = (ROOT / "dashboards" / name).read_text()
    for before, after in changes.items():
        assert before in text, f"{name} has no {before!r} any more"
        text = text.replace(before, after)
    (folder / name).write_text(text)
    return str(folder / name)


class Prometheus:
    """A running one."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/query"

    def asked(self, query: str) -> dict[str, float]:
        """A query's values, by the job and component they are about."""
        try:
            answer = httpx.get(self._url, params={"query": query}, timeout=5).json()
        except httpx.TransportError:
            return {}
        rows = answer.get("data", {}).get("result", [])
        return {row["metric"].get("component", ""): float(row["value"][1]) for row in rows}

    def wait_for(self, query: str, holds: Callable[[dict[str, float]], bool]) -> None:
        until_s = time.monotonic() + 60
        while not holds(found := self.asked(query)):
            assert time.monotonic() < until_s, f"{query}: {found}"
            time.sleep(0.5)


@contextmanager
def watched(folder: Path, baton: Deployment, pager: Pager) -> Iterator[Prometheus]:
    """Prometheus and Alertmanager by the files that this project gives, but for addresses."""
    web, alerts = free_port(), free_port()
    shutil.copytree(RULES, folder / "rules")
    scrape = written(
        folder,
        "prometheus.yml",
        {
            "http://127.0.0.1:9400": baton.status()["observability"]["url"].rstrip("/"),
            "# alerting:": "alerting:",
            "#   alertmanagers:": "  alertmanagers:",
            "127.0.0.1:9093": f"127.0.0.1:{alerts}",
        },
    )
    routes = written(
        folder, "alertmanager-example.yaml", {"127.0.0.1:9095": f"127.0.0.1:{pager.port}"}
    )
    with ExitStack() as stack:
        stack.enter_context(
            program(
                folder,
                "alertmanager",
                f"--config.file={routes}",
                f"--storage.path={folder / 'alertmanager'}",
                f"--web.listen-address=127.0.0.1:{alerts}",
                "--cluster.listen-address=",
            )
        )
        stack.enter_context(
            program(
                folder,
                "prometheus",
                f"--config.file={scrape}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                f"--web.listen-address=127.0.0.1:{web}",
            )
        )
        await_ready(folder, "alertmanager", alerts)
        await_ready(folder, "prometheus", web)
        yield Prometheus(web)


def await_ready(folder: Path, name: str, port: int) -> None:
    """Wait until a program answers; what it complains of is shown where it does not."""
    until_s = time.monotonic() + 30
    while True:
        with suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/-/ready", timeout=5).is_success:
                return
        assert time.monotonic() < until_s, (folder / f"{name}.log").read_text()
        time.sleep(0.2)


def title_of(process: psutil.Process) -> str:
    """What it calls itself; empty when it is gone."""
    with suppress(psutil.NoSuchProcess):
        return "".join(process.cmdline()[:1])
    return ""


class Killer:
    """Kills every replica of a pool, and whoever Ray starts in its place, until it is left."""

    def __init__(self, baton: Deployment, pool: str) -> None:
        first = [
            psutil.Process(pid)
            for replica, pid in baton.pids().items()
            if replica.startswith(f"{pool}-")
        ]
        assert first
        # Ray names its processes `ray::ServeReplica:APP:POOL`, and what they do may follow.
        self._titles = tuple({title_of(process).partition(".")[0] for process in first})
        self._raylets = {process.ppid() for process in first}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on)
        self.killed = 0
        self.began_at_s = 0.0

    def _kill(self) -> None:
        for raylet in self._raylets:
            for child in psutil.Process(raylet).children():
                if title_of(child).startswith(self._titles):
                    child.kill()
                    self.killed += 1

    def _go_on(self) -> None:
        while not self._over.wait(0.2):
            self._kill()

    def __enter__(self) -> Self:
        self.began_at_s = time.monotonic()
        self._kill()
        assert self.killed, self._titles
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_losing_all_decode_replicas_pages_within_a_minute_and_resolves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{text}\n")

    settings = {"observability.metrics.port": 0}
    with (
        running_deployment("sim.yaml", tmp_path, **settings) as baton,
        Pager() as pager,
        watched(tmp_path, baton, pager) as prometheus,
    ):
        targets = {"controller": 1, "ingress": 1, "replica": 4}
        prometheus.wait_for("sum by (component) (up)", lambda up: up == targets)
        prometheus.wait_for("baton:decoding_replicas:sum", lambda found: found == {"": 2})
        assert pager.calls("/pages") == []
        with Killer(baton, "decode") as killer:
            paged_at_s, page = pager.wait_for("/pages", _ALERT, "firing", 2 * _PAGED_WITHIN_S)
        left_at_s = time.monotonic()
        assert page["labels"]["severity"] == "page"
        assert page["annotations"]["runbook"] == f"docs/operations/runbooks/{_ALERT}.md"
        assert (ROOT / page["annotations"]["runbook"]).exists()
        paged_s = paged_at_s - killer.began_at_s
        say(f"paged {paged_s:.1f} s after the first of {killer.killed} kills")
        assert paged_s < _PAGED_WITHIN_S
        resolved_at_s, _ = pager.wait_for("/pages", _ALERT, "resolved", 240)
        say(f"resolved {resolved_at_s - left_at_s:.1f} s after replicas were left alone")
        assert set(pager.calls("/pages")) == {_ALERT}
