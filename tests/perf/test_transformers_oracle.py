"""Parameters of every architecture of transformers, against the model that transformers builds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.domain.errors import UnknownModel
from baton.perf.hardware.accelerators import Dtype
from baton.perf.model.config_json import from_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
_TOLERANCE = 0.02
"""Of weights. Norms and biases, which a shape leaves out, are less."""
_MIN_RIGHT = 95
"""Architectures that a shape describes; others are refused."""
_MIN_KV_RIGHT = 60
_HYBRIDS = Path(__file__).with_name("hybrid_configs.json")
_NOT_BUILT = frozenset({"XiaomiMiMo/MiMo-V2-Flash"})
"""Transformers reads other keys than those that its authors publish."""
_PROGRAM = """
import json, sys, warnings
warnings.filterwarnings("ignore")
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
given = json.loads(sys.argv[1])
for name in sorted(given or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
    try:
        text = given.get(name) or {"model_type": name}
        text = {**text.get("text_config", text)}
        kind = text.pop("model_type")
        kind = {"minimax_m3": "minimax_m3_vl_text"}.get(kind, kind)
        config = CONFIG_MAPPING[kind](**text)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception:  # its defaults describe no model
        continue
    sizes = {id(weights): weights.numel() for weights in model.parameters()}
    projected = sum(
        getattr(module, "out_features", 0)
        for path, module in model.named_modules()
        if path.endswith((".self_attn.k_proj", ".self_attn.v_proj")) and "encoder" not in path
    )
    row = {"name": name, "parameters": sum(sizes.values()), "config": config.to_dict()}
    row["projected"] = projected
    sys.stdout.write(json.dumps(row, default=str) + "\\n")
"""


def built(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Each model that transformers builds without memory, of the given or of all defaults."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(given)],
        env=os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


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
def architectures() -> list[dict[str, Any]]:
    return built({})


def test_no_architecture_is_answered_wrongly(architectures: list[dict[str, Any]]) -> None:
    right, wrong = [], {}
    for row in architectures:
        try:
            shape = from_config(row["config"], name=row["name"])
        except UnknownModel:
            continue
        ratio = shape.parameters / row["parameters"]
        if abs(ratio - 1) <= _TOLERANCE:
            right.append(row["name"])
        elif not (shape.left_out and ratio < 1):
            wrong[row["name"]] = f"{shape.parameters:,} parameters, expected {row['parameters']:,}"
    assert wrong == {}
    assert len(right) >= _MIN_RIGHT, right


def test_no_kv_cache_is_answered_wrongly(architectures: list[dict[str, Any]]) -> None:
    """Where keys and values have projections of their own, their outputs are what is kept."""
    right, wrong = [], {}
    for row in architectures:
        try:
            shape = from_config(row["config"], name=row["name"])
        except UnknownModel:
            continue
        if shape.latent is not None or not row["projected"]:
            continue
        kv_numbers = shape.kv_token_bytes(Dtype.BF16) / 2
        if kv_numbers == row["projected"]:
            right.append(row["name"])
        else:
            wrong[row["name"]] = f"{kv_numbers:,} numbers, expected {row['projected']:,}"
    assert wrong == {}
    assert len(right) >= _MIN_KV_RIGHT, right


def test_hybrids_have_the_parameters_of_their_modules() -> None:
    configs = json.loads(_HYBRIDS.read_text(encoding="utf-8"))
    configs["with shared keys"] = {**configs["google/gemma-4-26B-A4B"]["text_config"], **SHARED}
    found = {row["name"]: row["parameters"] for row in built(configs)}
    assert set(configs) - set(found) <= _NOT_BUILT
    for name in set(found) - _NOT_BUILT:
        parameters = from_config(configs[name], name=name).parameters
        assert parameters == pytest.approx(found[name], rel=0.01), name
