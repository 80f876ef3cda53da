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
from baton.domain.errors import ConfigInvalid
from baton.serving.application.app import build_app
from baton.serving.application.builds import encode_build_record, initial_build_record
from baton.serving.checks.start import check_declared
from baton.serving.store.config_store import (
    BUILD_RECORD_KEY,
    Generations,
    GenerationStatus,
    HeadStore,
    LiveConfig,
    Store,
)

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
    check_declared(config, warn=lambda line: _LOGGER.warning("%s", line))
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
