"""One YAML file becomes one frozen configuration: layers, checks, schema."""

from baton.config.derive import (
    coordinator_limits,
    engine_env,
    index_options,
    predicted_options,
    probe_options,
    sim_settings,
    wants_cache_events,
)
from baton.config.fields import SecretRef
from baton.config.jsonschema import schema
from baton.config.load import LoadedConfig, load_config
from baton.config.render import render
from baton.config.schema import DeploymentConfig

__all__ = [
    "DeploymentConfig",
    "LoadedConfig",
    "SecretRef",
    "coordinator_limits",
    "engine_env",
    "index_options",
    "load_config",
    "predicted_options",
    "probe_options",
    "render",
    "schema",
    "sim_settings",
    "wants_cache_events",
]
