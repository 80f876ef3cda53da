"""Which LoRA adapters were added to the models of a running deployment, and which may be.

Theory of operation. A registry is a value with a version; each change gives the next version. Its
keeper (the controller, in the cluster's store) lets only one writer have a version.

Every load has a number, and in the fleet an adapter goes by its *key*, `<name>@<number>`: engines
and prefix indexes name KV blocks after it. So a name that is loaded again from elsewhere never
finds blocks that were computed with other weights, and requests under way end with the weights that
they began with. An adapter that is unloaded is *draining* until no request needs it; new requests
do not find it, replicas still do.

The configuration file comes first: a name that the file has, too, is the file's.
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
_KEY_SEPARATOR = "@"
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
    """The adapters that may be added to one model."""

    max: int
    """Adapters at a time; 0: none."""
    max_per_tenant: int | None = None
    """Of them, of one tenant; None: as many as there may be."""
    paths: tuple[str, ...] = ()
    """Folders, and owners on a hub with a slash behind (`acme/`), in which they must lie."""
    reserved_names: frozenset[str] = frozenset()
    """Names of models, and of adapters in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A client's order to load an adapter."""

    name: str
    source: str
    tenant: str
    model: str | None = None
    """Over which model; None where there is one only."""
    in_place: bool = False
    """Whether it may replace one of its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRejection:
    """Why a change is not made, with the HTTP status that says so."""

    status: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRegistry:
    """The adapters of a deployment that no file names."""

    version: int = 0
    adapters: tuple[RuntimeAdapter, ...] = ()

    @property
    def draining(self) -> tuple[RuntimeAdapter, ...]:
        """Those that are being unloaded."""
        return tuple(adapter for adapter in self.adapters if adapter.draining)

    def find(self, name: str) -> RuntimeAdapter | None:
        """The adapter that new requests for a name get; None: there is none."""
        return next(
            (adapter for adapter in self.adapters if adapter.name == name and not adapter.draining),
            None,
        )


RulesByModel: TypeAlias = Mapping[str, AdapterRules]
"""By model."""


def adapter_key(name: str, number: int) -> str:
    """How the fleet calls the load of an adapter that has this number."""
    return f"{name}{_KEY_SEPARATOR}{number}"


def load_adapter(
    registry: AdapterRegistry, request: LoadRequest, rules: RulesByModel
) -> AdapterRegistry | AdapterRejection:
    """The registry with one adapter more, or why there is none."""
    model = _resolve_model(request, rules)
    if isinstance(model, AdapterRejection):
        return model
    source = _resolve_source(request.source, rules[model])
    if isinstance(source, AdapterRejection):
        return source
    current = registry.find(request.name)
    rejection = _check_name(request, current, rules) or _check_quota(
        registry, replace(request, model=model), current, rules[model]
    )
    if rejection is not None:
        return rejection
    number = registry.version + 1
    existing = (
        replace(adapter, draining=True) if adapter is current else adapter
        for adapter in registry.adapters
    )
    added = RuntimeAdapter(
        name=request.name, model=model, source=source, tenant=request.tenant, number=number
    )
    return AdapterRegistry(version=number, adapters=(*existing, added))


def unload_adapter(
    registry: AdapterRegistry, name: str, rules: RulesByModel
) -> AdapterRegistry | AdapterRejection:
    """The registry with an adapter draining, or why it is not."""
    adapter = registry.find(name)
    if adapter is None:
        if any(name in rule.reserved_names for rule in rules.values()):
            reason = (
                f"adapter {name!r} is in the configuration file; remove it there and apply that"
            )
            return AdapterRejection(status=400, reason=reason)
        return AdapterRejection(status=404, reason=f"The lora adapter {name!r} cannot be found.")
    adapters = (
        replace(other, draining=True) if other is adapter else other for other in registry.adapters
    )
    return AdapterRegistry(version=registry.version + 1, adapters=tuple(adapters))


def remove_drained(registry: AdapterRegistry, keys: Iterable[str]) -> AdapterRegistry:
    """The registry without adapters that have drained; itself where it has none of them."""
    drained_keys = {adapter.key for adapter in registry.draining} & set(keys)
    if not drained_keys:
        return registry
    adapters = tuple(adapter for adapter in registry.adapters if adapter.key not in drained_keys)
    return AdapterRegistry(version=registry.version + 1, adapters=adapters)


def requestable_adapters(
    registry: AdapterRegistry, model: str, rules: RulesByModel
) -> dict[str, RuntimeAdapter]:
    """The names that new requests for a model may use beyond the file's."""
    return {
        adapter.name: adapter
        for adapter in registry.adapters
        if adapter.model == model
        and not adapter.draining
        and _unserved_reason(adapter, rules) is None
    }


def replica_adapters(registry: AdapterRegistry, model: str, rules: RulesByModel) -> dict[str, str]:
    """Where replicas of a model find each adapter, by its key; those that drain as well."""
    model_rules = rules.get(model)
    if model_rules is None or not model_rules.max:
        return {}
    return {adapter.key: adapter.source for adapter in registry.adapters if adapter.model == model}


def unserved_adapters(
    registry: AdapterRegistry, rules: RulesByModel
) -> Iterator[tuple[RuntimeAdapter, str]]:
    """The adapters that are kept and yet not served, and why."""
    for adapter in registry.adapters:
        reason = None if adapter.draining else _unserved_reason(adapter, rules)
        if reason is not None:
            yield adapter, reason


def _unserved_reason(adapter: RuntimeAdapter, rules: RulesByModel) -> str | None:
    if adapter.model not in rules:
        return f"model {adapter.model!r} is no longer in the configuration file"
    if not rules[adapter.model].max:
        return f"models.{adapter.model}.runtime_adapters.max is 0 now"
    if adapter.name in reserved_names(rules):
        return "the configuration file has that name, too, which counts"
    return None


def reserved_names(rules: RulesByModel) -> frozenset[str]:
    """Every name that the file gives to a model or an adapter."""
    return frozenset(name for rule in rules.values() for name in rule.reserved_names)


def _resolve_model(request: LoadRequest, rules: RulesByModel) -> str | AdapterRejection:
    names = ", ".join(sorted(rules))
    if request.model is None and len(rules) > 1:
        reason = f"'base_model_name' is needed, for there are several models: {names}"
        return AdapterRejection(status=400, reason=reason)
    model = next(iter(rules)) if request.model is None else request.model
    if model not in rules:
        return AdapterRejection(
            status=404, reason=f"model {model!r} is not served; there are {names}"
        )
    if not rules[model].max:
        reason = (
            f"model {model!r} takes no adapters while it serves;"
            f" set models.{model}.runtime_adapters.max and .paths, and restart"
        )
        return AdapterRejection(status=400, reason=reason)
    return model


def _resolve_source(source: str, rules: AdapterRules) -> str | AdapterRejection:
    """The source in its shortest form, where it lies in a place that is allowed."""
    if len(source) > MAX_SOURCE_CHARS or not source.isprintable():
        reason = f"'lora_path' is no path of at most {MAX_SOURCE_CHARS} printable characters"
        return AdapterRejection(status=400, reason=reason)
    is_path = source.startswith("/")
    if not is_path and not _HUB_ID.fullmatch(source):
        reason = f"'lora_path' is {source!r}, expected an absolute path or a hub id (OWNER/NAME)"
        return AdapterRejection(status=400, reason=reason)
    normalized = posixpath.normpath(source) if is_path else source
    if not any(is_inside(normalized, place) for place in rules.paths):
        reason = (
            f"'lora_path' is {normalized!r}, which is in none of the places that"
            f" runtime_adapters.paths allows: {', '.join(rules.paths)}"
        )
        return AdapterRejection(status=403, reason=reason)
    return normalized


def is_inside(source: str, allowed_prefix: str) -> bool:
    """Whether a path lies in a folder, or a hub id belongs to an owner."""
    folder = allowed_prefix.rstrip("/") + "/"
    return source.startswith(folder) and len(source) > len(folder)


def _check_name(
    request: LoadRequest, current: RuntimeAdapter | None, rules: RulesByModel
) -> AdapterRejection | None:
    if not _NAME.fullmatch(request.name):
        reason = (
            f"'lora_name' is {request.name[:140]!r}, expected at most 128 letters, digits, '.',"
            " '_', '/' and '-', of which the first is a letter or digit"
        )
        return AdapterRejection(status=400, reason=reason)
    if request.name in reserved_names(rules):
        reason = f"the name {request.name!r} is taken by the configuration file; choose another"
        return AdapterRejection(status=400, reason=reason)
    if current is not None and not request.in_place:
        reason = (
            f"The lora adapter {request.name!r} has already been loaded. If you want to load the"
            " adapter in place, set 'load_inplace' to True."
        )
        return AdapterRejection(status=400, reason=reason)
    return None


def _check_quota(
    registry: AdapterRegistry,
    request: LoadRequest,
    current: RuntimeAdapter | None,
    rules: AdapterRules,
) -> AdapterRejection | None:
    """Why there are enough already; an adapter that drains, or is replaced, does not count."""
    others = [
        adapter for adapter in registry.adapters if not adapter.draining and adapter is not current
    ]
    of_model = [other for other in others if other.model == request.model]
    if len(of_model) >= rules.max:
        return _limit_reached(f"model {request.model!r}", of_model, "max")
    of_tenant = [adapter for adapter in of_model if adapter.tenant == request.tenant]
    if rules.max_per_tenant is not None and len(of_tenant) >= rules.max_per_tenant:
        return _limit_reached(f"tenant {request.tenant!r}", of_tenant, "max_per_tenant")
    return None


def _limit_reached(owner: str, adapters: Sequence[RuntimeAdapter], key: str) -> AdapterRejection:
    reason = (
        f"{owner} has {len(adapters)} adapters that were added while it serves, as many as"
        f" runtime_adapters.{key} allows; unload one first"
    )
    return AdapterRejection(status=400, reason=reason)
