"""Models and types of numbers as they are named on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from baton.domain.errors import UnknownModel

if TYPE_CHECKING:  # imported where they are used: keeps --help fast
    from baton.perf.hardware.accelerators import Dtype
    from baton.perf.model.shape import ModelShape

AUTO = "auto"
_REMEDY = "give the config.json that came with the weights"


def read_model(model: str, *, weights: Dtype | None = None) -> tuple[ModelShape, Dtype | None]:
    """The shape of a model, and how its weights are stored if its config or its name says so.

    `weights` are the user's word on that, which counts more.

    Raises:
        UnknownModel: neither a config nor a known name, or an incomplete config.
    """
    from baton.config.derive.model_files import read_model_config
    from baton.perf.model.config_json import from_config, weights_dtype
    from baton.perf.model.known_models import dtype_hint, find_shape

    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    elif not path.is_file():
        if path.suffix == ".json" or path.is_absolute():
            raise UnknownModel(f"{path}: there is no such file", _REMEDY)
        return find_shape(model), weights or dtype_hint(model)
    config = read_model_config(path)
    return from_config(config, name=str(path)), weights or weights_dtype(config)


def parse_dtype(text: str, option: str) -> Dtype | None:
    """A data type by its name here, in vLLM or in torch; None for `auto`.

    Raises:
        BadParameter: it is unknown.
    """
    from baton.perf.hardware.accelerators import Dtype

    normalized = text.lower()
    if normalized == AUTO:
        return None
    names = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}
    try:
        return Dtype(names.get(normalized, normalized.split("_")[0]))
    except ValueError:
        expected = ", ".join((AUTO, *Dtype))
        raise typer.BadParameter(f"got {text!r}, expected {expected}", param_hint=option) from None
