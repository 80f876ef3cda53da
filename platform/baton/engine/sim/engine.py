"""The simulated engine on asyncio: advances its core, carries out its commands, delivers outputs.

Theory of operation: a task steps the core and sleeps through each step. Without work it waits for
an event, or for the end of a lease, and uses no CPU. Pulls and releases are tasks of the same
group. An unexpected exception in a task ends the engine like a crash: `steps` raises EngineDied.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import Final

import msgspec

from baton.domain.errors import (
    EngineDied,
    EngineStartFailed,
    LegInvalid,
    TransferFailed,
    prompt_too_long_message,
)
from baton.domain.fleet import LinkTotals, Load, ReplicaFacts, Role
from baton.domain.handoff import RENEWALS_PER_LEASE, KvHandle, Leg, LegFailure, LegOutput
from baton.domain.kv_events import KvEventBatch
from baton.domain.names.addresses import format_address
from baton.engine.sim.side_channel import (
    EngineDescription,
    LeaseClient,
    LeaseServer,
    PullFailedError,
    check_source,
    pull,
    release,
    renew,
)
from baton.runtime.known_adapters import KnownAdapters
from baton.runtime.process.log_events import log_event
from baton.simulator.engine.commands import (
    CancelFetch,
    FreeSource,
    LoadBlocks,
    SimKvHandle,
    StartPull,
)
from baton.simulator.engine.core import SimCore
from baton.simulator.engine.settings import SimSettings, replica_facts
from baton.simulator.network.network import Network

_log = logging.getLogger(__name__)
_OUTBOX_STEPS: Final = 256
_FEED_BATCHES: Final = 4096
_FLUSH_DEADLINE_S: Final = 2.0
"""How long `abort` waits for the consumer to take earlier outputs."""
_CATCH_UP_S: Final = 0.02
"""A step that starts up to this late still ends on time, so that timer errors do not add up. A
longer delay (a busy machine, a freeze) is not made up for."""
_TARGET = "into"
_SOURCE = "out of the source"
_KIND = "baton-sim-kv-handle-1"
_Outputs = tuple[LegOutput, ...]


class UnreadableKvHandleError(ValueError):
    """A KV handle that no simulated engine wrote."""


class SimEngine:
    """An engine without weights, behind `baton.runtime.ports.Engine`."""

    def __init__(
        self,
        settings: SimSettings,
        *,
        replica_id: str,
        pool: str,
        role: Role,
        model: str,
        adapters: KnownAdapters | None = None,
    ) -> None:
        """`adapters` are those that it serves; None: any that a leg names."""
        self._adapters = adapters
        self._settings = settings
        self._facts = replica_facts(
            settings, replica_id=replica_id, pool=pool, role=role, model=model, side_channel=""
        )
        self._side_channel = LeaseServer(
            EngineDescription(replica_id, self._facts.layout),
            self._renew_lease,
            self._release_lease,
            idle_s=settings.lease_s + settings.side_channel_deadline_s,
        )
        self._core: SimCore | None = None
        self._stopped = False
        self._main_task: asyncio.Task[None] | None = None
        self._task_group: asyncio.TaskGroup | None = None
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._outbox = _Outbox(_OUTBOX_STEPS)
        self._feed = KvEventFeed(_FEED_BATCHES)
        self._sequence = 0
        self._wake = asyncio.Event()
        self._has_awaited_leases = asyncio.Event()
        """Set when a leg arrives that waits for blocks."""
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._inbound_link = InboundLink(settings)
        self._transfer_factor = 1.0
        self._agent_broken = False

    # ------------------------------------------------------------------ the port
    async def start(self) -> ReplicaFacts:
        """Open the side channel and begin to step.

        Raises:
            EngineStartFailed: the side channel's address cannot be bound.
        """
        if self._core is not None:
            raise RuntimeError(f"engine of replica {self._facts.replica_id} was started before")
        host, port = self._settings.side_channel_host, self._settings.side_channel_port
        try:
            address = await self._side_channel.start(host, port)
        except OSError as error:
            raise EngineStartFailed(
                f"replica {self._facts.replica_id}: cannot listen on {format_address(host, port)}:"
                f" {error}",
                "choose another side_channel_port, or 0 for any free one",
            ) from error
        self._facts = replace(self._facts, side_channel=address)
        self._core = SimCore(
            self._settings,
            engine_id=self._facts.replica_id,
            model=self._facts.model,
            address=address,
            encode_kv_handle=encode_kv_handle,
        )
        name = f"sim-engine-{self._facts.replica_id}"
        self._main_task = asyncio.create_task(self._run(self._core), name=name)
        return self._facts

    async def submit(self, leg: Leg) -> LegFailure | None:
        """Start a leg; None when accepted, else why not.

        Raises:
            LegInvalid: its prompt does not fit into the context.
            AdapterFailed: there is no such adapter; it never runs.
        """
        if self._core is None or self._stopped:
            return LegFailure.ENGINE_ERROR
        if leg.adapter is not None and self._adapters is not None:
            await self._adapters.source(leg.adapter)
        try:
            kv_handle = None if leg.kv_handle is None else decode_kv_handle(leg.kv_handle)
        except UnreadableKvHandleError as error:
            fields = {"leg_id": leg.leg_id, "reason": str(error)}
            log_event(_log, logging.WARNING, "leg_refused", fields)
            return LegFailure.KV_LOAD_FAILED
        now_s = asyncio.get_running_loop().time()
        failure = self._core.add(leg, kv_handle, now_s=now_s)
        if failure is LegFailure.INVALID:
            max_len_tokens = self._settings.max_len_tokens
            raise LegInvalid(
                leg.leg_id, prompt_too_long_message(len(leg.prompt_token_ids), max_len_tokens)
            )
        if (rejected := self._core.reject_invalid(leg)) is not None:
            self._outbox.put((rejected,))
        if kv_handle is not None:
            self._has_awaited_leases.set()
        self._wake.set()
        return failure

    async def abort(self, leg_ids: Sequence[str]) -> None:
        """Stop legs and free their blocks, here and at the source.

        `steps` yields earlier outputs first. A consumer that does not take them in time, or that
        awaits this inside its own loop over `steps`, does not get them.
        """
        core = self._core
        if core is None or self._stopped:
            return
        core.abort(leg_ids)
        self._execute_orders(core)
        self._wake.set()
        ids = frozenset(leg_ids)
        if await self._outbox.wait_flushed(ids, _FLUSH_DEADLINE_S):
            return
        for output in self._outbox.discard(ids):
            if output.kv_handle is not None:
                self._release_lease(output.leg_id)

    async def release(self, kv_handle: KvHandle) -> None:
        """Tell the engine that issued `kv_handle` to free its blocks; best effort."""
        if self._stopped:
            return
        try:
            await self._free_source(decode_kv_handle(kv_handle))
        except UnreadableKvHandleError as error:
            log_event(_log, logging.WARNING, "ticket_not_released", {"reason": str(error)})

    async def steps(self) -> AsyncIterator[_Outputs]:
        """Yield each step's outputs until the engine closes.

        Raises:
            EngineDied: the engine died.
        """
        while (outputs := await self._outbox.get()) is not None:
            yield outputs

    def kv_events(self) -> KvEventFeed:
        """Changes of the prefix cache since the engine was made; for a single reader."""
        return self._feed

    def links(self) -> tuple[LinkTotals, ...]:
        """Totals of pulls by source."""
        return () if self._core is None else self._core.links()

    async def check_side_channel(self, source_id: str, address: str, deadline_s: float) -> None:
        """Ask another simulated engine for its id and the layout of its blocks.

        Raises:
            TransferFailed: it does not answer in time, or pulls from it are impossible.
        """
        try:
            async with asyncio.timeout(deadline_s):
                client = LeaseClient(address, "", deadline_s=deadline_s)
                await check_source(client, EngineDescription(source_id, self._facts.layout))
        except TimeoutError as error:
            reason = f"no answer from {address} within {deadline_s:g} s"
            raise TransferFailed(source_id, reason) from error
        except PullFailedError as error:
            raise TransferFailed(source_id, str(error)) from error

    def load(self) -> Load:
        """The load at this moment, exactly."""
        return Load() if self._core is None else self._core.load()

    async def close(self) -> None:
        """Stop everything and free the port. `steps` still yields queued outputs."""
        self._stop(None)
        if self._main_task is not None:
            await asyncio.wait((self._main_task,))
        await self._side_channel.wait_closed()

    # ------------------------------------------------------------------ beyond the port
    def reset_cache(self) -> bool:
        """Empty the prefix cache, as an operator may; False while any block is in use."""
        is_reset = self._core is not None and self._core.reset_cache()
        if is_reset and self._core is not None:
            self._publish(self._core)
        return is_reset

    def freeze(self) -> None:
        """Stop as under SIGSTOP: no steps, no answers to other engines. Legs may still be sent."""
        self._thawed.clear()
        self._side_channel.pause()

    def thaw(self) -> None:
        """Continue after `freeze`."""
        self._side_channel.resume()
        self._thawed.set()

    def die(self, reason: str = "killed") -> None:
        """Fail like a crashed engine: outputs that were not yielded are lost."""
        self._stop(self._engine_died(reason))

    def transfer_slowdown(self, factor: float) -> None:
        """Make every pull into this engine that starts from now on take `factor` times as long."""
        self._transfer_factor = factor

    def break_agent(self) -> None:
        """Fail every pull into this engine from now on, but still answer other engines."""
        self._agent_broken = True

    # ------------------------------------------------------------------ life
    async def _run(self, core: SimCore) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._task_group = tasks
                tasks.create_task(self._renew_forever(core))
                await self._step_forever(core)
        except ExceptionGroup as group:
            _log.exception("simulated engine of replica %s failed", self._facts.replica_id)
            self._stop(self._engine_died(f"{group.exceptions[0]!r}"))

    def _stop(self, failure: EngineDied | None) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._outbox.end(failure, drop=failure is not None)
        self._feed.end()
        self._side_channel.stop()
        if self._main_task is not None:
            self._main_task.cancel()

    def _engine_died(self, reason: str) -> EngineDied:
        return EngineDied(self._facts.replica_id, reason)

    async def _step_forever(self, core: SimCore) -> None:
        now_s = asyncio.get_running_loop().time
        due_s = now_s()
        while True:
            await self._thawed.wait()
            await self._outbox.wait_for_room()
            begun_at_s = now_s()
            step = core.begin_step(begun_at_s)
            self._publish(core)
            self._execute_orders(core)
            if step is None:
                await self._wait_for_event(core)
                due_s = now_s()
                continue
            is_late = begun_at_s - due_s > _CATCH_UP_S
            due_s = (begun_at_s if is_late else due_s) + step.duration_s
            await asyncio.sleep(max(0.0, due_s - begun_at_s))
            await self._thawed.wait()
            outputs = core.finish_step(now_s())
            self._publish(core)
            self._outbox.put(outputs)

    async def _wait_for_event(self, core: SimCore) -> None:
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(core.next_expiry_s):
                await self._wake.wait()

    async def _renew_forever(self, core: SimCore) -> None:
        """Renew the leases of all legs that wait; ignores sources that do not answer.

        From the moment that the engine has a leg, like a real engine.
        """
        while True:
            awaited_handles = core.pending_kv_handles()
            if not awaited_handles:
                self._has_awaited_leases.clear()
                await self._has_awaited_leases.wait()
                continue
            async with asyncio.TaskGroup() as tasks:
                for kv_handle in awaited_handles:
                    tasks.create_task(self._renew(kv_handle))
            await asyncio.sleep(self._settings.lease_s / RENEWALS_PER_LEASE)
            await self._thawed.wait()

    async def _renew(self, kv_handle: SimKvHandle) -> None:
        try:
            await renew(self._client(kv_handle))
        except PullFailedError as error:
            fields = {"leg_id": kv_handle.leg_id, "reason": str(error)}
            log_event(_log, logging.INFO, "lease_not_renewed", fields)

    # ------------------------------------------------------------------ orders of the core
    def _execute_orders(self, core: SimCore) -> None:
        for order in core.pop_commands():
            match order:
                case StartPull():
                    self._fetches[order.leg_id] = self._spawn(self._pull(core, order))
                case LoadBlocks():
                    self._fetches[order.leg_id] = self._spawn(self._load(core, order))
                case CancelFetch():
                    self._fetches.pop(order.leg_id).cancel()
                case FreeSource():
                    self._spawn(self._free_source(order.kv_handle))

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        if self._task_group is None:
            raise AssertionError("orders before the first step")
        return self._task_group.create_task(coroutine)

    async def _pull(self, core: SimCore, order: StartPull) -> None:
        now_s = asyncio.get_running_loop().time
        moved_bytes = order.blocks * self._settings.kv_block_bytes
        transfer = self._inbound_link.transfer(moved_bytes, slowdown=self._transfer_factor)
        begun_at_s = now_s()
        blocks_kept, reason = False, "the transfer agent of this engine is broken"
        try:
            if not self._agent_broken:
                blocks_kept, reason = await pull(self._client(order.kv_handle), transfer), ""
        except PullFailedError as error:
            reason = str(error)
        await self._thawed.wait()
        del self._fetches[order.leg_id]
        if reason:
            log_event(
                _log, logging.WARNING, "pull_failed", {"leg_id": order.leg_id, "reason": reason}
            )
            output = core.pull_failed(order.leg_id)
        else:
            if not blocks_kept:
                log_event(_log, logging.WARNING, "blocks_were_lost", {"leg_id": order.leg_id})
            output = core.pull_done(
                order.leg_id,
                blocks=order.blocks,
                duration_s=now_s() - begun_at_s,
                source_kept=blocks_kept,
            )
        self._outbox.put(() if output is None else (output,))
        self._publish(core)
        self._wake.set()

    async def _load(self, core: SimCore, order: LoadBlocks) -> None:
        await asyncio.sleep(self._settings.host_load_s(order.blocks))
        await self._thawed.wait()
        del self._fetches[order.leg_id]
        core.load_done(order.leg_id)
        self._publish(core)
        self._wake.set()

    async def _free_source(self, kv_handle: SimKvHandle) -> None:
        try:
            await release(self._client(kv_handle))
        except PullFailedError as error:
            fields = {"leg_id": kv_handle.leg_id, "reason": str(error)}
            log_event(_log, logging.INFO, "lease_left_to_expire", fields)

    def _client(self, kv_handle: SimKvHandle) -> LeaseClient:
        deadline_s = self._settings.side_channel_deadline_s
        return LeaseClient(kv_handle.address, kv_handle.leg_id, deadline_s=deadline_s)

    # ------------------------------------------------------------------ what others ask
    def _renew_lease(self, leg_id: str) -> bool:
        core, now_s = self._core, asyncio.get_running_loop().time()
        if core is None or not core.is_leased(leg_id, now_s):
            return False
        core.renew(leg_id, now_s)
        return True

    def _release_lease(self, leg_id: str) -> bool:
        core = self._core
        was_leased = core is not None and core.release(leg_id, asyncio.get_running_loop().time())
        self._wake.set()
        return was_leased

    # ------------------------------------------------------------------ KV events
    def _publish(self, core: SimCore) -> None:
        events = core.pop_events()
        if not events:
            return
        batch = KvEventBatch(
            replica_id=self._facts.replica_id, sequence=self._sequence, events=events
        )
        self._sequence += 1
        self._feed.put(batch)


class InboundLink:
    """An engine's network interface, inwards.

    Transfers from its sources to other engines are unknown here, so only this engine's pulls share.
    """

    def __init__(self, settings: SimSettings) -> None:
        self._setup_s = settings.transfer_setup_s / settings.speed
        self._network = Network(share=settings.share_bandwidth)
        for name in (_TARGET, _SOURCE):
            self._network.connect(name, settings.wire_bytes_per_s)
        self._arrivals: dict[str, asyncio.Event] = {}
        self._keys = count()
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def transfer(self, moved_bytes: int, *, slowdown: float) -> AsyncIterator[asyncio.Event]:
        """Begin to move bytes; the event is set on arrival."""
        loop = asyncio.get_running_loop()
        key, arrived = str(next(self._keys)), asyncio.Event()
        setup = loop.call_later(
            self._setup_s * slowdown, self._begin_transfer, key, moved_bytes * slowdown, arrived
        )
        try:
            yield arrived
        finally:
            setup.cancel()
            if self._arrivals.pop(key, None) is not None:
                self._network.end(key, loop.time())
                self._set_timer()

    def _begin_transfer(self, key: str, moved_bytes: float, arrived: asyncio.Event) -> None:
        self._arrivals[key] = arrived
        now_s = asyncio.get_running_loop().time()
        self._network.begin(
            key, source_id=_SOURCE, target_id=_TARGET, moved_bytes=moved_bytes, now_s=now_s
        )
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        at_s = self._network.next_done_at_s()
        loop = asyncio.get_running_loop()
        self._timer = None if at_s is None else loop.call_at(at_s, self._on_timer)

    def _on_timer(self) -> None:
        for key in self._network.pop_done(asyncio.get_running_loop().time()):
            self._arrivals.pop(key).set()
        self._set_timer()


def encode_kv_handle(kv_handle: SimKvHandle) -> bytes:
    """A KV handle's `params`."""
    return msgspec.msgpack.encode((_KIND, kv_handle))


def decode_kv_handle(kv_handle: KvHandle) -> SimKvHandle:
    """The handle that `encode_kv_handle` encoded.

    Raises:
        UnreadableKvHandleError: the bytes are something else, such as a real engine's handle.
    """
    try:
        kind, decoded = msgspec.msgpack.decode(kv_handle.params, type=tuple[str, SimKvHandle])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableKvHandleError(
            f"KV handle of {len(kv_handle.params)} bytes: {error}"
        ) from error
    if kind != _KIND:
        raise UnreadableKvHandleError(f"KV handle of kind {kind!r}, expected {_KIND!r}")
    return decoded


class _Outbox:
    """Steps for a single consumer."""

    def __init__(self, limit_steps: int) -> None:
        self._limit_steps = limit_steps
        self._steps: deque[_Outputs] = deque()
        self._ended = False
        self._error: Exception | None = None
        self._not_empty = asyncio.Event()
        self._item_removed = asyncio.Event()

    async def wait_for_room(self) -> None:
        """Wait until another step may be put."""
        await self._wait_until(lambda: len(self._steps) < self._limit_steps)

    def put(self, outputs: _Outputs) -> None:
        """Queue a step's outputs; after `end` they are dropped."""
        if outputs and not self._ended:
            self._steps.append(outputs)
            self._not_empty.set()

    async def get(self) -> _Outputs | None:
        """The next step's outputs, or None at the end.

        Raises:
            Exception: the error that `end` was given, after all earlier outputs.
        """
        while not self._steps and not self._ended:
            self._not_empty.clear()
            await self._not_empty.wait()
        if self._steps:
            self._item_removed.set()
            return self._steps.popleft()
        if self._error is not None:
            raise self._error
        return None

    async def wait_flushed(self, leg_ids: Collection[str], deadline_s: float) -> bool:
        """Wait until no output of these legs is queued; False if they were not taken in time."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._wait_until(lambda: not self._has_outputs_of(leg_ids))
        except TimeoutError:
            return False
        return True

    def discard(self, leg_ids: Collection[str]) -> tuple[LegOutput, ...]:
        """Drop the queued outputs of these legs and return them."""
        dropped = [out for step in self._steps for out in step if out.leg_id in leg_ids]
        if dropped:
            remaining = (tuple(o for o in step if o.leg_id not in leg_ids) for step in self._steps)
            self._steps = deque(step for step in remaining if step)
            self._item_removed.set()
        return tuple(dropped)

    def end(self, error: Exception | None = None, *, drop: bool = False) -> None:
        """Accept no more; the reader gets the rest, unless dropped, then the end or `error`."""
        if self._ended:
            return
        self._ended, self._error = True, error
        if drop:
            self._steps.clear()
        self._not_empty.set()
        self._item_removed.set()

    def _has_outputs_of(self, leg_ids: Collection[str]) -> bool:
        return any(output.leg_id in leg_ids for step in self._steps for output in step)

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self._ended:
            self._item_removed.clear()
            await self._item_removed.wait()


class KvEventFeed:
    """An engine's KV events since it was made, for one reader; an async iterator, to be closed."""

    def __init__(self, limit_batches: int) -> None:
        self._batches: deque[KvEventBatch] = deque(maxlen=limit_batches)
        self._closed = False
        self._not_empty = asyncio.Event()

    def put(self, batch: KvEventBatch) -> None:
        """Queue a batch, dropping the oldest when full; after the end it is dropped."""
        if not self._closed:
            self._batches.append(batch)
            self._not_empty.set()

    def end(self) -> None:
        """Let the reader finish what is queued, then stop."""
        self._closed = True
        self._not_empty.set()

    def __aiter__(self) -> KvEventFeed:
        return self

    async def __anext__(self) -> KvEventBatch:
        while not self._batches:
            if self._closed:
                raise StopAsyncIteration
            self._not_empty.clear()
            await self._not_empty.wait()
        return self._batches.popleft()

    async def aclose(self) -> None:
        """Stop reading, for good."""
        self._batches.clear()
        self.end()
