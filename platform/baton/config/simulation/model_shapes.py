"""The shape of a configuration's model: by its name, or from a `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from baton.domain.errors import UnknownModel
from baton.perf.hardware.accelerators import Dtype
from baton.perf.model.known_models import dtype_hint, find_shape
from baton.perf.model.shape import ModelShape, from_config, weights_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShape:
    """A model's shape, and how its weights are stored as far as its source tells."""

    shape: ModelShape
    weights: Dtype | None = None


def load_shape(source: str, config_file: Path | None = None) -> SourceShape:
    """The shape of a model by its source (a hub id or a folder), or by a file that says it.

    Raises:
        UnknownModel: the name is not known, or the file is none or says too little.
    """
    if config_file is None and (file := Path(source) / "config.json").is_file():
        config_file = file
    if config_file is None:
        return SourceShape(shape=find_shape(source), weights=dtype_hint(source))
    if config_file.is_dir():
        config_file /= "config.json"
    config = _read(config_file)
    return SourceShape(shape=from_config(config, name=source), weights=weights_dtype(config))


def _read(file: Path) -> Mapping[str, object]:
    try:
        content: object = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _unreadable(file, reason) from error
    if not isinstance(content, dict):
        raise _unreadable(file, f"got {type(content).__name__}, wanted an object")
    return cast("Mapping[str, object]", content)


def _unreadable(file: Path, reason: str) -> UnknownModel:
    return UnknownModel(
        f"{file}: cannot be read as a model's config.json: {reason}",
        "give the config.json that lies beside the model's weights",
    )
