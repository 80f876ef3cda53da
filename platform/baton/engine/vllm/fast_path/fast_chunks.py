"""Chunks of a stream are written as vLLM writes them, without being checked first.

vLLM makes of each token two or three pydantic models, each of which is looked at by a validator in
Python before it is turned into JSON. What they are made of is vLLM's own; nothing in them is to be
checked, and checking takes a tenth of what its server does for a token. So the names by which its
handlers make them stand for structs here: the same fields in the same order, and the same JSON,
which `tests/engine/test_quick_chunks.py` compares. What is asked of a chunk otherwise than by those
who stream tokens (the last one, with the usage) is left to vLLM's models.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, Raw
from pydantic import BaseModel
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion import serving as chat
from vllm.entrypoints.openai.completion import serving as completions
from vllm.entrypoints.serve.utils import tool_calls_utils

_ONLY_CONTENT = {"content"}


class QuickChunk(msgspec.Struct):
    """A chunk, or a part of one; what was not said of it is `UNSET`."""

    vllms: ClassVar[type[BaseModel]]
    """What vLLM makes in its place."""

    def model_dump_json(self, *, exclude_unset: bool = False, exclude_none: bool = False) -> str:
        """As that of vLLM's model."""
        if exclude_unset and not exclude_none:
            return _ENCODE(self).decode()
        return self.checked().model_dump_json(
            exclude_unset=exclude_unset, exclude_none=exclude_none
        )

    def checked(self) -> BaseModel:
        """The same as vLLM's model."""
        said = {
            name: value
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not UNSET
        }
        return self.vllms(**{name: _checked(value) for name, value in said.items()})


def quick(model: type[BaseModel]) -> type[QuickChunk]:
    """A class that stands for a model of vLLM's: it is made with the same arguments."""
    fields = [(name, Any, UNSET) for name in model.model_fields]
    made = msgspec.defstruct(model.__name__, fields, bases=(QuickChunk,), kw_only=True)
    made.vllms = model  # type: ignore[attr-defined]  # of the class, not of what it makes
    return made  # type: ignore[return-value]  # by its base


def write_chunks_quickly() -> None:
    """Have vLLM's handlers make quick chunks from now on, in this process. Idempotent."""
    for module, response, choice in (
        (completions, "CompletionStreamResponse", "CompletionResponseStreamChoice"),
        (chat, "ChatCompletionStreamResponse", "ChatCompletionResponseStreamChoice"),
    ):
        for name in (response, choice):
            _stand_in(module, name)
    # It asks of what it is given whether it is a choice, and finds the delta in that.
    theirs = tool_calls_utils.ChatCompletionResponseStreamChoice
    if not isinstance(theirs, tuple):
        ours = chat.ChatCompletionResponseStreamChoice
        tool_calls_utils.ChatCompletionResponseStreamChoice = (theirs, ours)


def _stand_in(module: ModuleType, name: str) -> None:
    theirs = getattr(module, name)
    if not issubclass(theirs, QuickChunk):
        setattr(module, name, quick(theirs))


def _checked(value: object) -> object:
    if isinstance(value, QuickChunk):
        return value.checked()
    return [_checked(one) for one in value] if isinstance(value, list) else value


def _as_theirs(value: Any) -> object:  # noqa: ANN401 - whatever a chunk is made with
    """What is no struct: pydantic writes it."""
    if type(value) is DeltaMessage and value.model_fields_set == _ONLY_CONTENT:
        return {"content": value.content}  # nearly all of them
    if isinstance(value, BaseModel):
        return Raw(value.model_dump_json(exclude_unset=True).encode())
    raise TypeError(f"a chunk holds a {type(value).__name__}, wanted what JSON has")


_ENCODE = msgspec.json.Encoder(enc_hook=_as_theirs).encode
