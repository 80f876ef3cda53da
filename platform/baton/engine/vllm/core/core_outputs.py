"""What EngineCore says, read on the event loop with nothing in between.

Theory of operation: vLLM's client reads its socket in a task, through ZMQ's own futures, and hands
what comes to a queue, where another task waits for it. That is dearer than everything baton does
with a step of a few tokens. Here the loop itself says that there is something, it is read at once,
and whoever waits in `get` is woken. The rest of the client stays as it is: it is told what its
calls return, and believes this to be its task, so that it ends it with its sockets.

As in the client, what was read and not taken is not bounded: whoever takes must keep up. A turn of
the loop reads a few messages only.
"""

from __future__ import annotations

import asyncio
from collections import deque

import zmq
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, _process_utility_output
from vllm.v1.engine.exceptions import EngineDeadError

from baton.engine.vllm.patches import table
from baton.engine.vllm.patches.api_server import mark_engine_dead

# As plain numbers: flags of enumerations are put together anew, by Python, for each message.
_POLLIN, _NOBLOCK = int(zmq.POLLIN), int(zmq.NOBLOCK)
_BATCH_MESSAGES = 16
"""Messages that are read before others get their turn."""


class CoreOutputs:
    """The outputs of a client's engine; to be made on the running loop, before its first call."""

    def __init__(self, client: AsyncMPClient) -> None:
        # No reference to the client itself: what frees it when it is forgotten holds this.
        self._resources = client.resources
        self._decoder = client.decoder
        self._utility_calls = client.utility_results
        socket = client.resources.output_socket
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._pending: deque[EngineCoreOutputs | asyncio.Event] = deque()
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()  # the client looks for it under this name
        table.CORE_OUTPUTS.install(client.resources, output_queue_task=self)
        self._loop.add_reader(self._fd, self._receive)
        self._loop.call_soon(self._receive)  # ZMQ signals edges: what is there already is silent

    async def get(self) -> EngineCoreOutputs:
        """The outputs of the next step, or its statistics. For one caller at a time.

        Raises:
            EngineDeadError: the engine died, or its client was shut down.
            Exception: it said what cannot be read.
        """
        while True:
            while not self._pending:
                if self._failure is not None:
                    is_dead = self._resources.engine_dead
                    raise EngineDeadError(suppress_context=True) if is_dead else self._failure
                self._waiter = self._loop.create_future()
                await self._waiter
            item = self._pending.popleft()
            if not isinstance(item, asyncio.Event):
                return item
            item.set()

    def fence(self) -> asyncio.Event:
        """Is set once everything that was read until now has been taken, and asked for more."""
        fence = asyncio.Event()
        self._pending.append(fence)
        self._wake()
        return fence

    def done(self) -> bool:
        """Whether nothing is read any more."""
        return self._failure is not None

    def cancel(self) -> None:
        """Read no more; what was read can still be taken. Idempotent."""
        self._stop_reading(EngineDeadError())

    def _receive(self) -> None:
        try:
            for _ in range(_BATCH_MESSAGES):
                if self.done() or not int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN:
                    return
                self._on_message(self._socket.recv_multipart(_NOBLOCK))
        except Exception as error:  # noqa: BLE001 - as vLLM's task does; whoever takes gets it
            self._stop_reading(error)
        else:
            self._loop.call_soon(self._receive)

    def _on_message(self, parts: list[bytes]) -> None:
        if len(parts) == 1 and parts[0] == EngineCoreProc.ENGINE_CORE_DEAD:
            mark_engine_dead(self._resources)
            raise EngineDeadError
        outputs: EngineCoreOutputs = self._decoder.decode(parts)
        if outputs.utility_output:
            _process_utility_output(outputs.utility_output, self._utility_calls)
        elif outputs.outputs or outputs.scheduler_stats:
            self._pending.append(outputs)
            self._wake()

    def _stop_reading(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
            self._loop.remove_reader(self._fd)
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
