"""The application as others deploy it: KubeRay's RayService, `serve deploy`, Ray's REST API.

Ray Serve imports `application` in a task on the cluster and calls it with the arguments of its
configuration file, again after each change and while the old application serves. So the first
configuration starts the store of Ray's head, and a different one becomes its next generation.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from baton.config.load import load_text
from baton.config.schema.deployment import DeploymentConfig
from baton.config.write.render import render
from baton.domain.errors import ConfigInvalid, PreflightFailed
from baton.domain.names.addresses import is_loopback_address
from baton.serving.application.app import build_app
from baton.serving.application.builds import encode_build_record, initial_build_record
from baton.serving.preflight.checks import cluster_version_findings, key_findings
from baton.serving.preflight.facts import cluster_facts
from baton.serving.preflight.security import ray_auth_findings
from baton.serving.ray.auth_probe import probe_ray_auth
from baton.serving.ray.context import get_gcs_address
from baton.serving.store.config_store import (
    BUILD_RECORD_KEY,
    Generations,
    GenerationStatus,
    HeadStore,
    LiveConfig,
    Store,
)
from baton.serving.versions import PACKAGES

if TYPE_CHECKING:
    from ray.serve import Application

_OPERATION = "serve deploy"
_LOGGER = logging.getLogger(__name__)


def application(arguments: dict[str, object]) -> Application:
    """Build the application of these arguments.

    Raises:
        ConfigInvalid: the arguments hold no valid configuration.
        PreflightFailed: the cluster cannot run it.
    """
    config = config_of(arguments)
    check_nodes(config)
    commit_config(config, HeadStore())
    return build_app(config)


def config_of(arguments: Mapping[str, object]) -> DeploymentConfig:
    """The configuration in the arguments.

    Raises:
        ConfigInvalid: there is none, or it is wrong.
    """
    config = arguments.get("config")
    if set(arguments) != {"config"} or not isinstance(config, Mapping):
        keys = ", ".join(sorted(arguments)) or "none"
        raise ConfigInvalid(
            (f"arguments of the application: got {keys}; expected 'config', a mapping of its keys",)
        )
    return load_text(json.dumps(dict(config)))


def check_nodes(config: DeploymentConfig) -> None:
    """Check everything that does not depend on the number of nodes: more may join on demand.

    Raises:
        PreflightFailed: with every finding.
    """
    store = get_gcs_address()
    ray_auth = "guarded" if is_loopback_address(store) else probe_ray_auth(store)
    errors, warnings = ray_auth_findings(store, ray_auth, allowed=config.cluster.allow_open)
    for line in warnings:
        _LOGGER.warning("%s", line)
    findings = (
        *key_findings(config),
        *cluster_version_findings(config, cluster_facts(PACKAGES).versions),
        *errors,
    )
    if findings:
        raise PreflightFailed(findings)


def commit_config(config: DeploymentConfig, store: Store) -> None:
    """Make this the current configuration; does nothing if it is current already."""
    generations = Generations(store)
    if store.get(f"note/{BUILD_RECORD_KEY}") is None:
        generations.add_first(config)
    elif render(generations.newest(config).config) != render(config):
        live = LiveConfig(generation=generations.newest_number() + 1, config=config)
        if generations.add(live, operation=_OPERATION):
            generations.set_status(live.generation, GenerationStatus.APPLIED)
    store.put(
        f"note/{BUILD_RECORD_KEY}",
        encode_build_record(initial_build_record(config)),
        overwrite=True,
    )
