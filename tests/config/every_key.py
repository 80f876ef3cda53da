"""Every key of a configuration, each with another value that it may have.

Whoever says something about all keys tries it on these: `all_changes` has, for each key of the
schema, a configuration that can be loaded and one that differs from it in that key. A key that
comes new is among them by itself, or says here what it may be changed to.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

from baton.config import DeploymentConfig
from baton.config.diff import diff
from baton.config.language.fields import (
    EnvVariables,
    Field,
    NamedSections,
    NestedSection,
    NodeLabels,
    RawMapping,
    each,
    fields_of,
)
from baton.config.language.scalars import (
    Boolean,
    Choice,
    Float,
    Integer,
    ListOf,
    Pluggable,
    Quantity,
)
from baton.config.language.tree import (
    Entry,
    FileOrigin,
    ListNode,
    Node,
    Path,
    Scalar,
    Section,
    format_path,
)
from baton.config.language.units import format_quantity
from baton.config.load import _build_config, load_text
from baton.config.write.render import plain_value, to_plain
from baton.domain.errors import ConfigInvalid

Tree = dict[str, object]
_ORIGIN = FileOrigin("every_key", 1, 1)

FULL_CONFIG: Tree = {
    "version": 1,
    "models": {
        "m": {
            "source": "meta-llama/Llama-3.1-8B-Instruct",
            "revision": "one",
            "max_len": 16384,
            "engine": {"block_size": 16, "extra": {"x": 1}},
            "adapters": {"a": {"source": "org/a"}},
            "runtime_adapters": {"max": 4, "max_per_tenant": 2, "paths": ["/adapters"]},
            "api": {"sse_keep_alive_interval": 15},
        }
    },
    "pools": {
        name: {
            "role": role,
            "replicas": {"min": 1, "initial": 2, "max": 4},
            "resources": {"cpus": 2, "gpus": 2, "accelerator": "H100", "memory": "64GiB"},
            "parallel": {"tp": 2},
            "engine": {"extra": {"x": 1}, "max_num_seqs": 64, "max_num_batched_tokens": 4096},
            "placement": {"labels": {"x": "one"}},
            "env": {"x": "1"},
        }
        for name, role in (("p", "prefill"), ("d", "decode"))
    },
    "slo": {
        "default": {"ttft": "1s", "tpot": "50ms", "itl_p99": "1s"},
        "classes": {"c": {"ttft": "5s", "match": "prompt_tokens > 4000"}},
    },
    "autoscaler": {"interval": "2s", "gpu_budget": 16},
    "tenants": {
        "t": {"keys_file": "t.keys", "rate": {"requests": "10/s", "tokens": "10k/s"}},
        "default": {"anonymous": True},
    },
    "transfer": {"env": {"x": "1"}},
    "server": {"replicas": {"max": 3}},
    "cluster": {"model_cache": {"size": "1TiB", "storage_class": "fast"}},
    "security": {"tls": {"cert_file": "a.pem", "key_file": "b.pem"}},
    "observability": {
        "token_file": "token",
        "tracing": {"otlp": "http://one.example:4318"},
    },
}
"""Real engines, and every section that may be left out."""

SIMULATED_CONFIG: Tree = {
    "version": 1,
    "models": {
        "m": {
            "source": "tiny",
            "max_len": 4096,
            "engine": {
                "kind": "sim",
                "block_size": 16,
                "sim": {"kv_blocks": 4096, "decode_kv": "2ms"},
            },
            "adapters": {"a": {"source": "org/a"}},
        }
    },
    "pools": {
        "d": {
            "role": "mixed",
            "replicas": {"min": 0, "initial": 2, "max": 4},
            "resources": {"cpus": 0.1},
            "engine": {"sim": {"eos_probability": 0.1, "decode_kv": "2ms"}},
        }
    },
    "router": {"disaggregate": "never"},
    "autoscaler": {},
}
"""Simulated engines, where keys are about them alone."""

RUST_CONFIG: Tree = {
    "version": 1,
    "models": {"m": {"source": "tiny", "max_len": 4096, "engine": {"kind": "sim"}}},
    "pools": {"p": {"role": "prefill"}, "d": {"role": "decode"}},
    "server": {"api_server": "rust"},
    "tenants": {"t": {"keys_file": "t.keys"}, "default": {"anonymous": True}},
}
"""vLLM's Rust frontend, which takes other things live than the one in Python does."""

TWO_MODELS_CONFIG: Tree = {
    "version": 1,
    "models": {"m": {"source": "tiny", "max_len": 4096}, "n": {"source": "tiny", "max_len": 2048}},
    "pools": {
        "p": {"role": "mixed", "model": "m"},
        "q": {"role": "mixed", "model": "m"},
        "n": {"role": "mixed", "model": "n"},
    },
}
"""Two models."""

_SHARED = ("slo", "router", "autoscaler", "tenants", "admission", "recovery", "transfer", "server")
_BASES: tuple[tuple[Tree, tuple[str, ...]], ...] = (
    (
        FULL_CONFIG,
        ("version", "models.m", "pools.d", *_SHARED, "cluster", "observability", "security"),
    ),
    (SIMULATED_CONFIG, ("models.m.engine", "pools.d", "router", "autoscaler", "transfer")),
    (RUST_CONFIG, ("server", "admission", "slo", "tenants", "router", "observability")),
    (
        TWO_MODELS_CONFIG,
        (
            "models.n",
            "pools.p.model",
            "pools.q.resources",
            "pools.q.parallel",
            "pools.n.engine.kind",
        ),
    ),
)
"""Each with the keys that are changed in it: not all in each, for it takes a while."""

_OTHER_VALUES: Mapping[str, tuple[object, ...]] = {
    "source": ("mistralai/Mistral-7B-v0.3",),
    "revision": ("two",),
    "dtype": ("float32",),
    "gpu_memory_utilization": (0.8,),
    "x": (2, "2"),
    "sse_keep_alive_interval": (20,),
    "paths": (["/others"],),
    "accelerator": ("B200",),
    "model": ("n",),
    "policy": ("predicted",),
    "match": ("prompt_tokens > 77",),
    "keys_file": ("other.keys",),
    "slo": ("c",),
    "classes": (["c"],),
    "anonymous": (False,),
    "bind": ("10.1.0.0/16",),
    "host": ("127.0.0.2",),
    "media_domains": (["media.example"],),
    "node_address": ("10.1.2.3",),
    "address": ("10.1.2.4:6379",),
    "otlp": ("http://collector.example:4318",),
    "token_file": ("other",),
    "cert_file": ("c.pem",),
    "key_file": ("c.pem",),
    "client_ca_file": ("c.pem",),
    "routes": (["chat", "health"],),
    "path": ("/data/models",),
    "claim": ("models",),
    "storage_class": ("slow",),
}
"""What may be written to a key of this name, where its kind of value does not say it, or where not
any other value would change anything."""

_NO_CLAIM: Tree = {"size": None, "storage_class": None}
_COMPANION_CHANGES: Mapping[Path, Tree] = {
    ("models", "*", "engine", "kind"): {"engine": {"sim": {}, "extra": {}}},
    ("pools", "*", "engine", "kind"): {"engine": {"sim": {}, "extra": {}}},
    ("pools", "*", "resources", "gpus"): {"parallel": {"tp": 1}},
    ("pools", "*", "parallel", "tp"): {"resources": {"gpus": 4}},
    ("pools", "*", "parallel", "pp"): {"resources": {"gpus": 4}},
    ("cluster", "model_cache", "path"): _NO_CLAIM,
    ("cluster", "model_cache", "claim"): _NO_CLAIM,
}
"""What has to change in the same model, pool or section."""

ONE_VALUE = frozenset({("version",), ("transfer", "connector"), ("pools", "*", "parallel", "dp")})
"""Keys that have one value only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange:
    """One key, and two configurations that differ in it; in others only where they must."""

    path: Path
    field: Field
    old: DeploymentConfig
    new: DeploymentConfig

    def __str__(self) -> str:
        return format_path(self.path)


@cache
def all_changes() -> tuple[KeyChange, ...]:
    """Every key of the schema that can have another value, in each base that has it."""
    return tuple(found for base in _BASES for found in _changes(*base))


def apply_compatible(candidates: Sequence[KeyChange]) -> tuple[DeploymentConfig, list[KeyChange]]:
    """All these changes of one configuration at once, but those that contradict the others."""
    config, applied = candidates[0].old, list[KeyChange]()
    tree = to_plain(config)
    for change in candidates:
        candidate_tree = copy.deepcopy(tree)
        _section_at(candidate_tree, change.path[:-1])[change.path[-1]] = _section_at(
            to_plain(change.new), change.path[:-1]
        )[change.path[-1]]
        if (loaded := _load_or_none(candidate_tree)) is not None:
            config, tree = loaded, candidate_tree
            applied.append(change)
    return config, applied


def schema_keys() -> frozenset[Path]:
    """Every key, names that users choose as `*`."""
    return frozenset(_schema_keys(DeploymentConfig, ()))


def wildcard_path(path: Path) -> Path:
    """A path with `*` for every name that a user has chosen."""
    return next(key for key in schema_keys() if _matches(path, key))


def _matches(path: Path, key: Path) -> bool:
    return len(path) == len(key) and all(b in (a, "*") for a, b in zip(path, key, strict=True))


def _schema_keys(schema: type, path: Path) -> Iterator[Path]:
    for key, field in fields_of(schema).items():
        match field.kind:
            case NestedSection(inner):
                yield from _schema_keys(inner, (*path, key))
            case NamedSections(inner):
                yield from _schema_keys(inner, (*path, key, "*"))
            case RawMapping() | EnvVariables() | NodeLabels():
                yield (*path, key, "*")
            case _:
                yield (*path, key)


def _changes(base: Tree, sections: Sequence[str]) -> Iterator[KeyChange]:
    old = load_text(json.dumps(base))
    tree = to_plain(old)
    for path, field, had in each(old):
        value = plain_value(field, had)
        if not any(f"{format_path(path)}.".startswith(f"{section}.") for section in sections):
            continue
        for other in _other_values(path, field, value):
            new = None if other == value else _load_or_none(_with_value(tree, path, other))
            if new is not None and any(change.path == path for change in diff(old, new)):
                yield KeyChange(path=path, field=field, old=old, new=new)
                break


def _other_values(path: Path, field: Field, value: object) -> Iterator[object]:
    """What else may stand there, the likeliest first."""
    yield from (each_value for each_value in _OTHER_VALUES.get(path[-1], ()) if each_value != value)
    match field.kind:
        case Boolean():
            yield value is not True
        case Choice(enum) | Pluggable(enum):
            yield from (str(other) for other in enum if str(other) != value)
        case ListOf(Choice()) if isinstance(value, list):
            yield value[:-1]
        case Quantity(unit, bounds, whole):
            for number in _numbers(field, bounds.low, bounds.high):
                yield format_quantity(int(number) if whole else number, unit)
        case Integer(bounds):
            yield from (int(number) for number in _numbers_near(value, bounds.low))
        case Float(bounds):
            yield from _numbers_near(value, bounds.low)
        case _:
            pass


def _numbers(field: Field, low: float | None, high: float | None) -> Iterator[float]:
    default = field.default if isinstance(field.default, int | float) else 0
    for factor in (1.25, 0.8, 3.0, 0.5):
        yield default * factor
    yield from (2.0, 0.75, 0.001, 64 * 2**30, 2**33, low or 1.0, high or 1.0)


def _numbers_near(value: object, low: float | None) -> Iterator[float]:
    number = value if isinstance(value, int | float) else None
    if number is not None:
        yield from (number + 1, number - 1, number * 2, number / 2, number + 0.1, number - 0.1)
    yield from (low or 1, 2, 9, 90, 1024, 9000, 1.5, 0.3)


def _with_value(base: Tree, path: Path, value: object) -> Tree:
    """The same with another value there, and with what must go with it."""
    tree = copy.deepcopy(base)
    companions = next(
        (entry for key, entry in _COMPANION_CHANGES.items() if _matches(path, key)), None
    )
    if companions is not None:
        _merge(_section_at(tree, path[:2]), companions)
    _section_at(tree, path[:-1])[path[-1]] = value
    return tree


def _section_at(tree: Tree, path: Path) -> Tree:
    for key in path:
        inner = tree[key]
        assert isinstance(inner, dict)
        tree = inner
    return tree


def _merge(tree: Tree, others: Mapping[str, object]) -> None:
    for key, value in others.items():
        inner = tree[key]
        if isinstance(value, Mapping) and value and isinstance(inner, dict):
            _merge(inner, value)
        else:
            tree[key] = value


def _load_or_none(tree: Tree) -> DeploymentConfig | None:
    """The configuration; None where it contradicts itself."""
    try:
        return _build_config(cast(Section, _node(tree)), []).config
    except ConfigInvalid:
        return None


def _node(value: object) -> Node:
    """As it would be read from a file, which takes five times as long."""
    match value:
        case dict():
            entries = {key: Entry(_node(other), _ORIGIN) for key, other in value.items()}
            return Section(entries, _ORIGIN)
        case list():
            return ListNode(tuple(map(_node, value)), _ORIGIN)
        case _:
            assert value is None or isinstance(value, str | int | float | bool)
            return Scalar(value, _ORIGIN, str(value))
