"""What differs between two configurations, and what each difference takes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.derive.api_arguments import MODEL_LOADING_ARGUMENTS
from baton.config.diff import (
    _KEY_RULES,
    Change,
    Reload,
    changes_layout,
    conditional_reloads,
    diff,
    reload_class,
)
from baton.config.language.tree import Path, format_path, is_vllm_argument
from baton.config.write.render import to_plain
from tests.config.conftest import MINIMAL_CONFIG, Load
from tests.config.every_key import schema_keys
from tests.config.test_config_properties import CONFIGS, Tree, load

PD = MINIMAL_CONFIG.replace("{main: {role: mixed}}", "{p: {role: prefill}, d: {role: decode}}")


PATHS = sorted(schema_keys())


@pytest.mark.parametrize("path", PATHS, ids=format_path)
def test_every_key_of_the_schema_has_a_reload_class(path: Path) -> None:
    reload_class(path)


def test_every_rule_about_reloading_is_about_a_key_that_exists() -> None:
    others = {"pools.*.engine.extra.kv_cache_dtype"}
    others |= {
        f"models.*.{at}.{name}"
        for at in ("api", "engine.extra")
        for name in MODEL_LOADING_ARGUMENTS
    }
    for row in _KEY_RULES:
        assert row.pattern in others or any(row.covers(path) for path in PATHS), row.pattern


@pytest.mark.parametrize("place", [("api",), ("engine", "extra")])
def test_how_a_model_is_read_is_settled_when_its_ingresses_start(place: tuple[str, ...]) -> None:
    assert reload_class(("models", "m", *place, "tokenizer")) is Reload.RESTART


def test_an_unclassified_key_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"no reload class for what\.else"):
        reload_class(("what", "else"))


@pytest.mark.timeout(600)  # to make a failing example small takes minutes
@settings(deadline=None, max_examples=15)
@given(old=CONFIGS, new=CONFIGS)
def test_the_old_configuration_with_its_differences_is_the_new_one(old: Tree, new: Tree) -> None:
    before, after = load(old).config, load(new).config
    changes = diff(before, after)
    tree = to_plain(before)
    sets = []
    for change in changes:
        # What is passed on unread is laid over what was there key by key, at any depth.
        if change.new is None or (change.old is not None and is_vllm_argument(change.path)):
            remove(tree, change.path)
        if change.new is not None:
            sets.append(f"{format_path(change.path)}={change.new}")
    assert load(tree, sets=sets).config == after


def remove(tree: Tree, path: Path) -> None:
    """Take a key out, and every section that is empty then."""
    inner = tree[path[0]]
    if len(path) > 1:
        assert isinstance(inner, dict)
        remove(inner, path[1:])
    if len(path) == 1 or not inner:
        del tree[path[0]]


@settings(deadline=None, max_examples=8)
@given(tree=CONFIGS, data=st.data())
def test_only_what_differs_is_a_difference(tree: Tree, data: st.DataObject) -> None:
    config = load(tree).config
    assert diff(config, config) == ()
    port = data.draw(st.integers(1, 10_000).filter(lambda port: port != config.server.port))
    assert diff(config, load(tree, sets=[f"server.port={port}"]).config) == (
        Change(
            path=("server", "port"),
            old=str(config.server.port),
            new=str(port),
            reload=Reload.RESTART,
        ),
    )


@pytest.mark.parametrize(
    ("option", "reload", "shown"),
    [
        ("slo.default.ttft=1s", Reload.LIVE, "slo.default.ttft: null -> 1s"),
        (
            "admission.max_queued_requests=9",
            Reload.LIVE,
            "admission.max_queued_requests: 1024 -> 9",
        ),
        ("router.seed=9", Reload.LIVE, "router.seed: 0 -> 9"),
        (
            "transfer.early_first_token=true",
            Reload.LIVE,
            "transfer.early_first_token: false -> true",
        ),
        ("pools.d.resources.price_per_hour=2.5", Reload.LIVE, "price_per_hour: null -> 2.5"),
        ("pools.d.replicas.max=9", Reload.POOL_SIZE, "pools.d.replicas.max: 1 -> 9"),
        ("pools.d.resources.cpus=2", Reload.ROLLING, "pools.d.resources.cpus: 1.0 -> 2.0"),
        ("pools.d.engine.max_num_seqs=2", Reload.ROLLING, "engine.max_num_seqs: null -> 2"),
        ("pools.d.engine.extra.a=2", Reload.ROLLING, "pools.d.engine.extra.a: (absent) -> 2"),
        ("pools.d.parallel.tp=2", Reload.ROLLING, "pools.d.parallel.tp: 1 -> 2"),
        ("pools.d.placement.strategy=spread", Reload.ROLLING, "strategy: pack -> spread"),
        ("pools.d.role=mixed", Reload.RESTART, "pools.d.role: decode -> mixed"),
        ("pools.d.engine.extra.api_key=1", Reload.ROLLING, "api_key: (absent) -> (not shown)"),
        ("server.port=8001", Reload.RESTART, "server.port: 8000 -> 8001"),
        ("transfer.lease=1m", Reload.RESTART, "transfer.lease: 30s -> 60s"),
        ("admission.timeouts.total=1h", Reload.RESTART, "admission.timeouts.total: 600s -> 3600s"),
        ("router.index=events", Reload.RESTART, "router.index: hybrid -> events"),
    ],
)
def test_a_change_says_what_it_takes(load: Load, option: str, reload: Reload, shown: str) -> None:
    (change,) = diff(load(PD).config, load(PD, sets=[option]).config)
    assert change.reload is reload
    assert shown in str(change)


def test_engine_keys_of_a_model_are_changes_of_its_pools(load: Load) -> None:
    changed = load(PD, sets=["model.engine.block_size=32"]).config
    classes = {format_path(change.path): change.reload for change in diff(load(PD).config, changed)}
    assert classes == {
        "models.tiny.engine.block_size": Reload.LIVE,
        "pools.p.engine.block_size": Reload.ROLLING,
        "pools.d.engine.block_size": Reload.ROLLING,
    }


@pytest.mark.parametrize(
    ("option", "cannot"),
    [
        ("model.engine.block_size=32", True),
        ("model.engine.dtype=float16", True),
        ("model.engine.extra.kv_cache_dtype=fp8", True),
        ("model.revision=abc", True),
        ("model.engine.max_num_seqs=9", False),
        ("model.engine.extra.seed=9", False),
        ("slo.default.ttft=1s", False),
    ],
)
def test_it_is_known_which_changes_keep_old_and_new_replicas_from_exchanging_blocks(
    load: Load, option: str, *, cannot: bool
) -> None:
    changes = diff(load(PD).config, load(PD, sets=[option]).config)
    assert changes
    assert changes_layout(changes) is cannot


def test_a_revision_of_a_model_is_rolled_out_and_another_model_is_not(load: Load) -> None:
    (revision,) = diff(load(PD).config, load(PD, sets=["model.revision=abc"]).config)
    assert revision.reload is Reload.ROLLING
    other = diff(load(PD).config, load(PD, sets=["model.source=org/x", "model.name=tiny"]).config)
    assert Reload.RESTART in {change.reload for change in other}


def test_a_tenant_that_comes_is_live_and_a_pool_that_comes_is_a_restart(load: Load) -> None:
    changed = load(PD, sets=["tenants.acme={weight: 2}", "pools.e={role: mixed}"]).config
    changes = diff(load(PD).config, changed)
    kinds = {(change.path[:2], change.reload) for change in changes}
    assert kinds == {(("tenants", "acme"), Reload.LIVE), (("pools", "e"), Reload.RESTART)}
    assert all(change.old is None for change in changes)
    gone = diff(changed, load(PD).config)
    assert {(change.path, change.new, change.old) for change in gone} == {
        (change.path, change.old, change.new) for change in changes
    }
    assert {change.reload for change in gone if change.path[0] == "pools"} == {Reload.RESTART}


CLASSES = "slo.classes={a: {match: prompt_tokens > 9}, b: {match: prompt_tokens > 99}, c: {}}"
MOVED = "slo.classes={c: {}, b: {match: prompt_tokens > 99}, a: {match: prompt_tokens > 9}}"
ONE_MORE = (
    "slo.classes={d: {match: prompt_tokens < 9}, a: {match: prompt_tokens > 9},"
    " b: {match: prompt_tokens > 99}, c: {}}"
)


def test_another_order_of_classes_is_a_change_for_the_first_whose_condition_holds_counts(
    load: Load,
) -> None:
    old, new = load(PD, sets=[CLASSES]).config, load(PD, sets=[MOVED]).config
    (change,) = diff(old, new)
    assert str(change) == "slo.classes: a, b, c -> c, b, a"
    assert change.reload is Reload.LIVE
    assert diff(old, old) == ()
    more = diff(old, load(PD, sets=[ONE_MORE]).config)
    assert {other.path[2] for other in more} == {"d"}  # nobody changed places


def test_the_effect_of_a_change_may_depend_on_the_api_server(load: Load) -> None:
    old, new = "admission.max_body=1MiB", "admission.max_body=2MiB"
    rust = "server.api_server=rust"
    (live,) = diff(load(PD, sets=[old]).config, load(PD, sets=[new]).config)
    (rolling,) = diff(load(PD, sets=[old, rust]).config, load(PD, sets=[new, rust]).config)
    assert (live.reload, rolling.reload) == (Reload.LIVE, Reload.ROLLING)
    path = ("admission", "max_body")
    assert conditional_reloads(path) == {"with `server.api_server: rust`": Reload.ROLLING}
    assert conditional_reloads(("admission", "max_n")) == {}


def test_a_row_names_the_processes_built_from_keys_that_are_not_live() -> None:
    live = {Reload.LIVE, Reload.POOL_SIZE}
    for row in _KEY_RULES:
        if row.reload in live:
            assert not row.built_into, row.pattern
        if row.reload is Reload.ROLLING:
            assert row.built_into, row.pattern


def test_secret_values_are_hidden_and_file_names_are_shown(load: Load) -> None:
    before = load(PD, sets=["pools.d.engine.extra={api_key: 1234}"]).config
    after = load(
        PD,
        sets=["pools.d.engine.extra={api_key: 5678}", "tenants.acme.keys_file=secrets/acme.keys"],
    ).config
    shown = "\n".join(map(str, diff(before, after)))
    assert "1234" not in shown
    assert "5678" not in shown
    assert "extra.api_key: (not shown) -> (not shown)" in shown
    assert "tenants.acme.keys_file: (absent) -> secrets/acme.keys" in shown


def test_differences_come_in_the_order_of_the_file(load: Load) -> None:
    sets = ["server.port=1", "slo.default.ttft=1s", "pools.d.engine.extra.a=1"]
    sets.append("autoscaler.interval=5s")
    paths = [change.path for change in diff(load(PD).config, load(PD, sets=sets).config)]
    firsts = list(dict.fromkeys(path[0] for path in paths))
    assert firsts == ["pools", "slo", "autoscaler", "server"]
