"""The engine side of vLLM's EngineCore wire: for vLLM's API server, the fleet is an engine.

Theory of operation: vLLM's client, in Python or in Rust, listens on two sockets in a private
folder. The server connects to both and reports ready. Then it turns ADD, ABORT and UTILITY messages
into calls of its hooks. It sends one `EngineCoreOutputs` message for all deliveries of the same
turn of the event loop, because a message costs more than a token. It keeps only the prompt length
of a request. A request that it cannot decode, or whose hook raises, fails at once, so that no
client waits.

A client in the same event loop is attached directly: its requests and aborts are calls, and outputs
go into its queue unencoded. The handshake and utilities stay on the sockets. See decision 40.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from copy import copy
from typing import Any, TypeAlias

import msgspec
import vllm
import zmq
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from baton.domain.commands import Delivery
from baton.domain.errors import (
    BatonError,
    EngineFailed,
    LinkFailed,
    QueueFull,
    RequestInvalid,
)
from baton.domain.request import Request
from baton.engine.vllm.frontend.settings import FleetFacts, FrontendHooks
from baton.engine.vllm.gate.errors import Problem
from baton.engine.vllm.patches import table
from baton.engine.vllm.wire.codec import (
    FrontendCodec,
    Identify,
    UnsupportedRequest,
    identify_by_gate,
)
from baton.runtime.link.channel import Channel, SendResult, try_send
from baton.runtime.link.options import LinkCounters
from baton.runtime.ports import Clock
from baton.runtime.process.log_events import log_event

logger = logging.getLogger(__name__)

# The name of data-parallel rank 0 in vLLM's client.
_IDENTITY = (0).to_bytes(2, "little")
# A message is a step of a replica. ZMQ queues as many before the first waits here, so more than a
# handful here means a failure.
_MAX_UNSENT_MESSAGES = 4096
_RETRY_S = 0.01
_PREPARE_S = 30.0
_PREPARING_THREADS = 2
_MAX_PREPARING = 256
"""Requests whose grammars wait for a check; admission has not counted them yet."""
_BATCH_MESSAGES = 64
"""Requests per turn of the event loop."""

_UTILITIES: Mapping[str, object] = {
    "get_supported_tasks": ("generate",),
    "is_sleeping": False,
    "is_scheduler_paused": False,
    # Engines load adapters when they need them.
    "list_loras": (),
    "add_lora": True,
    # A frontend must not reset the fleet's caches: nothing was reset.
    "reset_prefix_cache": False,
    "reset_mm_cache": None,
    "reset_encoder_cache": None,
}


Prepare: TypeAlias = Callable[[EngineCoreRequest], None]
"""Raises `UnsupportedRequest` for a request that no engine could run."""


def is_constrained(request: EngineCoreRequest) -> bool:
    """Whether a request's answer must keep to a grammar, which may need preparation."""
    params = request.sampling_params
    return params is not None and params.structured_outputs is not None


class FleetEngineServer:
    """The fleet as an engine of vLLM's API server. Satisfies `ports.Frontend`."""

    def __init__(
        self,
        facts: FleetFacts,
        hooks: FrontendHooks,
        clock: Clock,
        *,
        identify: Identify = identify_by_gate,
        prepare: Prepare | None = None,
    ) -> None:
        """Take the dependencies, some of which the kind of frontend decides.

        Args:
            facts: Of the fleet.
            hooks: Gets requests and aborts.
            clock: Of this process.
            identify: Finds a request's caller.
            prepare: Prepares the grammar of a constrained request; blocks.
        """
        table.ENGINE_CORE_WIRE.fits()
        self._facts = facts
        self._hooks = hooks
        self._clock = clock
        # Engines of a fleet have this version; an engine of another version refuses a leg it cannot
        # resume.
        reason = table.RESUME.find_incompatibility()
        self._codec = FrontendCodec(
            max_len_tokens=facts.max_len_tokens, supports_resume=reason is None, identify=identify
        )
        if reason is not None:
            log_event(logger, logging.WARNING, "sampling_state_not_resumed", {"reason": reason})
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder()
        self._prompt_tokens: dict[str, int] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox: Channel | None = None
        self._outbox = self._context.socket(zmq.PUSH)
        self._unsent: deque[Sequence[bytes]] = deque()
        """Messages that wait for room in ZMQ, while the client is slow."""
        self._client_stalled = False
        """Whether the client was slow for too long."""
        self._batched_outputs: dict[str, EngineCoreOutput] = {}
        """Outputs of this turn of the event loop, by request."""
        self._loop = asyncio.get_running_loop()
        self._prepare = prepare
        self._prepare_executor = ThreadPoolExecutor(_PREPARING_THREADS, "baton-prepare")
        self._preparing: dict[str, asyncio.Task[None]] = {}
        """Requests that were read and wait for their grammar."""
        self._inprocess_queue: asyncio.Queue[Any] | None = None
        """The queue of a client in this event loop."""
        self._detached_context = copy_context()
        """Separates the work for a request from its client's context variables."""

    @property
    def is_running(self) -> bool:
        """Whether requests that the API server accepts are still read."""
        return self._inbox is not None

    @property
    def open_requests(self) -> int:
        """Requests that were read and have not ended."""
        return len(self._prompt_tokens) + len(self._preparing)

    async def start(self, input_address: str, output_address: str) -> None:
        """Connect and report ready; the client may bind its sockets later."""
        inbox = self._context.socket(zmq.DEALER)
        inbox.setsockopt(zmq.IDENTITY, _IDENTITY)
        for socket in (inbox, self._outbox):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._outbox.setsockopt(zmq.SNDHWM, _MAX_UNSENT_MESSAGES)
        inbox.connect(input_address)
        self._outbox.connect(output_address)
        self._inbox = Channel(
            inbox, self._on_message, batch_frames=_BATCH_MESSAGES, counters=LinkCounters()
        )
        self._inbox.send([msgspec.msgpack.encode(_ready_response(self._facts))])

    def attach_inprocess(self, client: Any) -> None:  # noqa: ANN401 - vllm is not followed
        """Replace the sockets of a client in this event loop.

        Args:
            client: An `AsyncMPClient` after its handshake and before its first request.
        """
        if table.INPROCESS_CLIENT.install(
            client,
            add_request_async=self._add_inprocess,
            abort_requests_async=self._abort_inprocess,
        ):
            self._inprocess_queue = client.outputs_queue

    async def close(self) -> None:
        """Stop reading and free the sockets. Idempotent."""
        self._stop_reading()
        preparing, self._preparing = self._preparing, {}
        for task in preparing.values():
            task.cancel()
        self._prepare_executor.shutdown(wait=False, cancel_futures=True)
        self._context.destroy(linger=0)

    def _stop_reading(self) -> None:
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            inbox.close()
        self._unsent.clear()

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Send tokens, in one message per turn of the event loop.

        Raises:
            LinkFailed: vLLM's client has stopped reading; this frontend has failed.
        """
        self._check_client_reads()
        batch, open_requests = self._batched_outputs, self._prompt_tokens
        encode_delivery, unreadable = self._codec.encode_delivery, []
        for delivery in deliveries:
            request_id = delivery.request_id
            prompt_tokens = open_requests.get(request_id)
            if prompt_tokens is None:
                continue  # its client has disconnected
            try:
                output = encode_delivery(delivery, prompt_tokens=prompt_tokens)
            except (ValueError, msgspec.MsgspecError) as error:
                unreadable.append((request_id, error))
                continue
            if request_id in batch:
                self._flush()
                batch = self._batched_outputs
            if not batch:
                self._loop.call_soon(self._flush)
            batch[request_id] = output
            if delivery.finish is not None:
                del open_requests[request_id]
        for request_id, reason in unreadable:
            self._fail_unreadable(request_id, reason)

    def _fail_unreadable(self, request_id: str, reason: Exception) -> None:
        """End a request after an output that cannot be decoded, such as another vLLM version's."""
        fields = {"request_id": request_id}
        log_event(logger, logging.ERROR, "output_unreadable", fields, error=reason)
        error = EngineFailed(request_id, f"the engine's message cannot be read: {reason}")
        self.fail(request_id, error)
        self._hooks.on_abort((request_id,))

    def _flush(self) -> None:
        batch, self._batched_outputs = self._batched_outputs, {}
        if batch and not self._context.closed and not self._client_stalled:
            self._send_now(EngineCoreOutputs(outputs=list(batch.values())))

    def fail(self, request_id: str, error: BatonError) -> None:
        """End a request with an error; its last output carries the client's message.

        Raises:
            LinkFailed: vLLM's client has stopped reading; this frontend has failed.
        """
        if self._prompt_tokens.pop(request_id, None) is not None:
            self._send_failure(request_id, error)

    def _send_failure(self, request_id: str, error: BatonError) -> None:
        output = EngineCoreOutput(
            request_id,
            [],
            finish_reason=FinishReason.ERROR,
            stop_reason=Problem.from_error(error).pack(),
        )
        self._send(EngineCoreOutputs(outputs=[output]))

    def _send(self, outputs: EngineCoreOutputs) -> None:
        """Send after the outputs of this turn."""
        self._check_client_reads()
        self._flush()
        self._send_now(outputs)

    def _check_client_reads(self) -> None:
        unread_messages = (
            len(self._unsent) if self._inprocess_queue is None else self._inprocess_queue.qsize()
        )
        if unread_messages >= _MAX_UNSENT_MESSAGES:
            self._drop_client()
        if self._client_stalled:
            reason = f"the API server left {_MAX_UNSENT_MESSAGES} messages unread; restart"
            raise LinkFailed("frontend", reason)

    def _drop_client(self) -> None:
        """Send nothing more to the API server: its streams would have gaps."""
        self._client_stalled = True
        self._stop_reading()
        self._batched_outputs.clear()
        self._outbox.close(linger=0)
        self.abort_all()

    def _send_now(self, outputs: EngineCoreOutputs) -> None:
        if self._inprocess_queue is not None and outputs.utility_output is None:
            self._inprocess_queue.put_nowait(outputs)
            return
        frames = self._encoder.encode(outputs)
        if self._unsent or try_send(self._outbox, frames) is not SendResult.QUEUED:
            if not self._unsent:
                self._loop.call_later(_RETRY_S, self._send_unsent)
            self._unsent.append(frames)

    def _send_unsent(self) -> None:
        """Send waiting messages, in order, as long as there is room."""
        while self._unsent and not self._context.closed:
            if try_send(self._outbox, self._unsent[0]) is not SendResult.QUEUED:
                self._loop.call_later(_RETRY_S, self._send_unsent)
                return
            self._unsent.popleft()

    def _on_message(self, message: Sequence[bytes]) -> None:
        kind, *frames = message
        try:
            self._handle(kind, frames)
        except Exception as error:  # noqa: BLE001 - one must not end the reading of all
            log_event(logger, logging.ERROR, "seam_message_not_handled", {}, error=error)

    def _handle(self, kind: bytes, frames: Sequence[bytes]) -> None:
        match EngineCoreRequestType(kind):
            case EngineCoreRequestType.ADD:
                self._add(frames)
            case EngineCoreRequestType.ABORT:
                self._abort(self._decoder.decode(frames))
            case EngineCoreRequestType.UTILITY:
                _client, call_id, method, _args = self._decoder.decode(frames)
                self._answer_utility(call_id, method)
            case other:
                log_event(logger, logging.WARNING, "seam_message_unknown", {"kind": other.name})

    def _add(self, frames: Sequence[bytes]) -> None:
        try:
            engine_request = self._codec.decode_engine_request(frames)
        except (ValueError, msgspec.MsgspecError) as error:
            request_id = _request_id(frames)
            self._send_failure(request_id, EngineFailed(request_id, f"cannot be read: {error}"))
            return
        if self._prepare is None or not is_constrained(engine_request):
            self._decode_and_open(engine_request)
        elif len(self._preparing) >= _MAX_PREPARING:
            reason = f"{_MAX_PREPARING} requests wait for their grammars to be looked at"
            request_id = engine_request.request_id
            self._send_failure(request_id, QueueFull(request_id, 1.0, reason))
        else:
            task = self._loop.create_task(self._prepare_and_open(engine_request, self._prepare))
            self._preparing[engine_request.request_id] = task

    async def _prepare_and_open(self, engine_request: EngineCoreRequest, prepare: Prepare) -> None:
        """Submit a request once it is prepared, unless its client has disconnected."""
        request_id = engine_request.request_id
        try:
            async with asyncio.timeout(_PREPARE_S):
                await self._loop.run_in_executor(self._prepare_executor, prepare, engine_request)
        except UnsupportedRequest as error:
            failure: BatonError | None = self._to_request_invalid(error)
        except TimeoutError:
            reason = f"its grammar was not looked through within {_PREPARE_S:g} s; ask for less"
            failure = RequestInvalid(request_id, reason)
        except Exception as error:  # noqa: BLE001 - of one request, which is answered
            fields = {"request_id": request_id}
            log_event(logger, logging.ERROR, "request_not_prepared", fields, error=error)
            failure = EngineFailed(request_id, "could not be prepared")
        else:
            failure = None
        if self._preparing.pop(request_id, None) is None:
            return
        if failure is not None:
            self._send_failure(request_id, failure)
        else:
            self._decode_and_open(engine_request)

    def _decode_and_open(self, engine_request: EngineCoreRequest) -> None:
        try:
            request = self._codec.decode_request(engine_request, now_s=self._clock.now_s())
        except UnsupportedRequest as error:
            self._send_failure(error.request_id, self._to_request_invalid(error))
        except (ValueError, msgspec.MsgspecError) as error:
            request_id = engine_request.request_id
            self._send_failure(request_id, EngineFailed(request_id, f"cannot be read: {error}"))
        else:
            self._open_request(request)

    def _to_request_invalid(self, error: UnsupportedRequest) -> RequestInvalid:
        """The client's error, which is also logged because the Rust frontend hides it."""
        field = error.reason.partition(":")[0]  # the rest may quote the request
        fields = {"request_id": error.request_id, "what": field}
        log_event(logger, logging.INFO, "request_refused", fields)
        return RequestInvalid(error.request_id, error.reason)

    async def _add_inprocess(self, engine_request: EngineCoreRequest) -> None:
        if not self.is_running:
            raise EngineDeadError  # or it would wait forever
        request_copy = copy(engine_request)
        request_copy.sampling_params = copy(request_copy.sampling_params)
        try:
            request = self._codec.decode_request(request_copy, now_s=self._clock.now_s())
        except UnsupportedRequest as error:
            self._send_failure(error.request_id, self._to_request_invalid(error))
            return
        # In a turn of its own, as from a socket: the client is still using the request.
        self._loop.call_soon(self._open_request, request, context=self._detached_context)

    async def _abort_inprocess(self, request_ids: Sequence[str]) -> None:
        self._loop.call_soon(self._abort, tuple(request_ids), context=self._detached_context)

    def _open_request(self, request: Request) -> None:
        self._prompt_tokens[request.request_id] = len(request.prompt_token_ids)
        try:
            self._hooks.on_request(request)
        except Exception as error:  # noqa: BLE001 - of one request, which is answered
            fields = {"request_id": request.request_id}
            log_event(logger, logging.ERROR, "request_not_handed_on", fields, error=error)
            self.fail(
                request.request_id, EngineFailed(request.request_id, "could not be handed on")
            )

    def abort_all(self) -> None:
        """Abort all open requests, because the client is gone."""
        self._abort((*self._preparing, *self._prompt_tokens))

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if (task := self._preparing.pop(request_id, None)) is not None:
                task.cancel()
        open_ids = tuple(i for i in request_ids if self._prompt_tokens.pop(i, None) is not None)
        if open_ids:
            self._hooks.on_abort(open_ids)

    def _answer_utility(self, call_id: int, method: str) -> None:
        if method in _UTILITIES:
            output = UtilityOutput(call_id, None, UtilityResult(_UTILITIES[method]))
        else:
            output = UtilityOutput(call_id, f"{method}: a fleet behind one seam cannot do this")
        self._send(EngineCoreOutputs(utility_output=output))


def _ready_response(facts: FleetFacts) -> EngineCoreReadyResponse:
    return EngineCoreReadyResponse(
        max_model_len=facts.max_len_tokens,
        num_gpu_blocks=facts.kv_blocks,
        block_size=facts.block_size_tokens,
        dp_stats_address=None,
        # Replicas decide it. vLLM's Rust frontend reads it for media, which are disabled.
        dtype="bfloat16",
        vllm_version=vllm.__version__,
        world_size=1,
        data_parallel_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_rank=0,
        max_num_seqs=facts.max_running_requests,
        max_num_batched_tokens=facts.max_batched_tokens,
        instance_id="baton",
        supports_lora=facts.adapters > 0,
        max_loras=facts.adapters,
    )


def _request_id(frames: Sequence[bytes]) -> str:
    """The id of a request that could not be decoded: the first field of the message."""
    fields = msgspec.msgpack.decode(frames[0], ext_hook=lambda _code, _data: None)
    return str(fields[0])
