"""What differs between two configurations, and what it takes for each difference to hold.

Theory of operation. One table says of every key what a change of it takes, and which processes are
built from it. A process keeps what it is built from until it is replaced; all else it takes while
it runs. So what is announced of a change and what is done about it are read from the same rows: the
word for what a replica or an ingress is built from (`serving.built_into`) is made of the keys that
have it in their row, and of no others.
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
    """What a change takes, from nothing to everything."""

    LIVE = "live"
    """Whatever runs goes on by the new value; nothing is started or stopped."""
    POOL_SIZE = "pool size"
    """Live, and replicas are started or drained where their number has to change."""
    ROLLING = "rolling"
    """The replicas of a pool are replaced, one after the other."""
    RESTART = "restart"
    """The deployment is drained, ended and started again."""


class ProcessKind(StrEnum):
    """A kind of process that is built from a configuration, as far as it is replaced for another.

    What Ray and its HAProxy are started with is no part: that takes a restart, and replaces all.
    """

    REPLICA = "replica"
    INGRESS = "ingress"
    CONTROLLER = "controller"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Condition:
    """In which deployments a row holds, where it does not in all."""

    description: str
    """Behind what a change takes there."""
    applies: Callable[[DeploymentConfig], bool]


@dataclass(frozen=True, slots=True)
class _KeyRule:
    """What is known of the keys that a pattern names."""

    pattern: str
    reload: Reload
    built_into: tuple[ProcessKind, ...] = ()
    """Who is built from them; nobody, exactly where whoever runs takes them."""
    condition: _Condition | None = None

    def covers(self, path: Path) -> bool:
        """Whether it is about this key."""
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
    # Which engines report what they cache is settled when they start, and so is what an ingress
    # keeps of it.
    _KeyRule("router.index", Reload.RESTART, _DATA_PATH),
    _KeyRule("router.**", Reload.LIVE),
    # The front and every replica are given time for the longest stream when they start.
    _KeyRule("admission.timeouts.total", Reload.RESTART, _DATA_PATH),
    # The gate before vLLM's Rust frontend and that program are started with it.
    _KeyRule("admission.max_body", Reload.ROLLING, _INGRESSES, _WITH_RUST_API_SERVER),
    _KeyRule("admission.**", Reload.LIVE),
    _KeyRule("recovery.**", Reload.LIVE),
    _KeyRule("pools.*.replicas.*", Reload.POOL_SIZE),
    # Only what usage is reckoned with.
    _KeyRule("pools.*.resources.price_per_hour", Reload.LIVE),
    _KeyRule("pools.*.resources.*", Reload.ROLLING, _REPLICAS),
    _KeyRule("pools.*.parallel.*", Reload.ROLLING, _REPLICAS),
    _KeyRule("pools.*.placement.**", Reload.ROLLING, _REPLICAS),
    _KeyRule("pools.*.env.*", Reload.ROLLING, _REPLICAS),
    _KeyRule("pools.*.engine.kind", Reload.RESTART, _REPLICAS),
    _KeyRule("pools.*.engine.**", Reload.ROLLING, _REPLICAS),
    # Which pools there are, and of which model, ingresses and the controller learn when they start.
    _KeyRule("pools.*.model", Reload.RESTART, _ALL),
    _KeyRule("pools.*.role", Reload.RESTART, _REPLICAS),
    # Read by nobody but the pools, where whatever it changes shows again.
    *(
        _KeyRule(f"models.*.engine.extra.{name}", Reload.RESTART, _INGRESSES)
        for name in MODEL_LOADING_ARGUMENTS
    ),
    _KeyRule("models.*.engine.**", Reload.LIVE),
    # Ingresses are replaced with the pools: their API servers are started for one revision.
    _KeyRule("models.*.revision", Reload.ROLLING, _DATA_PATH),
    *(
        _KeyRule(f"models.*.api.{name}", Reload.RESTART, _DATA_PATH)
        for name in MODEL_LOADING_ARGUMENTS
    ),
    _KeyRule("models.*.api.*", Reload.RESTART, _INGRESSES),
    # A request must not begin on one model and end on another.
    _KeyRule("models.**", Reload.RESTART, _DATA_PATH),
    # Each request keeps what held when it came.
    _KeyRule("transfer.early_first_token", Reload.LIVE),
    _KeyRule("transfer.probe.interval", Reload.RESTART, _INGRESSES),
    # Both ends of a handoff must agree about it, at any time.
    _KeyRule("transfer.**", Reload.RESTART, _DATA_PATH),
    # The controller keeps as many ingresses as there may be.
    _KeyRule("server.replicas.*", Reload.RESTART, (ProcessKind.INGRESS, ProcessKind.CONTROLLER)),
    _KeyRule("server.**", Reload.RESTART, _INGRESSES),
    # Engines and API servers look for their models there when they start.
    _KeyRule("cluster.model_cache.path", Reload.ROLLING, _DATA_PATH),
    # Of pods, which are made anew.
    _KeyRule("cluster.model_cache.*", Reload.RESTART, _DATA_PATH),
    # Both stay on the node that it says.
    _KeyRule("cluster.**", Reload.RESTART, (ProcessKind.INGRESS, ProcessKind.CONTROLLER)),
    _KeyRule("observability.**", Reload.RESTART, _ALL),
    # The front reads it when it starts.
    _KeyRule("security.**", Reload.RESTART, _INGRESSES),
)
"""By path, first match; `*` is one name, `**` any number of them."""

_LAYOUT_KEYS = (
    "pools.*.engine.dtype",
    "pools.*.engine.block_size",
    "pools.*.engine.extra.kv_cache_dtype",
    "pools.*.engine.sim.kv_block_size",
    "models.*.revision",
)
"""What replicas must agree in to hand KV blocks to each other, of all that replacing them changes.

Facts of replicas have it as their `layout`, and no two with different ones are ever paired.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key that says something else now."""

    path: Path
    old: str | None
    """As it stands in the file; None: there was no such key."""
    new: str | None
    reload: Reload

    def __str__(self) -> str:
        old, new = ("(absent)" if text is None else text for text in (self.old, self.new))
        return f"{format_path(self.path)}: {old} -> {new}"


def diff(old: DeploymentConfig, new: DeploymentConfig) -> tuple[Change, ...]:
    """Every key whose effective value differs, in the order of the schema; no secret is shown."""
    before, after = dict(leaves(old)), dict(leaves(new))
    added_or_removed = old.pools.keys() ^ new.pools.keys()
    changes = []
    for path in _merged_order(before, after):
        old_value, new_value = before.get(path), after.get(path)
        if old_value == new_value:
            continue
        reload = reload_class(path, new)
        if path[0] == "pools" and path[1] in added_or_removed:
            reload = Reload.RESTART  # every ingress follows the pools that it was started with
        if _is_secret(path):
            old_value, new_value = (text and "(not shown)" for text in (old_value, new_value))
        changes.append(Change(path=path, old=old_value, new=new_value, reload=reload))
    return tuple(sorted((*changes, *_reordered_classes(old, new)), key=_section_index))


def _section_index(change: Change) -> int:
    return list(fields_of(DeploymentConfig)).index(change.path[0])


def _reordered_classes(old: DeploymentConfig, new: DeploymentConfig) -> Iterator[Change]:
    """The order of classes, where it is another: of those whose condition holds the first counts.

    Of all mappings it is the only one whose order says anything.
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
    """Whether replicas before and after cannot hand KV blocks to each other."""
    return any(matches(change.path, pattern) for change in changes for pattern in _LAYOUT_KEYS)


def reload_class(path: Path, config: DeploymentConfig | None = None) -> Reload:
    """What a change of this key takes, in most deployments or in the one that is given.

    Raises:
        LookupError: nobody has said; a test asks for every key of the schema.
    """
    return _rule_for(path, config).reload


def conditional_reloads(path: Path) -> Mapping[str, Reload]:
    """What a change of this key takes in some deployments only, by which these are, in words."""
    return {
        row.condition.description: row.reload
        for row in _rules_for(path)
        if row.condition is not None
    }


def process_inputs(
    config: DeploymentConfig, process: ProcessKind, *, pool: str | None = None
) -> dict[str, str]:
    """All that a process is built from, and keeps until it is replaced: by key, its value.

    Of replicas those of one `pool`: other pools, and models of others, are no business of theirs.
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
    """Each key with its value as it would stand in the file; empty sections have none."""
    for path, field, value in each(config):
        yield path, format_flow(plain_value(field, value))


def _merged_order(before: Mapping[Path, str], after: Mapping[Path, str]) -> list[Path]:
    """All paths of both, what only one has beside what it stands near to."""
    position = {path: index for index, path in enumerate(before)}
    last = -1
    for path in after:
        last = position.setdefault(path, last)
    return sorted(position, key=position.__getitem__)  # equal places stay in the order they came in


def _is_secret(path: Path) -> bool:
    """Whether a value must not be shown: raw engine arguments may hold anything.

    Elsewhere secrets cannot be written but as the name of a variable or a file.
    """
    return is_vllm_argument(path) and any(is_secret_name(key) for key in path)
