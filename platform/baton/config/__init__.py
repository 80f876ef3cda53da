"""One YAML file becomes one frozen configuration: layers, checks, schema."""

from baton.config.derive.options import (
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
from baton.config.language.fields import SecretRef
from baton.config.load import LoadedConfig, load_config
from baton.config.schema.deployment import DeploymentConfig
from baton.config.write.jsonschema import schema
from baton.config.write.render import render

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
