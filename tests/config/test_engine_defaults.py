"""What engines take where a file is silent, and how that is known."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from baton.config.derive.effective_options import (
    EffectiveOption,
    effective_engine_options,
    engine_option_comments,
)
from baton.config.load import load_text


def taken(
    engine: str = "{}", resources: str = "{gpus: 1, accelerator: H100}"
) -> Mapping[str, EffectiveOption]:
    text = (
        "version: 1\nmodel: {source: m}\n"
        f"pools: {{main: {{role: mixed, engine: {engine}, resources: {resources}}}}}\n"
    )
    origins = {"pools.main.engine.max_num_seqs": "file, line 3"}
    return effective_engine_options(load_text(text), origins)["main"]


def test_on_a_known_gpu_it_is_vllms_default_there() -> None:
    found = taken()
    assert found["engine.max_num_seqs"] == EffectiveOption(1024, "vLLM's default on H100")
    assert found["engine.max_num_batched_tokens"] == EffectiveOption(8192, "vLLM's default on H100")
    assert found["engine.gpu_memory_utilization"] == EffectiveOption(0.92, "vLLM's default")
    assert found["engine.block_size"].value == 16
    assert found["engine.extra.attention_backend"] == EffectiveOption(
        None, "chosen by the engine at its start"
    )


def test_explicit_values_win_and_keep_their_origin() -> None:
    found = taken("{max_num_seqs: 7, extra: {attention_backend: FLASHINFER}}")
    assert found["engine.max_num_seqs"] == EffectiveOption(7, "file, line 3", is_explicit=True)
    assert found["engine.extra.attention_backend"].value == "FLASHINFER"


@pytest.mark.parametrize(
    ("resources", "why"),
    [
        ("{gpus: 1}", "chosen by the engine at its start: name resources.accelerator"),
        ("{gpus: 1, accelerator: X9}", "X9 is not among the accelerators known here"),
    ],
)
def test_on_a_gpu_that_is_not_known_it_is_said_to_be_unknown(resources: str, why: str) -> None:
    found = taken(resources=resources)["engine.max_num_seqs"]
    assert found.value is None
    assert why in found.origin


def test_without_gpus_it_is_vllms_default_on_cpus() -> None:
    found = taken(resources="{gpus: 0}")
    assert found["engine.max_num_seqs"] == EffectiveOption(128, "vLLM's default on CPUs")
    assert "engine.gpu_memory_utilization" not in found


def test_no_more_requests_are_taken_than_a_step_has_tokens() -> None:
    assert taken("{max_num_batched_tokens: 512}")["engine.max_num_seqs"].value == 512


def test_throughput_mode_doubles_what_is_not_said() -> None:
    found = taken("{extra: {performance_mode: throughput}}")
    assert found["engine.max_num_seqs"].value == 2048
    assert found["engine.max_num_batched_tokens"].value == 16384


def test_a_share_of_memory_has_no_say_beside_a_number_of_bytes() -> None:
    assert taken("{kv_cache: 20GiB}")["engine.gpu_memory_utilization"].value is None


def test_for_a_person_it_is_comments_that_change_nothing() -> None:
    lines = list(engine_option_comments({"main": taken()}))
    assert lines[0] == "# pools.main.engine.max_num_seqs: 1024 (vLLM's default on H100)"
    assert all(line.startswith("# ") for line in lines)
    assert [line for line in lines if "not known" in line] == [
        "# pools.main.engine.extra.attention_backend: not known (chosen by the engine at its start)"
    ]


def test_values_of_the_file_are_not_repeated() -> None:
    lines = engine_option_comments({"main": taken("{max_num_seqs: 7}")})
    assert not [line for line in lines if "max_num_seqs" in line]


def test_simulated_engines_take_what_they_are_told() -> None:
    text = (
        "version: 1\nmodel: {source: m, max_len: 512}\n"
        "pools: {main: {role: mixed, engine: {kind: sim}}}\n"
    )
    assert effective_engine_options(load_text(text), {}) == {}
