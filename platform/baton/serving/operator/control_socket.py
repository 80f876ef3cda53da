"""A local socket at which the owner of a deployment answers control commands.

Theory of operation: a command that joins the Ray cluster imports Ray and starts a driver, which
takes a minute on a busy machine. The process behind `baton up` is a driver already. So commands on
the same machine ask it, one line of JSON each way, over a Unix socket in the deployment's folder
that only its user may open. It passes the query on to the controller or to all ingresses, with a
deadline.

Without a socket (an older deployment, a node at an IPv6 address, a deployment that starts) the
command joins the cluster. A replica that does not answer in time is an error that names its
deployment. While the deployment ends, the socket says so: joining a cluster that ends would take
minutes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.domain.errors import DeploymentEnded, NotRunning, OperatorError, TimedOut
from baton.serving.shared.names import CLUSTER, CONTROLLER, INGRESS

_LOGGER = logging.getLogger(__name__)

SOCKET_NAME = "control.sock"
ANSWER_TIMEOUT_S = 5.0
SCALE_TIMEOUT_S = 20.0
"""The longest time in which the controller changes a pool's size."""
_SLACK_S = 2.0
_MAX_REQUEST_BYTES = 1 << 20
_MAX_CONCURRENT = 8

METHODS = {
    CONTROLLER: frozenset({"status", "explain_scale", "usage", "scale"}),
    INGRESS: frozenset({"status", "explain", "requests", "links"}),
    CLUSTER: frozenset({"lost_nodes"}),
}
"""The permitted queries, by deployment. Others go over Ray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Of the replicas of a deployment to one query; at least one has answered."""

    values: list[object]
    failures: list[str] = field(default_factory=list)
    """Why each of the others has not."""


Query = Callable[[str, str, tuple[object, ...], float], Answers]
"""`(deployment, method, arguments, deadline_s)`: the answers of its replicas."""
LoadNote = Callable[[str], bytes | None]
"""The note with this name in the deployment's store; None if there is none."""

_ERRORS: dict[str, type[OperatorError]] = {
    kind.__name__: kind for kind in (NotRunning, TimedOut, DeploymentEnded)
}


def timeout_of(method: str) -> float:
    """The deadline of a query."""
    return SCALE_TIMEOUT_S if method == "scale" else ANSWER_TIMEOUT_S


class ControlSocket:
    """The owner's end; answers in threads of its own until it is closed."""

    def __init__(self, folder: Path, *, query: Query, load_note: LoadNote) -> None:
        self._path = folder / SOCKET_NAME
        self._server = _Server(str(self._path), query=query, load_note=load_note)
        self._path.chmod(0o600)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="control socket", daemon=True
        )
        self._thread.start()

    def announce_shutdown(self) -> None:
        """Answer with `DeploymentEnded` from now on."""
        self._server.is_ending = True

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._path.unlink(missing_ok=True)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, path: str, *, query: Query, load_note: LoadNote) -> None:
        super().__init__(path, _Handler)
        self.query = query
        self.load_note = load_note
        self.is_ending = False
        self.slots = threading.BoundedSemaphore(_MAX_CONCURRENT)


class _Handler(socketserver.StreamRequestHandler):
    server: _Server
    timeout = ANSWER_TIMEOUT_S

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            request_line = self.rfile.readline(_MAX_REQUEST_BYTES)
            if not request_line:
                return  # it only looked whether an owner answers
            self.wfile.write(json.dumps(self._answer(request_line), default=str).encode() + b"\n")

    def _answer(self, request_line: bytes) -> dict[str, object]:
        if not self.server.slots.acquire(blocking=False):
            return _error_answer(
                TimedOut(f"{_MAX_CONCURRENT} commands are being answered", "try again")
            )
        try:
            return _reply(self._execute(json.loads(request_line)))
        except OperatorError as error:
            return _error_answer(error)
        except Exception as error:  # a boundary: the client gets the error, and it is logged
            _LOGGER.exception("a control command failed")
            return _error_answer(NotRunning(f"{type(error).__name__}: {error}", "see 'baton logs'"))
        finally:
            self.server.slots.release()

    def _execute(self, request: dict[str, Any]) -> object:
        if self.server.is_ending:
            raise DeploymentEnded("the deployment is being ended", "wait, and start one anew")
        if "check" in request:
            return None
        if "note" in request:
            data = self.server.load_note(str(request["note"]))
            return None if data is None else data.decode()
        deployment, method = str(request["deployment"]), str(request["method"])
        if method not in METHODS.get(deployment, frozenset()):
            reason = (
                f"control socket: got {deployment}.{method}, expected one of {_known_methods()}"
            )
            raise NotRunning(reason, "use the command line of the baton that runs")
        arguments = tuple(request["arguments"])
        return self.server.query(deployment, method, arguments, timeout_of(method))


def _reply(answer: object) -> dict[str, object]:
    if isinstance(answer, Answers):
        return {"answer": answer.values, "failures": answer.failures}
    return {"answer": answer}


def _known_methods() -> str:
    return ", ".join(
        sorted(f"{component}.{name}" for component, names in METHODS.items() for name in names)
    )


def _error_answer(error: OperatorError) -> dict[str, object]:
    kind = next((name for name, value in _ERRORS.items() if type(error) is value), "NotRunning")
    return {"error": kind, "reason": error.reason, "remedy": error.remedy}


class ControlClient:
    """A command's end."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SOCKET_NAME

    def is_reachable(self) -> bool:
        """Whether an owner answers."""
        try:
            with self._connect(_SLACK_S):
                return True
        except OSError:
            return False

    def check_not_ending(self) -> None:
        """Check that the deployment does not end; passes if no owner answers.

        Raises:
            DeploymentEnded: it is being ended.
        """
        if self.is_reachable():
            self._exchange({"check": True}, ANSWER_TIMEOUT_S + _SLACK_S)

    def query(self, deployment: str, method: str, *arguments: object) -> Answers:
        """The answers of the replicas of a deployment.

        Raises:
            NotRunning: there is no replica, or none can be asked.
            TimedOut: none of them answered in time.
            DeploymentEnded: the owner has ended.
        """
        request = {"deployment": deployment, "method": method, "arguments": arguments}
        reply = self._exchange(request, timeout_of(method) + _SLACK_S)
        return Answers(values=list(reply["answer"]), failures=list(reply["failures"]))

    def load_note(self, name: str) -> bytes | None:
        """A note in the deployment's store; None if there is none.

        Raises:
            OperatorError: as `query` does.
        """
        note = self._exchange({"note": name}, ANSWER_TIMEOUT_S + _SLACK_S)["answer"]
        return None if note is None else str(note).encode()

    def _exchange(self, request: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        try:
            with self._connect(timeout_s) as connection, connection.makefile("rb") as answers:
                connection.sendall(json.dumps(request).encode() + b"\n")
                line = answers.readline()
        except TimeoutError as error:
            reason = f"the deployment's holder did not answer within {timeout_s:g} s"
            raise TimedOut(reason, "try again") from error
        except OSError as error:
            reason = f"the deployment's holder cannot be asked: {error.strerror or error}"
            raise DeploymentEnded(
                reason, "see whether it still runs with 'baton status'"
            ) from error
        if not line:
            raise DeploymentEnded(
                "the deployment's holder broke off", "see whether it still runs with 'baton status'"
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise _ERRORS[reply["error"]](reply["reason"], reply["remedy"])
        return reply

    @contextlib.contextmanager
    def _connect(self, timeout_s: float) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(self._path))
            yield connection
