"""Models and types of numbers as they are named on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from baton.domain.errors import UnknownModel

if TYPE_CHECKING:  # imported where they are used: keeps --help fast
    from baton.perf.hardware.accelerators import Dtype
    from baton.perf.model.shape import ModelShape

AUTO = "auto"
_REMEDY = "give the config.json that came with the weights"


class StoredModel(NamedTuple):
    """A model as an engine keeps it."""

    shape: ModelShape
    weights: Dtype
    kv: Dtype
    published: Dtype | None
    """Type of the published weights; None if neither config nor name tells."""


def read_model(model: str, *, weights: Dtype | None = None, kv: Dtype | None = None) -> StoredModel:
    """A model by its name, or by its config or the folder of that.

    `weights` and `kv` are the user's word; else the config or the name tells, else they have 16
    bits, and KV 32 where weights do.

    Raises:
        UnknownModel: neither a config nor a known name, or an incomplete config.
    """
    from baton.config.derive.model_files import read_published
    from baton.perf.hardware.accelerators import DTYPE_BYTES, Dtype
    from baton.perf.model.known_models import dtype_hint, find_shape

    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        shape, published, published_kv = read_published(
            path, name=str(path), needs_weights=weights is None
        )
        kv = kv or published_kv
    elif path.suffix == ".json" or path.is_absolute():
        raise UnknownModel(f"{path.parent} has no {path.name}", _REMEDY)
    else:
        shape = find_shape(model)
        published = dtype_hint(model)
    weights = weights or published or Dtype.BF16
    is_wide = DTYPE_BYTES[weights] >= DTYPE_BYTES[Dtype.BF16]
    return StoredModel(shape, weights, kv or (weights if is_wide else Dtype.BF16), published)


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
