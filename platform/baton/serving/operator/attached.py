"""A deployment that runs elsewhere, joined once and asked as often as wanted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from baton.domain.commands import RecordOrder
from baton.domain.errors import DeploymentEnded, NotRunning, SeveralRunning, TimedOut
from baton.serving.cluster.cluster_state import ClusterState, running_clusters, state_folder
from baton.serving.cluster.local_cluster import attach, detach
from baton.serving.operator.control_socket import ControlClient, deadline_of
from baton.serving.operator.local_deployment import ask_all
from baton.serving.shared.names import CONTROLLER, INGRESS
from baton.serving.shared.reports import explained, merged_links, merged_stories
from baton.serving.store.config_store import ROLLOUT, WHERE, load, wall_s

Report = Mapping[str, object]


class Joined:
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
        told, failures = self._answers_of(CONTROLLER, "status")
        ingresses, more_failures = self._answers_of(INGRESS, "status")
        failures += more_failures
        missing = [one.why for one in failures]
        if not told and not ingresses:
            why = "; ".join(dict.fromkeys(missing))
            if any(isinstance(one, NotRunning) for one in failures):
                raise NotRunning(why, failures[0].remedy)
            raise TimedOut(why, "try again, or look at 'baton logs --follow'")
        found: dict[str, object] = self._endpoint()
        found |= {"unanswered": missing} if missing else {}
        rollout = self._last_rollout()
        found |= {} if rollout is None else {"rollout": rollout}
        for one in told[:1]:
            found |= cast("dict[str, object]", one)
        return found | {"ingresses": ingresses}

    def _endpoint(self) -> dict[str, object]:
        if self.state is not None:
            return {"endpoint": self.state.http_url}
        try:
            noted = load(WHERE)
            told: dict[str, object] = {} if noted is None else json.loads(noted)
        except Exception:  # noqa: BLE001 - a boundary: a note is not worth the rest of the status
            return {}
        return {"endpoint": told["endpoint"]} if "endpoint" in told else {}

    def _answers_of(
        self, deployment: str, method: str
    ) -> tuple[list[object], list[TimedOut | NotRunning]]:
        try:
            return self.ask(deployment, method), []
        except DeploymentEnded:
            raise
        except (TimedOut, NotRunning) as error:
            return [], [error]

    def explain_route(self, request_id: str) -> Report:
        """How a request was placed, as every ingress that remembers it tells.

        Raises:
            UnknownRequest: none does.
        """
        answers = self.ask(INGRESS, "explain", request_id)
        return explained(request_id, cast("list[list[Report]]", answers))

    def requests(self, count: int, *, order: str) -> Report:
        """Stories of the last requests of every ingress; `order` is a `RecordOrder`."""
        answers = self.ask(INGRESS, "requests", count, order)
        stories = merged_stories(cast("list[list[Report]]", answers), count, RecordOrder(order))
        return {"requests": stories, "ingresses": len(answers)}

    def links(self) -> Report:
        """Every pair of replicas between which KV blocks may move, and what is known of it."""
        answers = cast("list[list[Report]]", self.ask(INGRESS, "links"))
        return {"links": merged_links(answers), "ingresses": len(answers)}

    def explain_scale(self, ticks: int) -> Report:
        """The last ticks of the autoscaler, oldest first."""
        (told, *_) = self.ask(CONTROLLER, "explain_scale", ticks)
        return cast("dict[str, object]", told)

    def usage(self) -> Report:
        """What each tenant has used, and what nobody has."""
        (told, *_) = self.ask(CONTROLLER, "usage")
        return cast("dict[str, object]", told)

    def scale(self, pool: str, replicas: int | None, for_s: float | None = None) -> Report:
        """Have the controller set a pool's replicas, or with None leave it to the autoscaler."""
        (told, *_) = self.ask(CONTROLLER, "scale", pool, replicas, for_s)
        return cast("dict[str, object]", told)

    def _last_rollout(self) -> Report | None:
        """How far the last one is; None where there was none, or nobody knows."""
        try:
            data = load(ROLLOUT) if self._control is None else self._control.note(ROLLOUT)
            told: dict[str, object] = {} if data is None else json.loads(data)
        except Exception:  # noqa: BLE001 - a boundary: a note is not worth the rest of the status
            return None
        if not told:
            return None
        at_s = cast("float", told.pop("at_s"))
        return {**told, "age_s": round(max(0.0, wall_s() - at_s), 1)}

    def ask(self, deployment: str, method: str, *arguments: object) -> list[object]:
        """The answers of every replica of a deployment; there is one at least."""
        if self.state is not None and not self.state.is_alive():
            # Ray would look for the cluster for a minute, and then end this process.
            raise DeploymentEnded(
                f"the deployment at {self.state.http_url} has ended",
                "start one with 'baton up -c FILE'",
            )
        if self._control is not None:
            return self._control.ask(deployment, method, *arguments)
        return ask_all(deployment, method, *arguments, timeout_s=deadline_of(method))


@contextmanager
def reach(address: str | None) -> Iterator[Joined]:
    """Ask a deployment, by the shortest way: the process that holds it, where it runs here.

    Raises:
        NotRunning: none runs here.
        SeveralRunning: several run here, and no address is given.
        ClusterFailed: nothing answers there, or it refuses us.
    """
    state = state_of(address)
    control = None if state is None else ControlClient(Path(state.run_dir))
    if control is not None and control.is_there():
        yield Joined(state, control)
        return
    with join(address) as deployment:
        yield deployment


@contextmanager
def join(address: str | None) -> Iterator[Joined]:
    """Join the cluster of a deployment: the local one unless an address is given.

    Raises:
        NotRunning: none runs here.
        DeploymentEnded: it is being ended.
        SeveralRunning: several run here, and no address is given.
        ClusterFailed: nothing answers there, or it refuses us.
    """
    state = state_of(address)
    if state is not None:
        ControlClient(Path(state.run_dir)).check()
        attach(state.address, token_file=state.token_file)
    else:
        attach(meant(address))
    try:
        yield Joined(state)
    finally:
        detach()


def state_of(address: str | None) -> ClusterState | None:
    """The deployment of this machine that is meant; None where one on another cluster is.

    That is where an address is given that is none of this machine's, or else `RAY_ADDRESS` is.

    Raises:
        NotRunning: none runs here, and none elsewhere is named.
        SeveralRunning: several run here, and no address is given.
    """
    named = address or _named()
    return local_state() if named is None else _here(named)


def meant(address: str | None) -> str:
    """The address of the cluster that is meant, where it is none of this machine's deployments."""
    named = address or _named()
    assert named is not None, "without an address a deployment of this machine is meant"
    return named


def _named() -> str | None:
    """What `RAY_ADDRESS` names, as for Ray's own commands."""
    named = os.environ.get("RAY_ADDRESS", "")
    return None if named in {"", "local"} else named


def local_state(address: str | None = None) -> ClusterState:
    """The deployment of this user on this machine; the one at `address` where there are several.

    Raises:
        NotRunning: there is none, or none at that address.
        SeveralRunning: any of them may be meant, and what one is told may not be meant for another.
    """
    states = running_clusters(state_folder())
    if not states:
        raise NotRunning(
            "no deployment of this user runs on this machine", "start one with 'baton up -c FILE'"
        )
    if address is None and len(states) == 1:
        return states[0]
    listed = "; ".join(f"{one.http_url} at {one.address}" for one in states)
    if address is None:
        raise SeveralRunning(
            f"{len(states)} deployments of this user run on this machine: {listed}",
            "say which with --address HOST:PORT",
        )
    if (found := _here(address)) is None:
        raise NotRunning(
            f"no deployment of this user on this machine is at {address}: there is {listed}",
            "say which with --address HOST:PORT",
        )
    return found


def _here(address: str) -> ClusterState | None:
    """The deployment of this user on this machine whose Ray, or whose endpoint, is there."""
    for state in running_clusters(state_folder()):
        if address in {state.address, state.http_url, state.http_url.rpartition("/")[2]}:
            return state
    return None
