"""A baton that is started as a user would start it, and looked at as an operator would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.domain.errors import EngineStartFailed, OperatorError
from baton.domain.names.addresses import connectable_host, format_endpoint
from baton.engine.vllm.frontend.rust_frontend import find_rust_frontend
from baton.serving.cluster.cluster_state import running_clusters, state_folder
from baton.serving.front.data_path import DataPath, choose_data_path
from baton.serving.operator.attached import AttachedCluster
from baton.serving.operator.control_socket import ControlClient
from tests.fakes.free_ports import free_port
from tests.fakes.processes import start_process, stop_process, wait_output
from tests.fakes.scaled_deadline import ScaledDeadline

CONFIGS = Path(__file__).parents[2] / "configs"
_BATON = [sys.executable, "-m", "baton.cli.main"]
MAX_TOKENS = 64
SERVING = "Ctrl-C ends it"
"""What `baton up` says as soon as it serves."""
_START_S = 240.0
POLL_S = 0.5
"""Between two questions of a test that waits."""
_ALWAYS_PASSING = ("endpoint", "pairs", "replicas joined", "reports")
"""Checks of `baton doctor` that a deployment passes from the moment that its pairs are probed."""


def skip_without_rust() -> None:
    """Skip what needs vLLM's Rust frontend and a HAProxy in front of it, and say which is away."""
    try:
        find_rust_frontend(os.environ)
    except EngineStartFailed as error:
        pytest.skip(str(error))
    choice = choose_data_path(os.environ)
    if choice.data_path is not DataPath.SERVE_HAPROXY:
        pytest.skip(choice.warning or "no HAProxy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A running baton."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    options: tuple[str, ...] = ()
    """Of the command line that say by which configuration it was started."""
    model: str = "tiny"
    exec_prefix: tuple[str, ...] = ()
    """What to put before a command so that it runs on the deployment's node."""

    def run_json(
        self, *command: str, timeout_s: float = 60, interpreter: str = sys.executable
    ) -> dict[str, Any]:
        """What a command of `baton`, that of an interpreter, answers in JSON."""
        process = self._run_command(*command, timeout_s=timeout_s, interpreter=interpreter)
        assert process.returncode == 0, process.stderr.decode()
        answer: dict[str, Any] = json.loads(process.stdout)
        return answer

    def assert_hands_off(self) -> None:
        """A stream is prefilled and decoded apart, and found by the name its client gave it."""
        assert len(self.stream("pass the baton on", request_id="why-there")) > 0
        (report,) = self.run_json("explain", "route", "why-there")["requests"]
        assert (report["outcome"], report["mode"]) == ("finished", "pull")
        assert report["output_tokens"] == MAX_TOKENS

    def assert_healthy(self, *, pairs: int) -> None:
        """`baton doctor` finds nothing wrong, once this many pairs of replicas have been probed."""
        self.wait_for(lambda answer: _count_ok(answer["links"]) == pairs, 60, "links")
        checks = self.run_json("doctor", *self.options, timeout_s=170)["checks"]
        deployment_checks = {
            check["name"]: check for check in checks if check["area"] == "deployment"
        }
        failed = [check for check in checks if check["status"] == "FAIL"]
        not_passed = [
            deployment_checks[name]
            for name in _ALWAYS_PASSING
            if deployment_checks[name]["status"] != "PASS"
        ]
        assert not failed + not_passed, f"not well: {failed + not_passed}"

    def _run_command(
        self, *command: str, timeout_s: float = 60, interpreter: str = sys.executable
    ) -> subprocess.CompletedProcess[bytes]:
        command = (*self.exec_prefix, interpreter, *_BATON[1:], *command, "-o", "json")
        return subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)

    def run_failing(self, *command: str) -> str:
        """What a command of `baton` that fails complains of."""
        process = subprocess.run([*_BATON, *command], capture_output=True, timeout=60, check=False)
        assert process.returncode != 0, process.stdout.decode()
        return process.stderr.decode()

    def status(self) -> dict[str, Any]:
        """What `baton status` says."""
        return self.run_json("status")

    def replicas(self) -> list[dict[str, Any]]:
        """The replicas as the ingress sees them."""
        rows: list[dict[str, Any]] = self.status()["ingresses"][0]["replicas"]
        return rows

    def pids(self) -> dict[str, int]:
        """The process of each replica, by replica id."""
        status = self.wait_for(lambda status: "members" in status, 30)
        return {row["replica_id"]: row["pid"] for row in status["members"]}

    def wait_for(
        self, predicate: Callable[[dict[str, Any]], bool], timeout_s: float, command: str = "status"
    ) -> dict[str, Any]:
        """Wait until the answer of `status` or `links` is as expected.

        A question that fails, or that some do not answer, is asked again: a replica may just be
        replaced.
        """
        deadline = ScaledDeadline(timeout_s)
        while True:
            report, trouble = self._ask(command)
            if report and "unanswered" not in report and predicate(report):
                return report
            assert not deadline.is_expired(), f"not so within {timeout_s} s: {trouble or report}"
            time.sleep(POLL_S)

    def _ask(self, command: str) -> tuple[dict[str, Any], str]:
        """The answer of `status` or `links`, or why there is none.

        Where the deployment runs on this node, its owner is asked from here: the command itself
        takes a core for a second, which the test may be waiting for.
        """
        if not self.exec_prefix and (owner := self._owner()) is not None:
            try:
                answer = owner.status() if command == "status" else owner.links()
            except OperatorError as error:
                return {}, str(error)
            return dict(json.loads(json.dumps(answer, default=str))), ""
        process = self._run_command(command)
        # One that lost its own node of Ray on the way says nothing, and ends well.
        stdout = process.stdout if process.returncode == 0 else b""
        assert not stdout or stdout.lstrip().startswith(b"{"), (
            f"{command} printed no JSON: {stdout!r}"
        )
        return dict(json.loads(stdout or b"{}")), (process.stdout + process.stderr).decode()

    def _owner(self) -> AttachedCluster | None:
        for state in running_clusters(state_folder()):
            control = ControlClient(Path(state.run_dir))
            if state.pid == self.process.pid and control.is_reachable():
                return AttachedCluster(state, control)
        return None

    def stream(
        self,
        prompt: str | list[int],
        *,
        max_tokens: int = MAX_TOKENS,
        request_id: str = "",
        model: str = "",
        on_chunk: Callable[[int], None] = lambda _count: None,
    ) -> str:
        """The text of one streamed completion; fails unless the stream ends properly."""
        body = {
            "model": model or self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        text, chunks, finish = "", 0, None
        url = f"{self.url}/v1/completions"
        headers = {"X-Request-Id": request_id} if request_id else {}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=90) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    assert finish == "length", f"ended with {finish!r} after {text!r}"
                    return text
                if data:
                    event = json.loads(data)
                    assert "error" not in event, event
                    text += event["choices"][0]["text"]
                    finish = event["choices"][0].get("finish_reason") or finish
                    chunks += 1
                    on_chunk(chunks)
        raise AssertionError(f"the stream was cut after {text!r}")


def _count_ok(links: list[dict[str, Any]]) -> int:
    return sum(row["state"] == "ok" for row in links)


@contextmanager
def running_deployment(config: str, folder: Path, **settings: object) -> Iterator[Deployment]:
    """`baton up` with a file of `configs/`, on a port of its own; ended in good order."""
    port = free_port()
    log = folder / "up.log"
    # The endpoint of metrics takes any port, so that deployments do not meet there either.
    sets = {"server.port": port, "observability.metrics.port": 0, **settings}
    options = ["-c", str(CONFIGS / config)]
    for name, value in sets.items():
        options += ["--set", f"{name}={value}"]
    command = [*_BATON, "up", *options]
    process = start_process(command, log, os.environ | {"NO_COLOR": "1"})
    try:
        wait_output(SERVING, process, log, timeout_s=_START_S)
        url = format_endpoint(
            "http", connectable_host(str(sets.get("server.host", "127.0.0.1"))), port
        )
        yield Deployment(url=url, process=process, log=log, options=tuple(options))
    finally:
        survivors = stop_process(process)
        assert not survivors, f"processes were left behind: {survivors}"
