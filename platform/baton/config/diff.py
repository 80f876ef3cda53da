"""What differs between two configurations, and what it takes for each difference to hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from baton.config.fields import Anything, Environment, Field, Labels, Named, Nested, fields_of
from baton.config.render import flow, plain_value
from baton.config.schema import DeploymentConfig
from baton.config.tree import Path, format_path, is_raw, is_secret_name


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


_CLASSES: tuple[tuple[str, Reload], ...] = (
    ("version", Reload.RESTART),
    ("slo.**", Reload.LIVE),
    ("tenants.**", Reload.LIVE),
    ("autoscaler.**", Reload.LIVE),
    # Which engines report what they cache is settled when they start, and so is what an ingress
    # keeps of it.
    ("router.index", Reload.RESTART),
    ("router.**", Reload.LIVE),
    # The front and every replica are given time for the longest stream when they start.
    ("admission.timeouts.total", Reload.RESTART),
    ("admission.**", Reload.LIVE),
    ("pools.*.replicas.*", Reload.POOL_SIZE),
    # Only what usage is reckoned with.
    ("pools.*.resources.price_per_hour", Reload.LIVE),
    ("pools.*.resources.*", Reload.ROLLING),
    ("pools.*.parallel.*", Reload.ROLLING),
    ("pools.*.placement.**", Reload.ROLLING),
    ("pools.*.env.*", Reload.ROLLING),
    ("pools.*.engine.kind", Reload.RESTART),
    ("pools.*.engine.**", Reload.ROLLING),
    ("pools.*.model", Reload.RESTART),
    ("pools.*.role", Reload.RESTART),
    # Read by nobody but the pools, where whatever it changes shows again.
    ("models.*.engine.**", Reload.LIVE),
    # Ingresses are replaced with the pools: their API servers are started for one revision.
    ("models.*.revision", Reload.ROLLING),
    # A request must not begin on one model and end on another.
    ("models.**", Reload.RESTART),
    # Each request keeps what held when it came.
    ("transfer.early_first_token", Reload.LIVE),
    # Both ends of a handoff must agree about it, at any time.
    ("transfer.**", Reload.RESTART),
    ("server.**", Reload.RESTART),
    ("cluster.**", Reload.RESTART),
    ("observability.**", Reload.RESTART),
    # The front reads it when it starts.
    ("security.**", Reload.RESTART),
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
        reload = reload_class(path)
        if path[0] == "pools" and path[1] in born_or_gone:
            reload = Reload.RESTART  # every ingress follows the pools that it was started with
        if _is_secret(path):
            was, is_now = (text and "(not shown)" for text in (was, is_now))
        changes.append(Change(path=path, old=was, new=is_now, reload=reload))
    return tuple(changes)


def changes_layout(changes: Iterable[Change]) -> bool:
    """Whether replicas before and after cannot hand KV blocks to each other."""
    patterns = [tuple(pattern.split(".")) for pattern in _LAYOUTS]
    return any(_matches(one.path, pattern) for one in changes for pattern in patterns)


def reload_class(path: Path) -> Reload:
    """What a change of this key takes.

    Raises:
        LookupError: nobody has said; a test asks for every key of the schema.
    """
    for pattern, reload in _CLASSES:
        if _matches(path, tuple(pattern.split("."))):
            return reload
    raise LookupError(f"no reload class for {format_path(path)}")


def _matches(path: Path, pattern: tuple[str, ...]) -> bool:
    if pattern[-1] == "**":
        fixed = pattern[:-1]
        return len(path) >= len(fixed) and _matches_fixed(path[: len(fixed)], fixed)
    return len(path) == len(pattern) and _matches_fixed(path, pattern)


def _matches_fixed(path: Path, pattern: tuple[str, ...]) -> bool:
    return all(want in ("*", key) for key, want in zip(path, pattern, strict=True))


def leaves(config: DeploymentConfig) -> Iterator[tuple[Path, str]]:
    """Each key with its value as it would stand in the file; empty sections have none."""
    yield from _leaves(config, ())


def _leaves(section: object, at: Path) -> Iterator[tuple[Path, str]]:
    for key, field in fields_of(type(section)).items():
        yield from _of_field(field, getattr(section, field.attribute), (*at, key))


def _of_field(field: Field, value: object, path: Path) -> Iterator[tuple[Path, str]]:
    match field.kind, value:
        case Nested(), None:
            return
        case Nested(), _:
            yield from _leaves(value, path)
        case Named(), Mapping():
            for name, section in value.items():
                yield from _leaves(section, (*path, name))
        case ((Anything() | Environment() | Labels()), Mapping()):
            written = plain_value(field, value)
            assert isinstance(written, Mapping), "mappings are written as mappings"
            for name, one in written.items():
                yield (*path, name), flow(one)
        case _:
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
