"""`baton chat`: what is sent, what is printed, and what is said where nothing comes."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from baton.cli.backend import Backend
from baton.cli.main import build_app
from baton.domain.errors import UnknownRequest
from tests.fakes.completion_server import (
    SSE_DONE,
    CompletionServer,
    ReceivedRequest,
    chunk,
    events,
    usage,
)
from tests.fakes.free_ports import free_port
from tests.fakes.scaled_deadline import ScaledDeadline, slowdown


def text(content: str, *, finish: str | None = None) -> str:
    return chunk(choices=[{"delta": {"content": content}, "finish_reason": finish}])


HELLO = events(text("Hel"), text("lo", finish="stop"), usage(2), SSE_DONE)


_AT_A_TERMINAL = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell's children ignore it
from baton.cli.main import main
main()
"""


class Deployment:
    """One that runs, and remembers requests or does not."""

    def __init__(self, url: str = "", *, remembers: bool = True) -> None:
        self.url = url
        self.remembers = remembers

    def status(self, *, address: str | None) -> Mapping[str, object]:
        assert address is None
        return {"endpoint": self.url}

    def explain_route(self, request_id: str, *, address: str | None) -> Mapping[str, object]:
        assert address is None
        if not self.remembers:
            raise UnknownRequest(f"no request {request_id!r}", "ask again")
        return {"requests": [{"prefill_replica": "p-1", "decode_replica": "d-2"}]}


def chat(
    *words: str, lines: str = "", deployment: Deployment | None = None, **environ: str
) -> Result:
    backend = Backend(commands=lambda: deployment, environ=environ)  # type: ignore[arg-type,return-value]
    return CliRunner().invoke(build_app(), ["chat", *words], input=lines, obj=backend)


def test_an_answer_to_a_message_of_the_command_line_is_printed() -> None:
    with CompletionServer(HELLO).in_thread() as server:
        done = chat("--url", server.url, "say", "hello", "--max-tokens", "9", "--temperature", "0")
    assert (done.exit_code, done.stdout) == (0, "Hello\n")
    (request,) = server.requests
    assert request.body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "say hello"}],
        "max_tokens": 9,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert request.headers["x-request-id"].startswith("chat-")


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_an_endpoint_may_be_written_with_its_path(suffix: str) -> None:
    with CompletionServer(HELLO).in_thread() as server:
        assert chat("--url", server.url + suffix, "hello").stdout == "Hello\n"


def test_lines_of_a_pipe_are_one_conversation() -> None:
    with CompletionServer(HELLO).in_thread() as server:
        done = chat("--url", server.url, "--system", "Be kind.", lines="one\n\ntwo\n")
    assert (done.exit_code, done.stdout) == (0, "Hello\nHello\n")
    assert [message["content"] for message in server.requests[1].body["messages"]] == [
        "Be kind.",
        "one",
        "Hello",
        "two",
    ]


def test_a_new_conversation_gets_another_system_prompt() -> None:
    with CompletionServer(HELLO).in_thread() as server:
        lines = "one\n/reset\ntwo\n/system Be brief.\nthree\n/sing\n/exit\nfour\n"
        done = chat("--url", server.url, lines=lines)
    assert done.exit_code == 0
    sent = [
        [message["content"] for message in request.body["messages"]] for request in server.requests
    ]
    assert sent == [["one"], ["two"], ["Be brief.", "three"]]
    assert "command: got '/sing', expected /reset" in done.stderr


def test_without_an_address_the_running_deployment_answers_and_says_where() -> None:
    with CompletionServer(HELLO).in_thread() as server:
        done = chat("hello", "--verbose", deployment=Deployment(server.url))
    assert done.stdout == "Hello\n"
    assert "2 tokens, ended by stop, p-1 -> d-2, chat-" in done.stderr
    assert "ttft " in done.stderr
    assert "tpot " in done.stderr


def test_an_answer_that_no_ingress_remembers_has_its_latencies_all_the_same() -> None:
    with CompletionServer(HELLO).in_thread() as server:
        done = chat("hello", "-v", deployment=Deployment(server.url, remembers=False))
    assert done.exit_code == 0
    assert "ended by stop, chat-" in done.stderr


def test_json_is_one_object_for_each_answer() -> None:
    with CompletionServer(HELLO).in_thread() as server:
        done = chat("--url", server.url, "-o", "json", lines="one\ntwo\n")
    answers: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["text"] for answer in answers] == ["Hello", "Hello"]
    assert [answer["output_tokens"] for answer in answers] == [2, 2]
    assert all(answer["ttft_s"] > 0 for answer in answers)


def test_a_key_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret-1\n")
    with CompletionServer(HELLO).in_thread() as server:
        chat("--url", server.url, "hello", "--key-file", str(tmp_path / "key"))
        chat("--url", server.url, "hello", OPENAI_API_KEY="secret-2")
    sent = [request.headers["authorization"] for request in server.requests]
    assert sent == ["bearer secret-1", "bearer secret-2"]


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        ("401 Unauthorized", "give the API key: --key-file FILE"),
        ("404 Not Found", "served: tiny"),
        ("503 Busy", "send it again later"),
        ("400 Bad Request", "correct the request"),
    ],
)
def test_a_refusal_is_shown_with_its_remedy(status: str, remedy: str) -> None:
    refusal = events(status, json.dumps({"error": {"message": "not this one"}}))
    with CompletionServer(refusal).in_thread() as server:
        done = chat("--url", server.url, "hello")
    assert done.exit_code == 1
    assert f"status {status[:3]}: not this one" in done.stderr
    assert remedy in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        (events(text("Hel")), "the answer broke off before its end"),
        (events(text("Hel"), chunk(error={"message": "no engine"})), "broke off: no engine"),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(behaviour: Any, said: str) -> None:  # noqa: ANN401
    with CompletionServer(behaviour).in_thread() as server:
        done = chat("--url", server.url, "hello")
    assert done.exit_code == 1
    assert said in done.stderr


def test_where_nothing_listens_the_exit_code_is_that_of_no_deployment() -> None:
    done = chat("--url", f"http://127.0.0.1:{free_port()}", "hello")
    assert done.exit_code == 3
    assert "connection refused: nothing listens there" in done.stderr


@pytest.mark.parametrize("models", ['{"data": []}', "{}"])
def test_an_endpoint_without_a_model_is_said_to_have_none(models: str) -> None:
    with CompletionServer(HELLO, models=models).in_thread() as server:
        done = chat("--url", server.url, "hello")
    assert done.exit_code == 1
    assert "serves no model" in done.stderr


def test_certificates_that_are_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    done = chat("--url", "https://127.0.0.1:1", "--ca-file", str(tmp_path / "ca.pem"), "hello")
    assert done.exit_code == 1
    assert "ca.pem: got" in done.stderr


def test_an_answer_cannot_command_the_terminal() -> None:
    hostile = events(text("a\x1b]0;owned\x07b\n", finish="stop"), SSE_DONE)
    with CompletionServer(hostile).in_thread() as server:
        done = chat("--url", server.url, "hello")
    assert "\x1b" not in done.stdout
    assert "\x07" not in done.stdout
    assert done.stdout.startswith("a")


def test_a_person_types_at_a_terminal_and_ends_with_ctrl_d() -> None:
    with CompletionServer(HELLO).in_thread() as server, typing("--url", server.url) as person:
        person.wait_for("/exit or Ctrl-D ends")
        person.type("hello\n")
        person.wait_for("Hello")
        person.type("again\n")
        person.wait_for("Hello")
        person.type("\x04")
        assert person.process.wait(60 * slowdown()) == 0
    assert len(server.requests[1].body["messages"]) == 3


def test_ctrl_c_stops_an_answer_and_not_the_conversation() -> None:
    async def endless(request: ReceivedRequest) -> AsyncIterator[str]:
        yield text("word ")
        if len(request.body["messages"]) == 1:
            await asyncio.Event().wait()
        yield text("end", finish="stop") + SSE_DONE

    with CompletionServer(endless).in_thread() as server, typing("--url", server.url) as person:
        person.wait_for("> ")
        person.type("hello\n")
        person.wait_for("word")
        person.type("\x03")
        person.wait_for("> ")
        person.type("again\n")
        person.wait_for("word end")
        person.type("\x04")
        assert person.process.wait(60 * slowdown()) == 0
    assert [message["content"] for message in server.requests[1].body["messages"]] == [
        "hello",
        "word ",
        "again",
    ]


class Person:
    """Types at a terminal in which `baton chat` runs, and reads it."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self._terminal = terminal
        self._unread = ""

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def wait_for(self, words: str) -> None:
        """Read until these words, and past them."""
        deadline = ScaledDeadline(60)
        while words not in self._unread:
            ready, _, _ = select.select([self._terminal], [], [], 0.2)
            if ready:
                self._unread += os.read(self._terminal, 4096).decode(errors="replace")
            assert not deadline.is_expired(), f"no {words!r} in {self._unread!r}"
        self._unread = self._unread.partition(words)[2]


@contextmanager
def typing(*options: str) -> Iterator[Person]:
    terminal, inside = pty.openpty()
    settings = termios.tcgetattr(inside)
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(inside, termios.TCSANOW, settings)
    process = subprocess.Popen(
        [sys.executable, "-c", _AT_A_TERMINAL, "chat", *options],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
        env=os.environ | {"TERM": "dumb"},
    )
    os.close(inside)
    try:
        yield Person(process, terminal)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
