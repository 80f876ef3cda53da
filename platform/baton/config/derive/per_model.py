"""The part of a configuration that is about one model."""

from __future__ import annotations

from dataclasses import replace

from baton.config.schema.deployment import DeploymentConfig


def for_model(config: DeploymentConfig, name: str) -> DeploymentConfig:
    """As if only this model were served; what all models share stays as it is.

    Raises:
        KeyError: there is no such model.
    """
    return replace(
        config,
        models={name: config.models[name]},
        pools={pool_name: pool for pool_name, pool in config.pools.items() if pool.model == name},
    )


def split_by_model(config: DeploymentConfig) -> dict[str, DeploymentConfig]:
    """The part of each model, by its name."""
    return {name: for_model(config, name) for name in config.models}
