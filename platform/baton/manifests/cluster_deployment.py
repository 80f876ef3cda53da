"""Adapts a configuration to a cluster of several nodes.

In a cluster, clients and Prometheus come from other machines. So loopback listeners listen on all
addresses, guarded by the network's rules, and key files are where secrets are mounted. Other keys
stay as configured, without defaults. Options that only `baton up` supports are rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Final

from baton.config.language.tree import Path, format_path
from baton.config.load import LoadedConfig, load_text
from baton.config.schema.deployment import DeploymentConfig
from baton.config.schema.security import TlsConfig
from baton.config.schema.service import TenantConfig
from baton.config.write.render import to_plain
from baton.domain.names.addresses import any_address, is_loopback
from baton.manifests.settings import CannotExport

ANY_ADDRESS: Final = "0.0.0.0"  # noqa: S104 - guarded by a network policy, a token and keys
KEYS_DIR: Final = PurePosixPath("/etc/baton/keys")
"""API keys of tenants, one file each."""
TOKEN_FILE: Final = PurePosixPath("/etc/baton/console/token")
_DEFAULT_ORIGIN: Final = "default"

PlainDict = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDeployment:
    """A configuration for a cluster, and the files that it needs there."""

    config: DeploymentConfig
    explicit_values: Mapping[str, object]
    """The configuration as plain values, without defaults."""
    key_files: Mapping[str, str]
    """File on this machine, by name in `KEYS_DIR`."""
    token_file: str | None
    """On this machine."""

    @property
    def needs_gpus(self) -> bool:
        """Whether a pool runs on GPUs."""
        return any(pool.resources.gpus for pool in self.config.pools.values())

    @property
    def needs_token(self) -> bool:
        """Whether metrics or console are served."""
        observability = self.config.observability
        return observability.metrics.enabled or observability.console.enabled


def adapt_to_cluster(loaded: LoadedConfig) -> ClusterDeployment:
    """The same deployment, for a cluster.

    Raises:
        CannotExport: it terminates TLS, which only `baton up` does, or two key files have one name.
    """
    config = loaded.config
    if config.security.tls != TlsConfig():
        raise CannotExport(
            "security.tls is set, and the front of a cluster does not use TLS",
            "end TLS before baton, in the cluster's gateway, and remove security.tls",
        )
    tenants: dict[str, TenantConfig] = {}
    key_files: dict[str, str] = {}
    for name, tenant in config.tenants.items():
        tenants[name] = tenant
        if tenant.keys_file is None:
            continue
        file_name = PurePosixPath(tenant.keys_file).name
        if key_files.setdefault(file_name, tenant.keys_file) != tenant.keys_file:
            raise CannotExport(
                f"tenants have the key files {key_files[file_name]} and {tenant.keys_file}, which"
                f" would be one file {KEYS_DIR / file_name}",
                "give them different names",
            )
        tenants[name] = replace(tenant, keys_file=str(KEYS_DIR / file_name))
    cluster_config = _listen_everywhere(config, tenants)
    return ClusterDeployment(
        config=cluster_config,
        explicit_values=_explicit_values_for(cluster_config, loaded),
        key_files=key_files,
        token_file=config.observability.token_file,
    )


def explicit_config_values(loaded: LoadedConfig) -> Mapping[str, object]:
    """The configuration as plain values, without defaults."""
    return _explicit_values_for(loaded.config, loaded)


def _explicit_values_for(config: DeploymentConfig, loaded: LoadedConfig) -> Mapping[str, object]:
    all_values = to_plain(config)
    explicit = _explicit_values(all_values, to_plain(loaded.config), loaded.origins, ())
    # All values, if a class or a tenant has no explicit key.
    for entry in (explicit, all_values):
        _omit_inherited(entry, config, loaded.origins)
        if load_text(json.dumps(entry)) == config:
            return entry
    return to_plain(config)


def _omit_inherited(
    values: PlainDict, config: DeploymentConfig, origins: Mapping[str, str]
) -> None:
    """Remove engine options that pools inherit, so that they keep following their models."""
    models, pools = to_plain(config)["models"], values["pools"]
    assert isinstance(models, Mapping), "models are a section"
    assert isinstance(pools, Mapping), "pools are a section"
    for name, pool in pools.items():
        model = config.pools[name].model
        pool_path, model_path = ("pools", name, "engine"), ("models", model, "engine")
        overrides = _pool_overrides(
            pool.pop("engine", {}), models[model]["engine"], origins, (pool_path, model_path)
        )
        if overrides:
            pool["engine"] = overrides


def _pool_overrides(
    pool: Mapping[str, object],
    model: Mapping[str, object],
    origins: Mapping[str, str],
    paths: tuple[Path, Path],
) -> PlainDict:
    """Options of a pool that differ from its model's in value or origin."""
    overrides: PlainDict = {}
    for key, value in pool.items():
        model_value = model.get(key)
        key_paths = (*paths[0], key), (*paths[1], key)
        if isinstance(value, Mapping) and isinstance(model_value, Mapping):
            if nested := _pool_overrides(value, model_value, origins, key_paths):
                overrides[key] = nested
            continue
        pool_origin, model_origin = (
            origins.get(format_path(path), _DEFAULT_ORIGIN) for path in key_paths
        )
        if (value, pool_origin) != (model_value, model_origin):
            overrides[key] = value
    return overrides


def _explicit_values(new: object, old: object, origins: Mapping[str, str], path: Path) -> PlainDict:
    """Configured keys, and keys whose value has changed."""
    values: PlainDict = {}
    assert isinstance(new, Mapping), "a section is written as a mapping"
    for key, value in new.items():
        key_path, old_value = (*path, str(key)), old.get(key) if isinstance(old, Mapping) else None
        if isinstance(value, Mapping) and value:
            nested = _explicit_values(value, old_value, origins, key_path)
            if nested:
                values[str(key)] = nested
        elif (
            value != old_value
            or origins.get(format_path(key_path), _DEFAULT_ORIGIN) != _DEFAULT_ORIGIN
        ):
            values[str(key)] = value
    return values


def _listen_everywhere(
    config: DeploymentConfig, tenants: Mapping[str, TenantConfig]
) -> DeploymentConfig:
    observability, server = config.observability, config.server
    # A manifest cannot name port 0, which means any free port.
    metrics = replace(
        observability.metrics,
        host=any_address(observability.metrics.host),
        port=observability.metrics.port or 9400,
    )
    return replace(
        config,
        tenants=tenants,
        server=replace(server, host=any_address(server.host))
        if is_loopback(server.host)
        else server,
        observability=replace(observability, metrics=metrics, token_file=str(TOKEN_FILE)),
    )
