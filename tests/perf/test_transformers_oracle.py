"""Parameters of every architecture of transformers, against the model that transformers builds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from baton.domain.errors import UnknownModel
from baton.perf.model.config_json import from_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
_TOLERANCE = 0.02
"""Of weights. Norms and biases, which a shape leaves out, are less."""
_MIN_RIGHT = 75
"""Architectures that a shape describes; others are refused."""
_PROGRAM = """
import json, sys, warnings
warnings.filterwarnings("ignore")
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
    try:
        config = CONFIG_MAPPING[name]()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception:  # its defaults describe no model
        continue
    sizes = {id(weights): weights.numel() for weights in model.parameters()}
    row = {"name": name, "parameters": sum(sizes.values()), "config": config.to_dict()}
    sys.stdout.write(json.dumps(row, default=str) + "\\n")
"""


@pytest.fixture(scope="module")
def architectures() -> list[dict[str, Any]]:
    """Each architecture that transformers builds from its default configuration, without memory."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


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
