"""Where models may be, how long engines may take to read them, and who is told how."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config import DeploymentConfig, load_config
from baton.config.derive.options import api_arguments, model_loading_arguments
from baton.config.derive.start_deadlines import deployment_deadline_s, start_deadline_s
from baton.domain.errors import ConfigInvalid
from baton.domain.names.model_sources import hub_id, is_in_object_store, is_path, source_error
from tests.repo.project import ROOT


def config(*sets: str) -> DeploymentConfig:
    return load_config([ROOT / "configs" / "quickstart.yaml"], env={}, sets=sets).config


@pytest.mark.parametrize(
    "source",
    [
        "tiny",
        "Qwen/Qwen3-1.7B",
        "gpt2",
        "hf://Qwen/Qwen3-1.7B",
        "./llama",
        "/models/llama/8b",
        "s3://bucket/llama",
        "gs://bucket/a/b",
        "az://container/llama",
    ],
)
def test_a_model_may_be_on_a_hub_in_a_folder_or_in_a_store(source: str) -> None:
    assert source_error(source) is None
    (model,) = config(f"model.source={source}").models.values()
    assert model.source == source


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("ftp://host/llama", "expected an id on the hub, a folder, or a place in s3://"),
        ("https://hub.example/llama", "expected an id on the hub"),
        ("/models/llama.Q4_K_M.gguf", "which vLLM 0.32 and 0.33 do not read"),
        ("hf://", "expected an id on the hub"),
    ],
)
def test_an_unloadable_model_is_refused_with_its_file(source: str, why: str) -> None:
    with pytest.raises(ConfigInvalid, match=why):
        config(f"model.source={source}")


def test_a_scheme_is_not_taken_for_a_folder() -> None:
    assert [is_path(name) for name in ("s3://b/m", "a/b", "a/b/c", "~/m")] == [
        False,
        False,
        True,
        True,
    ]
    assert is_in_object_store("S3://bucket/m")
    assert hub_id("hf://Qwen/Qwen3-1.7B") == hub_id("Qwen/Qwen3-1.7B") == "Qwen/Qwen3-1.7B"


def deadline_s(*sets: str) -> float:
    wanted = config(*sets)
    return start_deadline_s(wanted.pools["decode"], wanted.models[wanted.model_name])


def test_an_engine_has_time_for_the_bytes_of_its_weights(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(4_000_000))
    assert deadline_s() == 600.0
    assert deadline_s(f"model.source={tmp_path}") == pytest.approx(600.1)
    # 70.6 thousand million parameters of two bytes, at 40 MB/s
    assert deadline_s("model.source=meta-llama/Llama-3.1-70B-Instruct") == pytest.approx(
        600 + 141.1e9 / 40e6, rel=0.01
    )
    assert deadline_s("model.source=org/of-nobody-knows-what") == 1600.0


def test_the_time_can_be_said_and_a_deployment_waits_for_its_slowest_pool() -> None:
    said = ("pools.decode.engine.start_deadline=2h", "model.engine.start_deadline=20m")
    wanted = config(*said)
    model = wanted.models[wanted.model_name]
    assert {name: start_deadline_s(pool, model) for name, pool in wanted.pools.items()} == {
        "prefill": 1200.0,
        "decode": 7200.0,
    }
    assert deployment_deadline_s(wanted) == 7200.0
    with pytest.raises(ConfigInvalid, match="no effect on a simulated engine"):
        load_config(
            [ROOT / "configs" / "sim.yaml"], env={}, sets=["model.engine.start_deadline=20m"]
        )


@pytest.mark.parametrize("under", ["api", "engine.extra"])
def test_how_a_model_is_read_is_said_once_and_both_are_told(under: str) -> None:
    wanted = config(f"model.{under}.trust_remote_code=true", f"model.{under}.tokenizer=/t")
    model = wanted.models[wanted.model_name]
    both = {"trust_remote_code": True, "tokenizer": "/t"}
    assert model_loading_arguments(model) == both
    assert api_arguments(model) == both


def test_two_ways_to_read_one_model_are_refused() -> None:
    with pytest.raises(ConfigInvalid, match=r"differs from engine\.extra\.tokenizer; set it once"):
        config("model.api.tokenizer=/a", "model.engine.extra.tokenizer=/b")
