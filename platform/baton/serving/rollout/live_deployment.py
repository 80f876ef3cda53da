"""The deployment on the Ray cluster that this process is connected to, as applying sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from baton.config.schema.deployment import DeploymentConfig, PoolConfig
from baton.control.autoscaling.rollout import NOTHING, Tally
from baton.domain.errors import ApplyRefused, ClusterFailed, NotRunning
from baton.domain.fleet import Role
from baton.domain.names.addresses import is_loopback
from baton.serving.application.app import build_app
from baton.serving.application.builds import Builds, Built, decoded, encoded, of_this_code
from baton.serving.operator.local_deployment import telling_line
from baton.serving.ray import serve_control
from baton.serving.ray.context import control_store
from baton.serving.ray.packing import unpacked
from baton.serving.ray.serve_control import Answers
from baton.serving.rollout.lease import RolloutLease
from baton.serving.rollout.rollout import Sight
from baton.serving.shared.names import APP, CONTROLLER, INGRESS
from baton.serving.store.config_store import (
    BUILT,
    ROLLOUT,
    Fate,
    Generations,
    Kept,
    LiveConfig,
    load,
    save,
    wall_s,
)

_ASK_S = 10.0
"""Answers take milliseconds; building a policy of the user's own may import a lot first."""
_ACT_S = 10.0
_LOGGER = logging.getLogger(__name__)
_TOLD = (INGRESS, CONTROLLER)
"""Who works by the configuration."""


@contextlib.contextmanager
def _asking(what: str) -> Iterator[None]:
    """Do what Ray may refuse, be too late for or not be there for; `what` says what that comes to.

    Raises:
        ClusterFailed: so it was.
    """
    from ray import exceptions
    from ray.serve.exceptions import RayServeException

    try:
        yield
    except (exceptions.RayError, RayServeException, TimeoutError, OSError) as error:
        why = f"{what}: {type(error).__name__}: {error}".partition("\n")[0]
        raise ClusterFailed(why, "look at 'baton status', then try again") from error


@contextlib.contextmanager
def _if_possible(what: str) -> Iterator[None]:
    """Do what nothing depends on: where Ray does not do it, it is said, and all else goes on."""
    try:
        with _asking(what):
            yield
    except ClusterFailed as error:
        _LOGGER.warning("%s", error.why)


class ServeRunning:
    """A `Running` on Ray Serve; whatever Ray raises is a `ClusterFailed` to whoever asks."""

    def __init__(self, runner: asyncio.Runner, app: str = APP) -> None:
        self._runner = runner
        self._app = app
        self._generations = Generations()
        self._config: DeploymentConfig | None = None
        self._surge = True
        """Whether there is room for a replica beside the one that it replaces."""
        self._lease = RolloutLease(f"{socket.gethostname()}, process {os.getpid()}")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only one who changes what runs.

        Raises:
            ApplyRefused: somebody else is at it.
        """
        with _asking("the cluster's store does not answer"):
            who = self._lease.take()
        if who:
            raise ApplyRefused(
                f"somebody else is changing it: {who}",
                "nothing of yours has changed; 'baton status' shows how far they are; a command"
                " that was killed is forgotten after a minute",
            )
        try:
            yield
        finally:
            with _if_possible("the right to change what runs is kept for another minute"):
                self._lease.drop()

    @_asking("it cannot be told what holds")
    def current(self) -> LiveConfig:
        """What holds now: as the store has it, or else as the controller was started.

        Raises:
            NotRunning: there is no controller, or it does not answer.
        """
        answers = self._ask(CONTROLLER, "config")
        for answer in answers.given:
            if isinstance(answer, LiveConfig):
                newest = self._generations.newest(answer.config)
                live = newest if newest.generation > answer.generation else answer
                self._config = live.config
                return live
        why = "; ".join(answers.missing) or "there is none"
        raise NotRunning(f"the controller does not answer: {why}", "look at 'baton status'")

    def prepare(self, on_top_of: int, config: DeploymentConfig) -> Sequence[str]:
        """Why processes cannot take it, those that do not answer among them."""
        wrong: list[str] = []
        for deployment in _TOLD:
            answers = self._ask(deployment, "prepare_config", on_top_of, config)
            wrong += answers.missing
            wrong += [f"{deployment}: {why}" for why in answers.given if why]
            if not answers.given and not answers.missing:
                wrong.append(f"{deployment}: there is none")
        return list(dict.fromkeys(wrong))

    @_asking("the next generation may not have been kept")
    def commit(self, live: LiveConfig, by: str) -> bool:
        """Keep it as the next generation; False: somebody else's is.

        Raises:
            ApplyRefused: somebody else is changing what runs now.
        """
        self._lease.renew()
        if live.generation == 1 and self._config is not None:
            self._generations.add_first(self._config)
        return self._generations.add(live, by=by)

    @_asking("the cluster's store does not answer")
    def find(self, generation: int) -> DeploymentConfig | None:
        """The configuration of a generation; None when it is not kept."""
        return self._generations.find(generation)

    @_asking("the cluster's store does not answer")
    def history(self) -> Sequence[Kept]:
        """Every generation that is kept, oldest first."""
        return self._generations.history()

    def tell(self, live: LiveConfig) -> Sequence[str]:
        """Have every process take it; what went wrong."""
        wrong: list[str] = []
        for deployment in _TOLD:
            answers = self._ask(deployment, "take_config", live)
            wrong += answers.missing
            wrong += [
                f"{deployment}: still at generation {got}"
                for got in answers.given
                if not isinstance(got, int) or got < live.generation
            ]
        return wrong

    def problems(self) -> Sequence[str]:
        """What ails: one line for each ingress that cannot serve."""
        answers = self._ask(INGRESS, "healthy")
        ailing = sum(answer is not True for answer in answers.given)
        unwell = [f"{ailing} of {len(answers.given)} ingresses cannot serve"] if ailing else []
        return [*answers.missing, *unwell]

    @_asking("Ray Serve does not say how many replicas there are")
    def sizes(self) -> Mapping[str, int]:
        """How many replicas each pool is to have at present."""
        pools = self._config.pools if self._config is not None else ()
        states = self._runner.run(
            serve_control.deployment_states(self._app, pools, timeout_s=_ASK_S)
        )
        return {name: state.target for name, state in states.items()}

    @_asking("Ray Serve took no new size")
    def resize(self, pool: str, replicas: int) -> None:
        """Have exactly so many replicas of a pool, from now on."""
        self._runner.run(
            serve_control.scale_soon(self._app, pool, replicas=replicas, timeout_s=_ACT_S)
        )

    @_asking("Ray does not say what is free")
    def cannot_replace(self, config: DeploymentConfig, pools: Sequence[str]) -> Sequence[str]:
        """Why replicas of these pools cannot be replaced one by one.

        Without room for one more, a replica goes before its successor comes. So a lone one would
        leave nobody, unless it only prefills, for decode replicas prefill, too; and the successor
        must fit where the other was.
        """
        import ray

        free: Mapping[str, float] = ray.available_resources()
        tight = [name for name in pools if not fits(config.pools[name], free=free)]
        self._surge = not tight
        return cramped(config, self._config, self.sizes(), tight)

    @_asking("Ray does not say how many CPUs it counts")
    def cannot_grow(self, config: DeploymentConfig) -> Sequence[str]:
        """Why pools could not have as many replicas as they may; empty where other nodes may join.

        On a machine of its own, Ray counts as many CPUs as were asked for when it was started.
        """
        import ray

        if not is_loopback(control_store()):
            return []
        return outgrown(config, self._config, cpus=ray.cluster_resources().get("CPU", 0.0))

    @_asking("the cluster's store does not answer")
    def built(self) -> Built:
        """What runs was built from what.

        Raises:
            NotRunning: nobody knows.
        """
        data = load(BUILT)
        if data is None:
            raise NotRunning(
                "the cluster's store does not say what runs was built from",
                "the head of the Ray cluster has lost its store: start the deployment again",
            )
        return decoded(data)

    @_asking("Ray Serve took no order")
    def order(self, builds: Builds) -> None:
        """Have everything built so, from now on, at its present size; returns at once.

        Serve begins within a tenth of a second and calls the application `DEPLOYING` at once.

        Raises:
            ClusterFailed: Serve did not take it.
            ApplyRefused: somebody else is changing what runs now.
        """
        from ray import serve

        self._lease.renew()
        config = builds[CONTROLLER].config
        sizes = {**self.sizes(), **self._doors(config)}
        app = build_app(config, builds=builds, sizes=sizes, surge=self._surge)
        target = serve.RunTarget(
            app, name=self._app, route_prefix="/", external_scaler_enabled=True
        )
        # First: a command that dies in between leaves a note of what may be, not of what was.
        save(BUILT, encoded(self.built().after(builds)))
        serve.run_many(
            [target],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def _doors(self, config: DeploymentConfig) -> Mapping[str, int]:
        """How many ingresses there are to be at present, if that is a number that they may have."""
        states = self._runner.run(
            serve_control.deployment_states(self._app, (INGRESS,), timeout_s=_ASK_S)
        )
        counts = config.server.replicas
        return {
            name: max(counts.min, min(counts.max, state.target)) for name, state in states.items()
        }

    def look(self, names: Sequence[str]) -> Sight | None:
        """How far a rollout is, and how these deployments fare; None when nobody could say.

        Raises:
            ApplyRefused: somebody else is changing what runs now.
        """
        try:
            with _asking(f"cannot look at {', '.join(names)}"):
                self._lease.renew()
                return self._look(names)
        except ClusterFailed as error:
            _LOGGER.debug("%s", error.why)
            return None

    def settle(self, generation: int, fate: Fate, why: str = "") -> None:
        """Write down what became of a generation; one that cannot be goes on as `under way`."""
        with _if_possible(f"'baton history' will not say that generation {generation} is {fate}"):
            self._generations.settle(generation, fate, why)

    @_asking("it is not kept that this version runs")
    def sign(self) -> None:
        """Write down that all of it runs the code of this process."""
        save(BUILT, encoded(of_this_code(self.built())))

    def note(self, told: Mapping[str, object]) -> None:
        """Write down how far a rollout is, for whoever asks; it goes on all the same where not."""
        with _if_possible("'baton status' will not say how far it is"):
            save(ROLLOUT, json.dumps({**told, "at_s": wall_s()}).encode())

    def _look(self, names: Sequence[str]) -> Sight:
        from ray import serve

        app = serve.status().applications[self._app]
        states = {name: str(one.status.value) for name, one in app.deployments.items()}
        found = self._runner.run(serve_control.replicas_present(self._app, names, timeout_s=_ASK_S))
        failed = str(app.status.value) == "DEPLOY_FAILED"
        said = [one.message for one in app.deployments.values() if one.message]
        return Sight(
            done=str(app.status.value) != "DEPLOYING"
            and all(states.get(name) == "HEALTHY" for name in names),
            failed=(telling_line(said) or "Ray Serve has given up") if failed else "",
            ready=_ids({name: one.ready for name, one in found.items()}),
            starting=_ids({name: one.starting for name, one in found.items()}),
            targets={name: one.target for name, one in found.items()},
            tallies=self._tallies(),
        )

    def _tallies(self) -> dict[str, Tally]:
        """By replica, what all ingresses have seen it do; whoever is silent says nothing."""
        totals: dict[str, Tally] = {}
        for answer in self._ask(INGRESS, "outcomes").given:
            told = cast("dict[str, list[int]]", unpacked(answer))
            for replica_id, row in told.items():
                totals[replica_id] = totals.get(replica_id, NOTHING).plus(Tally(*row))
        return totals

    def _ask(self, deployment: str, method: str, *arguments: object) -> Answers:
        return self._runner.run(
            serve_control.call_all(self._app, deployment, method, *arguments, timeout_s=_ASK_S)
        )


def _ids(by_pool: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Replicas as ingresses call them, given Serve's own ids of them."""
    return frozenset(f"{pool}-{one}" for pool, ids in by_pool.items() for one in ids)


def cramped(
    new: DeploymentConfig,
    old: DeploymentConfig | None,
    sizes: Mapping[str, int],
    tight: Sequence[str],
) -> list[str]:
    """Why replicas of these pools, for which there is no room beside, cannot be replaced."""
    wrong = []
    for name in tight:
        pool = new.pools[name]
        before = None if old is None else old.pools[name]
        if sizes.get(name) == 1 and pool.role is not Role.PREFILL:
            wrong.append(
                f"pool {name} has one replica, and the cluster no room for the one that replaces"
                " it; add a node, or scale it up first"
            )
        elif before is None or not fits(pool, free=wants(before)):
            wrong.append(
                f"pool {name} asks for more than before, and the cluster has no room for it;"
                " add a node, or scale it down first"
            )
    return wrong


def outgrown(new: DeploymentConfig, old: DeploymentConfig | None, *, cpus: float) -> list[str]:
    """Why a cluster of so many CPUs would never start all replicas that pools may have now."""
    asked, before = _all_cpus(new), 0.0 if old is None else _all_cpus(old)
    if asked <= max(before, cpus):
        return []
    return [
        f"pools may come to {asked:g} CPUs, and Ray was started with {cpus:g}: replicas beyond that"
        " would never start; lower replicas.max or resources.cpus, or end the deployment with"
        " 'baton down' and start it again"
    ]


def _all_cpus(config: DeploymentConfig) -> float:
    return sum(pool.resources.cpus * pool.replicas.max for pool in config.pools.values())


def wants(pool: PoolConfig) -> dict[str, float]:
    """What one replica takes, by Ray's names."""
    resources = pool.resources
    taken = {
        "CPU": resources.cpus,
        "GPU": float(resources.gpus),
        "memory": float(resources.memory_bytes or 0),
    }
    return {name: amount for name, amount in taken.items() if amount}


def fits(pool: PoolConfig, *, free: Mapping[str, float]) -> bool:
    """Whether one more replica could be had; by sums, which a single node may still lack."""
    return all(free.get(name, 0.0) >= amount for name, amount in wants(pool).items())


@contextlib.contextmanager
def running_deployment() -> Iterator[ServeRunning]:
    """The deployment of the cluster that this process is connected to."""
    import ray.serve  # noqa: F401 - importing it sets the level of its logger

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with asyncio.Runner() as runner:
        yield ServeRunning(runner)
