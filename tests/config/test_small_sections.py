"""Small sections of a configuration: how the front is guarded, adapters, recovery."""

from __future__ import annotations

import pytest

from baton.config import coordinator_limits
from baton.config.derive.options import adapter_rules, adapter_sources, sim_settings
from baton.config.diff import Reload, reload_class
from baton.control.state.limits import RecoveryOptions
from baton.policy.resilience.circuit_breakers import BreakerOptions
from baton.policy.resilience.hedging import HedgeOptions
from baton.policy.resilience.retry_budget import RetryOptions
from tests.config.conftest import MINIMAL_CONFIG, Load, Refuse


def tls(what: str) -> str:
    return f"{MINIMAL_CONFIG}security: {{tls: {{{what}}}}}\n"


def test_nothing_is_encrypted_for_clients_unless_told(load: Load) -> None:
    said = load(MINIMAL_CONFIG).config.security.tls
    assert (said.cert_file, said.key_file, said.client_ca_file) == (None, None, None)
    assert not said.required


def test_a_certificate_and_its_key_are_said_together(load: Load) -> None:
    assert load(tls("cert_file: a.pem, key_file: b.pem")).config.security.tls.key_file == "b.pem"


@pytest.mark.parametrize("path", ["'a\"b'", '"a\'b"', "'a\\b'", "'a$b'", "'a#b'"])
def test_a_path_cannot_say_more_to_haproxy_than_a_path(load_invalid: Refuse, path: str) -> None:
    (finding,) = load_invalid(tls(f"cert_file: {path}, key_file: b.pem"))
    assert "security.tls.cert_file: has a quote" in finding


def test_it_is_read_when_the_front_starts() -> None:
    assert reload_class(("security", "tls", "cert_file")) is Reload.RESTART


def test_where_tls_was_expected_it_is_said_where_it_is(load_invalid: Refuse) -> None:
    (finding,) = load_invalid(f"{MINIMAL_CONFIG}server: {{tls: {{cert: a}}}}\n")
    assert "security.tls" in finding


# -------------------------------------------------------------------- adapters


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


# -------------------------------------------------------------------- recovery


def recovery(keys: str) -> str:
    return MINIMAL_CONFIG + f"recovery: {{{keys}}}\n"


def test_unless_told_coordinators_go_by_their_own_defaults(load: Load) -> None:
    assert coordinator_limits(load(MINIMAL_CONFIG).config).recovery == RecoveryOptions()


def test_coordinators_follow_the_configuration(load: Load) -> None:
    text = recovery(
        "heartbeat_timeout: 2s, circuit_breaker: {failure_threshold: 5, open_duration: 3s},"
        " retry_budget: {ratio: 0.1}, hedging: {latency_multiple: 8}"
    )
    assert coordinator_limits(load(text).config).recovery == RecoveryOptions(
        heartbeat_timeout_s=2.0,
        circuit_breaker=BreakerOptions(failure_threshold=5, open_duration_s=3.0),
        retry_budget=RetryOptions(ratio=0.1),
        hedging=HedgeOptions(latency_multiple=8.0),
    )


def test_hedges_can_be_switched_off(load: Load) -> None:
    limits = coordinator_limits(load(recovery("hedging: {latency_multiple: null}")).config)
    assert limits.recovery.hedging.latency_multiple is None
