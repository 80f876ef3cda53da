"""`baton chat`: a conversation with a deployment, in the terminal."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.bench.client.trust import UNAUTHORIZED, connection_error, key_remedy
from baton.cli.endpoint import CaFile, Connection, ConnectionArgs, Insecure, KeyFile, connect
from baton.cli.explain.trace import route_text
from baton.cli.options import Address, Output, parse_seconds
from baton.cli.output import (
    OutputFormat,
    TextStyle,
    duration_text,
    print_error,
    report_errors,
    styled,
)
from baton.domain.errors import BatonError, OperatorError, TimedOut
from baton.domain.names.words import count_text

if TYPE_CHECKING:
    import httpx

_CONNECT_S = 3.0
_HELP = (
    "/reset begins anew, /system TEXT changes the system prompt, /exit or Ctrl-D ends, Ctrl-C stops"
    " an answer"
)
_ERROR_CHARS = 500
"""Of an error body that is no JSON."""
_STATUS_OVERLOADED = (429, 503)
_STATUS_NOT_FOUND = 404

_PROMPT = typer.Argument(
    metavar="[PROMPT]...", help="One message to send; without: a conversation."
)
_URL = typer.Option("--url", metavar="URL", help="URL of an endpoint; else the running deployment.")
_SYSTEM = typer.Option("--system", metavar="TEXT", help="System prompt.")
_MODEL = typer.Option("--model", metavar="NAME", help="Model or adapter; else the first served.")
_MAX_TOKENS = typer.Option("--max-tokens", min=1, help="Limit of each answer.")
_TEMPERATURE = typer.Option("--temperature", min=0.0, help="0 always gives the likeliest token.")
_DEADLINE = typer.Option("--timeout", metavar="DURATION", help="Time limit between two tokens.")
_VERBOSE = typer.Option("--verbose", "-v", help="Show latencies, and where each answer was made.")


class ChatFailed(OperatorError):
    """The endpoint did not answer a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer, and its latencies as its client saw them."""

    text: str
    finish_reason: str | None
    """`stop`, `length` or another reason of the endpoint; None if it was stopped here."""
    output_tokens: int
    ttft_s: float | None
    """From the request to the first text; None without text."""
    tpot_s: float | None
    """Mean time of each token after the first; None with fewer than two."""
    request_id: str


def chat(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    prompt: Annotated[list[str] | None, _PROMPT] = None,
    *,
    url: Annotated[str | None, _URL] = None,
    model: Annotated[str | None, _MODEL] = None,
    system: Annotated[str, _SYSTEM] = "",
    max_tokens: Annotated[int | None, _MAX_TOKENS] = None,
    temperature: Annotated[float | None, _TEMPERATURE] = None,
    key_file: KeyFile = None,
    ca_file: CaFile = None,
    insecure: Insecure = False,
    timeout: Annotated[str, _DEADLINE] = "120s",
    verbose: Annotated[bool, _VERBOSE] = False,
    address: Address = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Chat with a deployment: answers stream to the terminal.

    With a PROMPT, it prints one answer. Lines of a pipe are sent one after the other.
    """
    timeout_s = parse_seconds(timeout)
    options = {"max_tokens": max_tokens, "temperature": temperature}
    with report_errors():
        connection = connect(
            context,
            ConnectionArgs(
                url=url, key_file=key_file, ca_file=ca_file, insecure=insecure, address=address
            ),
        )
        commands = connection.commands
        with ChatClient.connect(connection, timeout_s=timeout_s) as client:
            conversation = Conversation(
                client,
                model=model or client.first_model(),
                system=system,
                options={name: value for name, value in options.items() if value is not None},
            )
            for message in _messages(prompt):
                if message.startswith("/"):
                    if not _obey(conversation, message):
                        return
                    continue
                answer = _ask(conversation, message, output, is_scripted=_is_scripted(prompt))
                if answer is None:
                    continue
                if output is OutputFormat.JSON:
                    typer.echo(json.dumps(asdict(answer)))
                if verbose:
                    where = "" if commands is None else _where(commands, answer, address)
                    typer.echo(styled(_figures(answer, where), TextStyle.DIM, err=True), err=True)


def _is_scripted(prompt: Sequence[str] | None) -> bool:
    return bool(prompt) or not sys.stdin.isatty()


def _messages(prompt: Sequence[str] | None) -> Iterator[str]:
    """The messages of a user: words of the command line, or lines until the end of the input."""
    if prompt:
        yield " ".join(prompt)
        return
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    import readline  # noqa: F401  # gives input() a history and a line to edit

    typer.echo(styled(_HELP, TextStyle.DIM, err=True), err=True)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if line:
            yield line


def _obey(conversation: Conversation, command: str) -> bool:
    """Carry out a command that begins with a slash; whether the conversation goes on."""
    word, _, rest = command.partition(" ")
    match word:
        case "/exit" | "/quit" | "/bye":
            return False
        case "/reset":
            conversation.reset()
        case "/system":
            conversation.reset(system=rest.strip())
        case "/help":
            typer.echo(_HELP, err=True)
        case _:
            print_error(f"command: got {word!r}, expected /reset, /system, /help or /exit")
    return True


def _ask(
    conversation: Conversation, message: str, output: OutputFormat, *, is_scripted: bool
) -> Answer | None:
    """The answer; text is printed as it comes. A scripted conversation ends with an error."""
    try:
        answer = conversation.ask(message, echo=output is OutputFormat.TEXT)
    except BatonError as error:
        if is_scripted:
            raise
        print_error(str(error))
        return None
    if output is OutputFormat.TEXT:
        typer.echo()
    return answer


def _where(commands: Any, answer: Answer, address: str | None) -> str:  # noqa: ANN401 - `Commands`
    """The replicas that made an answer; empty where no ingress says so."""
    try:
        report = commands.explain_route(answer.request_id, address=address)
    except BatonError:
        return ""
    return route_text(report["requests"][0])


def _figures(answer: Answer, where: str) -> str:
    parts = [
        f"ttft {duration_text(answer.ttft_s)}",
        f"tpot {duration_text(answer.tpot_s)}",
        count_text(answer.output_tokens, "token"),
        f"ended by {answer.finish_reason or 'Ctrl-C'}",
        *([where] if where else []),
        answer.request_id,
    ]
    return f"[{', '.join(parts)}]"


class Conversation:
    """Messages so far, and the options of every request."""

    def __init__(
        self, client: ChatClient, *, model: str, system: str, options: Mapping[str, object]
    ) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._system = system
        self._messages: list[dict[str, str]] = []
        self.reset()

    def reset(self, *, system: str | None = None) -> None:
        """Forget all messages; `system` replaces the system prompt."""
        self._system = self._system if system is None else system
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def ask(self, message: str, *, echo: bool) -> Answer:
        """Send a message; both it and its answer become part of the conversation.

        Raises:
            BatonError: there is no answer; the conversation is as it was.
        """
        user = {"role": "user", "content": message}
        body = {"model": self._model, "messages": [*self._messages, user], **self._options}
        answer = self._client.stream(body, echo=echo)
        self._messages += [user, {"role": "assistant", "content": answer.text}]
        return answer


class ChatClient:
    """An OpenAI-compatible endpoint."""

    def __init__(self, http: httpx.Client, url: str, *, timeout_s: float) -> None:
        self._http = http
        self._url = url
        self._timeout_s = timeout_s

    @classmethod
    @contextmanager
    def connect(cls, connection: Connection, *, timeout_s: float) -> Iterator[ChatClient]:
        """A client; its connections are closed afterwards.

        Raises:
            CertificatesUnusable: the certificates cannot be read.
        """
        import httpx  # here: keeps --help fast

        base = connection.url.rstrip("/").removesuffix("/v1")
        verify = connection.trust.context() if base.lower().startswith("https:") else True
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        with httpx.Client(headers=dict(connection.headers), verify=verify, timeout=timeout) as http:
            yield cls(http, base, timeout_s=timeout_s)

    def first_model(self) -> str:
        """The first model of the endpoint's list.

        Raises:
            BatonError: the endpoint does not answer, or serves no model.
        """
        models = self._served_models()
        if not models:
            raise ChatFailed(f"{self._url}: serves no model", "look at 'baton status'")
        return models[0]

    def _served_models(self) -> list[str]:
        with self._errors():
            response = self._http.get(f"{self._url}/v1/models")
            self._check(response, model="")
        return [str(model["id"]) for model in response.json().get("data") or []]

    def stream(self, body: Mapping[str, object], *, echo: bool) -> Answer:
        """The answer to one request; Ctrl-C ends it early.

        Raises:
            BatonError: the endpoint refuses it, breaks off, or says nothing in time.
        """
        request_id = f"chat-{uuid.uuid4().hex[:12]}"
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        reader = _StreamReader(echo=echo)
        sent_at_s = time.monotonic()
        with self._errors():
            url, headers = f"{self._url}/v1/chat/completions", {"X-Request-Id": request_id}
            with self._http.stream("POST", url, json=body, headers=headers) as response:
                self._check(response, model=str(body["model"]))
                try:
                    for line in response.iter_lines():
                        reader.read(line)
                except KeyboardInterrupt:
                    reader.finish_reason = None
                else:
                    reader.check_complete()
        return reader.answer(request_id, sent_at_s)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of the connection into errors for an operator."""
        import httpx

        try:
            yield
        except (httpx.ConnectTimeout, httpx.ConnectError) as error:
            raise connection_error(error, self._url, timeout_s=_CONNECT_S) from error
        except httpx.UnsupportedProtocol as error:
            why = f"--url: got {self._url!r}, expected http:// or https:// before the host"
            raise ChatFailed(why, "write it as http://host:port") from error
        except httpx.TimeoutException as error:
            reason = f"{self._url}: nothing came for {self._timeout_s:g} s"
            raise TimedOut(reason, "allow more time with --timeout") from error
        except httpx.HTTPError as error:
            reason = f"{self._url}: the answer broke off: {error}"
            raise ChatFailed(reason, "send it again; 'baton logs' may say more") from error
        except httpx.InvalidURL as error:
            reason = f"--url: got {self._url!r}, expected a URL: {error}"
            raise ChatFailed(reason, "write it as http://host:port") from error

    def _check(self, response: httpx.Response, *, model: str) -> None:
        if response.is_success:
            return
        response.read()
        status, message = response.status_code, _error_message(response)
        reason = f"{self._url}: status {status}: {message}"
        if status in UNAUTHORIZED:
            raise ChatFailed(reason, key_remedy(self._http.headers))
        if status == _STATUS_NOT_FOUND and model:
            served = ", ".join(self._served_models()) or "none"
            raise ChatFailed(f"{reason}; served: {served}", "name one of these with --model")
        if status in _STATUS_OVERLOADED:
            retry_after = response.headers.get("retry-after")
            when = f"in {retry_after} s" if retry_after else "later"
            raise ChatFailed(reason, f"send it again {when}; 'baton status' shows the load")
        raise ChatFailed(reason, "correct the request")


class _StreamReader:
    """Reads the events of one answer."""

    def __init__(self, *, echo: bool) -> None:
        self._echo = echo
        self._texts: list[str] = []
        self._first_at_s: float | None = None
        self._last_at_s = 0.0
        self._usage_tokens: int | None = None
        self._is_done = False
        self.finish_reason: str | None = None

    def read(self, line: str) -> None:
        """Take in one line of the stream; prints its text.

        Raises:
            ChatFailed: it is an error.
        """
        data = line.removeprefix("data: ")
        if data == line or not data:
            return
        if data == "[DONE]":
            self._is_done = True
            return
        event = json.loads(data)
        if "error" in event:
            error = event["error"]
            message = error.get("message") if isinstance(error, Mapping) else error
            raise ChatFailed(f"the answer broke off: {message}", "send it again")
        if usage := event.get("usage"):
            self._usage_tokens = int(usage["completion_tokens"])
        for choice in event.get("choices", ()):
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or {}
            self._take(delta.get("reasoning_content") or delta.get("content") or "")

    def _take(self, text: str) -> None:
        if not text:
            return
        self._last_at_s = time.monotonic()
        if self._first_at_s is None:
            self._first_at_s = self._last_at_s
        self._texts.append(text)
        if self._echo:
            sys.stdout.write(_without_controls(text))
            sys.stdout.flush()

    def check_complete(self) -> None:
        """Check that the stream came to its end.

        Raises:
            ChatFailed: it did not.
        """
        if not self._is_done:
            raise ChatFailed("the answer broke off before its end", "send it again")

    def answer(self, request_id: str, sent_at_s: float) -> Answer:
        """The text that was read, with latencies since the request."""
        tokens = len(self._texts) if self._usage_tokens is None else self._usage_tokens
        first_at_s = self._first_at_s
        tpot_s = None
        if first_at_s is not None and tokens > 1:
            tpot_s = (self._last_at_s - first_at_s) / (tokens - 1)
        return Answer(
            text="".join(self._texts),
            finish_reason=self.finish_reason,
            output_tokens=tokens,
            ttft_s=None if first_at_s is None else first_at_s - sent_at_s,
            tpot_s=tpot_s,
            request_id=request_id,
        )


def _without_controls(text: str) -> str:
    """Text that cannot move a terminal's cursor or set its title."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )


def _error_message(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return response.text[:_ERROR_CHARS] or "no reason given"
    return str(error.get("message") if isinstance(error, Mapping) else error)
