"""A deployment that runs elsewhere, joined once and asked as often as wanted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from baton.domain.commands import RecordSelection
from baton.domain.errors import AmbiguousDeployment, DeploymentEnded, NotRunning, TimedOut
from baton.serving.cluster.cluster_state import ClusterState, running_clusters, state_folder
from baton.serving.cluster.local_cluster import attach, detach
from baton.serving.operator.control_socket import ControlClient, timeout_of
from baton.serving.operator.local_deployment import query_all
from baton.serving.shared.names import CONTROLLER, INGRESS
from baton.serving.shared.reports import merge_link_reports, merge_request_reports, route_report
from baton.serving.store.config_store import ENDPOINT_KEY, ROLLOUT_KEY, load, unix_time_s

Report = Mapping[str, object]


class AttachedCluster:
    """What can be asked of the deployment whose cluster this process is connected to.

    Each question has a deadline, and raises `NotRunning` when nobody answers, `TimedOut` when not
    everybody does in time, `DeploymentEnded` when there is nobody left to ask.
    """

    def __init__(self, state: ClusterState | None, control: ControlClient | None = None) -> None:
        self.state = state
        """How it is found, when it runs on this machine."""
        self._control = control
        """Who is asked in the cluster's place; None where this process has joined that."""

    def status(self) -> Report:
        """The deployment, its replicas as Serve and as each ingress sees them.

        Of a deployment that is too busy to answer as a whole, or of which a part is missing, what
        there is: under `unanswered` stands what is not, and why.

        Raises:
            TimedOut: nobody answered in time.
            NotRunning: nobody is there to answer.
            DeploymentEnded: nobody will be.
        """
        controller_answers, failures = self._try_query(CONTROLLER, "status")
        ingresses, ingress_failures = self._try_query(INGRESS, "status")
        failures += ingress_failures
        unanswered = [failure.why for failure in failures]
        if not controller_answers and not ingresses:
            why = "; ".join(dict.fromkeys(unanswered))
            if any(isinstance(failure, NotRunning) for failure in failures):
                raise NotRunning(why, failures[0].remedy)
            raise TimedOut(why, "try again, or look at 'baton logs --follow'")
        report: dict[str, object] = self._endpoint()
        report |= {"unanswered": unanswered} if unanswered else {}
        rollout = self._last_rollout()
        report |= {} if rollout is None else {"rollout": rollout}
        for controller_answer in controller_answers[:1]:
            report |= cast("dict[str, object]", controller_answer)
        return report | {"ingresses": ingresses}

    def _endpoint(self) -> dict[str, object]:
        if self.state is not None:
            return {"endpoint": self.state.http_url}
        try:
            data = load(ENDPOINT_KEY)
            note: dict[str, object] = {} if data is None else json.loads(data)
        except Exception:  # noqa: BLE001 - a boundary: a note is not worth the rest of the status
            return {}
        return {"endpoint": note["endpoint"]} if "endpoint" in note else {}

    def _try_query(
        self, deployment: str, method: str
    ) -> tuple[list[object], list[TimedOut | NotRunning]]:
        try:
            return self.query(deployment, method), []
        except DeploymentEnded:
            raise
        except (TimedOut, NotRunning) as error:
            return [], [error]

    def explain_route(self, request_id: str) -> Report:
        """How a request was placed, as every ingress that remembers it tells.

        Raises:
            UnknownRequest: none does.
        """
        answers = self.query(INGRESS, "explain", request_id)
        return route_report(request_id, cast("list[list[Report]]", answers))

    def requests(self, count: int, *, order: str) -> Report:
        """Stories of the last requests of every ingress; `order` is a `RecordSelection`."""
        answers = self.query(INGRESS, "requests", count, order)
        reports = merge_request_reports(
            cast("list[list[Report]]", answers), count, RecordSelection(order)
        )
        return {"requests": reports, "ingresses": len(answers)}

    def links(self) -> Report:
        """Every pair of replicas between which KV blocks may move, and what is known of it."""
        answers = cast("list[list[Report]]", self.query(INGRESS, "links"))
        return {"links": merge_link_reports(answers), "ingresses": len(answers)}

    def explain_scale(self, ticks: int) -> Report:
        """The last ticks of the autoscaler, oldest first."""
        (answer, *_) = self.query(CONTROLLER, "explain_scale", ticks)
        return cast("dict[str, object]", answer)

    def usage(self) -> Report:
        """What each tenant has used, and what nobody has."""
        (answer, *_) = self.query(CONTROLLER, "usage")
        return cast("dict[str, object]", answer)

    def scale(self, pool: str, replicas: int | None, for_s: float | None = None) -> Report:
        """Have the controller set a pool's replicas, or with None leave it to the autoscaler."""
        (answer, *_) = self.query(CONTROLLER, "scale", pool, replicas, for_s)
        return cast("dict[str, object]", answer)

    def _last_rollout(self) -> Report | None:
        """How far the last one is; None where there was none, or nobody knows."""
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

    def query(self, deployment: str, method: str, *arguments: object) -> list[object]:
        """The answers of every replica of a deployment; there is one at least."""
        if self.state is not None and not self.state.is_alive():
            # Ray would look for the cluster for a minute, and then end this process.
            raise DeploymentEnded(
                f"the deployment at {self.state.http_url} has ended",
                "start one with 'baton up -c FILE'",
            )
        if self._control is not None:
            return self._control.query(deployment, method, *arguments)
        return query_all(deployment, method, *arguments, timeout_s=timeout_of(method))


@contextmanager
def connect_deployment(address: str | None) -> Iterator[AttachedCluster]:
    """Ask a deployment, by the shortest way: the process that holds it, where it runs here.

    Raises:
        NotRunning: none runs here.
        AmbiguousDeployment: several run here, and no address is given.
        ClusterFailed: nothing answers there, or it refuses us.
    """
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
    """The deployment of this machine that is meant; None where one on another cluster is.

    That is where an address is given that is none of this machine's, or else `RAY_ADDRESS` is.

    Raises:
        NotRunning: none runs here, and none elsewhere is named.
        AmbiguousDeployment: several run here, and no address is given.
    """
    target = address or _ray_address()
    return local_state() if target is None else _match_local_state(target)


def remote_address(address: str | None) -> str:
    """The address of the cluster that is meant, where it is none of this machine's deployments."""
    target = address or _ray_address()
    assert target is not None, "without an address a deployment of this machine is meant"
    return target


def _ray_address() -> str | None:
    """What `RAY_ADDRESS` names, as for Ray's own commands."""
    value = os.environ.get("RAY_ADDRESS", "")
    return None if value in {"", "local"} else value


def local_state(address: str | None = None) -> ClusterState:
    """The deployment of this user on this machine; the one at `address` where there are several.

    Raises:
        NotRunning: there is none, or none at that address.
        AmbiguousDeployment: any of them may be meant, and what one is told may not be meant for
            another.
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
    """The deployment of this user on this machine whose Ray, or whose endpoint, is there."""
    for state in running_clusters(state_folder()):
        if address in {state.address, state.http_url, state.http_url.rpartition("/")[2]}:
            return state
    return None
