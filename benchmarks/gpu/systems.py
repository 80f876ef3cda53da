"""`vllm serve` and baton with the same model on the same GPU, one at a time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._systems import ROOT, log_tail, pick_free_port, spawn, terminate, wait_until_healthy

_COMMAND_TIMEOUT_S = 60.0


class RunningProgram:
    """A program that answers at a URL; its log stays."""

    def __init__(self, command: Sequence[str], log: Path, *, port: int) -> None:
        """Start it and wait until it is healthy.

        Raises:
            NotStartedError: it ended, or was not healthy in time.
        """
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        began_s = time.monotonic()
        self._process = spawn(command, log)
        try:
            wait_until_healthy(self.url, self._failure_reason)
        except BaseException:
            terminate(self._process)
            raise
        self.start_s = time.monotonic() - began_s

    def stop(self) -> None:
        """In good order."""
        terminate(self._process)

    def _failure_reason(self) -> str | None:
        return None if self._process.poll() is None else f"it ended: {log_tail(self._log)}"


def vllm_serve(model: Path, log: Path, arguments: Sequence[str]) -> RunningProgram:
    """One API server with one engine, by its module: the command is not on every PATH."""
    port = pick_free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", model.name]
    command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    return RunningProgram(command, log, port=port)


def baton_up(config: Path, log: Path, overrides: Sequence[str]) -> RunningProgram:
    """A deployment, held by its command."""
    port = pick_free_port()
    command = [*_BATON, "up", "-c", str(config), "--set", f"server.port={port}"]
    command += [word for override in overrides for word in ("--set", override)]
    return RunningProgram(command, log, port=port)


def run_baton_json(*arguments: str) -> object:
    """What a command of the running deployment prints as JSON.

    Raises:
        CalledProcessError: it failed.
    """
    result = subprocess.run(  # noqa: S603 - our own program
        [*_BATON, *arguments, "--output", "json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=_COMMAND_TIMEOUT_S,
    )
    document: object = json.loads(result.stdout)
    return document


_BATON = (sys.executable, "-m", "baton.cli.main")
