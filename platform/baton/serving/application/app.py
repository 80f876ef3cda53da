"""The composition root: from a configuration to a Ray Serve application.

Requests and tokens do not pass through Serve's handles: the ingress finds the replicas through
Serve's membership and uses the fleet link.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from baton.config.schema.deployment import DeploymentConfig, PoolConfig
from baton.domain.names.addresses import is_loopback
from baton.serving.application.builds import Build, Builds, fresh_builds
from baton.serving.controller.deployment import Controller
from baton.serving.ingress.deployment import Ingress
from baton.serving.ray.context import HEAD_NODE_RESOURCE
from baton.serving.replica.deployment import EngineReplica
from baton.serving.shared.names import CONTROLLER, INGRESS

if TYPE_CHECKING:
    from ray.serve import Application, Deployment

Options = dict[str, object]

_SHUTDOWN_MARGIN_S = 60.0
"""Time for a replica to stop after its last stream has ended."""
_MAX_START_ATTEMPTS = 3
_HEALTH_CHECK_TIMEOUT_S = 10.0
"""Serve replaces a replica after three health checks without an answer: half a minute."""
_MAX_INGRESS_REQUESTS = 4096
_SURGE_PERCENT = 1
"""Of a pool, rounded up: one more replica at a time up to a hundred, since each takes GPUs."""
_ACTOR_CPUS = 0.01


def build_app(
    config: DeploymentConfig,
    *,
    builds: Builds | None = None,
    sizes: Mapping[str, int] | None = None,
    surge: bool = True,
) -> Application:
    """Bind every deployment into one application.

    Serve replaces only the replicas of deployments whose version has changed. It deploys none
    without replicas: a pool of size 0 gets one, which `serve_control.stop_replicas` stops.

    Args:
        config: The configuration of all deployments without an entry in `builds`.
        builds: The build of each deployment in a rollout.
        sizes: Replicas of pools and of the ingress, if other than initially.
        surge: Whether a pool's replaced replica stays until the next one serves. Ingresses and
            the controller always do.
    """
    from ray import serve

    # Serve replaces one replica at a time, so three failures in a row are the new build's.
    retry_options = {} if builds is None else {"max_constructor_retry_count": _MAX_START_ATTEMPTS}
    builds = fresh_builds(config) if builds is None else builds

    def make_deployment(
        kind: type, options: Options, build: Build, *, surge: bool = True
    ) -> Deployment:
        options = options | {"max_surge_percent": _SURGE_PERCENT if surge else 0}
        # `_internal` is Serve's own marker: the public call drops the version and makes up a new
        # one.
        made: Deployment = serve.deployment(kind).options(**with_interpreter(options, build.python))
        return made.options(version=build.version, _internal=True)

    pools = []
    for name in config.pools:
        build = builds[name]
        replicas = initial_sizes(build.config, sizes)[name]
        pool_size = {"num_replicas": max(1, replicas)}
        options = pool_options(build.config, name) | retry_options | pool_size
        pools.append(
            make_deployment(EngineReplica, options, build, surge=surge).bind(build.config, name)
        )
    controller_build, ingress_build = builds[CONTROLLER], builds[INGRESS]
    ingress_size = (
        {"num_replicas": sizes[INGRESS]} if sizes is not None and INGRESS in sizes else {}
    )
    controller = make_deployment(
        Controller, controller_options(controller_build.config), controller_build
    )
    ingress_settings = ingress_options(ingress_build.config) | ingress_size
    ingress = make_deployment(serve.ingress()(Ingress), ingress_settings, ingress_build)
    # The handles are not used; passing them makes all deployments parts of one application.
    bound_controller = controller.bind(controller_build.config)
    return ingress.bind(ingress_build.config, tuple(pools), bound_controller)


def initial_sizes(
    config: DeploymentConfig, sizes: Mapping[str, int] | None = None
) -> dict[str, int]:
    """The replicas of each pool: those of `sizes`, else what the configuration says."""
    return {
        name: pool.replicas.initial if sizes is None else sizes.get(name, pool.replicas.initial)
        for name, pool in config.pools.items()
    }


def with_interpreter(options: Options, python: str) -> Options:
    """The options of actors that run on another interpreter than the cluster's own."""
    if not python:
        return options
    actor = options["ray_actor_options"]
    assert isinstance(actor, dict), "every deployment says what its actors take"
    return options | {"ray_actor_options": actor | {"runtime_env": {"py_executable": python}}}


def ingress_options(config: DeploymentConfig) -> Options:
    """Serve's options for the ingress."""
    return {
        "name": INGRESS,
        "num_replicas": config.server.replicas.min,
        "max_ongoing_requests": _MAX_INGRESS_REQUESTS,
        "graceful_shutdown_timeout_s": config.admission.timeouts.total_s + _SHUTDOWN_MARGIN_S,
        "max_constructor_retry_count": _MAX_START_ATTEMPTS,
        "ray_actor_options": _ingress_placement(config),
    }


def controller_options(config: DeploymentConfig) -> Options:
    """Serve's options for the controller."""
    return {
        "name": CONTROLLER,
        "num_replicas": 1,
        "ray_actor_options": {"num_cpus": _ACTOR_CPUS} | _head_placement(config),
    }


def _ingress_placement(config: DeploymentConfig) -> Options:
    """Where ingresses may run, so that HAProxy reaches them.

    On an existing cluster HAProxy is on the head, which often has no CPUs to give. Ingresses on
    other nodes listen on addresses that others reach, which suits only a public endpoint.
    """
    if config.cluster.address is None:
        return {"num_cpus": _ACTOR_CPUS} | _head_placement(config)
    if is_loopback(config.server.host):
        return {"num_cpus": 0, "resources": {HEAD_NODE_RESOURCE: 0.001}}
    return {"num_cpus": _ACTOR_CPUS}


def _head_placement(config: DeploymentConfig) -> Options:
    """Stay on the node that started the cluster: its HAProxy reaches ingresses only there."""
    if is_loopback(config.cluster.node_address):
        return {}  # one node, or an existing cluster
    return {"resources": {HEAD_NODE_RESOURCE: 0.001}}


def pool_options(config: DeploymentConfig, name: str) -> Options:
    """Serve's options for one pool."""
    pool = config.pools[name]
    options: Options = {
        "name": name,
        "num_replicas": pool.replicas.initial,
        "graceful_shutdown_timeout_s": config.admission.timeouts.total_s + _SHUTDOWN_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": _HEALTH_CHECK_TIMEOUT_S,
        "max_constructor_retry_count": _MAX_START_ATTEMPTS * max(1, pool.replicas.initial),
    }
    if pool.parallel.workers > 1 and pool.resources.gpus:
        return options | _worker_bundles(pool)
    if pool.placement.max_per_node is not None:
        options["max_replicas_per_node"] = pool.placement.max_per_node
    return options | {"ray_actor_options": _actor_options(pool)}


def _actor_options(pool: PoolConfig) -> Options:
    resources = pool.resources
    actor: Options = {"num_cpus": resources.cpus}
    if resources.gpus:
        actor["num_gpus"] = resources.gpus
    if resources.accelerator:
        actor["accelerator_type"] = resources.accelerator
    if resources.memory_bytes:
        actor["memory"] = resources.memory_bytes
    if pool.placement.labels:
        actor["label_selector"] = dict(pool.placement.labels)
    return actor


def _worker_bundles(pool: PoolConfig) -> Options:
    """A placement group: the replica's actor in the first bundle, an engine worker in each."""
    resources, workers = pool.resources, pool.parallel.workers
    bundle: dict[str, float] = {
        "CPU": resources.cpus / workers,
        "GPU": resources.gpus / workers,
    }
    if resources.memory_bytes:
        bundle["memory"] = resources.memory_bytes / workers
    if resources.accelerator:
        # Ray's own resource of nodes with this accelerator; a sliver ties the bundle to one of
        # them.
        bundle[f"accelerator_type:{resources.accelerator}"] = 0.001
    group: Options = {
        "ray_actor_options": {"num_cpus": 0},
        "placement_group_bundles": [dict(bundle) for _ in range(workers)],
        "placement_group_strategy": str(pool.placement.strategy).upper(),
    }
    if pool.placement.labels:  # one stands for all bundles
        group["placement_group_bundle_label_selector"] = [dict(pool.placement.labels)]
    return group
