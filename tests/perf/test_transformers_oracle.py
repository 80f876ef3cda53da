"""Parameters of every architecture of transformers, against the model that transformers builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.domain.errors import UnknownModel
from baton.perf.hardware.accelerators import Dtype
from baton.perf.model.config_json import from_config
from benchmarks._fidelity_architectures import Answer, Architecture, architectures, built, lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
_MIN_RIGHT = 95
"""Architectures that a shape describes; others are refused."""
_MIN_KV_RIGHT = 60
_HYBRIDS = Path(__file__).with_name("hybrid_configs.json")
_NOT_BUILT = frozenset({"XiaomiMiMo/MiMo-V2-Flash"})
"""Transformers reads other keys than those that its authors publish."""
SHARED = {
    "num_kv_shared_layers": 10,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "use_double_wide_mlp": True,
    "enable_moe_block": False,
    "attention_k_eq_v": False,
}
"""Of a small Gemma 4."""


@pytest.fixture(scope="module")
def models() -> list[dict[str, Any]]:
    """Of each class, with its defaults."""
    return built({})


@pytest.fixture(scope="module")
def found(models: list[dict[str, Any]]) -> list[Architecture]:
    return architectures(models)


def test_no_architecture_is_answered_wrongly(found: list[Architecture]) -> None:
    wrong = [row for row in found if row.weights_answer is Answer.WRONG]
    assert wrong == [], list(lines(wrong))
    assert sum(row.weights_answer is Answer.RIGHT for row in found) >= _MIN_RIGHT


def test_no_kv_cache_is_answered_wrongly(found: list[Architecture]) -> None:
    """Where keys and values have projections of their own, their outputs are what is kept."""
    wrong = [row for row in found if row.kv_answer is Answer.WRONG]
    assert wrong == [], list(lines(wrong))
    assert sum(row.kv_answer is Answer.RIGHT for row in found) >= _MIN_KV_RIGHT


def test_a_config_without_one_of_its_keys_means_the_same_or_is_refused(
    models: list[dict[str, Any]],
) -> None:
    """All keys have their class's default, so that the class without one is the same model."""
    wrong, answered = [], 0
    for model in models:
        name, config = model["name"], model["config"]
        for key in set(config) - {"model_type"}:
            without = {other: value for other, value in config.items() if other != key}
            try:
                whole, part = (from_config(each, name=name) for each in (config, without))
            except UnknownModel:
                continue
            answered += 1
            figures = [
                (shape.parameters, shape.kv_bytes(8192, Dtype.BF16)) for shape in (whole, part)
            ]
            wrong += [(name, key, *figures)] if figures[0] != figures[1] else []
    assert wrong == []
    assert answered > 3000


def test_hybrids_have_the_parameters_of_their_modules() -> None:
    configs = json.loads(_HYBRIDS.read_text(encoding="utf-8"))
    configs["with shared keys"] = {**configs["google/gemma-4-26B-A4B"]["text_config"], **SHARED}
    found = {row["name"]: row["parameters"] for row in built(configs)}
    assert set(configs) - set(found) <= _NOT_BUILT
    for name in set(found) - _NOT_BUILT:
        parameters = from_config(configs[name], name=name).parameters
        assert parameters == pytest.approx(found[name], rel=0.01), name
