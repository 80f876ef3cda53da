"""Chunks of a stream are written as vLLM writes them, without being checked first.

vLLM makes of each token two or three pydantic models, each of which is looked at by a validator in
Python before it is turned into JSON. What they are made of is vLLM's own; nothing in them is to be
checked, and checking takes a tenth of what its server does for a token. So the names by which its
handlers make them stand for structs here: the same fields in the same order, and the same JSON,
which `tests/engine/test_quick_chunks.py` compares. What is asked of a chunk otherwise than by those
who stream tokens (the last one, with the usage) is left to vLLM's models.
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
    """A chunk, or a part of one; what was not said of it is `UNSET`."""

    vllm_model: ClassVar[type[BaseModel]]
    """What vLLM makes in its place."""

    def model_dump_json(self, *, exclude_unset: bool = False, exclude_none: bool = False) -> str:
        """As that of vLLM's model."""
        if exclude_unset and not exclude_none:
            return _ENCODE(self).decode()
        return self.to_vllm_model().model_dump_json(
            exclude_unset=exclude_unset, exclude_none=exclude_none
        )

    def to_vllm_model(self) -> BaseModel:
        """The same as vLLM's model."""
        set_fields = {
            name: value
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not UNSET
        }
        return self.vllm_model(
            **{name: _to_vllm_value(value) for name, value in set_fields.items()}
        )


def make_fast_class(model: type[BaseModel]) -> type[FastChunk]:
    """A class that stands for a model of vLLM's: it is made with the same arguments."""
    fields = [(name, Any, UNSET) for name in model.model_fields]
    fast_class = msgspec.defstruct(model.__name__, fields, bases=(FastChunk,), kw_only=True)
    fast_class.vllm_model = model  # type: ignore[attr-defined]  # of the class, not of what it makes
    return fast_class  # type: ignore[return-value]  # by its base


def install_fast_chunks() -> None:
    """Have vLLM's handlers make quick chunks from now on, in this process. Idempotent."""
    table.FAST_CHUNKS.install(make_fast_class, FastChunk)


def _to_vllm_value(value: object) -> object:
    if isinstance(value, FastChunk):
        return value.to_vllm_model()
    return [_to_vllm_value(item) for item in value] if isinstance(value, list) else value


def _encode_value(value: Any) -> object:  # noqa: ANN401 - whatever a chunk is made with
    """What is no struct: pydantic writes it."""
    if type(value) is DeltaMessage and value.model_fields_set == _ONLY_CONTENT:
        return {"content": value.content}  # nearly all of them
    if isinstance(value, BaseModel):
        return Raw(value.model_dump_json(exclude_unset=True).encode())
    raise TypeError(f"a chunk holds a {type(value).__name__}, expected what JSON has")


_ENCODE = msgspec.json.Encoder(enc_hook=_encode_value).encode
