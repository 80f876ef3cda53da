"""Chunks of a stream, serialized as vLLM does but without validation.

For each token vLLM makes two or three pydantic models and validates each in Python before it
becomes JSON. Their content is vLLM's own, and validation takes a tenth of the server's work for a
token. So the names with which handlers make chunks refer to structs with the same fields, order and
JSON (`tests/engine/test_fast_chunks.py` compares them). Other uses of a chunk, such as the last
one with the usage, convert it to vLLM's model.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, Raw
from pydantic import BaseModel
from vllm.entrypoints.generate.base.protocol import DeltaMessage

from baton.engine.vllm.patches import table

_ONLY_CONTENT = {"content"}


class FastChunk(msgspec.Struct):
    """A chunk, or a part of one; fields that were not given are `UNSET`."""

    vllm_model: ClassVar[type[BaseModel]]
    """The model that it replaces."""

    def model_dump_json(self, *, exclude_unset: bool = False, exclude_none: bool = False) -> str:
        """Serialize like vLLM's model."""
        if exclude_unset and not exclude_none:
            return _ENCODE(self).decode()
        return self.to_vllm_model().model_dump_json(
            exclude_unset=exclude_unset, exclude_none=exclude_none
        )

    def to_vllm_model(self) -> BaseModel:
        """Convert to vLLM's model."""
        set_fields = {
            name: value
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not UNSET
        }
        return self.vllm_model(
            **{name: _to_vllm_value(value) for name, value in set_fields.items()}
        )


def make_fast_class(model: type[BaseModel]) -> type[FastChunk]:
    """A class that replaces a model of vLLM and takes the same arguments."""
    fields = [(name, Any, UNSET) for name in model.model_fields]
    fast_class = msgspec.defstruct(model.__name__, fields, bases=(FastChunk,), kw_only=True)
    fast_class.vllm_model = model  # type: ignore[attr-defined]  # of the class, not of what it makes
    return fast_class  # type: ignore[return-value]  # by its base


def install_fast_chunks() -> None:
    """Have vLLM's handlers make fast chunks from now on, in this process. Idempotent."""
    table.FAST_CHUNKS.install(make_fast_class, FastChunk)


def _to_vllm_value(value: object) -> object:
    if isinstance(value, FastChunk):
        return value.to_vllm_model()
    return [_to_vllm_value(item) for item in value] if isinstance(value, list) else value


def _encode_value(value: Any) -> object:  # noqa: ANN401 - whatever a chunk is made with
    """Serialize values that are not structs, by pydantic."""
    if type(value) is DeltaMessage and value.model_fields_set == _ONLY_CONTENT:
        return {"content": value.content}  # nearly all of them
    if isinstance(value, BaseModel):
        return Raw(value.model_dump_json(exclude_unset=True).encode())
    raise TypeError(f"a chunk holds a {type(value).__name__}, expected what JSON has")


_ENCODE = msgspec.json.Encoder(enc_hook=_encode_value).encode
