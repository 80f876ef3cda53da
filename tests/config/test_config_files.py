"""The files in configs/, the JSON schema, and the schema itself."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from pathlib import Path

import jsonschema  # type: ignore[import-untyped,unused-ignore]  # has no types
import pytest
from ruamel.yaml import YAML

from baton.config import DeploymentConfig, json_schema, load_config, render
from baton.config.checks.topology import RESERVED_POOL_NAMES
from baton.config.language.fields import NestedSection, fields_of, planned_keys
from baton.config.schema.deployment import (
    EngineConfig,
    EngineKind,
    Route,
    ServerConfig,
    SimTimings,
)
from baton.domain.fleet import Role
from baton.engine.vllm.gate.gate import ROUTES
from baton.serving.shared.names import CONTROLLER, INGRESS
from baton.simulator.engine.settings import OnTransferFailure, SimSettings

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))


@cache
def checker() -> jsonschema.Draft202012Validator:
    """The JSON schema, which is a valid one."""
    jsonschema.Draft202012Validator.check_schema(json_schema())
    return jsonschema.Draft202012Validator(json_schema())


def test_there_are_configurations_to_load() -> None:
    names = {file.name for file in FILES}
    assert {"quickstart.yaml", "sim.yaml", "gpu-example.yaml", "tenants-example.yaml"} <= names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_file_in_configs_loads_and_renders(file: Path, tmp_path: Path) -> None:
    config = load_config([file]).config
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(render(config))
    assert load_config([rendered]).config == config


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_file_in_configs_fits_the_json_schema(file: Path) -> None:
    checker().validate(YAML(typ="safe", pure=True).load(file))


def test_the_effective_configuration_fits_the_json_schema(tmp_path: Path) -> None:
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(render(load_config([CONFIGS / "sim.yaml"]).config))
    checker().validate(YAML(typ="safe", pure=True).load(rendered))


LEAST: dict[str, object] = {
    "version": 1,
    "model": {"source": "x"},
    "pools": {"p": {"role": "mixed"}},
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": None},
        {"version": 2},
        {"pools": {"p": {"role": "mixt"}}},
        {"pools": {"P": {"role": "mixed"}}},
        {"pools": {}},
        {"model": {"source": "x", "max_len": "4k"}},
        {"transfer": {"deadline": "2"}},
        {"tenants": {"acme": {"wieght": 2}}},
        {"tenants": {"acme": {"rate": {"requests": 10}}}},
        {"slo": {"classes": {"long": {"match": "output_tokens > 8"}}}},
        {"autoscaler": {"policy": "own.policies"}},
        {"slo": {"default": {"ttft": 1}}},
        {"router": {"policy": "own.policies"}},
    ],
)
def test_the_json_schema_refuses_what_the_loader_refuses(wrong: dict[str, object]) -> None:
    checker().validate(LEAST)
    with pytest.raises(jsonschema.ValidationError):
        checker().validate(LEAST | wrong)


@pytest.mark.parametrize("missing", LEAST)
def test_the_json_schema_refuses_a_file_that_lacks_what_every_one_has(missing: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        checker().validate({key: value for key, value in LEAST.items() if key != missing})


def test_the_quickstart_has_one_real_prefill_and_one_real_decode_replica() -> None:
    config = load_config([CONFIGS / "quickstart.yaml"]).config
    roles = {pool.role: pool.replicas.initial for pool in config.pools.values()}
    assert roles == {Role.PREFILL: 1, Role.DECODE: 1}
    assert {pool.engine.kind for pool in config.pools.values()} == {EngineKind.VLLM}


def test_every_setting_of_the_simulated_engine_can_be_reached() -> None:
    elsewhere = {
        "max_len_tokens",
        "block_size_tokens",
        "kv_dtype",
        "max_running_requests",
        "max_batched_tokens",
        "max_batched_tokens_while_decoding",
        "invalid_token_id",
        "lease_s",
        "max_pulls",
        "on_transfer_failure",
        "side_channel_host",
        "side_channel_port",
        "side_channel_deadline_s",
        "host_blocks",
        "adapter_slots",
        "adapters_per_batch",
    }
    here = {field.name for field in fields(SimTimings)}
    assert here | elsewhere == {field.name for field in fields(SimSettings)}
    assert not here & elsewhere


def test_names_that_two_packages_share_are_the_same_in_both() -> None:
    assert [str(route) for route in Route] == list(ROUTES)
    on_failure = fields_of(DeploymentConfig)["transfer"].kind
    assert isinstance(on_failure, NestedSection)
    assert {"recompute", "fail"} == {str(member) for member in OnTransferFailure}
    assert {INGRESS, CONTROLLER} == RESERVED_POOL_NAMES


def all_sections(of: type) -> set[type]:
    """A section and every section under it."""
    nested = [getattr(field.kind, "schema", None) for field in fields_of(of).values()]
    return {of}.union(*(all_sections(section) for section in nested if section is not None))


def test_no_key_is_both_there_and_not_yet() -> None:
    sections = all_sections(DeploymentConfig)
    assert {EngineConfig, ServerConfig, SimTimings} <= sections
    for section in sections:
        assert not set(fields_of(section)) & set(planned_keys(section)), section
