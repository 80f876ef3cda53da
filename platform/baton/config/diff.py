"""What differs between two configurations, and what it takes for each difference to hold.

Theory of operation. One table says of every key what a change of it takes, and which processes are
built from it. A process keeps what it is built from until it is replaced; all else it takes while
it runs. So what is announced of a change and what is done about it are read from the same rows: the
word for what a replica or an ingress is built from (`serving.built`) is made of the keys that have
it in their row, and of no others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from baton.config.derive.api_arguments import READS_MODEL
from baton.config.language.fields import each, fields_of
from baton.config.language.tree import Path, format_path, is_raw, is_secret_name, matches
from baton.config.schema.deployment import DeploymentConfig, FrontendKind
from baton.config.write.render import flow, plain_value


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


class Part(StrEnum):
    """A kind of process that is built from a configuration, as far as it is replaced for another.

    What Ray and its HAProxy are started with is no part: that takes a restart, and replaces all.
    """

    REPLICA = "replica"
    INGRESS = "ingress"
    CONTROLLER = "controller"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Where:
    """In which deployments a row holds, where it does not in all."""

    words: str
    """Behind what a change takes there."""
    holds: Callable[[DeploymentConfig], bool]


@dataclass(frozen=True, slots=True)
class _Row:
    """What is known of the keys that a pattern names."""

    pattern: str
    reload: Reload
    built: tuple[Part, ...] = ()
    """Who is built from them; nobody, exactly where whoever runs takes them."""
    where: _Where | None = None

    def names(self, path: Path) -> bool:
        """Whether it is about this key."""
        return matches(path, self.pattern)


_ENGINES = (Part.REPLICA,)
_FRONTS = (Part.INGRESS,)
_DATA_PATH = (Part.REPLICA, Part.INGRESS)
_ALL = (Part.REPLICA, Part.INGRESS, Part.CONTROLLER)
_IN_RUST = _Where(
    words="with `server.frontend: rust`",
    holds=lambda config: config.server.frontend is FrontendKind.RUST,
)

_ROWS: tuple[_Row, ...] = (
    _Row("version", Reload.RESTART),
    _Row("slo.**", Reload.LIVE),
    _Row("tenants.**", Reload.LIVE),
    _Row("autoscaler.**", Reload.LIVE),
    # Which engines report what they cache is settled when they start, and so is what an ingress
    # keeps of it.
    _Row("router.index", Reload.RESTART, _DATA_PATH),
    _Row("router.**", Reload.LIVE),
    # The front and every replica are given time for the longest stream when they start.
    _Row("admission.timeouts.total", Reload.RESTART, _DATA_PATH),
    # The gate before vLLM's Rust frontend and that program are started with it.
    _Row("admission.max_body", Reload.ROLLING, _FRONTS, _IN_RUST),
    _Row("admission.**", Reload.LIVE),
    _Row("pools.*.replicas.*", Reload.POOL_SIZE),
    # Only what usage is reckoned with.
    _Row("pools.*.resources.price_per_hour", Reload.LIVE),
    _Row("pools.*.resources.*", Reload.ROLLING, _ENGINES),
    _Row("pools.*.parallel.*", Reload.ROLLING, _ENGINES),
    _Row("pools.*.placement.**", Reload.ROLLING, _ENGINES),
    _Row("pools.*.env.*", Reload.ROLLING, _ENGINES),
    _Row("pools.*.engine.kind", Reload.RESTART, _ENGINES),
    _Row("pools.*.engine.**", Reload.ROLLING, _ENGINES),
    # Which pools there are, and of which model, ingresses and the controller learn when they start.
    _Row("pools.*.model", Reload.RESTART, _ALL),
    _Row("pools.*.role", Reload.RESTART, _ENGINES),
    # Read by nobody but the pools, where whatever it changes shows again.
    *(_Row(f"models.*.engine.extra.{name}", Reload.RESTART, _FRONTS) for name in READS_MODEL),
    _Row("models.*.engine.**", Reload.LIVE),
    # Ingresses are replaced with the pools: their API servers are started for one revision.
    _Row("models.*.revision", Reload.ROLLING, _DATA_PATH),
    *(_Row(f"models.*.api.{name}", Reload.RESTART, _DATA_PATH) for name in READS_MODEL),
    _Row("models.*.api.*", Reload.RESTART, _FRONTS),
    # A request must not begin on one model and end on another.
    _Row("models.**", Reload.RESTART, _DATA_PATH),
    # Each request keeps what held when it came.
    _Row("transfer.early_first_token", Reload.LIVE),
    _Row("transfer.probe.interval", Reload.RESTART, _FRONTS),
    # Both ends of a handoff must agree about it, at any time.
    _Row("transfer.**", Reload.RESTART, _DATA_PATH),
    # The controller keeps as many ingresses as there may be.
    _Row("server.replicas.*", Reload.RESTART, (Part.INGRESS, Part.CONTROLLER)),
    _Row("server.**", Reload.RESTART, _FRONTS),
    # Engines and API servers look for their models there when they start.
    _Row("cluster.model_cache.path", Reload.ROLLING, _DATA_PATH),
    # Of pods, which are made anew.
    _Row("cluster.model_cache.*", Reload.RESTART, _DATA_PATH),
    # Both stay on the node that it says.
    _Row("cluster.**", Reload.RESTART, (Part.INGRESS, Part.CONTROLLER)),
    _Row("observability.**", Reload.RESTART, _ALL),
    # The front reads it when it starts.
    _Row("security.**", Reload.RESTART, _FRONTS),
)
"""By path, first match; `*` is one name, `**` any number of them."""

_LAYOUTS = (
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
    born_or_gone = old.pools.keys() ^ new.pools.keys()
    changes = []
    for path in _in_order(before, after):
        was, is_now = before.get(path), after.get(path)
        if was == is_now:
            continue
        reload = reload_class(path, new)
        if path[0] == "pools" and path[1] in born_or_gone:
            reload = Reload.RESTART  # every ingress follows the pools that it was started with
        if _is_secret(path):
            was, is_now = (text and "(not shown)" for text in (was, is_now))
        changes.append(Change(path=path, old=was, new=is_now, reload=reload))
    return tuple(sorted((*changes, *_moved_classes(old, new)), key=_section_number))


def _section_number(change: Change) -> int:
    return list(fields_of(DeploymentConfig)).index(change.path[0])


def _moved_classes(old: DeploymentConfig, new: DeploymentConfig) -> Iterator[Change]:
    """The order of classes, where it is another: of those whose condition holds the first counts.

    Of all mappings it is the only one whose order says anything.
    """
    was, is_now = (tuple(one.slo.classes) for one in (old, new))
    if [name for name in was if name in is_now] != [name for name in is_now if name in was]:
        path = ("slo", "classes")
        yield Change(
            path=path, old=", ".join(was), new=", ".join(is_now), reload=reload_class(path, new)
        )


def changes_layout(changes: Iterable[Change]) -> bool:
    """Whether replicas before and after cannot hand KV blocks to each other."""
    return any(matches(one.path, pattern) for one in changes for pattern in _LAYOUTS)


def reload_class(path: Path, config: DeploymentConfig | None = None) -> Reload:
    """What a change of this key takes, in most deployments or in the one that is given.

    Raises:
        LookupError: nobody has said; a test asks for every key of the schema.
    """
    return _row(path, config).reload


def elsewhere(path: Path) -> Mapping[str, Reload]:
    """What a change of this key takes in some deployments only, by which these are, in words."""
    return {row.where.words: row.reload for row in _rows(path) if row.where is not None}


def built_from(config: DeploymentConfig, part: Part, *, pool: str | None = None) -> dict[str, str]:
    """All that a process is built from, and keeps until it is replaced: by key, its value.

    Of replicas those of one `pool`: other pools, and models of others, are no business of theirs.
    """
    model = None if pool is None else config.pools[pool].model
    mine = {"pools": pool, "models": model}
    return {
        format_path(path): value
        for path, value in leaves(config)
        if part in _row(path, config).built and mine.get(path[0]) in {None, path[1]}
    }


def _row(path: Path, config: DeploymentConfig | None) -> _Row:
    for row in _rows(path):
        if row.where is None or (config is not None and row.where.holds(config)):
            return row
    raise LookupError(f"no reload class for {format_path(path)}")


@functools.lru_cache(maxsize=4096)
def _rows(path: Path) -> tuple[_Row, ...]:
    return tuple(row for row in _ROWS if row.names(path))


def leaves(config: DeploymentConfig) -> Iterator[tuple[Path, str]]:
    """Each key with its value as it would stand in the file; empty sections have none."""
    for path, field, value in each(config):
        yield path, flow(plain_value(field, value))


def _in_order(before: Mapping[Path, str], after: Mapping[Path, str]) -> list[Path]:
    """All paths of both, what only one has beside what it stands near to."""
    place = {path: index for index, path in enumerate(before)}
    last = -1
    for path in after:
        last = place.setdefault(path, last)
    return sorted(place, key=place.__getitem__)  # equal places stay in the order they came in


def _is_secret(path: Path) -> bool:
    """Whether a value must not be shown: raw engine arguments may hold anything.

    Elsewhere secrets cannot be written but as the name of a variable or a file.
    """
    return is_raw(path) and any(is_secret_name(key) for key in path)
