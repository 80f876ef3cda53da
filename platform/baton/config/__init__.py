"""One YAML file becomes one frozen configuration: layers, checks, schema."""

from baton.config.derive.options import (
    admission_options,
    allows_anonymous,
    autoscaler_options,
    coordinator_limits,
    devices_per_replica,
    emits_cache_events,
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
    slo_classes,
    tenants,
)
from baton.config.language.fields import SecretRef
from baton.config.load import LoadedConfig, load_config
from baton.config.schema.deployment import DeploymentConfig
from baton.config.write.jsonschema import json_schema
from baton.config.write.render import render

__all__ = [
    "DeploymentConfig",
    "LoadedConfig",
    "SecretRef",
    "admission_options",
    "allows_anonymous",
    "autoscaler_options",
    "coordinator_limits",
    "devices_per_replica",
    "emits_cache_events",
    "engine_env",
    "index_options",
    "json_schema",
    "key_files",
    "load_config",
    "pool_bounds",
    "predicted_options",
    "price_per_hour",
    "probe_options",
    "render",
    "scaling_policy_name",
    "service_rules",
    "sim_settings",
    "slo_classes",
    "tenants",
]
