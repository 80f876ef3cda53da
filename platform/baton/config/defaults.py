"""Defaults that depend on other keys of the configuration.

They are applied to the tree before it is built, so that every value keeps its origin.

- the short form `model:`, and the only model of pools
- engine options that pools inherit
- counts that default to other counts
- values that follow from the policy, and caches of tenants with keys
"""

from __future__ import annotations

from collections.abc import Callable

from baton.config.language.tree import DefaultOrigin, Entry, Finding, Node, Scalar, Section
from baton.config.layers import merge_sections
from baton.config.schema.deployment import EngineConfig
from baton.config.schema.routing import Policy
from baton.domain.tenant import CacheSharing
from baton.policy.placement.port import Disaggregate

SHORT_FORM_NAME = "model"
"""Name of a model without `name` and `source`."""


def apply_defaults(root: Section, findings: list[Finding]) -> tuple[Section, str | None]:
    """The tree with these defaults, and the model's name if it is in the short form."""
    short_name: str | None = None
    if "model" in root.entries:
        root, short_name = _expand_short_form(root, findings)
    root = _map_sections(root, "models", _default_sim)
    models = _section(root, "models")
    root = _map_sections(root, "pools", lambda pool: _apply_pool_defaults(pool, models))
    root = _map_sections(root, "tenants", _default_cache)
    router = _section(root, "router")
    if router is not None:
        root = _set_key(root, "router", _default_disaggregate(router))
    server = _section(root, "server")
    if server is not None and (replicas := _section(server, "replicas")) is not None:
        replicas = _default_from_key(replicas, "max", "min")
        root = _set_key(root, "server", _set_key(server, "replicas", replicas))
    return root, short_name


def _expand_short_form(root: Section, findings: list[Finding]) -> tuple[Section, str | None]:
    entry = root.entries["model"]
    entries = {key: value for key, value in root.entries.items() if key != "model"}
    if "models" in entries:
        message = f"both 'model' and 'models' are given, the latter at {entries['models'].origin}"
        findings.append(Finding(entry.origin, ("model",), f"{message}, keep one"))
        return Section(entries, root.origin), None
    node, name = entry.node, SHORT_FORM_NAME
    if isinstance(node, Section):
        source, explicit_name = _text(node, "source"), _text(node, "name")
        name = explicit_name or (source or "").rstrip("/").rpartition("/")[2] or name
        if explicit_name is not None:
            node = Section({k: v for k, v in node.entries.items() if k != "name"}, node.origin)
    models = Section({name: Entry(node, entry.origin)}, entry.origin)
    return Section({**entries, "models": Entry(models, entry.origin)}, root.origin), name


def _apply_pool_defaults(pool: Section, models: Section | None) -> Section:
    names = list(models.entries) if models is not None else []
    if "model" not in pool.entries and len(names) == 1:
        pool = _set_key(pool, "model", Scalar(names[0], DefaultOrigin("the only model"), names[0]))
    model = _section(models, _text(pool, "model") or "") if models is not None else None
    if model is not None and "engine" in model.entries:
        inherited = model.entries["engine"]
        pool_engine = pool.entries.get("engine")
        engine = inherited
        if pool_engine is not None:
            merged = merge_sections(inherited.node, pool_engine.node, EngineConfig)
            engine = Entry(merged, pool_engine.origin)
        pool = Section({**pool.entries, "engine": engine}, pool.origin)
    replicas = _section(pool, "replicas")
    if replicas is not None:
        replicas = _default_from_key(
            _default_from_key(replicas, "initial", "min"), "max", "initial"
        )
        pool = _set_key(pool, "replicas", replicas)
    return _default_sim(pool)


def _default_sim(owner: Section) -> Section:
    """A model or pool; simulated engines get timings even when it has none."""
    engine = _section(owner, "engine")
    if engine is None or _text(engine, "kind") != "sim":
        return owner
    sim = engine.entries.get("sim")
    if sim is not None and not (isinstance(sim.node, Scalar) and sim.node.value is None):
        return owner
    return _set_key(owner, "engine", _set_key(engine, "sim", Section({}, DefaultOrigin())))


def _default_disaggregate(router: Section) -> Section:
    """Only `predicted` supports `auto`; plain policies split every prompt that they can."""
    policy = _text(router, "policy")
    plain = [str(known) for known in Policy if known is not Policy.PREDICTED]
    if "disaggregate" in router.entries or policy not in plain:
        return router
    always = str(Disaggregate.ALWAYS)
    origin = DefaultOrigin(f"policy {policy!r} does not decide about it")
    return _set_key(router, "disaggregate", Scalar(always, origin, always))


def _default_cache(tenant: Section) -> Section:
    """A tenant with keys has its own cache, so that other tenants cannot probe its prompts."""
    if "cache" in tenant.entries or _text(tenant, "keys_file") is None:
        return tenant
    isolated = str(CacheSharing.ISOLATED)
    return _set_key(tenant, "cache", Scalar(isolated, DefaultOrigin("it has keys"), isolated))


def _default_from_key(section: Section, key: str, source_key: str) -> Section:
    """`section` with `key` set to the value of `source_key`, if only the latter is given."""
    entry = section.entries.get(source_key)
    if key in section.entries or entry is None or not isinstance(entry.node, Scalar):
        return section
    if isinstance(entry.node.value, bool) or not isinstance(entry.node.value, int):
        return section
    # A pool may be at zero replicas, but its maximum is at least one.
    count = max(1, entry.node.value) if key == "max" else entry.node.value
    return _set_key(section, key, Scalar(count, DefaultOrigin(f"as {source_key}"), str(count)))


def _section(parent: Section, key: str) -> Section | None:
    entry = parent.entries.get(key)
    return entry.node if entry is not None and isinstance(entry.node, Section) else None


def _text(section: Section, key: str) -> str | None:
    entry = section.entries.get(key)
    if entry is None or not isinstance(entry.node, Scalar):
        return None
    return entry.node.value if isinstance(entry.node.value, str) else None


def _set_key(section: Section, key: str, node: Node) -> Section:
    old_entry = section.entries.get(key)
    origin = old_entry.origin if old_entry is not None else DefaultOrigin()
    return Section({**section.entries, key: Entry(node, origin)}, section.origin)


def _map_sections(root: Section, key: str, change: Callable[[Section], Section]) -> Section:
    parent = _section(root, key)
    if parent is None:
        return root
    entries = {
        name: Entry(change(entry.node), entry.origin) if isinstance(entry.node, Section) else entry
        for name, entry in parent.entries.items()
    }
    return _set_key(root, key, Section(entries, parent.origin))
