"""Deprecated keys: they move, are converted, and warn with their place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.config import LoadedConfig, load_config
from baton.config.language.renamed_keys import RENAMED_KEYS, RenamedKey
from baton.config.language.tree import Node, Scalar
from baton.config.load import load_text
from baton.domain.errors import ConfigInvalid
from tests.config.conftest import MINIMAL_CONFIG, Load, Refuse


def from_offset(node: Node) -> Node:
    """A port from its distance to 8000."""
    if isinstance(node, Scalar) and isinstance(node.value, int):
        return Scalar(node.value + 8000, node.origin, str(node.value + 8000))
    return node


TABLE = (
    RenamedKey("limits.queue", "admission.max_queued_requests"),
    RenamedKey("limits.times", "admission.timeouts"),
    RenamedKey("server.offset", "server.port", from_offset),
    RenamedKey("pools.*.replicas.first", "pools.*.replicas.initial"),
    RenamedKey("gateway.address", "gateway.host"),
    RenamedKey("gateway", "server"),
    RenamedKey("slo", "slo.default.ttft"),
)


VALUES: Mapping[str, object] = {
    "admission.recovery.silence": "2s",
    "admission.recovery.failures": 5,
    "admission.recovery.pause": "3s",
    "admission.recovery.retries": 0.1,
    "admission.recovery.hedge": None,
    "admission.recovery": {},
    "admission.margin": 0.25,
    "admission.engine_queue": "200ms",
    "admission.max_queue": 7,
    "admission.max_queue_wait": "3s",
    "admission.max_cold_start_wait": "200s",
    "autoscaler.up": {"max_step": 3},
    "autoscaler.down": {"cooldown": "9s", "headroom": 0.1},
    "pools.*.replicas.start": 2,
    "models.*.engine.decode_step_tokens": 512,
    "model.engine.decode_step_tokens": 512,
    "pools.*.engine.decode_step_tokens": 512,
    "models.*.engine.sim.prefill_token_token": "1us",
    "model.engine.sim.prefill_token_token": "1us",
    "pools.*.engine.sim.prefill_token_token": "1us",
    "models.*.engine.sim.decode_kv_relief": "1ms",
    "model.engine.sim.decode_kv_relief": "1ms",
    "pools.*.engine.sim.decode_kv_relief": "1ms",
    "router.deflect.streams": 0.5,
    "router.deflect.prompts": 0.5,
    "router.deflect": {},
    "server.front": "gate",
    "server.frontend": "rust",
    "slo.classes.*.when": "prompt_tokens > 8000",
}
"""A value for each deprecated key of the schema."""


def tree_with(row: RenamedKey, **values: object) -> dict[str, object]:
    """A small configuration with values under the `old` name of a key, the `new` one, or both."""
    engine = {"kind": "sim", "max_num_batched_tokens": 2048, "sim": {"decode_kv": "2ms"}}
    model = {"source": "tiny", "max_len": 4096, "engine": engine}
    tree: dict[str, object] = {
        "version": 1,
        **({"model": model} if row.old.startswith("model.") else {"models": {"name": model}}),
        "pools": {"name": {"role": "mixed", "replicas": {"max": 4}}},
        "slo": {"classes": {"name": {"ttft": "1s"}}},
        "server": {"api_server": "rust"} if row.old == "server.front" else {},
    }
    for which, value in values.items():
        *parents, key = getattr(row, which).replace("*", "name").split(".")
        section: Any = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = value
    return tree


def load_tree(tree: object, file: Path) -> LoadedConfig:
    file.write_text(json.dumps(tree), encoding="utf-8")
    return load_config([file])


def test_every_deprecated_key_is_tried() -> None:
    assert list(VALUES) == [row.old for row in RENAMED_KEYS]


@pytest.mark.parametrize("row", RENAMED_KEYS, ids=lambda row: row.old)
def test_a_deprecated_key_means_what_the_new_one_means(row: RenamedKey, tmp_path: Path) -> None:
    value = VALUES[row.old]
    by_old_name = load_tree(tree_with(row, old=value), tmp_path / "old.yaml")
    new_value = "ingress" if value == "gate" else value
    by_new_name = load_tree(tree_with(row, new=new_value), tmp_path / "new.yaml")
    assert by_old_name.config == by_new_name.config
    assert by_new_name.warnings == ()
    (warning,) = by_old_name.warnings
    shown = row.new.replace("*", "name") + (": 'ingress'" if value == "gate" else "")
    place = re.escape(str(tmp_path / "old.yaml")) + r":1:\d+: "
    old = re.escape(row.old.replace("*", "name"))
    assert re.fullmatch(f"{place}{old}: deprecated, use {re.escape(shown)}", warning)


@pytest.mark.parametrize(
    "row", [row for row in RENAMED_KEYS if VALUES[row.old] != {}], ids=lambda row: row.old
)
def test_a_key_under_both_names_is_refused(row: RenamedKey, tmp_path: Path) -> None:
    value = VALUES[row.old]
    with pytest.raises(ConfigInvalid) as error:
        load_tree(tree_with(row, old=value, new=value), tmp_path / "both.yaml")
    assert any("deprecated, and " in problem for problem in error.value.problems)


@pytest.fixture
def read(load: Load) -> Load:
    """Loads with the table."""
    return partial(load, renamed=TABLE)


@pytest.fixture
def refused(load_invalid: Refuse) -> Refuse:
    return partial(load_invalid, renamed=TABLE)


def test_a_value_moves_to_the_new_name_with_its_place(read: Load) -> None:
    loaded = read(MINIMAL_CONFIG + "limits:\n  queue: 7\n")
    assert loaded.config.admission.max_queued_requests == 7
    assert loaded.origins["admission.max_queued_requests"] == "x0.yaml:5:10"
    assert loaded.warnings == (
        "x0.yaml:5:3: limits.queue: deprecated, use admission.max_queued_requests",
    )


def test_new_names_are_no_cause_for_a_warning(read: Load) -> None:
    text = MINIMAL_CONFIG + "admission: {max_queued_requests: 7}\nslo: {default: {ttft: 2s}}\n"
    assert read(text).warnings == ()


def test_the_names_that_a_user_chose_stay(read: Load) -> None:
    loaded = read(MINIMAL_CONFIG.replace("mixed", "mixed, replicas: {first: 3}"))
    assert loaded.config.pools["main"].replicas.initial == 3
    assert loaded.warnings == (
        "x0.yaml:3:40: pools.main.replicas.first: deprecated, use pools.main.replicas.initial",
    )


def test_a_value_is_converted_and_the_warning_gives_the_new_one(read: Load) -> None:
    loaded = read(MINIMAL_CONFIG + "server: {offset: 80}\n")
    assert loaded.config.server.port == 8080
    assert loaded.warnings == ("x0.yaml:4:10: server.offset: deprecated, use server.port: 8080",)


def test_an_unconvertible_value_is_refused_at_its_place(refused: Refuse) -> None:
    assert refused(MINIMAL_CONFIG + "server: {offset: far}\n") == (
        "x0.yaml:4:18: server.port: got 'far', expected a whole number, at least 1, at most 65535",
    )


def test_a_section_moves_and_joins_the_keys_that_are_there(read: Load) -> None:
    text = MINIMAL_CONFIG + "gateway: {address: h, port: 1}\nserver: {routes: [health]}\n"
    loaded = read(text + "limits: {times: {stall: 9s}}\nadmission: {timeouts: {total: 90s}}\n")
    server, timeouts = loaded.config.server, loaded.config.admission.timeouts
    assert (server.host, server.port, server.routes) == ("h", 1, ("health",))
    assert (timeouts.stall_s, timeouts.total_s) == (9, 90)
    assert loaded.warnings == (
        "x0.yaml:4:1: gateway: deprecated, use server",
        "x0.yaml:4:11: gateway.address: deprecated, use gateway.host",
        "x0.yaml:6:10: limits.times: deprecated, use admission.timeouts",
    )


def test_a_value_moves_into_a_section_of_the_same_name(read: Load) -> None:
    loaded = read(MINIMAL_CONFIG + "slo: 2s\n")
    assert loaded.config.slo.default.ttft_s == 2
    assert loaded.warnings == ("x0.yaml:4:1: slo: deprecated, use slo.default.ttft",)


def test_both_names_in_one_file_are_refused_with_both_places(refused: Refuse) -> None:
    text = MINIMAL_CONFIG + "limits: {queue: 7}\nadmission: {max_queued_requests: 8}\n"
    text += "gateway: {port: 1, host: h}\nserver: {port: 2}\n"
    assert refused(text) == (
        "x0.yaml:4:10: limits.queue: deprecated, and admission.max_queued_requests is given at"
        " x0.yaml:5:13, keep one",
        "x0.yaml:6:11: gateway.port: deprecated, and server.port is given at x0.yaml:7:10,"
        " keep one",
    )


def test_a_null_counts_as_a_value(refused: Refuse) -> None:
    first, *_ = refused(MINIMAL_CONFIG + "server: {offset: 1, port: }\n")
    assert first == (
        "x0.yaml:4:10: server.offset: deprecated, and server.port is given at x0.yaml:4:21,"
        " keep one"
    )


def test_a_section_with_everything_commented_out_makes_room(read: Load) -> None:
    assert (
        read(
            MINIMAL_CONFIG + "limits: {queue: 7}\nadmission:\n"
        ).config.admission.max_queued_requests
        == 7
    )


@pytest.mark.parametrize(
    ("base", "overlay"),
    [
        ("limits: {queue: 7}\n", "admission: {max_queued_requests: 8}\n"),
        ("admission: {max_queued_requests: 7}\n", "limits: {queue: 8}\n"),
        ("limits: {queue: 7}\n", "limits: {queue: 8}\n"),
    ],
)
def test_an_overlay_wins_by_either_name(read: Load, base: str, overlay: str) -> None:
    loaded = read(MINIMAL_CONFIG + base, overlay)
    assert loaded.config.admission.max_queued_requests == 8
    assert len(loaded.warnings) == (base + overlay).count("limits")


def test_a_variable_and_an_option_may_use_the_old_name(read: Load) -> None:
    text = MINIMAL_CONFIG + "admission: {max_queued_requests: 7}\n"
    by_variable = read(text, env={"BATON__LIMITS__QUEUE": "8"})
    assert by_variable.config.admission.max_queued_requests == 8
    assert by_variable.origins["admission.max_queued_requests"] == "env BATON__LIMITS__QUEUE"
    assert by_variable.warnings == (
        "env BATON__LIMITS__QUEUE: limits.queue: deprecated, use admission.max_queued_requests",
    )
    by_option = read(text, env={"BATON__LIMITS__QUEUE": "8"}, sets=["limits.queue=9"])
    assert by_option.config.admission.max_queued_requests == 9
    assert by_option.warnings == (
        *by_variable.warnings,
        "--set: limits.queue: deprecated, use admission.max_queued_requests",
    )


def test_variables_by_both_names_are_refused(refused: Refuse) -> None:
    env = {"BATON__LIMITS__QUEUE": "8", "BATON__ADMISSION__MAX_QUEUED_REQUESTS": "9"}
    for variables in (env, dict(reversed(env.items()))):
        assert refused(MINIMAL_CONFIG, env=variables) == (
            "env BATON__LIMITS__QUEUE: limits.queue: deprecated, and admission.max_queued_requests"
            " is given at env BATON__ADMISSION__MAX_QUEUED_REQUESTS, keep one",
        )


@pytest.mark.parametrize("sets", [["limits.queue=7", "admission.max_queued_requests=8"]])
def test_the_last_option_wins_by_either_name(read: Load, sets: list[str]) -> None:
    assert read(MINIMAL_CONFIG, sets=sets).config.admission.max_queued_requests == 8
    assert read(MINIMAL_CONFIG, sets=sets[::-1]).config.admission.max_queued_requests == 7


def test_a_configuration_of_another_version_may_have_old_names() -> None:
    assert (
        load_text(MINIMAL_CONFIG + "limits: {queue: 7}\n", TABLE).admission.max_queued_requests == 7
    )
