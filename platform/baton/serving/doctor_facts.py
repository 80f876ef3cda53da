"""Facts of a running deployment for `baton doctor`, gathered side by side.

Theory of operation: Ray ends a process that has joined a cluster whose store is away. So only a
process of its own joins it, prints each fact as soon as it has it, and is killed at its deadline. A
local deployment's status comes from its control socket; the endpoint is called as clients do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import psutil

from baton.config.schema.deployment import DeploymentConfig
from baton.domain.errors import BatonError, NotRunning, OperatorError
from baton.domain.names.addresses import is_loopback
from baton.serving.checks.endpoint import (
    REQUEST_TIMEOUT_S,
    TLS_TIMEOUT_S,
    Client,
    RequestFact,
    TlsFact,
    probe_request,
    probe_tls,
)
from baton.serving.checks.facts import (
    DiskFact,
    PendingFact,
    cluster_facts,
    gather_disks,
    gather_fact,
    health_problem,
    http_problem,
)
from baton.serving.checks.result import (
    UnknownFact,
)
from baton.serving.cluster.cluster_state import ClusterState, state_folder
from baton.serving.cluster.reaper import marked_processes
from baton.serving.operator.attached import AttachedCluster, attach_deployment
from baton.serving.operator.control_socket import ControlClient
from baton.serving.ray.auth_probe import probe_ray_auth
from baton.serving.ray.context import get_gcs_address
from baton.serving.store.config_store import Generations, unix_time_s

JsonDict = dict[str, Any]
_QUERY_TIMEOUT_S = 20.0
"""An answer of the control socket takes 7 s at most; a status has two."""
_CLUSTER_TIMEOUT_S = 40.0
_HTTP_TIMEOUT_S = 6.0
_PORTS_TIMEOUT_S = 10.0
_SLACK_S = 1.0
"""For a process that is killed at its deadline."""
_REQUEST_TIMEOUT_S = REQUEST_TIMEOUT_S + 3.0
"""For the list of models, and the token."""
_FRONT_TIMEOUT_S = 45.0
_AUTH_PROBE_TIMEOUT_S = 25.0
_QUERIES = ("status", "links")
_NODE_FACTS = ("gcs_address", "history", "versions", "ray_auth")
_FACT_PREFIX = "baton-fact "
_CLUSTER_SCRIPT = """
import json, sys
from baton.serving.doctor_facts import print_cluster_facts
print_cluster_facts(*json.loads(sys.argv[1]))
"""
DEFAULT_CLIENT = Client()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPort:
    """A port of a deployment's process on an address that other machines may reach."""

    address: str
    port: int
    program: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSnapshot:
    """Answers of an endpoint, as a client gets them."""

    endpoint: str | None
    """None for a deployment whose public URL is unknown here."""
    health_problem: str | UnknownFact = ""
    """Why `/health` is not healthy; empty when it is."""
    client: Client = DEFAULT_CLIENT
    tls: TlsFact | UnknownFact | None = None
    """None: plain HTTP."""
    request: RequestFact | UnknownFact
    at_s: float
    """When they came, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSnapshot:
    """Answers of a deployment."""

    front: FrontSnapshot
    status: Mapping[str, object] | UnknownFact
    links: tuple[JsonDict, ...] | UnknownFact = ()
    history: tuple[JsonDict, ...] | UnknownFact = ()
    """The applied configurations (`GenerationRecord`), oldest first."""
    disks: tuple[DiskFact, ...] | UnknownFact = ()
    metrics_problem: str | UnknownFact | None = None
    """Why the metrics URL does not answer; empty when it does; None: no metrics."""
    versions_by_node: Mapping[str, Mapping[str, str | None]] | UnknownFact
    open_ports: tuple[OpenPort, ...] | UnknownFact
    gcs_address: str
    ray_auth: str | UnknownFact
    """The store's answer to a connection without a token."""


def gather_deployment(
    state: ClusterState | None,
    address: str | None,
    *,
    client: Client,
    config: DeploymentConfig | None = None,
) -> DeploymentSnapshot | BatonError:
    """Ask the deployment, its endpoint and its nodes, side by side; or why it cannot be joined."""
    control = None if state is None else ControlClient(Path(state.run_dir))
    is_answering = control is not None and control.is_reachable()
    try:
        if is_answering and control is not None:
            control.check_not_ending()
    except BatonError as error:
        return error
    names = _NODE_FACTS if is_answering else (*_QUERIES, *_NODE_FACTS)
    disks = PendingFact(
        _QUERY_TIMEOUT_S, "its disks", lambda: gather_disks(_deployment_folders(state, config))
    )
    ports = PendingFact(
        _PORTS_TIMEOUT_S, "its processes", lambda: () if state is None else open_ports(state)
    )
    with ClusterProcess(address, names, timeout_s=_CLUSTER_TIMEOUT_S) as cluster:
        if is_answering:
            attached = AttachedCluster(state, control)
            status = PendingFact(_QUERY_TIMEOUT_S, "the deployment", attached.status)
            links = PendingFact(_QUERY_TIMEOUT_S, "its links", attached.links)
        else:
            status = PendingFact(
                _CLUSTER_TIMEOUT_S, "the deployment", partial(cluster.read, "status")
            )
            links = PendingFact(_CLUSTER_TIMEOUT_S, "its links", partial(cluster.read, "links"))
        known_url = client.url or (None if state is None else state.http_url)
        front = gather_front(known_url, client, status)
        status_answer = status.wait()
        if (
            isinstance(status_answer, UnknownFact)
            and not is_answering
            and cluster.error is not None
        ):
            return cluster.error
        metrics_url = metrics_url_in(status_answer)
        metrics = (
            None
            if metrics_url is None
            else PendingFact(_HTTP_TIMEOUT_S, metrics_url, lambda: http_problem(metrics_url))
        )
        links_answer, history = links.wait(), cluster.fact("history")
        return DeploymentSnapshot(
            front=_front_or_why(front.wait(), known_url, client),
            status=status_answer,
            links=links_answer
            if isinstance(links_answer, UnknownFact)
            else tuple(cast("list[JsonDict]", links_answer["links"])),
            history=history if isinstance(history, UnknownFact) else tuple(history),
            disks=disks.wait(),
            metrics_problem=None if metrics is None else metrics.wait(),
            versions_by_node=cluster.fact("versions"),
            open_ports=UnknownFact("its processes run elsewhere: look there with 'baton doctor'")
            if state is None
            else ports.wait(),
            gcs_address=str(cluster.fact("gcs_address")),
            ray_auth=cluster.fact("ray_auth"),
        )


def gather_front(
    url: str | None, client: Client, status: PendingFact[Mapping[str, object]] | None = None
) -> PendingFact[FrontSnapshot]:
    """The endpoint's answers; without a URL, of that in the deployment's status."""

    def gather() -> FrontSnapshot:
        status_answer = UnknownFact("") if status is None else status.wait()
        fields = {} if isinstance(status_answer, UnknownFact) else cast("JsonDict", status_answer)
        endpoint = url or cast("str | None", fields.get("endpoint"))
        if endpoint is None:
            reason = UnknownFact("its public address is not known here; name it with --url")
            return FrontSnapshot(
                endpoint=None,
                health_problem=reason,
                client=client,
                request=reason,
                at_s=unix_time_s(),
            )
        health = PendingFact(_HTTP_TIMEOUT_S, endpoint, lambda: health_problem(endpoint))
        tls = PendingFact(TLS_TIMEOUT_S, endpoint, lambda: probe_tls(endpoint, client)).wait()
        request: RequestFact | UnknownFact = UnknownFact(
            "not asked, for no replica runs, and a request would start one"
        )
        if not _is_at_zero(fields):
            request = PendingFact(
                _REQUEST_TIMEOUT_S, endpoint, lambda: probe_request(endpoint, tls, client)
            ).wait()
        return FrontSnapshot(
            endpoint=endpoint,
            health_problem=health.wait(),
            client=client,
            tls=tls,
            request=request,
            at_s=unix_time_s(),
        )

    return PendingFact(_FRONT_TIMEOUT_S, url or "the endpoint", gather)


def _is_at_zero(status: JsonDict) -> bool:
    """Whether the fleet has no replica, and wants none: a request would start one."""
    pools = cast("list[JsonDict]", status.get("pools") or [])
    return bool(pools) and not any(pool["desired"] for pool in pools)


class ClusterProcess:
    """A process that joins a Ray cluster and prints facts of it; ended with its context.

    At its deadline it is killed, with all that it has started.
    """

    def __init__(self, address: str | None, names: Sequence[str], *, timeout_s: float) -> None:
        self.error: BatonError | None = None
        """Why it could not join."""
        self._timeout_s = timeout_s
        self._answers: dict[str, object] = {}
        self._arrived = {name: threading.Event() for name in names}
        self._process = subprocess.Popen(  # noqa: S603 - this Python, a program of our own
            [sys.executable, "-c", _CLUSTER_SCRIPT, json.dumps([address, names])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._timer = threading.Timer(timeout_s, self._kill)
        self._timer.daemon = True
        self._reader = threading.Thread(
            target=self._read_lines, name="facts of the cluster", daemon=True
        )

    def __enter__(self) -> Self:
        self._timer.start()
        self._reader.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._timer.cancel()
        self._kill()
        self._reader.join(_SLACK_S)

    def read(self, name: str) -> Any:  # noqa: ANN401 - JSON
        """A fact, when it is there.

        Raises:
            OperatorError: it could not be found out.
        """
        fact = self.fact(name)
        if isinstance(fact, UnknownFact):
            raise OperatorError(fact.reason, "look at 'baton logs'")
        return fact

    def fact(self, name: str) -> Any:  # noqa: ANN401 - JSON
        """A fact, or why it is unknown; waits for it until the deadline."""
        if not self._arrived[name].wait(self._timeout_s + _SLACK_S):
            return UnknownFact(f"the Ray cluster: no answer within {self._timeout_s:g} s")
        return self._answers[name]

    def _read_lines(self) -> None:
        assert self._process.stdout is not None, "it was asked for"
        with self._process.stdout as lines:
            for line in lines:
                if line.startswith(_FACT_PREFIX):
                    self._accept(*json.loads(line.removeprefix(_FACT_PREFIX)))
        reason = (
            f"no answer within {self._timeout_s:g} s" if self.error is None else str(self.error)
        )
        for name, event in self._arrived.items():
            if not event.is_set():
                self._set(name, UnknownFact(f"the Ray cluster: {reason}"))

    def _accept(self, name: str, value: JsonDict) -> None:
        if name == "error":
            kind = NotRunning if value["is_absent"] else OperatorError
            self.error = kind(value["why"], value["remedy"])
        else:
            self._set(name, UnknownFact(value["unknown"]) if "unknown" in value else value["is"])

    def _set(self, name: str, answer: object) -> None:
        self._answers[name] = answer
        self._arrived[name].set()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def print_cluster_facts(address: str | None, names: Sequence[str]) -> None:
    """Join a Ray cluster and print these facts of it; the program of `ClusterProcess`."""
    try:
        with attach_deployment(address) as deployment:
            gcs_address = get_gcs_address()
            auth = PendingFact(
                _AUTH_PROBE_TIMEOUT_S, gcs_address, lambda: probe_ray_auth(gcs_address)
            )
            facts: dict[str, Callable[[], object]] = {
                "status": deployment.status,
                "links": deployment.links,
                "gcs_address": lambda: gcs_address,
                "history": lambda: [asdict(row) for row in Generations().history()],
                "versions": lambda: dict(cluster_facts().versions),
            }
            for name in names:
                if name == "ray_auth":
                    _print_fact(name, auth.wait())
                else:
                    _print_fact(name, gather_fact(_CLUSTER_TIMEOUT_S, name, facts[name]))
    except BatonError as error:
        _print_line(
            "error",
            {
                "is_absent": isinstance(error, NotRunning),
                "why": getattr(error, "reason", str(error)),
                "remedy": getattr(error, "remedy", "look at 'baton status'"),
            },
        )


def _print_fact(name: str, fact: object) -> None:
    _print_line(name, {"unknown": fact.reason} if isinstance(fact, UnknownFact) else {"is": fact})


def _print_line(name: str, value: JsonDict) -> None:
    line = f"{_FACT_PREFIX}{json.dumps([name, value], default=str)}\n"
    sys.stdout.write(line)
    sys.stdout.flush()


def _front_or_why(
    front: FrontSnapshot | UnknownFact, url: str | None, client: Client
) -> FrontSnapshot:
    if not isinstance(front, UnknownFact):
        return front
    return FrontSnapshot(
        endpoint=url, health_problem=front, client=client, request=front, at_s=unix_time_s()
    )


def _deployment_folders(
    state: ClusterState | None, config: DeploymentConfig | None
) -> dict[str, Path]:
    """The folders that a deployment on this machine writes to, by their purpose."""
    if state is None:
        return {}
    session = Path(state.run_dir) / "session_latest"
    cache = None if config is None else config.cluster.model_cache.path
    models = Path(cache or os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    folders = {
        "its Ray session and logs": session.resolve(),
        "its files": Path(state.run_dir),
        "its state": state_folder(),
    }
    return folders | ({"models": models} if models.exists() else {})


def metrics_url_in(status: Mapping[str, object] | UnknownFact) -> str | None:
    """The URL of the metrics in a status; None without."""
    if isinstance(status, UnknownFact):
        return None
    observability = cast("JsonDict", status.get("observability") or {})
    url = observability.get("url")
    return str(url) if url else None


def open_ports(state: ClusterState) -> tuple[OpenPort, ...]:
    """Ports of a local deployment's processes on other addresses than loopback."""
    ports: dict[tuple[str, int], OpenPort] = {}
    for pid in sorted({state.pid, *marked_processes(state.run_dir)}):
        try:
            process = psutil.Process(pid)
            listeners = [
                net_connection
                for net_connection in process.net_connections(kind="tcp")
                if net_connection.status == psutil.CONN_LISTEN
            ]
            program = process.name()
        except psutil.Error:  # it has ended, or belongs to another user
            continue
        for listener in listeners:
            host, port = listener.laddr
            if not is_loopback(host):
                open_port = OpenPort(address=host, port=port, program=program)
                ports.setdefault((host, port), open_port)
    return tuple(ports[key] for key in sorted(ports))
