"""LoRA adapters in a configuration."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.config.derive.options import adapter_rules, adapter_sources, sim_settings
from baton.config.diff import Reload, reload_class
from tests.config.conftest import MINIMAL_CONFIG, Load

Refuse = Callable[..., tuple[str, ...]]
WITH = MINIMAL_CONFIG.replace("source: tiny", "source: tiny, adapters: {sql: {source: org/sql}}")


def with_slots(slots: str) -> str:
    return WITH.replace("adapters: {sql", f"engine: {{adapters: {slots}}}, adapters: {{sql")


def test_adapters_are_named_with_where_they_are_kept(load: Load) -> None:
    (model,) = load(WITH).config.models.values()
    assert adapter_sources(model) == {"sql": "org/sql"}


def test_a_simulated_engine_has_room_for_adapters_only_where_there_are_any(load: Load) -> None:
    for text, wanted in ((WITH, (7, 3)), (MINIMAL_CONFIG, (0, 0))):
        room = "engine: {adapters: {max_loaded: 7, max_batched: 3}}"
        config = load(text.replace("role: mixed", f"role: mixed, {room}")).config
        (model,), (pool,) = config.models.values(), config.pools.values()
        settings = sim_settings(pool.engine, model, config.transfer)
        assert (settings.adapter_slots, settings.adapters_per_batch) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (WITH.replace("sql:", "tiny:"), "adapters.tiny: the name is taken by model 'tiny'"),
        (with_slots("{max_loaded: 2}"), "max_loaded: got 2, expected at least max_batched, 4"),
        (with_slots("{max_rank: 10}"), "max_rank: got 10, expected one of 1, 8, 16, 32"),
        (WITH.replace("source: org/sql", ""), "adapters.sql.source: missing"),
        (
            WITH.replace("adapters:", "engine: {extra: {max_loras: 2}}, adapters:"),
            "extra.max_loras: cannot be passed on, use 'engine.adapters.max_batched'",
        ),
    ],
)
def test_adapters_that_cannot_be_served_are_refused(
    load_invalid: Refuse, text: str, wanted: str
) -> None:
    assert any(wanted in finding for finding in load_invalid(text)), load_invalid(text)


def test_other_adapters_take_a_restart_and_other_room_does_not() -> None:
    # Every ingress and engine is told of all adapters when it starts.
    assert reload_class(("models", "m", "adapters", "sql", "source")) is Reload.RESTART
    assert reload_class(("pools", "p", "engine", "adapters", "max_loaded")) is Reload.ROLLING


RUNTIME = MINIMAL_CONFIG.replace(
    "source: tiny", "source: tiny, runtime_adapters: {max: 2, paths: [/a]}"
)


def test_an_engine_has_room_for_adapters_that_come_later(load: Load) -> None:
    config = load(RUNTIME).config
    (model,), (pool,) = config.models.values(), config.pools.values()
    assert sim_settings(pool.engine, model, config.transfer).adapter_slots > 0
    (rules,) = adapter_rules(config).values()
    assert (rules.max, rules.paths, rules.max_per_tenant) == (2, ("/a",), None)
    assert list(adapter_rules(config)) == list(rules.reserved_names)


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (
            "{max: 2}",
            "runtime_adapters.paths: got none, expected the folders in which adapters lie",
        ),
        (
            "{max: 2, paths: [a]}",
            "runtime_adapters.paths.0: got 'a', expected an absolute path, or",
        ),
        ("{max: 2, paths: [a/b/]}", "runtime_adapters.paths.0: got 'a/b/', expected an absolute"),
        ("{max: 2, max_per_tenant: 3, paths: [/a]}", "max_per_tenant: got 3, expected at most max"),
        ("{max: 1001, paths: [/a]}", "runtime_adapters.max: got 1001"),
    ],
)
def test_adapters_that_come_later_have_bounds_and_places(
    load_invalid: Refuse, keys: str, wanted: str
) -> None:
    (finding,) = load_invalid(
        MINIMAL_CONFIG.replace("source: tiny", f"source: tiny, runtime_adapters: {keys}")
    )
    assert wanted in finding


def test_the_rust_frontend_takes_none_later(load_invalid: Refuse) -> None:
    (finding,) = load_invalid(RUNTIME + "server: {api_server: rust}\n")
    assert "runtime_adapters.max: the Rust frontend takes no adapters while it serves" in finding
