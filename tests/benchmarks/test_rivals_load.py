"""The load generator and the mock in C, against servers whose every byte is known."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from benchmarks._systems import pick_free_port
from benchmarks.rivals.load import LoadError, LoadPoint, run_generator
from benchmarks.rivals.programs import NotAvailableError, compile_program

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler"
)

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"id":"a","choices":[{"index":0,"text":" word"}]}\n\n'
USAGE = b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":7}}\n\n'
DONE = b"data: [DONE]\n\n"
POINT = LoadPoint(concurrency=1, prompt_tokens=8)

Answer = Callable[[socket.socket], bool]
"""Answers a request that has been read; whether the connection stays open."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    compile_program("load", into=folder)
    compile_program("mock", into=folder)
    return folder


@pytest.fixture(scope="module")
def generator(programs: Path) -> Path:
    return compile_program("load", into=programs)


@pytest.fixture
def bodies(tmp_path: Path) -> Path:
    file = tmp_path / "bodies.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"{n} ", "max_tokens": 3}) for n in range(4)))
    return file


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(*events: bytes) -> bytes:
    return HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n"


def say(*parts: bytes, stay: bool = True) -> Answer:
    def answer(client: socket.socket) -> bool:
        for part in parts:
            client.sendall(part)
        return stay

    return answer


class Server:
    """Answers each request with the next answer, and counts connections."""

    def __init__(self, answers: list[Answer]) -> None:
        self.connections = 0
        self.requests: list[bytes] = []
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with client:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while (request := self._read(client)) and self._answers:
                    self.requests.append(request)
                    if not self._answers.pop(0)(client):
                        break

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _read(self, client: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data or len(data) < self._length(data):
            got = client.recv(65536)
            if not got:
                return b""
            data += got
        return data

    def _length(self, data: bytes) -> int:
        head, _, _ = data.partition(b"\r\n\r\n")
        said = head.lower().split(b"content-length:")[1].split(b"\r\n")[0]
        return len(head) + 4 + int(said)


@contextmanager
def serving(*answers: Answer) -> Iterator[Server]:
    server = Server([*answers])
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(10)


def test_events_are_counted_and_tokens_are_the_servers(generator: Path, bodies: Path) -> None:
    with serving(say(whole(TOKEN, TOKEN, USAGE, DONE))) as server:
        found = run_generator(
            generator, port=server.port, point=POINT, bodies=bodies, requests=1, quickack=True
        )

    assert (found.failed, found.events, found.tokens) == (0, [2], [7])
    assert 0 < found.ttft_s[0] <= found.took_s[0]


def test_an_event_may_come_in_pieces(generator: Path, bodies: Path) -> None:
    pieces = [bytes([byte]) for byte in whole(TOKEN[:9], TOKEN[9:] + TOKEN, USAGE + DONE)]
    with serving(say(*pieces)) as server:
        found = run_generator(
            generator, port=server.port, point=POINT, bodies=bodies, requests=1, quickack=False
        )

    assert (found.failed, found.events, found.tokens) == (0, [2], [7])


def test_a_connection_is_kept_and_each_request_has_its_own_body(
    generator: Path, bodies: Path
) -> None:
    with serving(*[say(whole(TOKEN, DONE))] * 3) as server:
        found = run_generator(
            generator, port=server.port, point=POINT, bodies=bodies, requests=3, quickack=True
        )

    assert (found.failed, server.connections, found.tokens) == (0, 1, [-1, -1, -1])
    sent = [json.loads(request.partition(b"\r\n\r\n")[2])["prompt"] for request in server.requests]
    assert sent == ["0 ", "1 ", "2 "]


def test_a_server_that_says_it_will_close_gets_a_new_connection(
    generator: Path, bodies: Path
) -> None:
    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + TOKEN + DONE
    with serving(*[say(closing, stay=False)] * 2) as server:
        found = run_generator(
            generator, port=server.port, point=POINT, bodies=bodies, requests=2, quickack=True
        )

    assert (found.failed, found.events, server.connections) == (0, [1, 1], 2)


def test_an_incomplete_stream_has_failed(generator: Path, bodies: Path) -> None:
    refused = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nbusy"
    broken = HEAD + chunk(TOKEN)
    empty = whole(DONE)
    unended = whole(TOKEN)
    with serving(
        say(refused), say(broken, stay=False), say(empty), say(unended), say(whole(TOKEN, DONE))
    ) as server:
        found = run_generator(
            generator, port=server.port, point=POINT, bodies=bodies, requests=5, quickack=True
        )

    assert (found.failed, found.events) == (4, [1])
    assert "busy" in found.problems[0]
    assert "lost after 1 token events" in found.problems[1]


def test_a_port_without_a_listener_has_no_load(generator: Path, bodies: Path) -> None:
    with pytest.raises(LoadError, match="cannot connect"):
        run_generator(
            generator, port=pick_free_port(), point=POINT, bodies=bodies, requests=1, quickack=True
        )


def test_a_machine_without_a_compiler_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotAvailableError, match="install gcc"):
        compile_program("load", into=tmp_path)


# ------------------------------------------------------------------ the mock


@pytest.fixture
def mock(programs: Path) -> Iterator[int]:
    port = pick_free_port()
    words = [str(compile_program("mock", into=programs)), "--port", str(port), "--step-us", "100"]
    process = subprocess.Popen([*words, "--decode-us", "100", "--byte-us", "0.1"])
    try:
        with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:
            assert client.get(f"http://127.0.0.1:{port}/health").is_success
        yield port
    finally:
        process.terminate()
        process.wait(10)


def test_the_mock_gives_as_many_tokens_as_were_asked_for(
    mock: int, generator: Path, tmp_path: Path
) -> None:
    bodies = tmp_path / "bodies"
    body = {"prompt": "word " * 50, "max_tokens": 5, "stream": True}
    bodies.write_text(json.dumps(body | {"stream_options": {"include_usage": True}}))
    point = LoadPoint(concurrency=8, prompt_tokens=50)

    found = run_generator(
        generator, port=mock, point=point, bodies=bodies, requests=8, quickack=True
    )

    assert (found.failed, found.events, found.tokens) == (0, [5] * 8, [5] * 8)


def test_the_mock_implements_the_handoff_protocol(mock: int) -> None:
    asked = {"prompt": "a", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}

    answer = httpx.post(f"http://127.0.0.1:{mock}/v1/completions", json=asked).json()

    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["kv_transfer_params"]["do_remote_prefill"] is True
