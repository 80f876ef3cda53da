"""Which LoRA adapters were added to the models of a running deployment, and which may be.

Theory of operation. A registry is a value with a version; each change gives the next one. Whoever
keeps it (the controller, in the cluster's store) lets only one writer have a version.

Every load has a number, and in the fleet an adapter goes by its *key*, `<name>@<number>`: engines
and prefix indexes name KV blocks after it. So a name that is loaded again from elsewhere never
finds blocks that were computed with other weights, and requests under way end with the weights that
they began with. An adapter that is unloaded is *draining* until no request needs it; new requests
do not find it, replicas still do.

What the configuration file says comes first: a name that the file has, too, is the file's.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
MAX_SOURCE_CHARS = 1024
_MARK = "@"
"""Between an adapter's name and its number; in no name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeAdapter:
    """One adapter that was added while a deployment ran."""

    name: str
    model: str
    source: str
    """A path that every node with an engine has, or a hub id."""
    tenant: str
    """Whose key added it."""
    number: int
    """Of the load; no two loads of a deployment share one."""
    draining: bool = False

    @property
    def key(self) -> str:
        """How the fleet calls it."""
        return adapter_key(self.name, self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRules:
    """What may be added to one model."""

    limit: int
    """Adapters at a time; 0: none."""
    limit_per_tenant: int | None = None
    """Of them, of one tenant; None: as many as there may be."""
    places: tuple[str, ...] = ()
    """Folders, and owners on a hub with a slash behind (`acme/`), in which they must lie."""
    taken: frozenset[str] = frozenset()
    """Names of models, and of adapters in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """What a client asks for."""

    name: str
    source: str
    tenant: str
    model: str | None = None
    """Over which model; None where there is one only."""
    in_place: bool = False
    """Whether it may replace one of its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRefusal:
    """Why a change is not made, with the HTTP status that says so."""

    status: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """The adapters of a deployment that no file names."""

    version: int = 0
    adapters: tuple[RuntimeAdapter, ...] = ()

    @property
    def draining(self) -> tuple[RuntimeAdapter, ...]:
        """Those that are being unloaded."""
        return tuple(one for one in self.adapters if one.draining)

    def find(self, name: str) -> RuntimeAdapter | None:
        """The one that new requests for a name get; None: there is none."""
        return next((one for one in self.adapters if one.name == name and not one.draining), None)


Rules: TypeAlias = Mapping[str, AdapterRules]
"""By model."""


def adapter_key(name: str, number: int) -> str:
    """How the fleet calls the load of an adapter that has this number."""
    return f"{name}{_MARK}{number}"


def loaded(registry: Registry, order: LoadOrder, rules: Rules) -> Registry | AdapterRefusal:
    """The registry with one adapter more, or why there is none."""
    model = _model_of(order, rules)
    if isinstance(model, AdapterRefusal):
        return model
    source = _place_of(order.source, rules[model])
    if isinstance(source, AdapterRefusal):
        return source
    before = registry.find(order.name)
    refusal = _name_refusal(order, before, rules) or _quota_refusal(
        registry, replace(order, model=model), before, rules[model]
    )
    if refusal is not None:
        return refusal
    number = registry.version + 1
    kept = (replace(one, draining=True) if one is before else one for one in registry.adapters)
    added = RuntimeAdapter(
        name=order.name, model=model, source=source, tenant=order.tenant, number=number
    )
    return Registry(version=number, adapters=(*kept, added))


def unloaded(registry: Registry, name: str, rules: Rules) -> Registry | AdapterRefusal:
    """The registry with an adapter draining, or why it is not."""
    found = registry.find(name)
    if found is None:
        if any(name in one.taken for one in rules.values()):
            why = f"adapter {name!r} is in the configuration file; remove it there and apply that"
            return AdapterRefusal(status=400, why=why)
        return AdapterRefusal(status=404, why=f"The lora adapter {name!r} cannot be found.")
    adapters = (replace(one, draining=True) if one is found else one for one in registry.adapters)
    return Registry(version=registry.version + 1, adapters=tuple(adapters))


def without(registry: Registry, keys: Iterable[str]) -> Registry:
    """The registry without adapters that have drained; itself where it has none of them."""
    gone = {one.key for one in registry.draining} & set(keys)
    if not gone:
        return registry
    adapters = tuple(one for one in registry.adapters if one.key not in gone)
    return Registry(version=registry.version + 1, adapters=adapters)


def offered(registry: Registry, model: str, rules: Rules) -> dict[str, RuntimeAdapter]:
    """What new requests for a model may name besides what the file has, by name."""
    return {
        one.name: one
        for one in registry.adapters
        if one.model == model and not one.draining and _hindrance(one, rules) is None
    }


def needed(registry: Registry, model: str, rules: Rules) -> dict[str, str]:
    """Where replicas of a model find each adapter, by its key; those that drain as well."""
    own = rules.get(model)
    if own is None or not own.limit:
        return {}
    return {one.key: one.source for one in registry.adapters if one.model == model}


def hindrances(registry: Registry, rules: Rules) -> Iterator[tuple[RuntimeAdapter, str]]:
    """The adapters that are kept and yet not served, and why."""
    for one in registry.adapters:
        why = None if one.draining else _hindrance(one, rules)
        if why is not None:
            yield one, why


def _hindrance(one: RuntimeAdapter, rules: Rules) -> str | None:
    if one.model not in rules:
        return f"model {one.model!r} is no longer in the configuration file"
    if not rules[one.model].limit:
        return f"models.{one.model}.runtime_adapters.max is 0 now"
    if one.name in taken_names(rules):
        return "the configuration file has that name, too, which counts"
    return None


def taken_names(rules: Rules) -> frozenset[str]:
    """Every name that the file gives to a model or an adapter."""
    return frozenset(name for one in rules.values() for name in one.taken)


def _model_of(order: LoadOrder, rules: Rules) -> str | AdapterRefusal:
    names = ", ".join(sorted(rules))
    if order.model is None and len(rules) > 1:
        why = f"'base_model_name' is needed, for there are several models: {names}"
        return AdapterRefusal(status=400, why=why)
    model = next(iter(rules)) if order.model is None else order.model
    if model not in rules:
        return AdapterRefusal(status=404, why=f"model {model!r} is not served; there are {names}")
    if not rules[model].limit:
        why = (
            f"model {model!r} takes no adapters while it serves;"
            f" set models.{model}.runtime_adapters.max and .paths, and restart"
        )
        return AdapterRefusal(status=400, why=why)
    return model


def _place_of(source: str, rules: AdapterRules) -> str | AdapterRefusal:
    """The source in its shortest form, where it lies in a place that is allowed."""
    if len(source) > MAX_SOURCE_CHARS or not source.isprintable():
        why = f"'lora_path' is no path of at most {MAX_SOURCE_CHARS} printable characters"
        return AdapterRefusal(status=400, why=why)
    is_path = source.startswith("/")
    if not is_path and not _HUB_ID.fullmatch(source):
        why = f"'lora_path' is {source!r}, wanted an absolute path or a hub id (OWNER/NAME)"
        return AdapterRefusal(status=400, why=why)
    plain = posixpath.normpath(source) if is_path else source
    if not any(lies_in(plain, place) for place in rules.places):
        why = (
            f"'lora_path' is {plain!r}, which is in none of the places that"
            f" runtime_adapters.paths allows: {', '.join(rules.places)}"
        )
        return AdapterRefusal(status=403, why=why)
    return plain


def lies_in(source: str, place: str) -> bool:
    """Whether a path lies in a folder, or a hub id belongs to an owner."""
    folder = place.rstrip("/") + "/"
    return source.startswith(folder) and len(source) > len(folder)


def _name_refusal(
    order: LoadOrder, before: RuntimeAdapter | None, rules: Rules
) -> AdapterRefusal | None:
    if not _NAME.fullmatch(order.name):
        why = (
            f"'lora_name' is {order.name[:140]!r}, wanted at most 128 letters, digits, '.', '_',"
            " '/' and '-', of which the first is a letter or digit"
        )
        return AdapterRefusal(status=400, why=why)
    if order.name in taken_names(rules):
        why = f"the name {order.name!r} is taken by the configuration file; choose another"
        return AdapterRefusal(status=400, why=why)
    if before is not None and not order.in_place:
        why = (
            f"The lora adapter {order.name!r} has already been loaded. If you want to load the"
            " adapter in place, set 'load_inplace' to True."
        )
        return AdapterRefusal(status=400, why=why)
    return None


def _quota_refusal(
    registry: Registry, order: LoadOrder, before: RuntimeAdapter | None, rules: AdapterRules
) -> AdapterRefusal | None:
    """Why there are enough already; one that drains, or is replaced, does not count."""
    others = [one for one in registry.adapters if not one.draining and one is not before]
    of_model = [one for one in others if one.model == order.model]
    if len(of_model) >= rules.limit:
        return _full(f"model {order.model!r}", of_model, "max")
    of_tenant = [one for one in of_model if one.tenant == order.tenant]
    if rules.limit_per_tenant is not None and len(of_tenant) >= rules.limit_per_tenant:
        return _full(f"tenant {order.tenant!r}", of_tenant, "max_per_tenant")
    return None


def _full(whose: str, there: Sequence[RuntimeAdapter], key: str) -> AdapterRefusal:
    why = (
        f"{whose} has {len(there)} adapters that were added while it serves, as many as"
        f" runtime_adapters.{key} allows; unload one first"
    )
    return AdapterRefusal(status=400, why=why)
