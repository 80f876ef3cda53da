"""The middle of a plain stream goes from vLLM's output processor to its client in one call.

Theory of operation: for each token vLLM makes an output, wakes the request's task with it, and
passes it through five generators, the last of which makes a chunk of it. Of a stream that is
nothing but text, one chunk is like the other but for the text. So where a request asks for no more,
its first chunks are looked at: when one becomes the other by putting the other's text in, that is
the form of all that come until the last. From then on, whenever such a stream has sent all it had
and waits for an output, the next text is put into the form and sent at once, by whoever brings it.

Its tokens are handed on with the next output that goes vLLM's way, since vLLM's handler counts
them: with the last one at the latest. That way go the first and the last of a stream, what comes
while its task is busy or its client reads too slowly, and all there is of any other request.

A server's `send` runs up to its first wait in the task of vLLM's output processor. It must not ask
which task it is in before that (as `asyncio.timeout` does); uvicorn's and Ray Serve's do not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineGenerateError

from baton.engine.vllm.gate.gate import Exchange, Message
from baton.engine.vllm.patches.api_server import restore_attribute
from baton.runtime.patch import replace_attributes

VllmObject: TypeAlias = Any
"""What vLLM makes, which is not followed."""
_MAX_SAMPLED_OUTPUTS = 8
"""Outputs, until it is taken that there is no form."""
_UNKNOWN = object()


class ChunkTemplate(NamedTuple):
    """What is around the text of a chunk, whichever text it is."""

    prefix: bytes
    suffix: bytes

    def render(self, text: str) -> bytes:
        """The chunk with this text."""
        return self.prefix + msgspec.json.encode(text) + self.suffix


class Chunk(NamedTuple):
    """A text, and the chunk that was made of it."""

    text: str
    body: bytes


def find_template(first: Chunk, second: Chunk) -> ChunkTemplate | None:
    """The form of two chunks; None where more than the text differs, or nothing does."""
    if first.text == second.text:
        return None
    encoded_text, templates, offset = msgspec.json.encode(first.text), [], 0
    while (offset := first.body.find(encoded_text, offset)) >= 0:
        template = ChunkTemplate(first.body[:offset], first.body[offset + len(encoded_text) :])
        if template.render(second.text) == second.body:
            templates.append(template)
        offset += 1
    return templates[0] if len(templates) == 1 else None


def is_bypassable(request: VllmObject, app: VllmObject) -> bool:
    """Whether a request wants a stream of one answer's text, of which nobody keeps account.

    `app` is the state of vLLM's app: its handlers may have more to do with each text than to pass
    it on (parsers of tools and of reasoning, a log), and say a word when there is none for long.
    """
    if not request.stream or request.n not in (None, 1) or request.use_beam_search:
        return False
    options = request.stream_options
    wants_continuous_usage = options is not None and options.continuous_usage_stats
    if wants_continuous_usage or request.return_token_ids or request.echo:
        return False
    if getattr(getattr(app, "args", None), "sse_keep_alive_interval", 0) > 0:
        return False
    if isinstance(request, CompletionRequest):
        handler = getattr(app, "openai_serving_completion", None)
        has_one_text = request.logprobs is None and _is_one_prompt(request.prompt)
        return has_one_text and not getattr(handler, "enable_force_include_usage", True)
    if isinstance(request, ChatCompletionRequest):
        return not request.logprobs and _is_passthrough(getattr(app, "openai_serving_chat", None))
    return False


def _is_one_prompt(prompt: object) -> bool:
    if isinstance(prompt, list):
        return bool(prompt) and isinstance(prompt[0], int)
    return isinstance(prompt, str)


def _is_passthrough(handler: VllmObject) -> bool:
    """Whether a handler of chats does nothing with a text but to pass it on."""
    parser = getattr(handler, "parser_cls", _UNKNOWN)
    option_names = ("enable_log_outputs", "enable_force_include_usage")
    return parser is None and not any(getattr(handler, name, True) for name in option_names)


class StreamBypass:
    """That of one request. Whoever made it closes it."""

    def __init__(self, exchange: Exchange) -> None:
        self.unsent: asyncio.Task[None] | None = None
        """What its client was too slow to take; to be waited for before anything else is sent."""
        self._exchange = exchange
        self._state: VllmObject = None
        self._is_active = False
        """The stream has a form, has sent all, and waits for an output."""
        self._template: ChunkTemplate | None = None
        self._sampled_outputs = 0
        self._previous: Chunk | None = None
        self._text = ""
        self._chunks: list[bytes] = []
        self._uncounted: list[int] = []
        """Tokens that were sent and that vLLM's handler has not counted yet."""

    def attach(self, state: VllmObject) -> None:
        """Stand between vLLM's output processor and the state that it keeps of the request."""
        if self._state is not None:  # it asks for more than one answer after all
            self._detach()
            return
        logprobs = state.logprobs_processor
        if (
            state.queue is not None
            and state.parent_req is None
            and state.output_kind == RequestOutputKind.DELTA
            and state.stream_interval == 1
            and state.detokenizer is not None
            and not state.streaming_input
            and logprobs.num_logprobs is None
            and logprobs.num_prompt_logprobs is None
        ):
            self._state = state
            replace_attributes(state, make_request_output=self._make_request_output)

    def on_output(self, output: VllmObject) -> None:
        """An output goes vLLM's way."""
        self._is_active = False
        if self._template is None:
            self._text = output.outputs[0].text
            self._chunks.clear()

    def on_chunk(self, chunk: bytes) -> None:
        """A chunk is sent that vLLM's handler has made."""
        if self._template is None and self._sampled_outputs < _MAX_SAMPLED_OUTPUTS:
            self._chunks.append(chunk)

    def on_idle(self) -> None:
        """All chunks of the last output were sent, and the next output is waited for."""
        if self._template is None and self._sampled_outputs < _MAX_SAMPLED_OUTPUTS:
            self._sample()
        all_sent = self.unsent is None or self.unsent.done()
        self._is_active = self._template is not None and self._state is not None and all_sent

    def close(self) -> None:
        """Nothing is sent here any more. Idempotent."""
        self._detach()
        if self.unsent is not None:
            self.unsent.cancel()

    def _detach(self) -> None:
        self._is_active, self._sampled_outputs = False, _MAX_SAMPLED_OUTPUTS
        if self._state is not None:
            restore_attribute(self._state, "make_request_output")
            self._state = None

    def _sample(self) -> None:
        self._sampled_outputs += 1
        if not self._chunks:
            return
        chunk = Chunk(self._text, self._chunks[-1])  # a stream may begin with a chunk of its own
        if self._previous is not None:
            self._template = (
                find_template(self._previous, chunk) if len(self._chunks) == 1 else None
            )
        self._previous = chunk

    def _make_request_output(  # noqa: PLR0913, PLR0917 - as vLLM has it
        self,
        new_token_ids: Sequence[int],
        pooling_output: VllmObject,
        finish_reason: VllmObject,
        stop_reason: VllmObject,
        kv_transfer_params: VllmObject = None,
        ec_transfer_params: VllmObject = None,
        error: VllmObject = None,
    ) -> VllmObject:
        """In place of the state's own: an output, or None when all that it would say is sent."""
        state = self._state
        if (
            self._is_active
            and finish_reason is None
            and new_token_ids
            and pooling_output is None
            and error is None
            and state.queue.output is None
            and not state.sampling_mask_chunks
            and self._exchange.is_passthrough
        ):
            self._uncounted += new_token_ids
            self._send(state.detokenizer.get_next_output_text(False, True))  # noqa: FBT003 - vLLM's
            return None
        output = type(state).make_request_output(
            state,
            new_token_ids,
            pooling_output,
            finish_reason,
            stop_reason,
            kv_transfer_params,
            ec_transfer_params,
            error=error,
        )
        if self._uncounted and output is not None:
            first = output.outputs[0]
            first.token_ids = [*self._uncounted, *first.token_ids]
            self._uncounted.clear()
        return output

    def _send(self, text: str) -> None:
        """Send a chunk. Servers wait in it only where a client is slow: a task does the rest.

        Nothing may be raised here: it would end vLLM's output processor, and all streams with it.
        """
        try:
            generator = self._exchange.send(self._message(text)).__await__()
            awaited = next(generator)
        except StopIteration:
            return
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - its own task raises it
            self._is_active = False
            self._state.queue.put(EngineGenerateError(f"not sent: {type(error).__name__}"))
            return
        self._is_active = False
        self.unsent = asyncio.get_running_loop().create_task(
            _finish(_StartedAwaitable(generator, awaited))
        )

    def _message(self, text: str) -> Message:
        assert self._template is not None, "a short cut is open once it has a form"
        return {
            "type": "http.response.body",
            "body": self._template.render(text),
            "more_body": True,
        }


class _StartedAwaitable(Generator[Any, Any, None]):
    """The rest of an awaitable that was begun outside of a task, and waits for something."""

    def __init__(self, generator: Generator[Any, Any, None], awaited: object) -> None:
        self._generator = generator
        self._awaited: object = awaited
        self._has_yielded = False

    def __await__(self) -> Generator[Any, Any, None]:
        return self

    def send(self, value: object) -> object:
        """Say what it waits for, and go on when that is there."""
        if self._has_yielded:
            return self._generator.send(value)
        self._has_yielded = True
        return self._awaited

    def throw(self, *error: Any) -> object:  # noqa: ANN401 - as a generator has it
        """Tell it that what it waits for has failed, or that it is not to go on."""
        self._has_yielded = True
        return self._generator.throw(*error)


async def _finish(started: _StartedAwaitable) -> None:
    await started
