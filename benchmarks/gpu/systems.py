"""`vllm serve` and baton with the same model on the same GPU, one at a time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._systems import ROOT, await_health, end_process, free_port, spawn, tail

_ASK_S = 60.0


class Held:
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
            await_health(self.url, self._why_not)
        except BaseException:
            end_process(self._process)
            raise
        self.start_s = time.monotonic() - began_s

    def end(self) -> None:
        """In good order."""
        end_process(self._process)

    def _why_not(self) -> str | None:
        return None if self._process.poll() is None else f"it ended: {tail(self._log)}"


def vllm_serve(model: Path, log: Path, arguments: Sequence[str]) -> Held:
    """One API server with one engine, by its module: the command is not on every PATH."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", model.name]
    command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    return Held(command, log, port=port)


def baton_up(config: Path, log: Path, sets: Sequence[str]) -> Held:
    """A deployment, held by its command."""
    port = free_port()
    command = [*_BATON, "up", "-c", str(config), "--set", f"server.port={port}"]
    command += [word for one in sets for word in ("--set", one)]
    return Held(command, log, port=port)


def baton_says(*words: str) -> object:
    """What a command of the running deployment prints as JSON.

    Raises:
        CalledProcessError: it failed.
    """
    done = subprocess.run(  # noqa: S603 - our own program
        [*_BATON, *words, "--output", "json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=_ASK_S,
    )
    said: object = json.loads(done.stdout)
    return said


_BATON = (sys.executable, "-m", "baton.cli.main")
