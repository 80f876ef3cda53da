"""Round trips, layers and unknown keys, on configurations made up by Hypothesis."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config import DeploymentConfig, LoadedConfig, json_schema, load_config, render
from baton.config.language.fields import (
    EnvVariables,
    Field,
    NamedSections,
    NestedSection,
    NodeLabels,
    RawMapping,
    fields_of,
)
from baton.config.language.scalars import (
    Boolean,
    Choice,
    Condition,
    Float,
    Integer,
    ListOf,
    Pluggable,
    Quantity,
    ScalarType,
    Selector,
    Text,
)
from baton.config.language.tree import format_path
from baton.config.language.units import Unit, format_quantity
from baton.config.schema.adapters import AdapterSlots
from baton.config.schema.allow import AllowConfig
from baton.config.schema.cluster import ClusterConfig
from baton.config.schema.deployment import (
    EngineConfig,
    IngressCounts,
    ModelConfig,
    OffloadConfig,
    Parallel,
    Placement,
    PoolConfig,
    ReplicaCounts,
    Resources,
    ServerConfig,
    SideChannel,
    SimTimings,
    TransferConfig,
)
from baton.config.schema.observability import MetricsConfig, TracingConfig
from baton.config.schema.routing import RouterConfig
from baton.config.schema.scaling import AutoscalerConfig
from baton.config.schema.security import SecurityConfig
from baton.config.schema.service import SloClassConfig, TenantConfig, Timeouts
from baton.config.write.render import to_plain
from baton.domain.errors import ConfigInvalid

Tree = dict[str, object]
Path_ = tuple[str, ...]
slow_machines = settings(deadline=None, max_examples=60)


def load(
    *trees: Tree, env: Mapping[str, str] | None = None, sets: Sequence[str] = ()
) -> LoadedConfig:
    """Loads trees as files x0.yaml and so on; JSON is YAML."""
    return load_texts(*(json.dumps(tree) for tree in trees), env=env, sets=sets)


def load_texts(
    *texts: str, env: Mapping[str, str] | None = None, sets: Sequence[str] = ()
) -> LoadedConfig:
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"x{index}.yaml") for index in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text, encoding="utf-8")
        return load_config(files, env=env, sets=sets)


# ----------------------------------------------------------------- configurations that are right

TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn"]), min_size=1, max_size=20
)
RAW = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**15), 10**15)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc-. é", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
COMPARISONS = st.sampled_from([">", ">=", "<", "<="])
SELECTORS = st.sampled_from(["a", "!h100", "in(a, b)", "!in(a)"])
NAMES = st.from_regex(r"x(_?[a-z0-9]){0,6}", fullmatch=True)


def durations(low_s: float, high_s: float) -> st.SearchStrategy[object]:
    return st.floats(low_s, high_s).map(lambda number: format_quantity(number, Unit.SECONDS))


def counts(*names: str) -> st.SearchStrategy[object]:
    several = st.lists(st.integers(1, 9), min_size=len(names), max_size=len(names)).map(sorted)
    return several.map(lambda numbers: dict(zip(names, numbers, strict=True)))


IN_AGREEMENT: dict[tuple[type, str], st.SearchStrategy[object]] = {
    (DeploymentConfig, "version"): st.just(1),
    (ModelConfig, "api"): st.fixed_dictionaries(
        {},
        optional={
            "sse_keep_alive_interval": st.integers(1, 60),
            "return_tokens_as_token_ids": st.booleans(),
        },
    ),
    (ModelConfig, "source"): st.sampled_from(["tiny", "org/model-8B", "./here", "s3://bucket/m"]),
    (PoolConfig, "model"): st.just("m.1"),
    (PoolConfig, "role"): st.sampled_from(["mixed", "decode"]),
    (PoolConfig, "replicas"): counts("min", "initial", "max"),
    (ServerConfig, "replicas"): counts("min", "max"),
    (ServerConfig, "host"): st.sampled_from(["::1", "127.0.0.1", "front.example"]),
    (ServerConfig, "port"): st.integers(1, 9_000),
    (AllowConfig, "media_domains"): st.none() | st.just(["media.example", "10.1.2.3"]),
    (MetricsConfig, "host"): st.sampled_from(["::1", "127.0.0.1", "localhost"]),
    (MetricsConfig, "port"): st.integers(10_001, 19_999),
    (TracingConfig, "otlp"): st.none() | st.just("http://collector.example:4318"),
    (SideChannel, "bind"): st.sampled_from(["private", "10.1.2.3", "fd00::1", "10.1.0.0/16"]),
    (ClusterConfig, "node_address"): st.sampled_from(["127.0.0.1", "10.1.2.3", "fd00::1"]),
    (ClusterConfig, "address"): st.sampled_from([None, "auto", "10.1.2.3:6379", "[fd00::1]:6379"]),
    (ClusterConfig, "model_cache"): st.sampled_from(
        [
            {},
            {"path": "/m"},
            {"claim": "m"},
            {"size": "1TiB"},
            {"size": "1TiB", "storage_class": "s"},
        ]
    ),
    (SideChannel, "port_base"): st.integers(20_000, 40_000),
    (Parallel, "tp"): st.integers(1, 16),
    (Parallel, "pp"): st.integers(1, 16),
    (Placement, "max_per_node"): st.none(),
    (Resources, "gpus"): st.just(0),
    (Resources, "accelerator"): st.none(),
    (EngineConfig, "kind"): st.just("vllm"),
    (EngineConfig, "sim"): st.none(),
    (EngineConfig, "max_num_seqs"): st.none() | st.integers(1, 600),
    (EngineConfig, "max_num_batched_tokens_while_decoding"): st.none() | st.integers(600, 2000),
    (EngineConfig, "max_num_batched_tokens"): st.none() | st.integers(2000, 10**6),
    (OffloadConfig, "host_memory"): st.none(),
    (RouterConfig, "policy"): st.sampled_from(["predicted", "own.policies:choose"]),
    (AdapterSlots, "max_batched"): st.integers(1, 16),
    (AdapterSlots, "max_loaded"): st.integers(16, 1000),
    (AdapterSlots, "max_rank"): st.sampled_from([8, 16, 320]),
    (ModelConfig, "runtime_adapters"): st.just({})
    | st.fixed_dictionaries(
        {"max": st.integers(2, 1000), "paths": st.just(["/adapters", "acme/"])},
        optional={"max_per_tenant": st.none() | st.integers(1, 2)},
    ),
    # What goes with the other one is in test_frontends.
    (ServerConfig, "api_server"): st.just("python"),
    (ServerConfig, "listener"): st.just("ray-serve"),
    (SecurityConfig, "tls"): st.just({})
    | st.fixed_dictionaries(
        {"cert_file": st.just("a.pem"), "key_file": st.just("b.pem")},
        optional={"client_ca_file": st.just("c.pem"), "required": st.booleans()},
    ),
    (TransferConfig, "deadline"): durations(0.001, 30),
    (TransferConfig, "lease"): durations(30, 86_400),
    (Timeouts, "first_token"): durations(0.001, 600),
    (Timeouts, "total"): durations(600, 86_400),
    (ModelConfig, "max_len"): st.none() | st.integers(5_000, 10**6),
    (TenantConfig, "slo"): st.sampled_from([None, "default"]),
    (TenantConfig, "classes"): st.none() | st.just(["default"]),
    (TenantConfig, "anonymous"): st.none(),
    (AutoscalerConfig, "policy"): st.sampled_from(["slo", "static", "own.scaling:make"]),
    (AutoscalerConfig, "gpu_budget"): st.none() | st.integers(256 * 9, 10**6),
    (AutoscalerConfig, "scale_to_zero"): st.just(value=False),
}
"""Keys that other keys set bounds to; everything else is drawn from the schema alone."""
SIM_ENGINE = st.fixed_dictionaries(
    {"kind": st.just("sim"), "block_size": st.integers(1, 64)},
    optional={
        "sim": st.fixed_dictionaries(
            {"kv_blocks": st.integers(10**6, 10**7)},
            optional={
                "prefill_rate": st.sampled_from(["1/s", "20k/s", "90k/min"]),
                "transfer_rate": st.sampled_from(["1B/s", "1.5GB/s", "2GiB/s"]),
                "decode_step": durations(0, 10),
                "speed": st.floats(0.001, 1000),
                "vocab_size": st.integers(10, 10**6),
            },
        ),
    },
)


def values(of: type, field: Field) -> st.SearchStrategy[object]:
    """What may stand in the file for this field."""
    if (of, field.key) in IN_AGREEMENT:
        return IN_AGREEMENT[of, field.key]
    match field.kind:
        case NestedSection(nested):
            return sections(nested)
        case NamedSections(nested):
            name = "m.1" if nested is ModelConfig else "a-1"
            one = st.fixed_dictionaries({name: sections(nested)})
            return one if field.required else st.just({}) | one
        case (RawMapping() | EnvVariables() | NodeLabels()) as free:
            return free_values(free)
        case leaf:
            some = leaf_values(leaf)
            return st.none() | some if field.optional else some


def free_values(mapping: RawMapping | EnvVariables | NodeLabels) -> st.SearchStrategy[object]:
    match mapping:
        case RawMapping():
            return st.dictionaries(NAMES, RAW, max_size=3)
        case EnvVariables():
            secrets = st.fixed_dictionaries({"env": TEXT}) | st.fixed_dictionaries({"file": TEXT})
            return st.dictionaries(NAMES, TEXT | secrets, max_size=3)
        case NodeLabels():
            return st.dictionaries(st.sampled_from(["a", "ray.io/b"]), SELECTORS, max_size=2)


def leaf_values(leaf: ScalarType) -> st.SearchStrategy[object]:
    match leaf:
        case Quantity(unit, bounds, whole):
            low, high = bounds.low or 0, bounds.high or 2**50
            numbers = st.integers(int(low), int(high)) if whole else st.floats(low, high)
            return numbers.map(lambda number: format_quantity(number, unit))
        case Choice(enum):
            return st.sampled_from([str(member) for member in enum])
        case Condition():
            return st.builds("prompt_tokens {} {}".format, COMPARISONS, st.integers(0, 10**8))
        case ListOf(Choice() as item):
            return st.lists(leaf_values(item), min_size=1, unique=True)
        case Integer(bounds) | Float(bounds):
            low, high = bounds.low or 0, bounds.high or 4000
            return (
                st.floats(low, high)
                if isinstance(leaf, Float)
                else st.integers(int(low), int(high))
            )
        case Text() | Boolean():
            return TEXT if isinstance(leaf, Text) else st.booleans()
        case Pluggable() | ListOf() | Selector():
            raise AssertionError("said above: other keys depend on it")


def sections(of: type) -> st.SearchStrategy[Tree]:
    """A section with its required keys and any of the others."""
    required: dict[str, st.SearchStrategy[object]] = {}
    optional: dict[str, st.SearchStrategy[object]] = {}
    for key, field in fields_of(of).items():
        (required if field.required else optional)[key] = values(of, field)
    return st.fixed_dictionaries(required, optional=optional)


def simulated(tree: Tree) -> st.SearchStrategy[Tree]:
    """The same with simulated engines."""
    model = {"source": "x", "max_len": 4096}
    pools = SIM_ENGINE.map(lambda engine: {"a-1": {"role": "mixed", "engine": engine}})
    return pools.map(lambda pools: {**tree, "models": {"m.1": model}, "pools": pools})


def on_devices(tree: Tree) -> Tree:
    """The same with GPUs for engines that are split as they can be on those alone."""
    pools = tree["pools"]
    assert isinstance(pools, Mapping)
    split = {}
    for name, pool in pools.items():
        parallel = {key: value for key, value in pool.get("parallel", {}).items() if key != "dp"}
        split[name] = pool | {"parallel": parallel}  # no deployment starts groups
        tp, pp = parallel.get("tp", 1), parallel.get("pp", 1)
        if pp > 1 or (parallel.get("ep") and tp * pp > 1):
            split[name] |= {"resources": pool.get("resources", {}) | {"gpus": tp * pp}}
    return {**tree, "pools": {**pools, **split}}


CONFIGS = sections(DeploymentConfig).map(on_devices) | sections(DeploymentConfig).flatmap(
    simulated
).filter(lambda tree: "admission" not in tree)


@slow_machines
@given(tree=CONFIGS)
def test_a_rendered_configuration_loads_as_an_equal_one(tree: Tree) -> None:
    config = load(tree).config
    again = load_texts(render(config))
    assert again.config == config
    for path, _value in keys(DeploymentConfig, to_plain(config)):
        assert again.origins.get(format_path(path)) != "default"


# ------------------------------------------------------------------------------------ the layers


def keys(of: type, tree: Mapping[str, object], at: Path_ = ()) -> Iterator[tuple[Path_, object]]:
    """Each key with its value, down to where the schema ends."""
    for key, field in fields_of(of).items():
        value = tree[key]
        match field.kind:
            case NestedSection(nested) if isinstance(value, Mapping):
                yield from keys(nested, value, (*at, key))
            case NamedSections(nested) if isinstance(value, Mapping):
                for name, section in value.items():
                    yield from keys(nested, section, (*at, key, name))
            case _:
                yield (*at, key), value


def variable(path: Path_) -> str:
    return "BATON__" + "__".join(re.sub(r"[^A-Z0-9_]", "_", key.upper()) for key in path)


@slow_machines
@given(tree=CONFIGS, data=st.data())
def test_a_key_means_the_same_in_a_file_an_overlay_a_variable_and_an_option(
    tree: Tree, data: st.DataObject
) -> None:
    config = load(tree).config
    said = dict(keys(DeploymentConfig, to_plain(config)))
    places = data.draw(
        st.lists(st.sampled_from("fose"), min_size=len(said), max_size=len(said)), label="places"
    )
    # Names that users choose are in the file, so that variables can find them.
    classes: Tree = {"classes": {name: {} for name in config.slo.classes}}
    tenants: Tree = {name: {} for name in config.tenants}
    adapters: Tree = {name: {} for name in config.models["m.1"].adapters}
    models: Tree = {"m.1": {"adapters": adapters}}
    trees: list[Tree] = [
        {"models": models, "pools": {"a-1": {}}, "slo": classes, "tenants": tenants},
        {},
    ]
    env: dict[str, str] = {}
    sets: list[str] = []
    for (path, value), place in zip(said.items(), places, strict=True):
        match place:
            case "s":
                sets.append(f"{format_path(path)}={json.dumps(value)}")
            case "e":
                env[variable(path)] = json.dumps(value)
            case _:
                put(trees["fo".index(place)], path, value)
    loaded = load(*trees, env=env, sets=sets)
    assert loaded.config == config
    origins = {"e": "env ", "s": "--set"}
    for path, place in zip(said, places, strict=True):
        origin = loaded.origins.get(format_path(path), "")
        assert origin == "" or origin.startswith(origins.get(place, "/"))


def put(tree: Tree, path: Path_, value: object) -> None:
    for key in path[:-1]:
        inner = tree.setdefault(key, {})
        assert isinstance(inner, dict)
        tree = inner
    tree[path[-1]] = value


# ------------------------------------------------------------------------------------ unknown keys

WHOLE = to_plain(
    load(
        {
            "version": 1,
            "model": {"source": "x", "max_len": 4096, "engine": {"kind": "sim"}},
            "pools": {"p": {"role": "prefill"}, "d": {"role": "decode"}},
            "slo": {"classes": {"batch": {}}},
            "tenants": {"acme": {}},
            "autoscaler": {},
        }
    ).config
)
"""A configuration that has every section."""


def section_paths(
    of: type, tree: Mapping[str, object], at: Path_ = ()
) -> Iterator[tuple[Path_, type]]:
    yield at, of
    for key, field in fields_of(of).items():
        value = tree[key]
        match field.kind:
            case NestedSection(nested) if isinstance(value, Mapping):
                yield from section_paths(nested, value, (*at, key))
            case NamedSections(nested) if isinstance(value, Mapping):
                for name, section in value.items():
                    yield from section_paths(nested, section, (*at, key, name))


SECTIONS = list(section_paths(DeploymentConfig, WHOLE))


def findings_of(path: Path_, value: object) -> tuple[str, tuple[str, ...]]:
    """The whole configuration with one more key: its text and what is found wrong."""
    tree: Tree = json.loads(json.dumps(WHOLE))
    put(tree, path, value)
    text = json.dumps(tree, indent=1)
    with pytest.raises(ConfigInvalid) as error:
        load_texts(text)
    return text, error.value.problems


def test_the_whole_configuration_has_every_section_of_the_schema() -> None:
    assert {of for _path, of in SECTIONS} >= {
        SimTimings,
        IngressCounts,
        ReplicaCounts,
        Resources,
        SloClassConfig,
        TenantConfig,
        AutoscalerConfig,
    }
    assert len(SECTIONS) > 25


@pytest.mark.parametrize("path", [path for path, _of in SECTIONS], ids=format_path)
def test_an_unknown_key_is_reported_at_every_level_with_its_position(path: Path_) -> None:
    text, findings = findings_of((*path, "zz_unknown"), "some value")
    lines = text.splitlines()
    (line,) = (number for number, line in enumerate(lines) if "zz_unknown" in line)
    column = lines[line].index('"zz_unknown"')
    (finding,) = findings
    where = f"x0.yaml:{line + 1}:{column + 1}: {format_path((*path, 'zz_unknown'))}: unknown key"
    assert where in finding


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ((*path, key), key)
        for path, of in SECTIONS
        for key in fields_of(of)
        if len(key) >= 6 and path[:2] != ("pools", "p")  # as long as a typing mistake is small
    ],
    ids=str,
)
def test_a_misspelt_key_is_answered_with_the_right_one(path: Path_, key: str) -> None:
    _text, findings = findings_of((*path[:-1], key[:-2] + key[-1] + key[-2] + "s"), 1)
    assert any(f"did you mean '{key}'?" in finding for finding in findings), findings


def test_the_json_schema_knows_the_same_keys() -> None:
    def check(of: type, found: object) -> None:
        assert isinstance(found, dict)
        properties = found["properties"]
        assert set(fields_of(of)) <= set(properties) <= {*fields_of(of), "model"}
        for key, field in fields_of(of).items():
            if isinstance(field.kind, NestedSection | NamedSections):
                inner = properties[key]["anyOf"][0]
                named = isinstance(field.kind, NamedSections)
                check(field.kind.schema, inner["additionalProperties"] if named else inner)

    check(DeploymentConfig, json_schema())
