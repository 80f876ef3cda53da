"""LoRA adapters in a configuration."""

from __future__ import annotations

from baton.config.derive.options import adapter_rules, adapter_sources, sim_settings
from baton.config.diff import Reload, reload_class
from tests.config.conftest import MINIMAL_CONFIG, Load, Refuse

WITH = MINIMAL_CONFIG.replace("source: tiny", "source: tiny, adapters: {sql: {source: org/sql}}")


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


def test_the_rust_frontend_takes_none_later(load_invalid: Refuse) -> None:
    (finding,) = load_invalid(RUNTIME + "server: {api_server: rust}\n")
    assert "runtime_adapters.max: the Rust frontend takes no adapters while it serves" in finding
