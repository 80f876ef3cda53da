"""What vLLM's app says of itself: its routes, and the schema of those that are open."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.engine.tiny_model import write_tiny_model
from baton.engine.vllm.frontend.app import VllmFrontend
from baton.engine.vllm.frontend.settings import FleetFacts, FrontendHooks, FrontendSettings
from baton.engine.vllm.gate.gate import ROUTES
from baton.runtime.process.clock import MonotonicClock

ROOT = Path(__file__).parents[2]
_SEED = 20261122
_PER_OPERATION = 40


def vllm_app() -> Any:  # noqa: ANN401 - vllm is not followed
    """vLLM's app as an ingress builds it; it serves nobody."""
    facts = FleetFacts(
        max_len_tokens=1024,
        block_size_tokens=16,
        kv_blocks=1000,
        max_running_requests=64,
        max_batched_tokens=2048,
    )
    hooks = FrontendHooks(
        on_request=lambda _request: None,
        on_abort=lambda _ids: None,
        admit=lambda _n, _caller: None,
        healthy=lambda: True,
    )

    async def build(folder: str) -> Any:  # noqa: ANN401
        settings = FrontendSettings(model=folder, served_model_name="tiny")
        frontend = VllmFrontend(settings, facts, hooks=hooks, clock=MonotonicClock())
        await frontend.start()
        try:
            assert frontend._api is not None
            return frontend._api.asgi
        finally:
            await frontend.close()

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_tiny_model(Path(folder))
        return asyncio.run(build(folder))


def routes_of(app: Any) -> set[tuple[str, str]]:  # noqa: ANN401 - vllm is not followed
    """Method and path of every route of an app."""
    return {
        (method, route.path)
        for route in app.routes
        for method in getattr(route, "methods", None) or ("GET",)
    }


def routes_of_vllm() -> set[tuple[str, str]]:
    """Of vLLM's app."""
    return routes_of(vllm_app())


def write_schema(file: Path) -> Path:
    """The OpenAPI schema of the routes that an ingress opens; vLLM serves it to nobody here."""
    app = vllm_app()
    document = app.openapi()
    open_paths = {path for paths in ROUTES.values() for path in paths}
    document["paths"] = {
        path: operations for path, operations in document["paths"].items() if path in open_paths
    }
    file.write_text(json.dumps(document))
    return file


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzReport:
    """What schemathesis did and found."""

    cases: int
    operations: int
    server_errors: int
    examples: tuple[str, ...]
    seed: int


def run_schemathesis(schema: Path, url: str, *, key: str, folder: Path) -> FuzzReport:
    """Have it make cases of the schema, good ones and bad ones, and look for 5xx."""
    tool = ROOT / ".tools" / "schemathesis" / "bin" / "schemathesis"
    report = folder / "cases.ndjson"
    command = [
        tool, "run", schema, "--url", url, "--checks", "not_a_server_error",
        "--max-examples", str(_PER_OPERATION), "--seed", str(_SEED), "--mode", "all",
        "--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--workers", "2",
        "--request-timeout", "30", "--generation-database", "none",
        "--report", "ndjson", "--report-ndjson-path", report,
    ]  # fmt: skip
    hooks = folder / "hooks.py"
    # In the environment, not in the arguments: those can be read by everybody on the machine.
    hooks.write_text(_HOOKS)
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": "hooks",
        "PYTHONPATH": str(folder),
        "BATON_KEY": key,
        "NO_COLOR": "1",
    }
    process = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    (folder / "schemathesis.txt").write_text(process.stdout + process.stderr)
    return _parse_report(report, process.stdout)


_HOOKS = """\
import os

import schemathesis


@schemathesis.hook
def before_call(context, case, kwargs):
    case.headers = {**(case.headers or {}), "Authorization": "Bearer " + os.environ["BATON_KEY"]}
"""


def _parse_report(report: Path, output: str) -> FuzzReport:
    statuses: list[int] = []
    examples: list[str] = []
    operations: set[str] = set()
    for line in report.read_text().splitlines():
        for method, uri, status in _requests_in(json.loads(line)):
            statuses.append(status)
            operations.add(f"{method} {re.sub('[?].*', '', uri)}")
            if status >= 500:
                examples.append(f"{method} {uri}: {status}")
    if not statuses:
        raise AssertionError(f"schemathesis made no case: {output[-2000:]}")
    return FuzzReport(
        cases=len(statuses),
        operations=len(operations),
        server_errors=len(examples),
        examples=tuple(dict.fromkeys(examples)),
        seed=_SEED,
    )


def _requests_in(event: object) -> list[tuple[str, str, int]]:
    """Every request with its answer in an event of the report, however deep."""
    match event:
        case {
            "request": {"method": str() as method, "uri": str() as uri},
            "response": Mapping() as response,
        }:
            status = response.get("status_code", 0)
            return [(method, uri, int(status))]
        case Mapping():
            return [request for value in event.values() for request in _requests_in(value)]
        case list():
            return [request for value in event for request in _requests_in(value)]
        case _:
            return []
