"""A wrong `--address` is refused within seconds by every verb that takes one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from baton.cli.main import build_app
from baton.domain.errors import ClusterFailed
from baton.serving.cluster import local_cluster
from tests.cli.invoked import run_baton
from tests.fakes.free_ports import free_port
from tests.repo.project import ROOT

CONFIG: Final = str(ROOT / "configs" / "sim.yaml")
VERBS: Final = {
    "apply": ("-c", CONFIG),
    "bench": (),
    "chat": ("hello",),
    "config show": ("--running",),
    "doctor": (),
    "down": (),
    "explain route": ("r-1",),
    "explain scale": (),
    "history": (),
    "join": (),
    "links": (),
    "logs": (),
    "replay": ("trace.jsonl",),
    "rollback": (),
    "scale": ("all", "1"),
    "status": (),
    "top": ("--once",),
    "trace": (),
    "up": ("-c", CONFIG),
    "upgrade": (),
    "usage": (),
}
"""Every verb with an address of a cluster, and its other arguments."""
_PROMPT_S: Final = 8.0
"""For an answer without a wait; on a busy machine a command takes a while."""


def verbs_with_an_address(command: Any, name: str = "") -> Iterator[str]:  # noqa: ANN401 - click's
    subcommands = getattr(command, "commands", {})
    for word, subcommand in subcommands.items():
        yield from verbs_with_an_address(subcommand, f"{name} {word}".strip())
    options = {option for parameter in command.params for option in parameter.opts}
    if options & {"--address", "--ray-address"}:
        yield name


@contextmanager
def listener(answer: bytes, heard: threading.Event | None = None) -> Iterator[str]:
    """A program that answers so whatever it is sent, and keeps the connection."""
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connections.append(connection)
                connection.recv(1024)
                connection.sendall(answer)
                if heard is not None:
                    heard.set()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for connection in connections:
                connection.close()


@contextmanager
def wrong_address(kind: str) -> Iterator[str]:
    if kind == "closed port":
        yield f"127.0.0.1:{free_port()}"
    elif kind == "unknown host":
        yield "no-such-host.invalid:6379"
    elif kind == "URL of a server":
        with listener(b"HTTP/1.1 200 OK\r\n\r\n") as address:
            yield f"http://{address}"
    else:
        with listener(b"" if kind == "silent listener" else b"HTTP/1.1 200 OK\r\n\r\n") as address:
            yield address


@pytest.fixture(autouse=True)
def nothing_runs_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text('{"at_s": 0, "input_length": 4, "output_length": 3}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_the_table_has_every_verb_that_takes_an_address() -> None:
    found = set(verbs_with_an_address(typer.main.get_command(build_app())))
    assert found == VERBS.keys()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("closed port", "nothing answers at"),
        ("silent listener", "no reply in"),
        ("HTTP server", "where an HTTP server listens"),
        ("unknown host", "nothing answers at"),
        ("URL of a server", "expected HOST:PORT"),
    ],
)
def test_a_wrong_address_is_refused_by_every_verb(
    kind: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert local_cluster._GREETING_TIMEOUT_S < 3
    monkeypatch.setattr(local_cluster, "_GREETING_TIMEOUT_S", 0.2)
    answers = {}
    with wrong_address(kind) as address:
        for verb, arguments in VERBS.items():
            option = "--ray-address" if verb == "up" else "--address"
            started_s = time.monotonic()
            result = run_baton(*verb.split(), *arguments, option, address)
            took_s = time.monotonic() - started_s
            is_said = why in result.stderr and address in result.stderr
            answers[verb] = (result.exit_code, is_said, took_s < _PROMPT_S)
            assert "next: " in result.stderr, result.output
    assert answers == dict.fromkeys(VERBS, (1, True, True))


def test_a_resolver_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()

    def answer_late(*_: object, **__: object) -> None:
        over.wait(60)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", answer_late)
    monkeypatch.setattr(local_cluster, "_GREETING_TIMEOUT_S", 0.2)
    try:
        with pytest.raises(ClusterFailed, match="was not resolved within"):
            local_cluster.check_store_address("slow.example:6379")
    finally:
        over.set()


def test_ctrl_c_ends_the_wait_for_a_listener_without_an_answer(tmp_path: Path) -> None:
    heard = threading.Event()
    with listener(b"", heard) as address:
        process = subprocess.Popen(
            [sys.executable, "-m", "baton.cli.main", "status", "--address", address],
            env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert heard.wait(60)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "another program listens" not in stderr
