"""The tiny model with weights and activations of eight bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.fakes.tiny_model import tiny_model

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
        }
    },
}


def write_tiny_int8(folder: Path) -> Path:
    """Write it into a folder below `folder`: each row of a weight has a scale of its own."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "int8"
    shutil.copytree(tiny_model(folder), path)
    weights = {}
    for name, weight in load_file(path / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            weights[name] = weight
            continue
        exact = weight.to(torch.float32)
        scale = exact.abs().amax(dim=1, keepdim=True) / 127
        weights[name] = (exact / scale).round().to(torch.int8)
        weights[f"{name}_scale"] = scale
    save_file(weights, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = _QUANTIZATION
    (path / "config.json").write_text(json.dumps(config))
    return path
