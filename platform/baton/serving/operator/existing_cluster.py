"""A deployment on an existing Ray cluster: deploy, leave, remove.

Theory of operation: no process stays. Serve's controller keeps the application running; the cluster
and its other applications do not change.

Serve's processes read their variables when they start. So if no Serve runs there, it is started
with baton's variables, which its controller hands on. If one runs already, clients come through its
proxies.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from baton.config.schema.deployment import DeploymentConfig, ListenerKind
from baton.domain.errors import ClusterFailed, NotRunning, PreflightFailed, TimedOut
from baton.domain.names.addresses import format_endpoint, is_any_address, parse_address
from baton.runtime.process.progress import Progress
from baton.serving.checks.autoscaling_capacity import resources_text, waiting_line
from baton.serving.checks.start import check_cluster
from baton.serving.cluster.local_cluster import attach, detach
from baton.serving.front.data_path import (
    FrontSettings,
    choose_data_path,
    pick_front_ports,
    serve_environment,
)
from baton.serving.operator.local_deployment import (
    announce_observability,
    await_application,
    deploy,
    query_all,
    timeout_error,
)
from baton.serving.operator.node_logs import NodeLogs, RayClusterReader
from baton.serving.ray.autoscaler import (
    infeasible_requests,
    pending_replicas,
    read_autoscaling_capacity,
)
from baton.serving.ray.context import get_gcs_address
from baton.serving.ray.driver import hide_serve_messages
from baton.serving.ray.serve_control import find_controller
from baton.serving.shared.names import APP, INGRESS
from baton.serving.store.config_store import ENDPOINT_KEY, load, save

_LOGGER = logging.getLogger(__name__)
_POLL_S = 0.5
_QUERY_TIMEOUT_S = 20.0


def cluster_address(config: DeploymentConfig, environ: Mapping[str, str]) -> str | None:
    """The address of the cluster to deploy to; None: start one on this machine."""
    address = config.cluster.address or environ.get("RAY_ADDRESS", "")
    return None if address in {"", "local"} else address


def with_live_cluster(new: DeploymentConfig, live: DeploymentConfig) -> DeploymentConfig:
    """A configuration to apply, with the cluster settings of the running deployment."""
    cluster = replace(new.cluster, address=live.cluster.address, allow_open=live.cluster.allow_open)
    return replace(new, cluster=cluster)


def deploy_to_cluster(
    config: DeploymentConfig, address: str, *, timeout_s: float, progress: Progress
) -> str:
    """Deploy to the cluster at `address`; returns the endpoint once it is healthy.

    After a failure the application is removed again.

    Raises:
        ClusterFailed: the cluster cannot be joined, or a baton runs there already.
        PreflightFailed: it cannot run this.
        EngineStartFailed: a replica could not be started.
        TimedOut: it was not healthy in time.
    """
    _check_supported(config)
    if "://" in address:
        raise ClusterFailed(
            f"the address of a Ray cluster: got {address!r}, expected HOST:PORT of its head's"
            " store",
            "give what 'ray start' prints for other nodes, as 10.0.0.7:6379; not the address of Ray"
            " Client or of the dashboard",
        )
    config = replace(config, cluster=replace(config.cluster, address=address))
    until_s = time.monotonic() + timeout_s
    variables = _serve_variables(config)
    with _driver(address, variables):
        _check_not_deployed(address)
        node_growth = read_autoscaling_capacity()
        check_cluster(config, warn=progress, shared=True, capacity=node_growth)
        started_serve = not _is_serve_running()
        try:
            _start_serve(config, address, variables, progress)
            url = _serve_endpoint()
            deploy(config, progress)
            save(
                ENDPOINT_KEY, json.dumps({"endpoint": url, "started_serve": started_serve}).encode()
            )
            pending_nodes = (lambda: "") if node_growth is None else partial(_pending_nodes, config)
            await_application(until_s, timeout_s, progress, pending_nodes=pending_nodes)
            _await_ingresses(until_s, timeout_s, progress)
        except BaseException:
            progress("taking away again what was begun")
            try:
                _remove_application(started_serve=started_serve)
            except Exception as error:  # noqa: BLE001 - the reason is reported
                progress(
                    f"it could not be taken away ({type(error).__name__}: {error});"
                    f" 'baton down --address {address}' does it"
                )
            raise
        announce_observability(progress)
    return url


def undeploy(address: str, *, timeout_s: float) -> str:
    """Drain and remove baton from a cluster; returns its endpoint.

    Raises:
        ClusterFailed: the cluster cannot be joined.
        NotRunning: no baton runs there.
        TimedOut: streams had not ended in time; Serve continues to drain.
    """
    with _driver(address, {}):
        if not _is_deployed():
            raise NotRunning(
                f"no baton runs on the Ray cluster at {address}",
                "start one with 'baton up --ray-address'",
            )
        note = endpoint_note()
        _remove_application(started_serve=bool(note.get("started_serve")), timeout_s=timeout_s)
    return str(note.get("endpoint", address))


@contextlib.contextmanager
def cluster_logs(address: str, on_warning: Progress) -> Iterator[NodeLogs]:
    """The logs of all nodes of the cluster; `on_warning` gets the nodes that do not answer.

    Raises:
        ClusterFailed: the cluster cannot be joined.
    """
    with _driver(address, {}):
        yield NodeLogs(RayClusterReader(), on_warning)


def endpoint_note() -> Mapping[str, object]:
    """The endpoint's note from the start; empty if there is none."""
    data = load(ENDPOINT_KEY)
    note: dict[str, object] = {} if data is None else json.loads(data)
    return note


@contextlib.contextmanager
def _driver(address: str, variables: Mapping[str, str]) -> Iterator[None]:
    os.environ.update(variables)  # Serve's parts in this process read them, too
    attach(address)
    try:
        yield
    finally:
        detach()


def _check_supported(config: DeploymentConfig) -> None:
    """Raise PreflightFailed with all settings that need a cluster of baton's own."""
    findings = []
    if config.security.tls.cert_file is not None:
        findings.append(
            "security.tls: Ray Serve's front on a cluster that runs already does not use TLS; end"
            " it before the cluster, and leave security.tls.cert_file out"
        )
    if config.server.listener is ListenerKind.INGRESS:
        findings.append(
            "server.listener: got 'ingress', which does not exist on a cluster that runs already;"
            " use 'ray-serve'"
        )
    if findings:
        raise PreflightFailed(tuple(findings))


def _check_not_deployed(address: str) -> None:
    if _is_deployed():
        current_endpoint = endpoint_note().get("endpoint", "an endpoint that was not noted")
        raise ClusterFailed(
            f"a baton runs on the Ray cluster at {address} already: {current_endpoint}",
            f"change it with 'baton apply --address {address}', or take it away with"
            f" 'baton down --address {address}'",
        )


def _is_deployed() -> bool:
    from ray import serve

    return _is_serve_running() and APP in serve.status().applications


def _is_serve_running() -> bool:
    try:
        find_controller()
    except ValueError:
        return False
    return True


def _serve_variables(config: DeploymentConfig) -> dict[str, str]:
    """For a Serve that is started here; each cluster has its own folder of HAProxy's files."""
    choice = choose_data_path(os.environ)
    suffix = secrets.token_hex(4)
    front = FrontSettings(
        data_path=choice.data_path,
        run_dir=Path("/tmp") / f"baton-{suffix}",  # noqa: S108 - made by Serve, on each node
        ports=pick_front_ports(),
        max_stream_s=config.admission.timeouts.total_s,
    )
    return serve_environment(front)


def _start_serve(
    config: DeploymentConfig, address: str, variables: Mapping[str, str], progress: Progress
) -> None:
    """Start Serve; if it runs already, nothing changes. Raises ClusterFailed."""
    if _is_serve_running():
        progress(
            "Ray Serve runs there already: clients come through its own proxies; for the faster"
            " path, end it with 'serve shutdown' before 'baton up'"
        )
        return
    from ray import exceptions, serve

    hide_serve_messages()
    progress(f"starting Ray Serve on the cluster at {address}")
    try:
        serve.start(
            http_options={"host": config.server.host, "port": config.server.port},
            proxy_location="HeadOnly",
            controller_options={"runtime_env": {"env_vars": dict(variables)}},
        )
    except (exceptions.RayError, TimeoutError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ClusterFailed(
            f"Ray Serve did not start on the cluster at {address}: {reason}",
            f"see whether port {config.server.port} is free on its head, and 'ray logs cluster'",
        ) from error


def _serve_endpoint() -> str:
    """The address of Serve's proxy on the head node."""
    from ray.serve.context import _get_global_client

    options = _get_global_client().http_config
    host, port = str(options.host), int(options.port)
    if is_any_address(host):
        host = parse_address(get_gcs_address()).host
    return format_endpoint("http", host, port)


def _pending_nodes(config: DeploymentConfig) -> str:
    from ray import exceptions

    try:
        line = waiting_line(config, pending_replicas())
        unavailable = infeasible_requests() if line else ()
    except (exceptions.RayError, ImportError, AttributeError) as error:
        _LOGGER.debug("Ray does not say what waits: %s", error)  # shown only, not acted on
        return ""
    if not unavailable:
        return line
    resources = "; ".join(resources_text(needs) for needs in unavailable)
    return f"{line}; the autoscaler of the cluster has no nodes at present for {resources}"


def _await_ingresses(until_s: float, timeout_s: float, progress: Progress) -> None:
    """Wait until every ingress is healthy; the endpoint may be unreachable from here."""
    progress("waiting until the endpoint is healthy")
    while time.monotonic() < until_s:
        try:
            answers = query_all(INGRESS, "healthy", timeout_s=_QUERY_TIMEOUT_S)
            if not answers.failures and all(answer is True for answer in answers.values):
                return
        except (NotRunning, TimedOut):
            pass  # it may just be starting
        time.sleep(_POLL_S)
    raise timeout_error("the endpoint was not healthy", timeout_s)


def _remove_application(*, started_serve: bool, timeout_s: float = 60.0) -> None:
    """Remove the application, and Serve if baton started it and it has no other application."""
    from ray import serve

    hide_serve_messages()
    if APP in serve.status().applications:
        serve.delete(APP, _blocking=False)
    until_s = time.monotonic() + timeout_s
    while APP in serve.status().applications:
        if time.monotonic() > until_s:
            raise TimedOut(
                f"baton had not ended after {timeout_s:.0f} s",
                "it waits for open streams, and goes on to end; look with 'baton status'",
            )
        time.sleep(_POLL_S)
    if started_serve and not serve.status().applications:
        serve.shutdown()
