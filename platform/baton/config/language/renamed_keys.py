"""Deprecated keys: a value under an old name moves to the new name, with a warning.

Each layer (a file, a variable, a `--set` option) is converted before it overlays others, so that a
later layer wins whichever name it uses. Old and new name together in one layer, or among the
variables, are an error: the intended value is unclear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.config.language.tree import (
    Entry,
    Finding,
    Node,
    Path,
    Scalar,
    Section,
    describe_node,
    format_path,
)


@dataclass(frozen=True, slots=True)
class RenamedKey:
    """One key, or a section with all its keys."""

    old: str
    """The former path; `*` is any one name."""
    new: str
    """The new path; each `*` stands for the name at the same `*` of `old`."""
    convert: Callable[[Node], Node] | None = None
    """Converts the value; None keeps it."""


def _renamed_values(**new_values: str) -> Callable[[Node], Node]:
    """A conversion that renames these values and keeps others."""

    def convert(node: Node) -> Node:
        if isinstance(node, Scalar) and node.value in new_values:
            value = new_values[str(node.value)]
            return Scalar(value, node.origin, value)
        return node

    return convert


def _renamed_in_engines(old: str, new: str) -> tuple[RenamedKey, ...]:
    """An engine option of models, of the only model, and of pools."""
    owners = ("models.*", "model", "pools.*")
    return tuple(RenamedKey(f"{owner}.engine.{old}", f"{owner}.engine.{new}") for owner in owners)


RENAMED_KEYS: tuple[RenamedKey, ...] = (
    RenamedKey("admission.recovery.silence", "recovery.heartbeat_timeout"),
    RenamedKey("admission.recovery.failures", "recovery.circuit_breaker.failure_threshold"),
    RenamedKey("admission.recovery.pause", "recovery.circuit_breaker.open_duration"),
    RenamedKey("admission.recovery.retries", "recovery.retry_budget.ratio"),
    RenamedKey("admission.recovery.hedge", "recovery.hedging.latency_multiple"),
    RenamedKey("admission.recovery", "recovery"),
    RenamedKey("admission.margin", "admission.slo_safety_margin"),
    RenamedKey("admission.engine_queue", "admission.max_engine_queue_delay"),
    RenamedKey("admission.max_queue", "admission.max_queued_requests"),
    RenamedKey("admission.max_queue_wait", "admission.queue_timeout"),
    RenamedKey("admission.max_cold_start_wait", "admission.cold_start_timeout"),
    RenamedKey("autoscaler.up", "autoscaler.scale_up"),
    RenamedKey("autoscaler.down", "autoscaler.scale_down"),
    RenamedKey("pools.*.replicas.start", "pools.*.replicas.initial"),
    *_renamed_in_engines("decode_step_tokens", "max_num_batched_tokens_while_decoding"),
    *_renamed_in_engines("sim.prefill_token_token", "sim.prefill_quadratic"),
    *_renamed_in_engines("sim.decode_kv_relief", "sim.decode_kv_quadratic"),
    RenamedKey("router.deflect.streams", "router.overflow.decode_on_prefill"),
    RenamedKey("router.deflect.prompts", "router.overflow.prefill_on_decode"),
    RenamedKey("router.deflect", "router.overflow"),
    RenamedKey(
        "server.front", "server.listener", _renamed_values(serve="ray-serve", gate="ingress")
    ),
    RenamedKey("server.frontend", "server.api_server"),
    RenamedKey("slo.classes.*.when", "slo.classes.*.match"),
)
"""Keys with an accepted old name; keys of a section precede the section itself."""


def with_new_names(
    layer: Section,
    *,
    table: Sequence[RenamedKey],
    warnings: list[Finding],
    findings: list[Finding],
) -> Section:
    """The layer without old names.

    Args:
        layer: one file, variable or option.
        table: the keys with an old name.
        warnings: receives each old name in the layer.
        findings: receives each key under both names; the value under the new name stays.
    """
    for row in table:
        for old, entry in list(_matches(layer, tuple(row.old.split(".")), ())):
            new = _new_path(row, old)
            if isinstance(entry.node, Section) and new[: len(old)] == old:
                continue  # a section instead of a value is the new form
            node = entry.node if row.convert is None else row.convert(entry.node)
            shown = format_path(new)
            if node is not entry.node and isinstance(node, Scalar):
                shown += f": {describe_node(node, new)}"
            warnings.append(Finding(entry.origin, old, f"deprecated, use {shown}"))
            moved = Section({new[-1]: Entry(node, entry.origin)}, entry.origin)
            for key in reversed(new[:-1]):
                moved = Section({key: Entry(moved, entry.origin)}, entry.origin)
            both: list[tuple[Path, Entry, Entry]] = []
            layer = _joined(_without(layer, old), moved, (), both)
            layer = _pruned(layer, old[:-1])
            for path, under_old, under_new in both:
                what = (
                    f"deprecated, and {format_path(path)} is given at {under_new.origin}, keep one"
                )
                findings.append(Finding(under_old.origin, (*old, *path[len(new) :]), what))
    return layer


def _new_path(row: RenamedKey, old: Path) -> Path:
    chosen = (key for key, part in zip(old, row.old.split("."), strict=True) if part == "*")
    return tuple(next(chosen) if part == "*" else part for part in row.new.split("."))


def _matches(section: Section, pattern: Path, at: Path) -> Iterator[tuple[Path, Entry]]:
    for key, entry in section.entries.items():
        if pattern[0] not in ("*", key):
            continue
        if len(pattern) == 1:
            yield (*at, key), entry
        elif isinstance(entry.node, Section):
            yield from _matches(entry.node, pattern[1:], (*at, key))


def _without(section: Section, path: Path) -> Section:
    entries = dict(section.entries)
    entry = entries.pop(path[0])
    if len(path) > 1 and isinstance(entry.node, Section):
        inner = Entry(_without(entry.node, path[1:]), entry.origin)
        entries = {**section.entries, path[0]: inner}  # in place, because order may matter
    return Section(entries, section.origin)


def _pruned(section: Section, path: Path) -> Section:
    """Without empty sections on this path."""
    entry = section.entries.get(path[0]) if path else None
    if entry is None or not isinstance(entry.node, Section):
        return section
    inner = _pruned(entry.node, path[1:])
    entries = {**section.entries, path[0]: Entry(inner, entry.origin)}
    if not inner.entries:
        del entries[path[0]]
    return Section(entries, section.origin)


def _joined(
    section: Section, moved: Section, at: Path, both: list[tuple[Path, Entry, Entry]]
) -> Section:
    """`section` with the moved keys; keys in both keep their value and are added to `both`."""
    entries = dict(section.entries)
    for key, entry in moved.entries.items():
        path, found = (*at, key), entries.get(key)
        if found is None or _says_nothing(found.node, entry.node):
            entries[key] = entry
        elif isinstance(found.node, Section) and isinstance(entry.node, Section):
            entries[key] = Entry(_joined(found.node, entry.node, path, both), found.origin)
        else:
            both.append((path, entry, found))
    return Section(entries, section.origin)


def _says_nothing(found: Node, moved: Node) -> bool:
    """Whether `found` is an empty section, or null instead of a section."""
    if isinstance(found, Section):
        return not found.entries
    return isinstance(moved, Section) and isinstance(found, Scalar) and found.value is None
