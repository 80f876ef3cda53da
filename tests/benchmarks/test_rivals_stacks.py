"""How rivals are started and told apart, without any of them installed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import zmq

from benchmarks._systems import API, ENGINE, HAPROXY, OTHER, NotStartedError, pick_free_port
from benchmarks.rivals.engine import handshake
from benchmarks.rivals.ray_llm import group_of
from benchmarks.rivals.routers import handshake_port
from benchmarks.rivals.stacks import Program, ProgramStack, RouterStack

_SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server(group: str, port: int) -> Program:
    return Program(group=group, command=(sys.executable, "-c", _SERVER, str(port)))


def serves(group: str) -> ProgramStack:
    def make(*, folder: Path, port: int) -> Sequence[Program]:
        return [server(group, port)]

    return ProgramStack(group, make)


def test_a_router_and_its_backend_count_as_one() -> None:
    behind: list[str] = []

    def make(url: str) -> ProgramStack:
        behind.append(url)
        return serves(API)

    both = RouterStack("both", serves(ENGINE), lambda url: make(url)._make_programs)
    try:
        both.start()
        groups = both.process_groups()

        assert behind[0] != both.url
        assert {group: len(processes) for group, processes in groups.items()} == {API: 1, ENGINE: 1}
    finally:
        assert both.stop() == []
    assert not any(process.is_running() for group in groups.values() for process in group)


def test_one_that_ends_while_it_starts_says_what_it_said_last() -> None:
    def make(*, folder: Path, port: int) -> Sequence[Program]:
        return [Program(group=API, command=(sys.executable, "-c", "raise SystemExit('no model')"))]

    broken = ProgramStack("broken", make)
    try:
        with pytest.raises(NotStartedError, match="no model"):
            broken.start()
    finally:
        broken.stop()


def test_the_port_of_smgs_handshake_is_the_one_of_its_documents() -> None:
    path = "/tmp/smg-zmq/engine-0"  # noqa: S108 - hashed, not opened
    assert handshake_port(path) == 22670


def test_an_engine_that_dials_is_told_where_to_connect() -> None:
    address = f"tcp://127.0.0.1:{pick_free_port()}"
    heard: list[str] = []

    def answer() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.bind(address)
            engine, said = socket.recv_multipart()
            heard.append(msgspec.msgpack.decode(said)["status"])
            told = {"addresses": {"inputs": ["ipc://in"], "outputs": ["ipc://out"]}}
            socket.send_multipart([engine, msgspec.msgpack.encode(told | {"parallel_config": {}})])
            heard.append(msgspec.msgpack.decode(socket.recv_multipart()[1])["status"])

    other = threading.Thread(target=answer)
    other.start()
    found = handshake(address)
    other.join(10)

    assert (found.inputs, found.outputs) == (["ipc://in"], ["ipc://out"])
    assert heard == ["HELLO", "READY"]


@pytest.mark.parametrize(
    ("name", "title", "group"),
    [
        ("haproxy", "/x/haproxy", HAPROXY),
        ("ray::ServeRepli", "ray::ServeReplica:llm:Decode:tiny", API),
        ("ray::ServeRepli", "ray::ServeReplica:llm:LLMRouter.choose", API),
        ("VLLM::EngineCor", "VLLM::EngineCore", ENGINE),
        ("VLLM::Worker", "VLLM::Worker", ENGINE),
        ("ray::ServeContr", "ray::ServeController.run", OTHER),
        ("raylet", "/x/raylet", OTHER),
    ],
)
def test_the_processes_of_ray_serve_llm_are_distinguished(
    name: str, title: str, group: str
) -> None:
    assert group_of(name, [title]) == group
