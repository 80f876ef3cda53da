"""Write a small random LoRA adapter over the tiny model: a real one for engines, no download.

It changes what attention carries along, so that most continuations differ from the model's own and
from those of adapters with other seeds, and stay as clear as the model's.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Final

RANK: Final = 8
_GAIN: Final = 3.0
"""With less, half of the continuations stay as the model's own."""


def write_tiny_adapter(path: Path, model: Path, *, seed: int) -> Path:
    """Write an adapter over the tiny model in the folder `model` into the folder `path`.

    The same seed gives the same adapter. It is in the format of the PEFT library.

    Returns:
        `path`, for an engine to load.

    Raises:
        ModuleNotFoundError: torch or safetensors is not installed.
    """
    import torch
    from safetensors.torch import save_file

    shape = json.loads((model / "config.json").read_text())
    hidden = int(shape["hidden_size"])
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(int(shape["num_hidden_layers"])):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        down = torch.randn(RANK, hidden, generator=random) / math.sqrt(hidden)
        up = torch.randn(hidden, RANK, generator=random) * _GAIN / math.sqrt(RANK)
        weights[f"{name}.lora_A.weight"] = down.to(torch.bfloat16)
        weights[f"{name}.lora_B.weight"] = up.to(torch.bfloat16)
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["o_proj"],
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path
