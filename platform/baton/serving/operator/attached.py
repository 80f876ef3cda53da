"""A connection to a running deployment."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from baton.domain.commands import RecordSelection
from baton.domain.errors import AmbiguousDeployment, DeploymentEnded, NotRunning, TimedOut
from baton.serving.cluster.cluster_state import ClusterState, running_clusters, state_folder
from baton.serving.cluster.local_cluster import attach, detach
from baton.serving.operator.control_socket import Answers, ControlClient, timeout_of
from baton.serving.operator.local_deployment import answer_query
from baton.serving.shared.names import CLUSTER, CONTROLLER, INGRESS
from baton.serving.shared.reports import (
    lost_node_row,
    lost_node_text,
    lost_replicas,
    merge_link_reports,
    merge_losses,
    merge_rejections,
    merge_request_reports,
    route_report,
)
from baton.serving.store.config_store import ENDPOINT_KEY, ROLLOUT_KEY, load, unix_time_s

Report = Mapping[str, object]
_CONNECT_TIMEOUT_S = 1.0


class AttachedCluster:
    """The queries to a deployment.

    Each query has a deadline. It raises `NotRunning` if there is no replica, `TimedOut` if none
    answers in time, `DeploymentEnded` if the deployment has ended. `unanswered` of a report says
    whose answer is missing.
    """

    def __init__(self, state: ClusterState | None, control: ControlClient | None = None) -> None:
        self.state = state
        """Of a deployment on this machine."""
        self._control = control
        """The owner's control socket; None if this process has joined the cluster."""

    def status(self) -> Report:
        """The deployment, its replicas as Serve and as each ingress sees them.

        `unanswered` lists the missing parts of a busy or broken deployment, and why;
        `unresponsive_ingresses` those that run without an answer.
        """
        controller, controller_error = self._try_query(CONTROLLER, "status")
        ingresses, ingress_error = self._try_query(INGRESS, "status")
        lost, lost_error = self._lost_nodes()
        queries = (controller_error, ingress_error, lost_error)
        errors = [error for error in queries if error is not None]
        if not controller.values and not ingresses.values:
            reasons = [error.reason for error in errors] + [lost_node_text(row) for row in lost]
            reason = "; ".join(dict.fromkeys(reasons))
            if any(isinstance(error, NotRunning) for error in errors):
                raise NotRunning(reason, errors[0].remedy)
            raise TimedOut(reason, "try again, or look at 'baton logs --follow'")
        report: dict[str, object] = self._endpoint()
        refusal = "" if self.state is None else connection_refusal(self.state.http_url)
        unanswered = [*filter(None, [refusal]), *(error.reason for error in errors)]
        unanswered += ingresses.failures
        report |= {"unanswered": unanswered} if unanswered else {}
        rollout = self._last_rollout()
        report |= {} if rollout is None else {"rollout": rollout}
        report |= {"lost_nodes": lost} if lost_error is None else {}
        for controller_answer in controller.values[:1]:
            report |= cast("dict[str, object]", controller_answer)
        rows = cast("list[Report]", ingresses.values)
        processes = cast("list[Report]", report.pop("process_losses", []))
        members = cast("list[Report]", report.pop("ingress_members", []))
        answered = {row.get("ingress") for row in rows}
        if ingresses.failures or ingress_error is not None:
            silent = [member for member in members if member["ingress"] not in answered]
            report["unresponsive_ingresses"] = silent
        return report | {
            "losses": merge_losses(rows, [*processes, *lost_replicas(lost, processes)]),
            "rejections": merge_rejections(rows),
            "ingresses": ingresses.values,
        }

    def _lost_nodes(self) -> tuple[list[Report], TimedOut | NotRunning | None]:
        """The nodes that the cluster lost, as rows; and why they are not known."""
        answers, error = self._try_query(CLUSTER, "lost_nodes")
        now_s = unix_time_s()
        return [
            lost_node_row(cast("Report", value), now_s=now_s) for value in answers.values
        ], error

    def _endpoint(self) -> dict[str, object]:
        if self.state is not None:
            found: dict[str, object] = {"endpoint": self.state.http_url}
            if self.state.cert_file is not None:
                found["certificate"] = self.state.cert_file
            return found
        try:
            data = load(ENDPOINT_KEY)
            note: dict[str, object] = {} if data is None else json.loads(data)
        except Exception:  # noqa: BLE001 - a boundary: a note is not worth the rest of the status
            return {}
        return {"endpoint": note["endpoint"]} if "endpoint" in note else {}

    def _try_query(
        self, deployment: str, method: str
    ) -> tuple[Answers, TimedOut | NotRunning | None]:
        try:
            return self.query(deployment, method), None
        except DeploymentEnded:
            raise
        except (TimedOut, NotRunning) as error:
            return Answers(values=[]), error

    def explain_route(self, request_id: str) -> Report:
        """How a request was placed, from every ingress that remembers it.

        Raises:
            UnknownRequest: none does.
            TimedOut: none does of those that answer, and some do not.
        """
        answers = self.query(INGRESS, "explain", request_id)
        reports = cast("list[list[Report]]", answers.values)
        if answers.failures and not any(reports):
            raise TimedOut("; ".join(answers.failures), "look at 'baton status', then try again")
        return {**route_report(request_id, reports), **_missing(answers)}

    def requests(self, count: int, *, order: str) -> Report:
        """Reports of the last requests of every ingress; `order` is a `RecordSelection`."""
        answers = self.query(INGRESS, "requests", count, order)
        reports = merge_request_reports(
            cast("list[list[Report]]", answers.values), count, RecordSelection(order)
        )
        return {"requests": reports, "ingresses": len(answers.values), **_missing(answers)}

    def links(self) -> Report:
        """The state of every pair of replicas between which KV blocks may move."""
        answers = self.query(INGRESS, "links")
        reports = cast("list[list[Report]]", answers.values)
        links = merge_link_reports(reports)
        return {"links": links, "ingresses": len(reports), **_missing(answers)}

    def explain_scale(self, ticks: int) -> Report:
        """The last ticks of the autoscaler, oldest first."""
        (answer, *_) = self.query(CONTROLLER, "explain_scale", ticks).values
        return cast("dict[str, object]", answer)

    def usage(self) -> Report:
        """The usage of each tenant, overhead and idle time."""
        (answer, *_) = self.query(CONTROLLER, "usage").values
        return cast("dict[str, object]", answer)

    def scale(self, pool: str, replicas: int | None, for_s: float | None = None) -> Report:
        """Have the controller set a pool's replicas; None: leave it to the autoscaler."""
        (answer, *_) = self.query(CONTROLLER, "scale", pool, replicas, for_s).values
        return cast("dict[str, object]", answer)

    def _last_rollout(self) -> Report | None:
        """The progress of the last rollout; None if there was none, or it is unknown."""
        try:
            data = (
                load(ROLLOUT_KEY) if self._control is None else self._control.load_note(ROLLOUT_KEY)
            )
            progress: dict[str, object] = {} if data is None else json.loads(data)
        except Exception:  # noqa: BLE001 - a boundary: a note is not worth the rest of the status
            return None
        if not progress:
            return None
        at_s = cast("float", progress.pop("at_s"))
        return {**progress, "age_s": round(max(0.0, unix_time_s() - at_s), 1)}

    def query(self, deployment: str, method: str, *arguments: object) -> Answers:
        """The answers of the replicas of a deployment; there is at least one."""
        if self.state is not None and not self.state.is_alive():
            # Ray would look for the cluster for a minute, and then end this process.
            raise DeploymentEnded(
                f"the deployment at {self.state.http_url} has ended",
                "start one with 'baton up -c FILE'",
            )
        if self._control is not None:
            return self._control.query(deployment, method, *arguments)
        return answer_query(deployment, method, arguments, timeout_of(method))


def connection_refusal(url: str) -> str:
    """Why no connection to an endpoint is accepted; empty where one is."""
    address = urlsplit(url)
    try:
        with socket.create_connection(
            (address.hostname or "", address.port or 0), timeout=_CONNECT_TIMEOUT_S
        ):
            return ""
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return f"endpoint {url}: {reason}; its proxy has ended, and Ray Serve starts another"


def _missing(answers: Answers) -> Report:
    """That some have not answered, as a part of a report; empty if all have."""
    return {"unanswered": answers.failures} if answers.failures else {}


@contextmanager
def connect_deployment(address: str | None) -> Iterator[AttachedCluster]:
    """Connect to a deployment: to its owner on this machine, else as `attach_deployment`."""
    state = find_local_state(address)
    control = None if state is None else ControlClient(Path(state.run_dir))
    if control is not None and control.is_reachable():
        yield AttachedCluster(state, control)
        return
    with attach_deployment(address) as deployment:
        yield deployment


@contextmanager
def attach_deployment(address: str | None) -> Iterator[AttachedCluster]:
    """Join the cluster of a deployment: the local one unless an address is given.

    Raises:
        NotRunning: none runs here.
        DeploymentEnded: it is being ended.
        AmbiguousDeployment: several run here, and no address is given.
        ClusterFailed: nothing answers there, or it refuses us.
    """
    state = find_local_state(address)
    if state is not None:
        ControlClient(Path(state.run_dir)).check_not_ending()
        attach(state.address, token_file=state.token_file)
    else:
        attach(remote_address(address))
    try:
        yield AttachedCluster(state)
    finally:
        detach()


def find_local_state(address: str | None) -> ClusterState | None:
    """The local deployment at `address` or `RAY_ADDRESS`, or the only one without an address.

    None if that address is another cluster's.

    Raises:
        NotRunning: none runs here, and none elsewhere is named.
        AmbiguousDeployment: several run here, and no address is given.
    """
    target = address or _ray_address()
    return local_state() if target is None else _match_local_state(target)


def remote_address(address: str | None) -> str:
    """The address of a cluster that is no local deployment's; see `find_local_state`."""
    target = address or _ray_address()
    assert target is not None, "without an address a deployment of this machine is meant"
    return target


def _ray_address() -> str | None:
    """`RAY_ADDRESS`, with the meaning that it has for Ray's own commands."""
    value = os.environ.get("RAY_ADDRESS", "")
    return None if value in {"", "local"} else value


def local_state(address: str | None = None) -> ClusterState:
    """This user's deployment on this machine; the one at `address` if there are several.

    Raises:
        NotRunning: there is none, or none at that address.
        AmbiguousDeployment: there are several, and no address is given.
    """
    states = running_clusters(state_folder())
    if not states:
        raise NotRunning(
            "no deployment of this user runs on this machine", "start one with 'baton up -c FILE'"
        )
    if address is None and len(states) == 1:
        return states[0]
    listing = "; ".join(f"{other.http_url} at {other.address}" for other in states)
    if address is None:
        raise AmbiguousDeployment(
            f"{len(states)} deployments of this user run on this machine: {listing}",
            "say which with --address HOST:PORT",
        )
    if (state := _match_local_state(address)) is None:
        raise NotRunning(
            f"no deployment of this user on this machine is at {address}: there is {listing}",
            "say which with --address HOST:PORT",
        )
    return state


def _match_local_state(address: str) -> ClusterState | None:
    for state in running_clusters(state_folder()):
        if address in {state.address, state.http_url, state.http_url.rpartition("/")[2]}:
            return state
    return None
