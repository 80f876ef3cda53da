"""A deployment on this machine: cluster and application together, from start to stop."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from baton.config.schema.deployment import ApiServerKind, DeploymentConfig, ListenerKind
from baton.domain.errors import BatonError, EngineStartFailed, NotRunning, TimedOut
from baton.domain.names.addresses import is_ipv6, parse_host_header
from baton.runtime.process.progress import Progress, RepeatedProgress, StatusLine
from baton.serving.application.app import build_app, initial_sizes
from baton.serving.application.builds import encode_build_record, initial_build_record
from baton.serving.checks.start import await_nodes, check_cluster
from baton.serving.cluster.cluster_state import ClusterState
from baton.serving.cluster.failed_start_logs import failures_folder, last_error
from baton.serving.cluster.local_cluster import ClusterSettings, LocalCluster
from baton.serving.cluster.readiness import front_is_direct, local_client
from baton.serving.front.certificates import CertificateWatch
from baton.serving.front.data_path import DataPath, front_thread_count
from baton.serving.front.haproxy_admin import admin_sockets
from baton.serving.front.haproxy_hardening import certificate_path
from baton.serving.operator.control_socket import Answers, ControlSocket
from baton.serving.ray.driver import hide_serve_messages
from baton.serving.ray.membership import find_lost_nodes
from baton.serving.ray.packing import unpack
from baton.serving.ray.serve_control import NO_REPLICA_READY, start_failure, stop_replicas
from baton.serving.replica import hub_environment
from baton.serving.replica.start_reports import StartWatch
from baton.serving.shared.names import APP, CLUSTER, CONTROLLER, INGRESS
from baton.serving.store.config_store import (
    BUILD_RECORD_KEY,
    STARTED_BY_KEY,
    clear_store,
    load,
    save,
    user_at_host,
)

_POLL_S = 0.5
_RUNNING = "RUNNING"
_STARTING = "STARTING"
_NO_SERVE_MESSAGE = "no Serve instance running"
"""Serve's message when no Serve runs (Ray 2.60)."""
_QUERY_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 20.0
_ORDER_TIMEOUT_S = 20.0


def query_all(
    deployment: str, method: str, *arguments: object, timeout_s: float = _QUERY_TIMEOUT_S
) -> Answers:
    """The answers of the replicas of a deployment to a control call.

    An unresponsive replica costs no other answer, nor does a replica that has just ended.

    Raises:
        NotRunning: there is no replica, or all ended before they answered.
        TimedOut: none of them answered in time.
    """
    from ray import exceptions, serve
    from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

    hide_serve_messages()
    try:
        handle = serve.get_deployment_handle(deployment, APP)
        broadcast = handle.broadcast(method, *arguments)
        results = broadcast.results(timeout_s=timeout_s, return_exceptions=True)
        errors = [result for result in results if isinstance(result, Exception)]
        absent = (TimeoutError, exceptions.RayActorError)
        if unexpected := [error for error in errors if not isinstance(error, absent)]:
            raise unexpected[0]
        if errors and len(errors) == len(results):
            raise errors[0]
    except TimeoutError as error:
        raise TimedOut(
            f"{deployment} did not answer {method!r} within {timeout_s:.0f} s", "try again"
        ) from error
    except KeyError as error:
        if isinstance(error, exceptions.RayError):  # a replica's error, wrapped by Ray
            raise
        raise NotRunning(
            f"{deployment}: it is not deployed yet", "try again in some seconds"
        ) from error
    except DeploymentUnavailableError as error:
        remedy = f"try again in some seconds, or look at 'baton logs --{deployment} --all'"
        raise NotRunning(f"{deployment}: {NO_REPLICA_READY}", remedy) from error
    except (RayServeException, exceptions.RayActorError) as error:
        reason = str(error).strip().partition("\n")[0]
        if _NO_SERVE_MESSAGE in reason:
            raise NotRunning(
                "no baton runs on this Ray cluster", "start one with 'baton up --ray-address'"
            ) from error
        remedy = "it may just be replaced: try again in some seconds"
        raise NotRunning(f"{deployment} cannot be asked: {reason}", remedy) from error
    return Answers(
        values=[unpack(result) for result in results if not isinstance(result, Exception)],
        failures=[
            f"one {deployment} did not answer {method!r} within {timeout_s:.0f} s"
            if isinstance(error, TimeoutError)
            else f"one {deployment} has just ended"
            for error in errors
        ],
    )


def announce_observability(progress: Progress) -> None:
    """Show where metrics and the console are, if the controller answers."""
    with contextlib.suppress(BatonError):
        (status, *_) = query_all(CONTROLLER, "status").values
        if isinstance(status, Mapping) and (line := observability_line(status)):
            progress(line)


def observability_line(status: Mapping[str, object]) -> str:
    """Where metrics and the console are, or why they are not; empty if none are configured."""
    observability = status.get("observability")
    if not isinstance(observability, Mapping):
        return ""
    enabled = [name for name in ("console", "metrics") if observability.get(name)]
    if not enabled:
        return ""
    if (problem := observability.get("trouble")) is not None:
        return f"{' and '.join(enabled)} are not there yet: {problem}"
    return f"{' and '.join(enabled)} at {observability['url']}"


class LocalDeployment:
    """Starts a Ray cluster and baton on it; leaving the context ends both."""

    def __init__(self, config: DeploymentConfig, progress: Progress) -> None:
        self._config = config
        self._progress = RepeatedProgress(progress)
        self._cluster = LocalCluster(cluster_settings(config), progress=self._progress)
        self._certificates: CertificateWatch | None = None
        self._control: ControlSocket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def state(self) -> ClusterState:
        """How other commands find this deployment."""
        return self._cluster.state

    def start(self, timeout_s: float) -> None:
        """Start everything and wait until the public endpoint is healthy.

        After a failure the logs are kept, and the error names their folder.

        Raises:
            ClusterFailed: Ray did not start.
            EngineStartFailed: a replica could not be started.
            TimedOut: it was not healthy in time.
        """
        try:
            with self._progress.repeating():
                self._start(timeout_s)
        except (EngineStartFailed, TimedOut) as error:
            raise self._with_log_excerpt(error) from error
        except Exception:
            self._cluster.archive_logs_on_stop(failures_folder())
            raise

    def _with_log_excerpt(
        self, error: EngineStartFailed | TimedOut
    ) -> EngineStartFailed | TimedOut:
        """The error with the last message of the failed process, and the folder of its logs."""
        logs_dir = self._cluster.archive_logs_on_stop(failures_folder())
        if logs_dir is None:
            return error
        error_text = last_error(Path(self.state.run_dir) / "session_latest" / "logs")
        is_known = not error_text or error_text in error.reason or error.remedy in error_text
        reason = error.reason if is_known else f"{error.reason}; last error: {error_text}"
        return type(error)(reason, f"{error.remedy}; its logs are kept in {logs_dir}")

    def _start(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        self._cluster.start()
        if not is_ipv6(parse_host_header(self.state.address)):
            # Calls from the driver that started Ray at an IPv6 address do not arrive (2.60); those
            # from a driver that joins do.
            self._control = ControlSocket(
                Path(self.state.run_dir), query=answer_query, load_note=load
            )
        await_nodes(self._config, deadline_at_s=until_s, progress=self._progress)
        check_cluster(self._config, warn=self._progress)
        deploy(self._config, self._progress)
        await_application(until_s, timeout_s, self._progress)
        self._await_health(until_s, timeout_s)
        if self.state.data_path is DataPath.SERVE_HAPROXY:  # a gate has a watch of its own
            self._certificates = _certificate_watch(self._config, Path(self.state.run_dir))
            self._certificates.start()

    def stop(self) -> None:
        """End everything that was started. Idempotent."""
        if self._control is not None:
            self._control.announce_shutdown()
        if self._certificates is not None:
            self._certificates.stop()
        try:
            with self._progress.repeating():
                self._cluster.stop(serve_timeout_s=_STOP_TIMEOUT_S)
        finally:
            if self._control is not None:
                self._control.close()
                self._control = None

    def _await_health(self, until_s: float, timeout_s: float) -> None:
        """Wait for health: ingresses answer in turn, so twice as many in a row as ingresses."""
        self._progress("waiting until the endpoint is healthy")
        ingresses = self._config.server.replicas.min
        required, successes = 1 if ingresses == 1 else 2 * ingresses, 0
        while time.monotonic() < until_s:
            try:
                with local_client(self.state.http_url) as client:  # a connection may stay with one
                    is_healthy = client.get("/health").is_success and front_is_direct(self.state)
            except httpx.TransportError:
                is_healthy = False  # HAProxy listens a moment after the ingress is up
            successes = successes + 1 if is_healthy else 0
            if successes >= required:
                return
            if not is_healthy:
                time.sleep(_POLL_S)
        raise timeout_error("the endpoint was not healthy", timeout_s)


def deploy(config: DeploymentConfig, progress: Progress) -> None:
    """Deploy baton with the Serve of the connected cluster; returns at once."""
    from ray import serve

    clear_store()
    save(BUILD_RECORD_KEY, encode_build_record(initial_build_record(config)))
    save(STARTED_BY_KEY, user_at_host().encode())
    hub_environment.store_variables(os.environ)
    target = serve.RunTarget(
        build_app(config), name=APP, route_prefix="/", external_scaler_enabled=True
    )
    progress("deploying ingress, controller and pools")
    serve.run_many(
        [target],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    empty = [name for name, size in initial_sizes(config).items() if not size]
    stop_replicas(APP, empty, timeout_s=_ORDER_TIMEOUT_S)


def _no_pending_nodes() -> str:
    return ""


def await_application(
    until_s: float,
    timeout_s: float,
    progress: Progress,
    *,
    pending_nodes: Callable[[], str] = _no_pending_nodes,
) -> None:
    """Wait until Serve says that every replica is ready.

    Args:
        until_s: The deadline, by `time.monotonic`.
        timeout_s: The whole timeout, for the error.
        progress: Gets changes of ready and waiting replicas.
        pending_nodes: A line about awaited nodes; empty for none.

    Raises:
        EngineStartFailed: a replica could not be started.
        TimedOut: they were not ready in time.
    """
    from ray import serve

    nodes_line, messages = "", list[str]()
    start_watch = StartWatch()
    while time.monotonic() < until_s:
        now_s = time.monotonic()
        start_watch.check()
        start_watch.poll(now_s)
        application = serve.status().applications.get(APP)
        if application is not None:
            state = str(application.status.value)
            counts = replica_counts(application.deployments)
            if state == _RUNNING:
                progress(ready_line(counts))
                return
            phases = start_watch.describe(starting_counts(counts), now_s)
            progress(StatusLine("; ".join(filter(None, (ready_line(counts), phases)))))
            if (line := pending_nodes()) != nodes_line:
                nodes_line = line
                if line:
                    progress(line)
            messages = [s.message for s in application.deployments.values() if s.message]
            if (failure := start_failure(application)) is not None:
                raise EngineStartFailed(failure, "correct the configuration")
        time.sleep(_POLL_S)
    detail = nodes_line or " ".join(dict.fromkeys(" ".join(messages).split("\n")))
    raise timeout_error("the replicas were not ready", timeout_s, detail)


def answer_query(
    deployment: str, method: str, arguments: tuple[object, ...], timeout_s: float
) -> Answers:
    """The answers to a query of the control socket; raises as `query_all`."""
    if deployment == CLUSTER:
        return Answers(values=[asdict(node) for node in find_lost_nodes(APP)])
    return query_all(deployment, method, *arguments, timeout_s=timeout_s)


def _certificate_watch(config: DeploymentConfig, run_dir: Path) -> CertificateWatch:
    def sockets() -> list[Path]:
        return admin_sockets(run_dir)

    return CertificateWatch(config.security.tls, certificate_path(run_dir), sockets)


def timeout_error(subject: str, timeout_s: float, detail: str = "") -> TimedOut:
    """The error after a timeout, with the last known detail."""
    reason = f"{subject} after {timeout_s:.0f} s" + (f": {detail}" if detail else "")
    return TimedOut(reason, "allow more time: 'baton up' and 'baton apply' take --timeout")


def cluster_settings(config: DeploymentConfig) -> ClusterSettings:
    """The local cluster of a configuration."""
    return ClusterSettings(
        http_host=config.server.host,
        http_port=config.server.port,
        node_address=config.cluster.node_address,
        cpus=_logical_cpus(config),
        data_path=DataPath.INGRESS_HAPROXY
        if config.server.listener is ListenerKind.INGRESS
        else None,
        max_stream_s=config.admission.timeouts.total_s,
        tls=config.security.tls,
        front_threads=front_thread_count(
            config.server.replicas.min,
            in_python=config.server.api_server is ApiServerKind.PYTHON,
            tls=config.security.tls.cert_file is not None,
            cores=os.cpu_count() or 1,
        ),
    )


def _logical_cpus(config: DeploymentConfig) -> float:
    """Logical CPUs for all replicas, also on a machine with fewer cores.

    On one machine only baton uses Ray's count of CPUs.
    """
    pools = config.pools.values()
    # During a replacement, two replicas run. Ray counts whole CPUs on a node.
    surge_cpus = max(pool.resources.cpus for pool in pools)
    return math.ceil(
        1.0 + surge_cpus + sum(pool.resources.cpus * pool.replicas.max for pool in pools)
    )


def replica_counts(deployments: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Replicas of each of Serve's deployments by state, the ingress first."""
    names = sorted(deployments, key=lambda name: (name != INGRESS, name))
    return {
        name: {
            str(getattr(state, "value", state)): count
            for state, count in deployments[name].replica_states.items()
            if count
        }
        for name in names
    }


def starting_counts(counts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Starting replicas of each deployment that has any."""
    starting = {name: states.get(_STARTING, 0) for name, states in counts.items()}
    return {name: count for name, count in starting.items() if count}


def ready_line(counts: Mapping[str, Mapping[str, int]]) -> str:
    """`ready: prefill 1/1, decode 0/1`, with states other than ready and starting."""
    parts = []
    for name, states in counts.items():
        others = sorted(state.lower() for state in states if state not in {_RUNNING, _STARTING})
        note = f" ({', '.join(others)})" if others else ""
        parts.append(f"{name} {states.get(_RUNNING, 0)}/{sum(states.values())}{note}")
    return "ready: " + ", ".join(parts) if parts else "waiting for Ray Serve"
