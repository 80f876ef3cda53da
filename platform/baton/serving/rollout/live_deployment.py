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
from baton.control.autoscaling.rollout import NO_COUNTS, RolloutCounts
from baton.domain.errors import ApplyRejected, ClusterFailed, NotRunning
from baton.domain.fleet import Role
from baton.domain.names.addresses import is_loopback
from baton.serving.application.app import build_app
from baton.serving.application.builds import (
    BuildRecord,
    Builds,
    decode_build_record,
    encode_build_record,
    with_current_code,
)
from baton.serving.operator.local_deployment import error_line
from baton.serving.ray import serve_control
from baton.serving.ray.context import get_gcs_address
from baton.serving.ray.packing import unpack
from baton.serving.ray.serve_control import CallResults
from baton.serving.rollout.lease import RolloutLease
from baton.serving.rollout.rollout import FleetStatus
from baton.serving.shared.names import APP, CONTROLLER, INGRESS
from baton.serving.store.config_store import (
    BUILD_RECORD_KEY,
    ROLLOUT_KEY,
    GenerationRecord,
    Generations,
    GenerationStatus,
    LiveConfig,
    load,
    save,
    unix_time_s,
)

_QUERY_TIMEOUT_S = 10.0
"""Answers take milliseconds; building a policy of the user's own may import a lot first."""
_ACTION_TIMEOUT_S = 10.0
_LOGGER = logging.getLogger(__name__)
_CONFIG_PARTICIPANTS = (INGRESS, CONTROLLER)
"""Who works by the configuration."""


@contextlib.contextmanager
def _wrap_ray_errors(failure: str) -> Iterator[None]:
    """Do what Ray may refuse or be too late for; `failure` says what that comes to.

    Raises:
        ClusterFailed: so it was.
    """
    from ray import exceptions
    from ray.serve.exceptions import RayServeException

    try:
        yield
    except (exceptions.RayError, RayServeException, TimeoutError, OSError) as error:
        why = f"{failure}: {type(error).__name__}: {error}".partition("\n")[0]
        raise ClusterFailed(why, "look at 'baton status', then try again") from error


@contextlib.contextmanager
def _best_effort(failure: str) -> Iterator[None]:
    """Do what nothing depends on: where Ray does not do it, it is said, and all else goes on."""
    try:
        with _wrap_ray_errors(failure):
            yield
    except ClusterFailed as error:
        _LOGGER.warning("%s", error.why)


class LiveDeployment:
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
    def exclusive(self) -> Iterator[None]:
        """Be the only one who changes what runs.

        Raises:
            ApplyRejected: somebody else is at it.
        """
        with _wrap_ray_errors("the cluster's store does not answer"):
            holder = self._lease.acquire()
        if holder:
            raise ApplyRejected(
                f"another command is changing it: {holder}",
                "nothing of yours has changed; 'baton status' shows how far they are; a command"
                " that was killed is forgotten after a minute",
            )
        try:
            yield
        finally:
            with _best_effort("the right to change what runs is kept for another minute"):
                self._lease.release()

    @_wrap_ray_errors("it cannot be told what holds")
    def current(self) -> LiveConfig:
        """What holds now: as the store has it, or else as the controller was started.

        Raises:
            NotRunning: there is no controller, or it does not answer.
        """
        answers = self._call_all(CONTROLLER, "config")
        for answer in answers.values:
            if isinstance(answer, LiveConfig):
                newest = self._generations.newest(answer.config)
                live = newest if newest.generation > answer.generation else answer
                self._config = live.config
                return live
        why = "; ".join(answers.failures) or "there is none"
        raise NotRunning(f"the controller does not answer: {why}", "look at 'baton status'")

    def prepare(self, base_generation: int, config: DeploymentConfig) -> Sequence[str]:
        """Why processes cannot take it, those that do not answer among them."""
        problems: list[str] = []
        for deployment in _CONFIG_PARTICIPANTS:
            answers = self._call_all(deployment, "prepare_config", base_generation, config)
            problems += answers.failures
            problems += [f"{deployment}: {why}" for why in answers.values if why]
            if not answers.values and not answers.failures:
                problems.append(f"{deployment}: there is none")
        return list(dict.fromkeys(problems))

    @_wrap_ray_errors("the next generation may not have been kept")
    def commit(self, live: LiveConfig, operation: str) -> bool:
        """Keep it as the next generation; False: somebody else's is.

        Raises:
            ApplyRejected: somebody else is changing what runs now.
        """
        self._lease.renew()
        if live.generation == 1 and self._config is not None:
            self._generations.add_first(self._config)
        return self._generations.add(live, operation=operation)

    @_wrap_ray_errors("the cluster's store does not answer")
    def find(self, generation: int) -> DeploymentConfig | None:
        """The configuration of a generation; None when it is not kept."""
        return self._generations.find(generation)

    @_wrap_ray_errors("the cluster's store does not answer")
    def history(self) -> Sequence[GenerationRecord]:
        """Every generation that is kept, oldest first."""
        return self._generations.history()

    def distribute(self, live: LiveConfig) -> Sequence[str]:
        """Have every process take it; what went wrong."""
        problems: list[str] = []
        for deployment in _CONFIG_PARTICIPANTS:
            answers = self._call_all(deployment, "commit_config", live)
            problems += answers.failures
            problems += [
                f"{deployment}: still at generation {generation}"
                for generation in answers.values
                if not isinstance(generation, int) or generation < live.generation
            ]
        return problems

    def problems(self) -> Sequence[str]:
        """What ails: one line for each ingress that cannot serve."""
        answers = self._call_all(INGRESS, "healthy")
        unhealthy_count = sum(answer is not True for answer in answers.values)
        unhealthy = (
            [f"{unhealthy_count} of {len(answers.values)} ingresses cannot serve"]
            if unhealthy_count
            else []
        )
        return [*answers.failures, *unhealthy]

    @_wrap_ray_errors("Ray Serve does not say how many replicas there are")
    def sizes(self) -> Mapping[str, int]:
        """How many replicas each pool is to have at present."""
        pools = self._config.pools if self._config is not None else ()
        states = self._runner.run(
            serve_control.deployment_states(self._app, pools, timeout_s=_QUERY_TIMEOUT_S)
        )
        return {name: state.target for name, state in states.items()}

    @_wrap_ray_errors("Ray Serve took no new size")
    def resize(self, pool: str, replicas: int) -> None:
        """Have exactly so many replicas of a pool, from now on."""
        self._runner.run(
            serve_control.scale_async(
                self._app, pool, replicas=replicas, timeout_s=_ACTION_TIMEOUT_S
            )
        )

    @_wrap_ray_errors("Ray does not say what is free")
    def replace_blockers(self, config: DeploymentConfig, pools: Sequence[str]) -> Sequence[str]:
        """Why replicas of these pools cannot be replaced one by one.

        Without room for one more, a replica goes before its successor comes. So a lone one would
        leave nobody, unless it only prefills, for decode replicas prefill, too; and the successor
        must fit where the other was.
        """
        import ray

        free: Mapping[str, float] = ray.available_resources()
        full_pools = [name for name in pools if not fits(config.pools[name], free=free)]
        self._surge = not full_pools
        return no_room_reasons(config, self._config, self.sizes(), full_pools)

    @_wrap_ray_errors("Ray does not say how many CPUs it counts")
    def growth_blockers(self, config: DeploymentConfig) -> Sequence[str]:
        """Why pools could not have as many replicas as they may; empty where other nodes may join.

        On a machine of its own, Ray counts as many CPUs as were asked for when it was started.
        """
        import ray

        if not is_loopback(get_gcs_address()):
            return []
        return cpu_shortfall(config, self._config, cpus=ray.cluster_resources().get("CPU", 0.0))

    @_wrap_ray_errors("the cluster's store does not answer")
    def build_record(self) -> BuildRecord:
        """What runs was built from what.

        Raises:
            NotRunning: nobody knows.
        """
        data = load(BUILD_RECORD_KEY)
        if data is None:
            raise NotRunning(
                "the cluster's store does not say what runs was built from",
                "the head of the Ray cluster has lost its store: start the deployment again",
            )
        return decode_build_record(data)

    @_wrap_ray_errors("Ray Serve took no order")
    def deploy_builds(self, builds: Builds) -> None:
        """Have everything built so, from now on, at its present size; returns at once.

        Serve begins within a tenth of a second and calls the application `DEPLOYING` at once.

        Raises:
            ClusterFailed: Serve did not take it.
            ApplyRejected: somebody else is changing what runs now.
        """
        from ray import serve

        self._lease.renew()
        config = builds[CONTROLLER].config
        sizes = {**self.sizes(), **self._ingress_size(config)}
        app = build_app(config, builds=builds, sizes=sizes, surge=self._surge)
        target = serve.RunTarget(
            app, name=self._app, route_prefix="/", external_scaler_enabled=True
        )
        # First: a command that dies in between leaves a note of what may be, not of what was.
        save(BUILD_RECORD_KEY, encode_build_record(self.build_record().with_builds(builds)))
        serve.run_many(
            [target],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def _ingress_size(self, config: DeploymentConfig) -> Mapping[str, int]:
        """How many ingresses there are to be at present, if that is a number that they may have."""
        states = self._runner.run(
            serve_control.deployment_states(self._app, (INGRESS,), timeout_s=_QUERY_TIMEOUT_S)
        )
        counts = config.server.replicas
        return {
            name: max(counts.min, min(counts.max, state.target)) for name, state in states.items()
        }

    def fleet_status(self, names: Sequence[str]) -> FleetStatus | None:
        """How far a rollout is, and how these deployments fare; None when nobody could say.

        Raises:
            ApplyRejected: somebody else is changing what runs now.
        """
        try:
            with _wrap_ray_errors(f"cannot look at {', '.join(names)}"):
                self._lease.renew()
                return self._fleet_status(names)
        except ClusterFailed as error:
            _LOGGER.debug("%s", error.why)
            return None

    def set_status(self, generation: int, status: GenerationStatus, why: str = "") -> None:
        """Write down what became of a generation; one that cannot be goes on as `under way`."""
        with _best_effort(f"'baton history' will not say that generation {generation} is {status}"):
            self._generations.set_status(generation, status, why)

    @_wrap_ray_errors("it is not kept that this version runs")
    def record_code_version(self) -> None:
        """Write down that all of it runs the code of this process."""
        save(BUILD_RECORD_KEY, encode_build_record(with_current_code(self.build_record())))

    def record_progress(self, progress: Mapping[str, object]) -> None:
        """Write down how far a rollout is, for whoever asks; it goes on all the same where not."""
        with _best_effort("'baton status' will not say how far it is"):
            save(ROLLOUT_KEY, json.dumps({**progress, "at_s": unix_time_s()}).encode())

    def _fleet_status(self, names: Sequence[str]) -> FleetStatus:
        from ray import serve

        app = serve.status().applications[self._app]
        states = {name: str(value.status.value) for name, value in app.deployments.items()}
        replicas = self._runner.run(
            serve_control.replicas_by_deployment(self._app, names, timeout_s=_QUERY_TIMEOUT_S)
        )
        failed = str(app.status.value) == "DEPLOY_FAILED"
        messages = [
            deployment.message for deployment in app.deployments.values() if deployment.message
        ]
        return FleetStatus(
            done=str(app.status.value) != "DEPLOYING"
            and all(states.get(name) == "HEALTHY" for name in names),
            failure=(error_line(messages) or "Ray Serve has given up") if failed else "",
            ready=_replica_ids({name: other.ready for name, other in replicas.items()}),
            starting=_replica_ids({name: other.starting for name, other in replicas.items()}),
            targets={name: other.target for name, other in replicas.items()},
            tallies=self._tallies(),
        )

    def _tallies(self) -> dict[str, RolloutCounts]:
        """By replica, what all ingresses have seen it do; whoever is silent says nothing."""
        totals: dict[str, RolloutCounts] = {}
        for answer in self._call_all(INGRESS, "outcomes").values:
            rows = cast("dict[str, list[int]]", unpack(answer))
            for replica_id, row in rows.items():
                totals[replica_id] = totals.get(replica_id, NO_COUNTS).add(RolloutCounts(*row))
        return totals

    def _call_all(self, deployment: str, method: str, *arguments: object) -> CallResults:
        return self._runner.run(
            serve_control.call_all(
                self._app, deployment, method, *arguments, timeout_s=_QUERY_TIMEOUT_S
            )
        )


def _replica_ids(by_pool: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Replicas as ingresses call them, given Serve's own ids of them."""
    return frozenset(f"{pool}-{id_}" for pool, ids in by_pool.items() for id_ in ids)


def no_room_reasons(
    new: DeploymentConfig,
    old: DeploymentConfig | None,
    sizes: Mapping[str, int],
    full_pools: Sequence[str],
) -> list[str]:
    """Why replicas of these pools, for which there is no room beside, cannot be replaced."""
    reasons = []
    for name in full_pools:
        pool = new.pools[name]
        old_pool = None if old is None else old.pools[name]
        if sizes.get(name) == 1 and pool.role is not Role.PREFILL:
            reasons.append(
                f"pool {name} has one replica, and the cluster no room for the one that replaces"
                " it; add a node, or scale it up first"
            )
        elif old_pool is None or not fits(pool, free=resource_requests(old_pool)):
            reasons.append(
                f"pool {name} asks for more than before, and the cluster has no room for it;"
                " add a node, or scale it down first"
            )
    return reasons


def cpu_shortfall(new: DeploymentConfig, old: DeploymentConfig | None, *, cpus: float) -> list[str]:
    """Why a cluster of so many CPUs would never start all replicas that pools may have now."""
    requested_cpus, old_cpus = _max_cpus(new), 0.0 if old is None else _max_cpus(old)
    if requested_cpus <= max(old_cpus, cpus):
        return []
    return [
        f"pools may come to {requested_cpus:g} CPUs, and Ray was started with {cpus:g}:"
        " replicas beyond that"
        " would never start; lower replicas.max or resources.cpus, or end the deployment with"
        " 'baton down' and start it again"
    ]


def _max_cpus(config: DeploymentConfig) -> float:
    return sum(pool.resources.cpus * pool.replicas.max for pool in config.pools.values())


def resource_requests(pool: PoolConfig) -> dict[str, float]:
    """What one replica takes, by Ray's names."""
    resources = pool.resources
    amounts = {
        "CPU": resources.cpus,
        "GPU": float(resources.gpus),
        "memory": float(resources.memory_bytes or 0),
    }
    return {name: amount for name, amount in amounts.items() if amount}


def fits(pool: PoolConfig, *, free: Mapping[str, float]) -> bool:
    """Whether one more replica could be had; by sums, which a single node may still lack."""
    return all(free.get(name, 0.0) >= amount for name, amount in resource_requests(pool).items())


@contextlib.contextmanager
def open_live_deployment() -> Iterator[LiveDeployment]:
    """The deployment of the cluster that this process is connected to."""
    import ray.serve  # noqa: F401 - importing it sets the level of its logger

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with asyncio.Runner() as runner:
        yield LiveDeployment(runner)
