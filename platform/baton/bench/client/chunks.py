"""The events of a streamed completion or chat, as far as a benchmark reads them."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct):
    """Of a prompt's tokens."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens as the endpoint counts them."""

    prompt_tokens: int | None = None
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class Delta(msgspec.Struct):
    """A piece of a chat's answer."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"null")

    def has_content(self) -> bool:
        """Whether there is anything of an answer in it."""
        return bool(
            self.content
            or self.reasoning_content
            or self.reasoning
            or bytes(self.tool_calls) not in {b"null", b"[]"}
        )


class Choice(msgspec.Struct):
    """A piece of an answer."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def answer_text(self) -> str:
        """The text of this piece; nothing for a token without."""
        return (self.text if self.delta is None else self.delta.content) or ""

    def has_tokens(self) -> bool:
        """Whether tokens came with it: not with a message that only opens or ends the answer.

        A token may be without text, e.g. a part of a character.
        """
        if self.delta is None or self.delta.has_content():
            return True
        return self.delta.role is None and self.finish_reason is None


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[Choice] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    error: object = None
