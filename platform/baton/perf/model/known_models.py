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

_SAYS_NOTHING = frozenset(
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
_DTYPES: Mapping[str, Dtype] = {
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


def shape_of(hub_id: str) -> ModelShape:
    """The shape of a model by its hub id, or by that of a variant of the same shape.

    Case and organisation do not matter, nor what says how a model was tuned or quantized.

    Raises:
        UnknownModel: it is not among those known here.
    """
    plain = _plain(hub_id)
    found = _BY_PLAIN_NAME.get(plain) or _BY_PLAIN_NAME.get(re.sub(r"-v0\.\d$", "", plain))
    if found is None:
        near = get_close_matches(plain, _BY_PLAIN_NAME, n=3, cutoff=0.5)
        names = ", ".join(_BY_PLAIN_NAME[one].name for one in near) or "another name"
        raise UnknownModel(
            f"the shape of {hub_id!r} is not known by its name",
            f"try {names}, or give the path of its config.json",
        )
    return found


def dtype_hint(hub_id: str) -> Dtype | None:
    """How the weights are stored, as far as the name tells; None when it says nothing."""
    for part in _parts(hub_id):
        if part in _DTYPES:
            return _DTYPES[part]
    known = _BY_PLAIN_NAME.get(_plain(hub_id))
    if known is None:
        return None
    stored = (dtype for start, dtype in _STORED_AS.items() if known.name.startswith(start))
    return None if "Distill" in known.name else next(stored, None)


def _parts(hub_id: str) -> list[str]:
    return re.split(r"[-_]", hub_id.rsplit("/", 1)[-1].lower())


def _plain(hub_id: str) -> str:
    kept = [part for part in _parts(hub_id) if part not in _SAYS_NOTHING and part not in _DTYPES]
    return re.sub(r"^llama-?(\d)", r"llama-\1", "-".join(kept))


def _plain_names() -> Iterator[tuple[str, ModelShape]]:
    for shape in KNOWN_MODELS.values():
        plain = _plain(shape.name)
        # The size of this one is not in its id, but everybody says it.
        if plain == "bloom":
            yield "bloom-176b", shape
        # `mixtral-8x7b` without its only version is the same; of several, the last one stays.
        yield re.sub(r"-v0\.\d$", "", plain), shape
        yield plain, shape


_BY_PLAIN_NAME: Mapping[str, ModelShape] = MappingProxyType(dict(_plain_names()))
