"""A baton on a Ray cluster that somebody else has started: deploy there, leave, take it away again.

Theory of operation: nothing here outlives the command. What is deployed is Serve's, whose
controller keeps it running; the cluster stays as it was found, and so do other applications on it.
Serve reads its variables when its processes begin. So where no Serve runs there yet, it is started
with those that a deployment of baton's own has, handed on by Serve's controller to all that it
starts. Where one runs already, clients come through the proxies that it has.
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

from baton.config.schema.deployment import DeploymentConfig, FrontKind
from baton.domain.errors import CannotStart, ClusterFailed, NotRunning, TimedOut
from baton.domain.names.addresses import endpoint, is_any
from baton.serving.cluster.local_cluster import attach, detach
from baton.serving.front.data_path import (
    FrontSettings,
    choose_data_path,
    pick_front_ports,
    serve_environment,
)
from baton.serving.operator.local_deployment import (
    Progress,
    ask_all,
    await_application,
    deploy,
    late,
    say_where_to_look,
)
from baton.serving.operator.node_logs import NodeLogs, RayReaders
from baton.serving.preflight.autoscaling_capacity import amounts, waiting_line
from baton.serving.preflight.checks import check_cluster
from baton.serving.preflight.ray_autoscaler import beyond_autoscaler, growth, waiting_replicas
from baton.serving.ray.context import control_store
from baton.serving.ray.serve_control import find_controller
from baton.serving.shared.names import APP, INGRESS
from baton.serving.store.config_store import WHERE, load, save

_LOGGER = logging.getLogger(__name__)
_POLL_S = 0.5
_ASK_S = 20.0


def named_cluster(config: DeploymentConfig, environ: Mapping[str, str]) -> str | None:
    """The address of the cluster to deploy to; None: one is started on this machine."""
    named = config.cluster.address or environ.get("RAY_ADDRESS", "")
    return None if named in {"", "local"} else named


def where_it_runs(wanted: DeploymentConfig, live: DeploymentConfig) -> DeploymentConfig:
    """A configuration that is to be applied: to where it runs, whatever it says of that."""
    here = replace(wanted.cluster, address=live.cluster.address, allow_open=live.cluster.allow_open)
    return replace(wanted, cluster=here)


def deploy_there(
    config: DeploymentConfig, address: str, *, timeout_s: float, progress: Progress
) -> str:
    """Deploy to the cluster at `address`; returns the endpoint once it is healthy.

    What was begun is taken away again where it does not come up.

    Raises:
        ClusterFailed: the cluster cannot be joined, or a baton runs there already.
        CannotStart: it cannot run this.
        EngineStartFailed: a replica could not be started.
        TimedOut: it was not healthy in time.
    """
    _check_possible(config)
    if "://" in address:
        raise ClusterFailed(
            f"the address of a Ray cluster: got {address!r}, wanted HOST:PORT of its head's store",
            "give what 'ray start' prints for other nodes, as 10.0.0.7:6379; not the address of Ray"
            " Client or of the dashboard",
        )
    config = replace(config, cluster=replace(config.cluster, address=address))
    until_s = time.monotonic() + timeout_s
    variables = _serve_variables(config)
    with _driver(address, variables):
        _check_nobody(address)
        grows = growth()
        check_cluster(config, warn=progress, shared=True, growth=grows)
        started = not _serve_runs()
        try:
            _start_serve(config, address, variables, progress)
            url = _endpoint()
            deploy(config, progress)
            save(WHERE, json.dumps({"endpoint": url, "started_serve": started}).encode())
            nodes = (lambda: "") if grows is None else partial(_awaited_nodes, config)
            await_application(until_s, timeout_s, progress, nodes=nodes)
            _await_ingresses(until_s, timeout_s, progress)
        except BaseException:
            progress("taking away again what was begun")
            try:
                _take_away(started=started)
            except Exception as error:  # noqa: BLE001 - why it did not come up is what is told
                progress(
                    f"it could not be taken away ({type(error).__name__}: {error});"
                    f" 'baton down --address {address}' does it"
                )
            raise
        say_where_to_look(progress)
    return url


def take_down(address: str, *, timeout_s: float) -> str:
    """Drain and take away baton from a cluster, which goes on; returns where it was.

    Raises:
        ClusterFailed: the cluster cannot be joined.
        NotRunning: no baton runs there.
        TimedOut: streams had not ended in time; Serve goes on with it.
    """
    with _driver(address, {}):
        if not _is_deployed():
            raise NotRunning(
                f"no baton runs on the Ray cluster at {address}",
                "start one with 'baton up --ray-address'",
            )
        where = where_clients_come()
        _take_away(started=bool(where.get("started_serve")), timeout_s=timeout_s)
    return str(where.get("endpoint", address))


@contextlib.contextmanager
def logs_there(address: str, tell: Progress) -> Iterator[NodeLogs]:
    """What is logged on all nodes of the cluster; `tell` hears of those that do not answer.

    Raises:
        ClusterFailed: the cluster cannot be joined.
    """
    with _driver(address, {}):
        yield NodeLogs(RayReaders(), tell)


def where_clients_come() -> Mapping[str, object]:
    """What was noted of the endpoint at the start; empty where nothing was."""
    data = load(WHERE)
    found: dict[str, object] = {} if data is None else json.loads(data)
    return found


@contextlib.contextmanager
def _driver(address: str, variables: Mapping[str, str]) -> Iterator[None]:
    # Serve's own parts in this process read them, too; but throughput mode, meant for replicas,
    # runs handles in the caller's event loop, and this process has none.
    os.environ.update({**variables, "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1"})
    attach(address)
    try:
        yield
    finally:
        detach()


def _check_possible(config: DeploymentConfig) -> None:
    """What only a cluster of baton's own can do.

    Raises:
        CannotStart: with everything of it.
    """
    findings = []
    if config.security.tls.cert_file is not None:
        findings.append(
            "security.tls: Ray Serve's front on a cluster that runs already speaks no TLS; end it"
            " before the cluster, and leave security.tls.cert_file out"
        )
    if config.server.front is FrontKind.GATE:
        findings.append(
            "server.front: got 'gate', which nobody starts on a cluster that runs already;"
            " use 'serve'"
        )
    if findings:
        raise CannotStart(tuple(findings))


def _check_nobody(address: str) -> None:
    if _is_deployed():
        where = where_clients_come().get("endpoint", "an endpoint that was not noted")
        raise ClusterFailed(
            f"a baton runs on the Ray cluster at {address} already: {where}",
            f"change it with 'baton apply --address {address}', or take it away with"
            f" 'baton down --address {address}'",
        )


def _is_deployed() -> bool:
    from ray import serve

    return _serve_runs() and APP in serve.status().applications


def _serve_runs() -> bool:
    try:
        find_controller()
    except ValueError:
        return False
    return True


def _serve_variables(config: DeploymentConfig) -> dict[str, str]:
    """For a Serve that is started here; its front's files have a folder of this cluster's own."""
    choice = choose_data_path(os.environ)
    folder = secrets.token_hex(4)
    front = FrontSettings(
        data_path=choice.data_path,
        run_dir=Path("/tmp") / f"baton-{folder}",  # noqa: S108 - made by Serve, on each node
        ports=pick_front_ports(),
        longest_stream_s=config.admission.timeouts.total_s,
    )
    return serve_environment(front)


def _start_serve(
    config: DeploymentConfig, address: str, variables: Mapping[str, str], progress: Progress
) -> None:
    """Have Serve run; where it does already, it is taken as it is.

    Raises:
        ClusterFailed: it did not start.
    """
    if _serve_runs():
        progress(
            "Ray Serve runs there already: clients come through its own proxies; for the faster"
            " path, end it with 'serve shutdown' before 'baton up'"
        )
        return
    from ray import exceptions, serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    progress(f"starting Ray Serve on the cluster at {address}")
    try:
        serve.start(
            http_options={"host": config.server.host, "port": config.server.port},
            proxy_location="HeadOnly",
            controller_options={"runtime_env": {"env_vars": dict(variables)}},
        )
    except (exceptions.RayError, TimeoutError, RuntimeError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise ClusterFailed(
            f"Ray Serve did not start on the cluster at {address}: {why}",
            f"see whether port {config.server.port} is free on its head, and 'ray logs cluster'",
        ) from error


def _endpoint() -> str:
    """Where clients reach Serve's front: on the head node, whose address Ray knows."""
    from ray.serve.context import _get_global_client

    options = _get_global_client().http_config
    host, port = str(options.host), int(options.port)
    if is_any(host):
        host = control_store().rpartition(":")[0].strip("[]")
    return endpoint("http", host, port)


def _awaited_nodes(config: DeploymentConfig) -> str:
    """Which replicas wait for nodes, and what the autoscaler says that it has none for."""
    from ray import exceptions

    try:
        line = waiting_line(config, waiting_replicas())
        beyond = beyond_autoscaler() if line else ()
    except (exceptions.RayError, ImportError, AttributeError) as error:
        _LOGGER.debug("Ray does not say what waits: %s", error)  # it is only said, not acted on
        return ""
    if not beyond:
        return line
    what = "; ".join(amounts(needs) for needs in beyond)
    return f"{line}; the autoscaler of the cluster has no nodes at present for {what}"


def _await_ingresses(until_s: float, timeout_s: float, progress: Progress) -> None:
    """Wait until every ingress says that it can serve: the endpoint may be out of reach of us."""
    progress("waiting until the endpoint is healthy")
    while time.monotonic() < until_s:
        try:
            if all(answer is True for answer in ask_all(INGRESS, "healthy", timeout_s=_ASK_S)):
                return
        except (NotRunning, TimedOut):
            pass  # it may just be starting
        time.sleep(_POLL_S)
    raise late("the endpoint was not healthy", timeout_s)


def _take_away(*, started: bool, timeout_s: float = 60.0) -> None:
    """End baton's application, and Serve where it was started for it and serves nobody else."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
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
    if started and not serve.status().applications:
        serve.shutdown()
