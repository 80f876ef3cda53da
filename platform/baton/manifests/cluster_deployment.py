"""The configuration as a cluster of several nodes needs it: open to others, with files in place.

*Theory of operation.* In a cluster, clients and Prometheus come from other machines, so what
listens on loopback listens everywhere, behind the network's own rules; and key files lie where
secrets are mounted. Everything else stays as it is written: manifests hold the keys that somebody
gave and no defaults. What only `baton up` can do on its own machine is refused here rather than
left out in silence.
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
from baton.config.write.render import plain
from baton.domain.names.addresses import everywhere, is_loopback
from baton.manifests.settings import CannotExport

EVERYWHERE: Final = "0.0.0.0"  # noqa: S104 - guarded by a network policy, a token and keys
KEYS: Final = PurePosixPath("/etc/baton/keys")
"""API keys of tenants, a file for each."""
TOKEN: Final = PurePosixPath("/etc/baton/console/token")
"""What metrics and the console ask for."""
_DEFAULT: Final = "default"

Plain = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A configuration for a cluster, and which files have to be brought there."""

    config: DeploymentConfig
    written: Mapping[str, object]
    """The same as plain values, without keys that have their defaults."""
    key_files: Mapping[str, str]
    """By their name in the cluster's folder of keys: what the file is called here."""
    token_file: str | None
    """Which file here holds what metrics and the console ask for; None where none is named."""

    @property
    def needs_gpus(self) -> bool:
        """Whether any pool runs on GPUs."""
        return any(pool.resources.gpus for pool in self.config.pools.values())

    @property
    def has_token(self) -> bool:
        """Whether anything is served to Prometheus or to people."""
        seen = self.config.observability
        return seen.metrics.enabled or seen.console.enabled


def adapted(loaded: LoadedConfig) -> Adapted:
    """The same deployment, for a cluster.

    Raises:
        CannotExport: it ends TLS itself, as only `baton up` does, or two key files have one name.
    """
    config = loaded.config
    if config.security.tls != TlsConfig():
        raise CannotExport(
            "security.tls is set, and the front of a cluster speaks no TLS",
            "end TLS before baton, in the cluster's gateway, and remove security.tls",
        )
    tenants: dict[str, TenantConfig] = {}
    files: dict[str, str] = {}
    for name, tenant in config.tenants.items():
        tenants[name] = tenant
        if tenant.keys_file is None:
            continue
        base = PurePosixPath(tenant.keys_file).name
        if files.setdefault(base, tenant.keys_file) != tenant.keys_file:
            raise CannotExport(
                f"tenants have the key files {files[base]} and {tenant.keys_file}, which would be"
                f" one file {KEYS / base}",
                "give them different names",
            )
        tenants[name] = replace(tenant, keys_file=str(KEYS / base))
    opened = _opened(config, tenants)
    return Adapted(
        config=opened,
        written=_written_for(opened, loaded),
        key_files=files,
        token_file=config.observability.token_file,
    )


def written_keys(loaded: LoadedConfig) -> Mapping[str, object]:
    """The configuration as plain values, without keys that have their defaults."""
    return _written_for(loaded.config, loaded)


def _written_for(config: DeploymentConfig, loaded: LoadedConfig) -> Mapping[str, object]:
    everything = plain(config)
    found = _written(everything, plain(loaded.config), loaded.origins, ())
    for one in (found, everything):  # the latter for a class or a tenant of which nothing is said
        _leave_to_models(one, config, loaded.origins)
        if load_text(json.dumps(one)) == config:
            return one
    return plain(config)


def _leave_to_models(found: Plain, config: DeploymentConfig, origins: Mapping[str, str]) -> None:
    """Take out engine options that pools have from their models, so that they go on following."""
    models, pools = plain(config)["models"], found["pools"]
    assert isinstance(models, Mapping), "models are a section"
    assert isinstance(pools, Mapping), "pools are a section"
    for name, pool in pools.items():
        model = config.pools[name].model
        here, there = ("pools", name, "engine"), ("models", model, "engine")
        own = _own(pool.pop("engine", {}), models[model]["engine"], origins, (here, there))
        if own:
            pool["engine"] = own


def _own(
    pool: Mapping[str, object],
    model: Mapping[str, object],
    origins: Mapping[str, str],
    paths: tuple[Path, Path],
) -> Plain:
    """Options of a pool that are not the very ones of its model: same value, said at one place."""
    found: Plain = {}
    for key, value in pool.items():
        theirs = model.get(key)
        both = (*paths[0], key), (*paths[1], key)
        if isinstance(value, Mapping) and isinstance(theirs, Mapping):
            if below := _own(value, theirs, origins, both):
                found[key] = below
            continue
        said, inherited = (origins.get(format_path(path), _DEFAULT) for path in both)
        if (value, said) != (theirs, inherited):
            found[key] = value
    return found


def _written(new: object, old: object, origins: Mapping[str, str], path: Path) -> Plain:
    """Keys that somebody gave, or that are others now than they were."""
    found: Plain = {}
    assert isinstance(new, Mapping), "a section is written as a mapping"
    for key, value in new.items():
        here, before = (*path, str(key)), old.get(key) if isinstance(old, Mapping) else None
        if isinstance(value, Mapping) and value:
            below = _written(value, before, origins, here)
            if below:
                found[str(key)] = below
        elif value != before or origins.get(format_path(here), _DEFAULT) != _DEFAULT:
            found[str(key)] = value
    return found


def _opened(config: DeploymentConfig, tenants: Mapping[str, TenantConfig]) -> DeploymentConfig:
    seen, server = config.observability, config.server
    # Port 0, any free one, could not be named in a manifest.
    metrics = replace(
        seen.metrics, host=everywhere(seen.metrics.host), port=seen.metrics.port or 9400
    )
    return replace(
        config,
        tenants=tenants,
        server=replace(server, host=everywhere(server.host))
        if is_loopback(server.host)
        else server,
        observability=replace(seen, metrics=metrics, token_file=str(TOKEN)),
    )
