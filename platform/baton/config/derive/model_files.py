"""The files beside a model's weights that describe them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

from baton.domain.errors import UnknownModel

_CONFIG: Final = "config.json"
_QUANTIZATION: Final = "hf_quant_config.json"
"""Of NVIDIA's ModelOpt. vLLM reads it where `config.json` has no `quantization_config`."""
_REMEDY = "give the config.json that came with the weights"


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
