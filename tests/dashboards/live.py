"""Every expression against a running baton: `python -m tests.dashboards.live`.

A deployment with tenants and classes on simulated engines, a real Prometheus that scrapes it as the
shipped configuration says, a load for a minute and a half. Then each expression of each panel and
rule is asked, with its variables filled in, and must have finite data, or be listed with a reason.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.dashboards.evaluate_expressions import QueryRange, evaluate, expressions, find_problems
from tests.dashboards.expected_empty import EXPECTED_EMPTY
from tests.dashboards.load import Load
from tests.dashboards.pages import pages
from tests.dashboards.prometheus import SCRAPE_S, Prometheus, running_prometheus
from tests.e2e.deployments import running_deployment
from tests.fakes.free_ports import free_port

_TENANTS = ("acme", "lab")
_WARM_UP_S = 10.0
_SETTINGS = {
    # Seen on two cores: few processes, and every prompt handed over.
    "pools.prefill.replicas.max": 2,
    "pools.decode.replicas.max": 2,
    "router.disaggregate": "always",
    "autoscaler.interval": "1s",
    # A promise of each kind, and a limit that the load goes beyond.
    "slo.default.itl_p99": "100ms",
    "tenants.default.rate.requests": "1/s",
}


def main() -> int:
    """0 when nothing is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.dashboards.live")
    parser.add_argument("--seconds", type=float, default=90.0, help="of load")
    parser.add_argument("--show", action="store_true", help="say what each expression answered")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="bd") as name,
        _running_deployment(Path(name)) as (load, server),
    ):
        started_s = server.clock_s()
        asyncio.run(_run_load(load, options.seconds))
        span = QueryRange(
            from_s=started_s + _WARM_UP_S,
            to_s=server.clock_s(),
            step_s=2.0 * SCRAPE_S,
            window=f"{8 * SCRAPE_S}s",
        )
        results = list(evaluate(server, expressions(pages(), span), span))
        names = server.metrics_since(started_s)
        problems = find_problems(results, EXPECTED_EMPTY, names.__contains__)
    if options.show:
        for answer in results:
            mark = "data" if answer.has_data else "EMPTY"
            sys.stderr.write(f"{mark:6}{len(answer.series):4} {answer.expression.location}\n")
    for line in problems:
        sys.stderr.write(f"live: {line}\n")
    report = {
        "expressions": len(results),
        "with_data": sum(answer.has_data for answer in results),
        "alerts": sum(answer.expression.is_alert for answer in results),
        "expected_empty": len(EXPECTED_EMPTY),
        "wrong": len(problems),
        "requests": dict(load.outcomes),
    }
    sys.stdout.write(json.dumps(report) + "\n")
    return 1 if problems else 0


async def _run_load(load: Load, seconds: float) -> None:
    """The load; halfway an operator takes a replica away for a while, so that pools change."""
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(seconds))
        await asyncio.sleep(seconds / 3)
        await asyncio.to_thread(_run_baton, "scale", "decode", "1", "--for", f"{seconds / 4:.0f}s")


def _run_baton(*command: str) -> bytes:
    """What a command of baton answers in JSON."""
    command_line = [sys.executable, "-m", "baton.cli.main", *command, "-o", "json"]
    return subprocess.run(command_line, capture_output=True, timeout=60, check=True).stdout


@contextmanager
def _running_deployment(folder: Path) -> Iterator[tuple[Load, Prometheus]]:
    """A deployment and its Prometheus, once that has reached every process."""
    keys = {tenant: _key(tenant, folder) for tenant in _TENANTS}
    port = free_port()
    settings = _SETTINGS | {"observability.metrics.port": port}
    settings |= {f"tenants.{tenant}.keys_file": _keys_file(tenant, folder) for tenant in _TENANTS}
    with running_deployment("tenants-example.yaml", folder, **settings) as deployment:
        controller_url = f"http://127.0.0.1:{port}"
        with running_prometheus(controller_url, folder, port=free_port()) as server:
            _await_targets(controller_url, server)
            yield Load(url=deployment.url, keys=keys), server


def _keys_file(tenant: str, folder: Path) -> Path:
    return folder / f"{tenant}.keys"


def _key(tenant: str, folder: Path) -> str:
    file = str(_keys_file(tenant, folder))
    key: str = json.loads(_run_baton("keys", "create", "--tenant", tenant, "--file", file))["key"]
    return key


def _await_targets(observatory: str, server: Prometheus) -> None:
    """Until every process that the controller names has been scraped."""
    until_s = time.monotonic() + 60
    while True:
        groups = httpx.get(f"{observatory}/sd", timeout=5).json()
        listed = {target for group in groups for target in group["targets"]}
        up = {target["discoveredLabels"]["__address__"] for target in server.targets()
              if target["health"] == "up"}  # fmt: skip
        if len(listed) > 1 and listed <= up:
            return
        assert time.monotonic() < until_s, f"not scraped: {listed - up or listed}"
        time.sleep(0.2)


if __name__ == "__main__":
    raise SystemExit(main())
