"""Weights and KV of every architecture of transformers, beside those of the built model.

Each architecture is built with its defaults, without memory. A shape describes it, refuses it, or
names what it leaves out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from baton.domain.errors import UnknownModel
from baton.perf.hardware.accelerators import Dtype
from baton.perf.model.config_json import from_config

_TOLERANCE = 0.02
"""Norms and biases, which a shape leaves out, are less."""
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


class Answer(StrEnum):
    """What a shape says of an architecture."""

    RIGHT = "right"
    PART_NAMED = "part_named"
    """It is smaller by parts that it names."""
    REFUSED = "refused"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Figures of baton and of the modules; None where there is none."""

    name: str
    class_parameters: int
    parameters: float | None = None
    kv_numbers: float | None = None
    """Of one token in all layers."""
    class_kv_numbers: int | None = None
    """Outputs of the projections to keys and values; None where these are compressed or unknown."""
    left_out: tuple[str, ...] = ()
    refusal: str | None = None

    @property
    def weights_answer(self) -> Answer:
        """About its parameters."""
        if self.parameters is None:
            return Answer.REFUSED
        ratio = self.parameters / self.class_parameters
        if abs(ratio - 1) <= _TOLERANCE:
            return Answer.RIGHT
        return Answer.PART_NAMED if self.left_out and ratio < 1 else Answer.WRONG

    @property
    def kv_answer(self) -> Answer | None:
        """About its KV cache; None: nothing to compare with."""
        if self.parameters is None:
            return Answer.REFUSED
        if self.class_kv_numbers is None:
            return None
        return Answer.RIGHT if self.kv_numbers == self.class_kv_numbers else Answer.WRONG


def compute_metrics(_data_dir: Path) -> dict[str, float]:
    """Counts of answers, and a table printed."""
    found = architectures(built({}))
    for line in lines(found):
        print(line)
    weights = Counter(row.weights_answer for row in found)
    kv = Counter(row.kv_answer for row in found)
    return {
        f"architectures_{side}_{answer}": counts[answer]
        for side, counts in (("weights", weights), ("kv", kv))
        for answer in Answer
    }


def architectures(models: Sequence[Mapping[str, Any]]) -> list[Architecture]:
    """What baton says of models that transformers built."""
    return [_architecture(row) for row in models]


def _architecture(row: Mapping[str, Any]) -> Architecture:
    name, class_parameters = row["name"], row["parameters"]
    try:
        shape = from_config(row["config"], name=name)
    except UnknownModel as error:
        return Architecture(name=name, class_parameters=class_parameters, refusal=str(error))
    has_projections = shape.latent is None and row["projected"]
    return Architecture(
        name=name,
        class_parameters=class_parameters,
        parameters=shape.parameters,
        kv_numbers=shape.kv_token_bytes(Dtype.BF16) / 2,
        class_kv_numbers=row["projected"] if has_projections else None,
        left_out=shape.left_out,
    )


def lines(found: Sequence[Architecture]) -> Iterator[str]:
    """A table: class, ours (theirs), answer."""
    for row in found:
        if row.refusal is not None:
            yield f"{row.name} | ({row.class_parameters:,}) | REFUSED: {row.refusal}"
            continue
        theirs = "no sum" if row.class_kv_numbers is None else f"{row.class_kv_numbers:,}"
        yield " | ".join(
            (
                row.name,
                f"{row.parameters:,.0f} ({row.class_parameters:,}) parameters",
                f"{row.kv_numbers:,.0f} ({theirs}) KV numbers a token",
                row.weights_answer,
                *(f"without {part}" for part in row.left_out),
            )
        )


def built(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Each model that transformers builds without memory, of the given or of all defaults."""
    done = subprocess.run(  # noqa: S603 - the program above
        [sys.executable, "-c", _PROGRAM, json.dumps(given)],
        env=os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]
