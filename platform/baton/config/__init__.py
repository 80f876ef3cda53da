"""One YAML file becomes one frozen configuration: layers, checks, schema."""

from baton.config.derive import (
    admission_options,
    allows_anonymous,
    autoscaler_options,
    coordinator_limits,
    devices_of,
    engine_env,
    index_options,
    key_files,
    pool_bounds,
    predicted_options,
    price_per_hour,
    probe_options,
    scaling_policy_name,
    service_rules,
    sim_settings,
    slo_book,
    tenants,
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
    "admission_options",
    "allows_anonymous",
    "autoscaler_options",
    "coordinator_limits",
    "devices_of",
    "engine_env",
    "index_options",
    "key_files",
    "load_config",
    "pool_bounds",
    "predicted_options",
    "price_per_hour",
    "probe_options",
    "render",
    "scaling_policy_name",
    "schema",
    "service_rules",
    "sim_settings",
    "slo_book",
    "tenants",
    "wants_cache_events",
]
