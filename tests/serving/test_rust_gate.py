"""What HAProxy is told as the gate before vLLM's Rust frontend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.engine.vllm.gate.access import STRIPPED_HEADERS
from baton.runtime.keys.api_keys import InvalidKey, KeyState, ValidKey
from baton.serving.front.gate_config import GateSettings, render_gate_config
from baton.serving.front.gate_maps import key_entries, map_commands, shed_entries, state_entries

SETTINGS = GateSettings(
    bind="fd@5",
    frontend_socket=Path("/run/g/http"),
    folder=Path("/run/g"),
    routes=("chat", "models", "health"),
    max_body_bytes=1000,
)
MAP = Path("/g/keys.map")


def rules(settings: GateSettings) -> list[str]:
    return [line.strip() for line in render_gate_config(settings).splitlines() if line.strip()]


def test_the_same_settings_make_the_same_configuration() -> None:
    assert render_gate_config(SETTINGS) == render_gate_config(replace(SETTINGS))


def test_only_listed_paths_exist_and_that_is_looked_at_first() -> None:
    lines = rules(SETTINGS)
    listed = lines.index('acl listed path "/v1/chat/completions" "/v1/models" "/health"')
    refusing = [line for line in lines if line.startswith("http-request return")]
    first = next(line for line in refusing if "status 404" in line)
    assert first.endswith("if !listed !one_model")
    ours = next(line for line in refusing if line.endswith("if { path /-/healthz }"))
    assert lines.index(ours) < listed < lines.index(first)


def test_every_header_that_goes_no_further_is_taken_off_before_the_id_is_set() -> None:
    lines = rules(SETTINGS)
    last = lines.index(
        "http-request set-header x-request-id %[var(txn.name)]~%[var(txn.who)]~%[var(txn.class)]"
        "%[var(txn.session)]"
    )
    for header in STRIPPED_HEADERS:
        assert lines.index(f"http-request del-header {header.decode()}") < last
    assert lines.index("http-request del-header x-baton- -m beg") < last


def test_keys_are_compared_by_their_digests() -> None:
    (look_up,) = [line for line in rules(SETTINGS) if "keys.map" in line]
    assert "sha2(256),hex,lower,map_str(/run/g/keys.map,!)" in look_up


@pytest.mark.parametrize("routes", [("chat",), ("models",)])
def test_health_is_answered_only_where_it_is_open(routes: tuple[str, ...]) -> None:
    assert not any("acl health" in line for line in rules(replace(SETTINGS, routes=routes)))


def test_a_good_key_is_the_word_for_its_tenant_and_another_says_why_not() -> None:
    found = key_entries(
        {
            "aa": ValidKey(key_id="k1", tenant="acme"),
            "bb": InvalidKey(state=KeyState.REVOKED, key_id="k2"),
        },
        {"acme": "h0"},
    )
    assert found == {"aa": "h0", "bb": "!revoked"}


def test_a_rejected_caller_is_named_with_any_class_and_waits_whole_seconds() -> None:
    found = shed_entries({("h0", None): 0.2, ("h1", "batch"): 2.1})
    assert found == {"h0": "1", "h1~batch": "3"}


def test_an_empty_state_accepts_no_caller() -> None:
    assert state_entries(healthy=False, anonymous=None, keys=False) == {}
    told = state_entries(healthy=True, anonymous="h", keys=True)
    assert told == {"healthy": "1", "anonymous": "h", "keys": "1"}


def test_only_changes_are_written_and_removals_come_first() -> None:
    (command,) = map_commands(MAP, {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"})
    assert command.split("; ") == [
        "del map /g/keys.map c",
        "set map /g/keys.map b 9",
        "add map /g/keys.map d 4",
    ]


def test_nothing_is_written_where_nothing_has_changed() -> None:
    assert list(map_commands(MAP, {"a": "1"}, {"a": "1"})) == []


def test_many_keys_are_written_in_commands_that_can_be_read() -> None:
    new = {f"{n:064x}": "h" * 18 for n in range(1000)}
    commands = list(map_commands(MAP, {}, new))
    assert max(map(len, commands)) < 16_000
    assert sum(command.count("add map") for command in commands) == 1000
    assert all(commands)
