"""A baton that is started as a user would start it, and looked at as an operator would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from baton.domain.errors import EngineStartFailed
from baton.domain.names.addresses import endpoint, loopback
from baton.engine.vllm.frontend.rust_binary import find_rust_frontend
from baton.serving.front.data_path import DataPath, choose_data_path
from tests.fakes.free_ports import free_port
from tests.fakes.scaled_deadline import ScaledDeadline

CONFIGS = Path(__file__).parents[2] / "configs"
_BATON = [sys.executable, "-m", "baton.cli.main"]
MAX_TOKENS = 64
_START_S = 240.0
POLL_S = 1.0
"""Between two questions of a test that waits: each takes a core for a second, and what it waits for
may need that core."""
_SURE = ("endpoint", "pairs", "replicas joined", "reports")
"""Checks of `baton doctor` that a deployment passes from the moment that its pairs are probed."""


def skip_without_rust() -> None:
    """Skip what needs vLLM's Rust frontend and a HAProxy in front of it, and say which is away."""
    try:
        find_rust_frontend(os.environ)
    except EngineStartFailed as missing:
        pytest.skip(str(missing))
    choice = choose_data_path(os.environ)
    if choice.data_path is not DataPath.HAPROXY:
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
    inside: tuple[str, ...] = ()
    """What to put before a command so that it runs on the deployment's node."""

    def ask(self, *command: str, within_s: float = 60, by: str = sys.executable) -> dict[str, Any]:
        """What a command of `baton`, that of an interpreter, answers in JSON."""
        done = self._answer(*command, within_s=within_s, by=by)
        assert done.returncode == 0, done.stderr.decode()
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def assert_hands_off(self) -> None:
        """A stream is prefilled and decoded apart, and found by the name its client gave it."""
        assert len(self.stream("pass the baton on", request_id="why-there")) > 0
        (story,) = self.ask("explain", "route", "why-there")["requests"]
        assert (story["outcome"], story["mode"]) == ("finished", "pull")
        assert story["output_tokens"] == MAX_TOKENS

    def assert_well(self, *, pairs: int) -> None:
        """`baton doctor` finds nothing wrong, once so many pairs of replicas have been probed."""
        self.wait_for(lambda answer: _proven(answer["links"]) == pairs, 60, "links")
        checks = self.ask("doctor", *self.options, within_s=170)["checks"]
        of_it = {check["name"]: check for check in checks if check["area"] == "deployment"}
        failed = [check for check in checks if check["verdict"] == "FAIL"]
        unwell = [of_it[name] for name in _SURE if of_it[name]["verdict"] != "PASS"]
        assert not failed + unwell, f"not well: {failed + unwell}"

    def _answer(
        self, *command: str, within_s: float = 60, by: str = sys.executable
    ) -> subprocess.CompletedProcess[bytes]:
        command = (*self.inside, by, *_BATON[1:], *command, "-o", "json")
        return subprocess.run(command, capture_output=True, timeout=within_s, check=False)

    def fails(self, *command: str) -> str:
        """What a command of `baton` that fails complains of."""
        done = subprocess.run([*_BATON, *command], capture_output=True, timeout=60, check=False)
        assert done.returncode != 0, done.stdout.decode()
        return done.stderr.decode()

    def status(self) -> dict[str, Any]:
        """What `baton status` says."""
        return self.ask("status")

    def replicas(self) -> list[dict[str, Any]]:
        """The replicas as the ingress sees them."""
        rows: list[dict[str, Any]] = self.status()["ingresses"][0]["replicas"]
        return rows

    def pids(self) -> dict[str, int]:
        """The process of each replica, by replica id."""
        return {row["replica_id"]: row["pid"] for row in self.status()["members"]}

    def wait_for(
        self, holds: Callable[[dict[str, Any]], bool], timeout_s: float, command: str = "status"
    ) -> dict[str, Any]:
        """Wait until the status, or what another command answers, is as wanted.

        A command that fails, or that not everybody answers, is tried again: who it asks may just be
        replaced.
        """
        deadline = ScaledDeadline(timeout_s)
        while True:
            answer = self._answer(command)
            # One that lost its own node of Ray on the way says nothing, and ends well.
            said = answer.stdout if answer.returncode == 0 else b""
            assert not said or said.lstrip().startswith(b"{"), f"{command} said no JSON: {said!r}"
            found: dict[str, Any] = json.loads(said) if said else {}
            if found and "unanswered" not in found and holds(found):
                return found
            shown = (answer.stdout + answer.stderr).decode()
            assert not deadline.passed(), f"not so within {timeout_s} s: {shown}"
            time.sleep(POLL_S)

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


def _proven(links: list[dict[str, Any]]) -> int:
    return sum(row["state"] == "ok" for row in links)


@contextmanager
def running(config: str, folder: Path, **settings: object) -> Iterator[Deployment]:
    """`baton up` with a file of `configs/`, on a port of its own; ended in good order."""
    port = free_port()
    log = folder / "up.log"
    # The endpoint of metrics takes any port, so that deployments do not meet there either.
    sets = {"server.port": port, "observability.metrics.port": 0, **settings}
    options = ["-c", str(CONFIGS / config)]
    for name, value in sets.items():
        options += ["--set", f"{name}={value}"]
    command = [*_BATON, "up", *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=_environment()
        )
    try:
        _await_serving(process, log, deadline=ScaledDeadline(_START_S))
        url = endpoint("http", loopback(str(sets.get("server.host", "127.0.0.1"))), port)
        yield Deployment(url=url, process=process, log=log, options=tuple(options))
    finally:
        _end(process)


def _environment() -> Mapping[str, str]:
    return os.environ | {"NO_COLOR": "1"}


def _await_serving(process: subprocess.Popen[bytes], log: Path, deadline: ScaledDeadline) -> None:
    while "Ctrl-C ends it" not in log.read_text(errors="replace"):
        assert process.poll() is None, f"baton up ended:\n{log.read_text(errors='replace')}"
        assert not deadline.passed(), f"not serving:\n{log.read_text(errors='replace')}"
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    family = descendants(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(90)
    left = alive(family)
    process.kill()
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    assert not left, f"processes were left behind: {left}"


def descendants(pid: int) -> list[psutil.Process]:
    """Every process below this one, now."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(processes: list[psutil.Process], within_s: float = 5.0) -> list[psutil.Process]:
    """Those that still run after a moment; a zombie is not running."""
    _, left = psutil.wait_procs(processes, timeout=within_s)
    return [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
