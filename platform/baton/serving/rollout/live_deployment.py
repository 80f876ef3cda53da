"""The deployment on the Ray cluster that this process is connected to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from baton.config.schema.deployment import DeploymentConfig, PoolConfig
from baton.control.autoscaling.rollout import NO_COUNTS, RolloutCounts
from baton.domain.errors import ApplyRejected, ClusterFailed, NotRunning
from baton.domain.fleet import Role
from baton.domain.names.addresses import is_loopback
from baton.domain.names.words import count_text
from baton.serving.application.app import build_app
from baton.serving.application.builds import (
    BuildRecord,
    Builds,
    decode_build_record,
    encode_build_record,
    with_current_code,
)
from baton.serving.ray import serve_control
from baton.serving.ray.context import get_gcs_address
from baton.serving.ray.driver import hide_serve_messages
from baton.serving.ray.packing import unpack
from baton.serving.ray.serve_control import CallResults, failure_reason
from baton.serving.replica.start_reports import StartWatch
from baton.serving.rollout.rollout import FleetStatus
from baton.serving.shared.names import APP, CONTROLLER, INGRESS
from baton.serving.store.config_store import (
    BUILD_RECORD_KEY,
    ROLLOUT_KEY,
    GenerationRecord,
    Generations,
    GenerationStatus,
    HeadStore,
    LiveConfig,
    Store,
    load,
    save,
    unix_time_s,
)

_QUERY_TIMEOUT_S = 10.0
"""Answers take milliseconds; a custom policy may import for seconds."""
_ACTION_TIMEOUT_S = 10.0
_LOGGER = logging.getLogger(__name__)
_CONFIG_PARTICIPANTS = (INGRESS, CONTROLLER)
_LEASE_KEY = "lease/rollout"
_LEASE_S = 60.0
_LEASE_RENEW_S = 5.0


@contextlib.contextmanager
def _wrap_ray_errors(failure: str) -> Iterator[None]:
    """Convert Ray's errors; `failure` says what has failed.

    Raises:
        ClusterFailed: Ray raised an error or timed out.
    """
    from ray import exceptions
    from ray.serve.exceptions import RayServeException

    try:
        yield
    except (exceptions.RayError, RayServeException, TimeoutError, OSError) as error:
        reason = f"{failure}: {type(error).__name__}: {error}".partition("\n")[0]
        raise ClusterFailed(reason, "look at 'baton status', then try again") from error


@contextlib.contextmanager
def _best_effort(failure: str) -> Iterator[None]:
    try:
        with _wrap_ray_errors(failure):
            yield
    except ClusterFailed as error:
        _LOGGER.warning("%s", error.reason)


class LiveDeployment:
    """An `ApplyTarget` on Ray Serve; raises `ClusterFailed` for Ray's errors."""

    def __init__(self, runner: asyncio.Runner, app: str = APP) -> None:
        self._runner = runner
        self._app = app
        self._generations = Generations()
        self._config: DeploymentConfig | None = None
        self._surge = True
        """Whether the cluster has room for one more replica."""
        self._start_watch = StartWatch()
        self._lease = RolloutLease(f"{socket.gethostname()}, process {os.getpid()}")

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lease during a change.

        Raises:
            ApplyRejected: another command holds it.
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

    @_wrap_ray_errors("the current configuration is unknown")
    def current(self) -> LiveConfig:
        """See `ApplyTarget`; without a stored generation it is the controller's.

        Raises:
            NotRunning: no controller answers.
        """
        answers = self._call_all(CONTROLLER, "config")
        for answer in answers.values:
            if isinstance(answer, LiveConfig):
                newest = self._generations.newest(answer.config)
                live = newest if newest.generation > answer.generation else answer
                self._config = live.config
                return live
        reason = "; ".join(answers.failures) or "there is none"
        raise NotRunning(f"the controller does not answer: {reason}", "look at 'baton status'")

    def prepare(self, base_generation: int, config: DeploymentConfig) -> Sequence[str]:
        """See `ApplyTarget`."""
        problems: list[str] = []
        for deployment in _CONFIG_PARTICIPANTS:
            answers = self._call_all(deployment, "prepare_config", base_generation, config)
            problems += answers.failures
            problems += [f"{deployment}: {reason}" for reason in answers.values if reason]
            if not answers.values and not answers.failures:
                problems.append(f"{deployment}: there is none")
        return list(dict.fromkeys(problems))

    @_wrap_ray_errors("the next generation may not have been kept")
    def commit(self, live: LiveConfig, operation: str) -> bool:
        """See `ApplyTarget`."""
        self._lease.renew()
        if live.generation == 1 and self._config is not None:
            self._generations.add_first(self._config)
        return self._generations.add(live, operation=operation)

    @_wrap_ray_errors("the cluster's store does not answer")
    def find(self, generation: int) -> DeploymentConfig | None:
        """See `ApplyTarget`."""
        return self._generations.find(generation)

    @_wrap_ray_errors("the cluster's store does not answer")
    def history(self) -> Sequence[GenerationRecord]:
        """See `ApplyTarget`."""
        return self._generations.history()

    def distribute(self, live: LiveConfig) -> Sequence[str]:
        """See `ApplyTarget`."""
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
        """See `ApplyTarget`."""
        answers = self._call_all(INGRESS, "healthy")
        unhealthy_count = sum(answer is not True for answer in answers.values)
        unhealthy = (
            [
                f"{unhealthy_count} of {count_text(len(answers.values), 'ingress', 'ingresses')}"
                " cannot serve"
            ]
            if unhealthy_count
            else []
        )
        return [*answers.failures, *unhealthy]

    @_wrap_ray_errors("Ray Serve does not say how many replicas there are")
    def sizes(self) -> Mapping[str, int]:
        """See `ApplyTarget`."""
        pools = self._config.pools if self._config is not None else ()
        states = self._runner.run(
            serve_control.deployment_states(self._app, pools, timeout_s=_QUERY_TIMEOUT_S)
        )
        return {name: state.target for name, state in states.items()}

    @_wrap_ray_errors("Ray Serve took no new size")
    def resize(self, pool: str, replicas: int) -> None:
        """See `ApplyTarget`."""
        self._runner.run(
            serve_control.scale(self._app, pool, replicas=replicas, timeout_s=_ACTION_TIMEOUT_S)
        )

    @_wrap_ray_errors("Ray does not say what is free")
    def replace_blockers(self, config: DeploymentConfig, pools: Sequence[str]) -> Sequence[str]:
        """Why replicas of these pools cannot be replaced one by one.

        Without room for one more, a replica stops before its successor starts. A single replica
        would leave none, except in a prefill pool, because decode replicas can prefill. The
        successor must also fit into the freed resources.
        """
        import ray

        free: Mapping[str, float] = ray.available_resources()
        full_pools = [name for name in pools if not fits(config.pools[name], free=free)]
        self._surge = not full_pools
        return no_room_reasons(config, self._config, self.sizes(), full_pools)

    @_wrap_ray_errors("Ray does not say how many CPUs it counts")
    def growth_blockers(self, config: DeploymentConfig) -> Sequence[str]:
        """Why the maximum of replicas would not fit; empty if other nodes may join.

        On a cluster of one machine Ray has the CPUs that it was started with.
        """
        import ray

        if not is_loopback(get_gcs_address()):
            return []
        return cpu_shortfall(config, self._config, cpus=ray.cluster_resources().get("CPU", 0.0))

    @_wrap_ray_errors("the cluster's store does not answer")
    def build_record(self) -> BuildRecord:
        """See `ApplyTarget`; raises `NotRunning` if the store has no record."""
        data = load(BUILD_RECORD_KEY)
        if data is None:
            raise NotRunning(
                "the cluster's store does not say what runs was built from",
                "the head of the Ray cluster has lost its store: start the deployment again",
            )
        return decode_build_record(data)

    @_wrap_ray_errors("Ray Serve took no order")
    def deploy_builds(self, builds: Builds) -> None:
        """See `RolloutTarget`; keeps the current sizes.

        Serve starts within 0.1 s; the application is `DEPLOYING` at once.
        """
        from ray import serve

        self._lease.renew()
        config = builds[CONTROLLER].config
        sizes = {**self.sizes(), **self._ingress_size(config)}
        app = build_app(config, builds=builds, sizes=sizes, surge=self._surge)
        target = serve.RunTarget(
            app, name=self._app, route_prefix="/", external_scaler_enabled=True
        )
        # First: if this command dies in between, the record has the ordered builds.
        save(BUILD_RECORD_KEY, encode_build_record(self.build_record().with_builds(builds)))
        serve.run_many(
            [target],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        empty = [name for name in config.pools if not sizes.get(name, 1)]
        serve_control.stop_replicas(self._app, empty, timeout_s=_QUERY_TIMEOUT_S)

    def _ingress_size(self, config: DeploymentConfig) -> Mapping[str, int]:
        states = self._runner.run(
            serve_control.deployment_states(self._app, (INGRESS,), timeout_s=_QUERY_TIMEOUT_S)
        )
        counts = config.server.replicas
        return {
            name: max(counts.min, min(counts.max, state.target)) for name, state in states.items()
        }

    def fleet_status(self, names: Sequence[str]) -> FleetStatus | None:
        """See `RolloutTarget`."""
        try:
            with _wrap_ray_errors(f"cannot look at {', '.join(names)}"):
                self._lease.renew()
                return self._fleet_status(names)
        except ClusterFailed as error:
            _LOGGER.debug("%s", error.reason)
            return None

    def set_status(self, generation: int, status: GenerationStatus, reason: str = "") -> None:
        """Store a generation's status; after a failure it stays `under way`."""
        with _best_effort(f"'baton history' will not say that generation {generation} is {status}"):
            self._generations.set_status(generation, status, reason)

    @_wrap_ray_errors("it is not kept that this version runs")
    def record_code_version(self) -> None:
        """See `ApplyTarget`."""
        save(BUILD_RECORD_KEY, encode_build_record(with_current_code(self.build_record())))

    def record_progress(self, progress: Mapping[str, object]) -> None:
        """See `RolloutTarget`."""
        with _best_effort("'baton status' will not say how far it is"):
            save(ROLLOUT_KEY, json.dumps({**progress, "at_s": unix_time_s()}).encode())

    def _fleet_status(self, names: Sequence[str]) -> FleetStatus:
        from ray import serve

        app = serve.status().applications[self._app]
        states = {name: str(value.status.value) for name, value in app.deployments.items()}
        replicas = self._runner.run(
            serve_control.replicas_by_deployment(self._app, names, timeout_s=_QUERY_TIMEOUT_S)
        )
        failed = app.status.value == "DEPLOY_FAILED"
        return FleetStatus(
            done=str(app.status.value) != "DEPLOYING"
            and all(states.get(name) == "HEALTHY" for name in names),
            failure=failure_reason(app) if failed else "",
            ready=_replica_ids({name: pool.ready for name, pool in replicas.items()}),
            starting=_replica_ids({name: pool.starting for name, pool in replicas.items()}),
            targets={name: pool.target for name, pool in replicas.items()},
            tallies=self._tallies(),
            phases=self._describe_phases(replicas),
        )

    def _describe_phases(self, replicas: Mapping[str, serve_control.DeploymentReplicas]) -> str:
        """The phases of starting replicas, with seconds."""
        now_s = time.monotonic()
        self._start_watch.poll(now_s)
        starting = {name: len(pool.starting) for name, pool in replicas.items() if pool.starting}
        return self._start_watch.describe(starting, now_s)

    def _tallies(self) -> dict[str, RolloutCounts]:
        """By replica, the sum over all ingresses that answer."""
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
    """Replica ids as ingresses use them, from Serve's ids."""
    return frozenset(f"{pool}-{id_}" for pool, ids in by_pool.items() for id_ in ids)


def no_room_reasons(
    new: DeploymentConfig,
    old: DeploymentConfig | None,
    sizes: Mapping[str, int],
    full_pools: Sequence[str],
) -> list[str]:
    """Why replicas of these pools, which have no room for one more, cannot be replaced."""
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
    """Why a cluster with this number of CPUs could not start the maximum of replicas."""
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
    """Resources of one replica, by Ray's names."""
    resources = pool.resources
    amounts = {
        "CPU": resources.cpus,
        "GPU": float(resources.gpus),
        "memory": float(resources.memory_bytes or 0),
    }
    return {name: amount for name, amount in amounts.items() if amount}


def fits(pool: PoolConfig, *, free: Mapping[str, float]) -> bool:
    """Whether one more replica fits into the free total; a single node may still lack room."""
    return all(free.get(name, 0.0) >= amount for name, amount in resource_requests(pool).items())


@contextlib.contextmanager
def open_live_deployment() -> Iterator[LiveDeployment]:
    """The deployment of the cluster that this process is connected to."""
    hide_serve_messages()
    with asyncio.Runner() as runner:
        yield LiveDeployment(runner)


class RolloutLease:
    """The exclusive right to change a deployment.

    Theory of operation. The lease is one key, written only if it is absent or expired; so the lease
    of a killed command expires. A renewal costs two calls to the store, so it happens at intervals.
    Expiry uses the wall clock, because machines share the lease; its duration is far above the
    clock differences of one cluster.

    A command that was suspended longer than its lease may find another's. Each lease has its own
    token, so the command does not renew or delete it, and ends. The store has no compare-and-set:
    two commands that write in the same millisecond may both proceed, until one finds the other's
    lease at its renewal.
    """

    def __init__(
        self, holder: str, store: Store | None = None, *, now_s: Callable[[], float] = unix_time_s
    ) -> None:
        self._holder = holder
        self._store = store or HeadStore()
        self._now_s = now_s
        self._token = secrets.token_hex(8)
        """Identifies this holder: process ids repeat across containers and time."""
        self._renewed_at_s: float | None = None

    def acquire(self) -> str:
        """Acquire the lease; returns the current holder, or an empty string on success."""
        if self._write(overwrite=False):
            return ""
        stored = self._read()
        if stored.get("until_s", 0.0) > self._now_s():
            return str(stored["who"])
        self._store.delete(_LEASE_KEY)
        # Read again: another command that saw the same expired lease may have deleted ours.
        if self._write(overwrite=False) and self._is_own(self._read()):
            return ""
        self._renewed_at_s = None
        return "another command"

    def renew(self) -> None:
        """Renew the lease if it is held and due.

        Raises:
            ApplyRejected: it expired, and another command has acquired it.
        """
        if self._renewed_at_s is None or self._now_s() - self._renewed_at_s < _LEASE_RENEW_S:
            return
        stored = self._read()
        if not self._is_own(stored):
            raise ApplyRejected(
                f"this command was not heard of for {self._now_s() - self._renewed_at_s:.0f} s, and"
                f" {stored.get('who', 'another command')} has begun to change what runs",
                "its changes so far stay; when the other is done, look at 'baton status'"
                " and 'baton history', then begin again",
            )
        self._write(overwrite=True)

    def release(self) -> None:
        """Release the lease; leaves another command's. Idempotent."""
        if self._renewed_at_s is not None:
            self._renewed_at_s = None
            if self._is_own(self._read()):
                self._store.delete(_LEASE_KEY)

    def _read(self) -> dict[str, Any]:
        return dict(json.loads(self._store.get(_LEASE_KEY) or b"{}"))

    def _is_own(self, stored: Mapping[str, Any]) -> bool:
        return bool(stored.get("token") == self._token)

    def _write(self, *, overwrite: bool) -> bool:
        now_s = self._now_s()
        entry = {"who": self._holder, "until_s": now_s + _LEASE_S, "token": self._token}
        if not self._store.put(_LEASE_KEY, json.dumps(entry).encode(), overwrite=overwrite):
            return False
        self._renewed_at_s = now_s
        return True
