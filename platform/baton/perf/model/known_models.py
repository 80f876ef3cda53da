"""Models by name, so that their shapes can be asked for without a download."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from baton.domain.errors import UnknownModel
from baton.perf.hardware.accelerators import Dtype
from baton.perf.model.published_shapes import KNOWN_MODELS
from baton.perf.model.shape import ModelShape

_IGNORED_NAME_PARTS = frozenset(
    {"instruct", "chat", "hf", "it", "base", "pt", "meta", "dynamic", "block", "quantized", "text"}
    | {"thinking", "preview", "original", "pro", "128k", "gguf", "mlx", "unsloth", "bnb", "a16"}
    | {
        "speciale",
        "exp",
        "0528",
        "0324",
        "0905",
        "2507",
        "0711",
        "0725",
        "fp8kv",
        "kv",
        "terminus",
        "hybrid",
    }
)
"""Parts of names that leave the shape as it is."""
_DTYPE_BY_NAME_PART: Mapping[str, Dtype] = {
    "fp8": Dtype.FP8,
    "float8": Dtype.FP8,
    "w8a8": Dtype.INT8,
    "int8": Dtype.INT8,
    "w8a16": Dtype.INT8,
    "int4": Dtype.INT4,
    "4bit": Dtype.INT4,
    "w4a16": Dtype.INT4,
    "awq": Dtype.INT4,
    "gptq": Dtype.INT4,
    "fp4": Dtype.FP4,
    "nvfp4": Dtype.FP4,
    "mxfp4": Dtype.FP4,
    "bf16": Dtype.BF16,
    "fp16": Dtype.FP16,
}
"""Parts of names that say how the weights are stored."""
_STORED_AS: Mapping[str, Dtype] = {
    "openai/gpt-oss": Dtype.FP4,
    "deepseek-ai/DeepSeek-V3": Dtype.FP8,
    "deepseek-ai/DeepSeek-R1": Dtype.FP8,
    "MiniMaxAI/MiniMax-M2": Dtype.FP8,
    "moonshotai/Kimi-K2": Dtype.FP8,
}
"""Models whose authors publish them quantized, by the beginning of their ids."""


def find_shape(hub_id: str) -> ModelShape:
    """The shape of a model by its hub id, or by that of a variant of the same shape.

    Case and organisation do not matter, nor what says how a model was tuned or quantized.

    Raises:
        UnknownModel: it is not among those known here.
    """
    normalized = _normalize_name(hub_id)
    shape = _BY_NORMALIZED_NAME.get(normalized) or _BY_NORMALIZED_NAME.get(
        re.sub(r"-v0\.\d$", "", normalized)
    )
    if shape is None:
        similar = get_close_matches(normalized, _BY_NORMALIZED_NAME, n=3, cutoff=0.5)
        names = (
            ", ".join(_BY_NORMALIZED_NAME[similar_name].name for similar_name in similar)
            or "another name"
        )
        raise UnknownModel(
            f"the shape of {hub_id!r} is not known by its name",
            f"try {names}, or give the path of its config.json",
        )
    return shape


def dtype_hint(hub_id: str) -> Dtype | None:
    """How the weights are stored, as far as the name tells; None when it says nothing."""
    for part in _parts(hub_id):
        if part in _DTYPE_BY_NAME_PART:
            return _DTYPE_BY_NAME_PART[part]
    shape = _BY_NORMALIZED_NAME.get(_normalize_name(hub_id))
    if shape is None:
        return None
    dtypes = (dtype for start, dtype in _STORED_AS.items() if shape.name.startswith(start))
    return None if "Distill" in shape.name else next(dtypes, None)


def _parts(hub_id: str) -> list[str]:
    return re.split(r"[-_]", hub_id.rsplit("/", 1)[-1].lower())


def _normalize_name(hub_id: str) -> str:
    parts = [
        part
        for part in _parts(hub_id)
        if part not in _IGNORED_NAME_PARTS and part not in _DTYPE_BY_NAME_PART
    ]
    return re.sub(r"^llama-?(\d)", r"llama-\1", "-".join(parts))


def _normalized_names() -> Iterator[tuple[str, ModelShape]]:
    for shape in KNOWN_MODELS.values():
        normalized = _normalize_name(shape.name)
        # The size of this one is not in its id, but everybody says it.
        if normalized == "bloom":
            yield "bloom-176b", shape
        # `mixtral-8x7b` without its only version is the same; of several, the last one stays.
        yield re.sub(r"-v0\.\d$", "", normalized), shape
        yield normalized, shape


_BY_NORMALIZED_NAME: Mapping[str, ModelShape] = MappingProxyType(dict(_normalized_names()))
