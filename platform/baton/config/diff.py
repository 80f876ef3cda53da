"""Differences between two configurations, and the actions that each requires.

Theory of operation. One table states for every key the action that a change requires, and the
processes that are built from it. A process keeps these values until it is replaced, and reads all
others while it runs. Announcements and actions use the same rows: the hash of a replica or an
ingress covers exactly the keys whose row names it (`process_inputs`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from baton.config.derive.api_arguments import MODEL_LOADING_ARGUMENTS
from baton.config.language.fields import each, fields_of
from baton.config.language.tree import Path, format_path, is_secret_name, is_vllm_argument, matches
from baton.config.schema.deployment import ApiServerKind, DeploymentConfig
from baton.config.write.render import format_flow, plain_value


class Reload(StrEnum):
    """Actions that a change requires, in increasing order."""

    LIVE = "live"
    """Running processes use the new value; none starts or stops."""
    POOL_SIZE = "pool size"
    """Live; replicas are started or drained if their number has to change."""
    ROLLING = "rolling"
    """The replicas of a pool are replaced one after the other."""
    RESTART = "restart"
    """The deployment is drained, stopped and started again."""


class ProcessKind(StrEnum):
    """Kinds of processes that are built from a configuration and can be replaced.

    Ray and its HAProxy are not included: replacing them takes a restart, which replaces everything.
    """

    REPLICA = "replica"
    INGRESS = "ingress"
    CONTROLLER = "controller"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Condition:
    """Deployments to which a rule applies."""

    description: str
    """Shown after the action."""
    applies: Callable[[DeploymentConfig], bool]


@dataclass(frozen=True, slots=True)
class _KeyRule:
    """Rule for the keys of a pattern."""

    pattern: str
    reload: Reload
    built_into: tuple[ProcessKind, ...] = ()
    """Processes that are built from them; empty exactly when running processes take the new value.
    """
    condition: _Condition | None = None

    def covers(self, path: Path) -> bool:
        """Whether the pattern matches this key."""
        return matches(path, self.pattern)


_REPLICAS = (ProcessKind.REPLICA,)
_INGRESSES = (ProcessKind.INGRESS,)
_DATA_PATH = (ProcessKind.REPLICA, ProcessKind.INGRESS)
_ALL = (ProcessKind.REPLICA, ProcessKind.INGRESS, ProcessKind.CONTROLLER)
_WITH_RUST_API_SERVER = _Condition(
    description="with `server.api_server: rust`",
    applies=lambda config: config.server.api_server is ApiServerKind.RUST,
)

_KEY_RULES: tuple[_KeyRule, ...] = (
    _KeyRule("version", Reload.RESTART),
    _KeyRule("slo.**", Reload.LIVE),
    _KeyRule("tenants.**", Reload.LIVE),
    _KeyRule("autoscaler.**", Reload.LIVE),
    # Engines report cache updates, and ingresses store these, as decided at their start.
    _KeyRule("router.index", Reload.RESTART, _DATA_PATH),
    _KeyRule("router.**", Reload.LIVE),
    # The front and every replica get the time of the longest stream at their start.
    _KeyRule("admission.timeouts.total", Reload.RESTART, _DATA_PATH),
    # The gate and vLLM's Rust frontend are started with it.
    _KeyRule("admission.max_body", Reload.ROLLING, _INGRESSES, _WITH_RUST_API_SERVER),
    _KeyRule("admission.**", Reload.LIVE),
    _KeyRule("recovery.**", Reload.LIVE),
    _KeyRule("pools.*.replicas.*", Reload.POOL_SIZE),
    # Used only for usage accounting.
    _KeyRule("pools.*.resources.price_per_hour", Reload.LIVE),
    _KeyRule("pools.*.resources.*", Reload.ROLLING, _REPLICAS),
    _KeyRule("pools.*.parallel.*", Reload.ROLLING, _REPLICAS),
    _KeyRule("pools.*.placement.**", Reload.ROLLING, _REPLICAS),
    _KeyRule("pools.*.env.*", Reload.ROLLING, _REPLICAS),
    _KeyRule("pools.*.engine.kind", Reload.RESTART, _REPLICAS),
    _KeyRule("pools.*.engine.**", Reload.ROLLING, _REPLICAS),
    # Ingresses and the controller learn pools and their models at their start.
    _KeyRule("pools.*.model", Reload.RESTART, _ALL),
    _KeyRule("pools.*.role", Reload.RESTART, _REPLICAS),
    # Only pools read it; their own keys show the change, too.
    *(
        _KeyRule(f"models.*.engine.extra.{name}", Reload.RESTART, _INGRESSES)
        for name in MODEL_LOADING_ARGUMENTS
    ),
    _KeyRule("models.*.engine.**", Reload.LIVE),
    # Ingresses are replaced with the pools: an API server is started for one revision.
    _KeyRule("models.*.revision", Reload.ROLLING, _DATA_PATH),
    *(
        _KeyRule(f"models.*.api.{name}", Reload.RESTART, _DATA_PATH)
        for name in MODEL_LOADING_ARGUMENTS
    ),
    _KeyRule("models.*.api.*", Reload.RESTART, _INGRESSES),
    # A request must not start on one model and end on another.
    _KeyRule("models.**", Reload.RESTART, _DATA_PATH),
    # Each request keeps the value of its arrival.
    _KeyRule("transfer.early_first_token", Reload.LIVE),
    _KeyRule("transfer.probe.interval", Reload.RESTART, _INGRESSES),
    # Both ends of a handoff must always agree about it.
    _KeyRule("transfer.**", Reload.RESTART, _DATA_PATH),
    # The controller keeps the number of ingresses within these bounds.
    _KeyRule("server.replicas.*", Reload.RESTART, (ProcessKind.INGRESS, ProcessKind.CONTROLLER)),
    _KeyRule("server.**", Reload.RESTART, _INGRESSES),
    # Engines and API servers look for models there at their start.
    _KeyRule("cluster.model_cache.path", Reload.ROLLING, _DATA_PATH),
    # Of pods, which are created again.
    _KeyRule("cluster.model_cache.*", Reload.RESTART, _DATA_PATH),
    # Both stay on the node of this address.
    _KeyRule("cluster.**", Reload.RESTART, (ProcessKind.INGRESS, ProcessKind.CONTROLLER)),
    _KeyRule("observability.**", Reload.RESTART, _ALL),
    # The front reads it at its start.
    _KeyRule("security.**", Reload.RESTART, _INGRESSES),
)
"""By path, first match; `*` is one name, `**` any number of names."""

_LAYOUT_KEYS = (
    "pools.*.engine.dtype",
    "pools.*.engine.block_size",
    "pools.*.engine.extra.kv_cache_dtype",
    "pools.*.engine.sim.kv_block_size",
    "models.*.revision",
)
"""Keys that change the KV layout although replacing replicas is enough to change them.

Facts of replicas carry the layout (`layout`); replicas with different layouts are never paired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key with a different value."""

    path: Path
    old: str | None
    """Text of the value in the file; None: the key was absent."""
    new: str | None
    reload: Reload

    def __str__(self) -> str:
        old, new = ("(absent)" if text is None else text for text in (self.old, self.new))
        return f"{format_path(self.path)}: {old} -> {new}"


def diff(old: DeploymentConfig, new: DeploymentConfig) -> tuple[Change, ...]:
    """Every key whose effective value differs, in the schema's order; secrets are not shown."""
    before, after = dict(leaves(old)), dict(leaves(new))
    added_or_removed = old.pools.keys() ^ new.pools.keys()
    changes = []
    for path in _merged_order(before, after):
        old_value, new_value = before.get(path), after.get(path)
        if old_value == new_value:
            continue
        reload = reload_class(path, new)
        if path[0] == "pools" and path[1] in added_or_removed:
            reload = Reload.RESTART  # an ingress knows only the pools of its start
        if _is_secret(path):
            old_value, new_value = (text and "(not shown)" for text in (old_value, new_value))
        changes.append(Change(path=path, old=old_value, new=new_value, reload=reload))
    return tuple(sorted((*changes, *_reordered_classes(old, new)), key=_section_index))


def _section_index(change: Change) -> int:
    return list(fields_of(DeploymentConfig)).index(change.path[0])


def _reordered_classes(old: DeploymentConfig, new: DeploymentConfig) -> Iterator[Change]:
    """A change of the order of classes, because the first matching class counts.

    It is the only mapping whose order has a meaning.
    """
    old_order, new_order = (tuple(deployment.slo.classes) for deployment in (old, new))
    if [name for name in old_order if name in new_order] != [
        name for name in new_order if name in old_order
    ]:
        path = ("slo", "classes")
        yield Change(
            path=path,
            old=", ".join(old_order),
            new=", ".join(new_order),
            reload=reload_class(path, new),
        )


def changes_layout(changes: Iterable[Change]) -> bool:
    """Whether replicas from before and after the changes cannot exchange KV blocks."""
    return any(matches(change.path, pattern) for change in changes for pattern in _LAYOUT_KEYS)


def reload_class(path: Path, config: DeploymentConfig | None = None) -> Reload:
    """The action that a change of this key requires, in this deployment or in most.

    Raises:
        LookupError: no rule matches; a test covers every key of the schema.
    """
    return _rule_for(path, config).reload


def conditional_reloads(path: Path) -> Mapping[str, Reload]:
    """Actions that a change of this key requires in some deployments only, by description."""
    return {
        row.condition.description: row.reload
        for row in _rules_for(path)
        if row.condition is not None
    }


def process_inputs(
    config: DeploymentConfig, process: ProcessKind, *, pool: str | None = None
) -> dict[str, str]:
    """The values that a process is built from and keeps until it is replaced, by key.

    For replicas these are the keys of one `pool` and its model, and not of other pools and models.
    """
    model = None if pool is None else config.pools[pool].model
    own_names = {"pools": pool, "models": model}
    return {
        format_path(path): value
        for path, value in leaves(config)
        if process in _rule_for(path, config).built_into
        and own_names.get(path[0]) in {None, path[1]}
    }


def _rule_for(path: Path, config: DeploymentConfig | None) -> _KeyRule:
    for row in _rules_for(path):
        if row.condition is None or (config is not None and row.condition.applies(config)):
            return row
    raise LookupError(f"no reload class for {format_path(path)}")


@functools.lru_cache(maxsize=4096)
def _rules_for(path: Path) -> tuple[_KeyRule, ...]:
    return tuple(row for row in _KEY_RULES if row.covers(path))


def leaves(config: DeploymentConfig) -> Iterator[tuple[Path, str]]:
    """Each key and its text in the file; empty sections have no keys."""
    for path, field, value in each(config):
        yield path, format_flow(plain_value(field, value))


def _merged_order(before: Mapping[Path, str], after: Mapping[Path, str]) -> list[Path]:
    """All paths of both; a path of one side follows its predecessor there."""
    position = {path: index for index, path in enumerate(before)}
    last = -1
    for path in after:
        last = position.setdefault(path, last)
    return sorted(position, key=position.__getitem__)  # stable for equal places


def _is_secret(path: Path) -> bool:
    """Whether a value must not be shown: raw engine arguments may contain secrets.

    Other keys hold only the name of a secret's variable or file.
    """
    return is_vllm_argument(path) and any(is_secret_name(key) for key in path)
