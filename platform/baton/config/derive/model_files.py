"""The files beside a model's weights that describe them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, cast

from baton.domain.errors import UnknownModel
from baton.perf.hardware.accelerators import Dtype
from baton.perf.model.config_json import from_config
from baton.perf.model.quantization import kv_dtype, stored_weights
from baton.perf.model.shape import ModelShape

_CONFIG: Final = "config.json"
_QUANTIZATION: Final = "hf_quant_config.json"
"""Of NVIDIA's ModelOpt. vLLM reads it where `config.json` has no `quantization_config`."""
_REMEDY = "give the config.json that came with the weights"


class PublishedModel(NamedTuple):
    """A model as its files describe it."""

    shape: ModelShape
    weights: Dtype | None
    """Type of most weights; None if it is not known and was not needed."""
    kv: Dtype | None
    """Type of the KV cache that its quantization asks for; None if it does not."""


def read_model_config(path: Path) -> Mapping[str, object]:
    """A `config.json`, or that of a folder, with the quantization of the file beside it.

    Source: `get_quant_config` of vLLM 0.32's `model_loader/weight_utils.py`.

    Raises:
        UnknownModel: there is none, or it is no JSON object.
    """
    file = path / _CONFIG if path.is_dir() else path
    config = _read_object(file)
    beside = file.with_name(_QUANTIZATION)
    if "quantization_config" in config or not beside.is_file():
        return config
    quantization = _read_object(beside).get("quantization")
    if not isinstance(quantization, Mapping):
        raise UnknownModel(f"{beside}: got no object 'quantization', expected one", _REMEDY)
    return {**config, "quantization_config": {"quant_method": "modelopt", **quantization}}


def read_published(path: Path, *, name: str, needs_weights: bool = True) -> PublishedModel:
    """The model that a `config.json`, or that of a folder, describes; errors mention `name`.

    Raises:
        UnknownModel: there is none, it is not supported, or its quantization is not known although
            that is needed.
    """
    config = read_model_config(path)
    shape = from_config(config, name=name)
    kv = kv_dtype(config)
    if any(layer.attention and layer.attention.compression for layer in shape.kinds):
        kv = Dtype.FP8  # vLLM's default for compressed keys
    try:
        stored = stored_weights(config, shape)
    except UnknownModel:
        if needs_weights:
            raise
        return PublishedModel(shape, None, kv)
    return PublishedModel(replace(shape, stored=stored), stored.dtype, kv)


def _read_object(file: Path) -> Mapping[str, object]:
    try:
        content: object = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnknownModel(f"{file.parent} has no {file.name}", _REMEDY) from None
    except OSError as error:
        raise UnknownModel(f"{file}: cannot be read: {error.strerror}", _REMEDY) from error
    except ValueError as error:  # not JSON, or not even text
        raise UnknownModel(f"{file}: got {error}, expected JSON", _REMEDY) from error
    if not isinstance(content, dict):
        raise UnknownModel(f"{file}: got a {type(content).__name__}, expected an object", _REMEDY)
    return cast("Mapping[str, object]", content)
