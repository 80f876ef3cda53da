"""`ports.Engine` over a real vLLM engine.

Theory of operation: `start` brings up EngineCore (a process, with worker processes under it) and
talks to it through vLLM's own client over ZMQ. Everything that leaves the engine comes in order
through one socket: `steps` takes what `core_outputs` reads there, and nobody else does. The
processes are started from a thread that lives as long as the engine (see `plugin`: the kernel ties
the processes to that thread).

An abort is a fence. The engine says nothing about an aborted request, but it answers a control
call in order with its outputs; when that answer is there, a fence goes behind what was read and
not taken, and once `steps` has come to it every earlier output has been yielded.

What a prompt's KV blocks are fetched with is in the ticket, vLLM's `kv_transfer_params`; blocks
that nobody will fetch are freed by a request that is aborted as it arrives (`release`).

Load comes from the scheduler's statistics of its last step (see `legs`). Transfers are what the
NIXL connector counted; with tensor parallelism each rank's transfer counts as one pull. Who they
came from is in `links`.

Outputs that were read wait without bound, so whoever iterates `steps` must keep up.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from pathlib import Path
from typing import TypeAlias

import msgspec
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from baton.domain.errors import (
    EngineDied,
    EngineStartFailed,
    LegInvalid,
    TransferFailed,
    prompt_too_long_message,
)
from baton.domain.fleet import LinkTotals, Load, ReplicaFacts
from baton.domain.handoff import KvHandle, Leg, LegFailure, LegKind, LegOutput
from baton.domain.kv_events import KvEventBatch
from baton.engine.gpus import gpu_start_lock
from baton.engine.vllm.core import process
from baton.engine.vllm.core.core_outputs import CoreOutputs
from baton.engine.vllm.core.facts import engine_config, replica_facts, start_failure
from baton.engine.vllm.core.kv_events import subscribe
from baton.engine.vllm.core.legs import LiveLegs
from baton.engine.vllm.core.lora import EngineAdapters
from baton.engine.vllm.core.series import VllmSeries
from baton.engine.vllm.core.settings import (
    VllmEngineSettings,
    engine_arguments,
    engine_environment,
    replay_endpoint,
)
from baton.engine.vllm.patches.cache_report import request_cache_report
from baton.engine.vllm.patches.rank_reports import query_ranks
from baton.engine.vllm.patches.refusals import first_line
from baton.engine.vllm.patches.resume_checks import query_resume_support
from baton.engine.vllm.patches.step_budget import limits_problem, scheduler_problem
from baton.engine.vllm.wire.codec import EngineCodec, release_request
from baton.engine.vllm.wire.kv_handles import UnusableKvHandle
from baton.runtime.known_adapters import KnownAdapters
from baton.runtime.process.log_events import log_event
from baton.runtime.process.scratch import scratch_folder
from baton.runtime.rank_transports import RankTransports

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 5.0
"""From SIGTERM to SIGKILL. A worker takes seconds to unload its libraries; nothing needs them."""


SideChannelCheck: TypeAlias = Callable[[str, str, float], Awaitable[None]]
"""`(source_id, address, deadline_s)`: asks a side channel for what a pull needs, or raises
`TransferFailed`."""


class VllmEngine:
    """One vLLM engine with its processes."""

    def __init__(
        self,
        settings: VllmEngineSettings,
        *,
        side_channel_check: SideChannelCheck | None = None,
        transport: Callable[[str], str] = lambda _source_id: "",
        series: VllmSeries | None = None,
        adapters: KnownAdapters | None = None,
    ) -> None:
        """Take what the engine cannot know by itself.

        Args:
            settings: What to start it with.
            side_channel_check: Asks a side channel whether it is in order; without it none is ever
                asked.
            transport: Says by what means blocks come from a replica; empty where it is not known.
            series: Is fed what vLLM says of itself for Prometheus.
            adapters: Where adapters are kept; None: those of the settings, and no others.
        """
        self._settings = settings
        self._side_channel_check = side_channel_check
        self._series = series
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm-parent")
        self._client: AsyncMPClient | None = None
        self._outputs: CoreOutputs | None = None
        self._codec = EngineCodec()
        self._facts: ReplicaFacts | None = None
        known_adapters = KnownAdapters(settings.adapters) if adapters is None else adapters
        self._adapters = EngineAdapters(known_adapters, slots=settings.adapter_slots.max_loaded)
        max_pulls = None if settings.nixl is None else settings.nixl.max_pulls
        self._legs = LiveLegs(self._codec, transport, self._adapters, max_pulls=max_pulls)
        self._release_ids = itertools.count()
        self._other_children: set[int] | None = None
        self._pids: set[int] = set()
        self._folder: Path | None = None
        self._events_endpoint: str | None = None
        self._supports_resume = False
        self._closed = False
        self._ended = asyncio.Event()
        """Set once no further output can come."""

    async def start(self) -> ReplicaFacts:
        """Bring the engine up and say what it is.

        Raises:
            EngineStartFailed: with one clear line and what to do about it.
        """
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(self._thread, self._construct)
        # After a timeout nobody waits for it any more; its error is then of no interest.
        job.add_done_callback(lambda done: done.cancelled() or done.exception())
        deadline_s = self._settings.start_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(job)
                self._outputs = CoreOutputs(self._core)
                self._supports_resume = await query_resume_support(self._core)
                cache_report = await request_cache_report(self._core)
        except TimeoutError:
            await self.close()
            raise EngineStartFailed(
                f"replica {self._settings.replica_id}: engine not ready within {deadline_s:.0f} s",
                "look at the engine's log above; a large model may need a longer deadline",
            ) from None
        except BaseException:
            await self.close()
            raise
        self._facts = replica_facts(
            self._settings,
            self._core.vllm_config,
            self._events_endpoint,
            cache_report=cache_report,
            supports_resume=self._supports_resume,
        )
        return self._facts

    def _construct(self) -> None:
        """In the engine's own thread: check, then start the processes and wait for them."""
        settings = self._settings
        process.check_startable(settings, on_cpu=current_platform.device_type == "cpu")
        self._folder = scratch_folder("baton-kv-")
        self._events_endpoint = self._kv_events_endpoint()
        environment = engine_environment(settings, self._folder)
        try:
            with process.patched_environment(environment):
                self._adapters.download_all()
                with self._start_lock():
                    if not self._closed:
                        self._launch()
        except Exception as error:
            raise start_failure(settings, error) from error
        if self._client is not None and self._is_closed():
            self._client.shutdown(timeout=_STOP_GRACE_S)
        elif self._client is not None and self._series is not None:
            self._series.start(self._client.vllm_config)

    def _start_lock(self) -> AbstractContextManager[None]:
        """Of those that share a GPU one starts at a time."""
        if not self._settings.shares_gpu:
            return nullcontext()
        return gpu_start_lock(os.environ, self._is_closed)

    def _launch(self) -> None:
        # No other engine starts meanwhile, so children that appear are this one's.
        self._other_children = process.child_pids()
        config = engine_config(engine_arguments(self._settings, self._events_endpoint))
        self._check_budget(config)
        self._client = EngineCoreClient.make_async_mp_client(
            config, Executor.get_class(config), log_stats=True
        )
        self._pids = process.child_pids() - self._other_children

    def _check_budget(self, config: VllmConfig) -> None:
        tokens = self._settings.max_batched_tokens_while_decoding
        if tokens is None:
            return
        speculative = config.speculative_config
        tokens_per_stream = 1 + (
            speculative.num_speculative_tokens or 0 if speculative is not None else 0
        )
        scheduler_config = config.scheduler_config
        why = limits_problem(tokens, scheduler_config, tokens_per_stream=tokens_per_stream)
        why = why or scheduler_problem(tokens, scheduler_config.get_scheduler_cls())
        if why is not None:
            raise ValueError(why)

    def _kv_events_endpoint(self) -> str | None:
        if not (self._settings.kv_events and self._settings.prefix_caching):
            return None
        # A socket in a folder of our own: no port, and nobody else on the machine can listen.
        return f"ipc://{self._folder}/events"

    async def submit(self, leg: Leg) -> LegFailure | None:
        """Start a leg; None when accepted, else why not (the leg then never runs).

        Raises:
            LegInvalid: its prompt does not fit into the context.
            AdapterFailed: its adapter cannot be loaded; it never runs.
        """
        facts = self._facts
        if facts is None or self._closed:
            return LegFailure.ENGINE_ERROR
        try:
            self._check_leg(leg, facts)
            request = self._codec.encode_leg(leg, supports_resume=self._supports_resume)
        except (ValueError, msgspec.MsgspecError) as error:
            fields = {"leg_id": leg.leg_id, "reason": str(error)}
            log_event(logger, logging.WARNING, "leg_refused", fields)
            is_unusable = isinstance(error, UnusableKvHandle)
            return LegFailure.KV_LOAD_FAILED if is_unusable else LegFailure.REJECTED
        load_adapter = self._core.add_lora_async
        request.lora_request = await self._adapters.ensure_loaded(
            leg.leg_id, leg.adapter, load_adapter
        )
        self._legs.add(leg)
        try:
            await self._core.add_request_async(request)
        except EngineDeadError:
            self._legs.remove(leg.leg_id)
            return LegFailure.ENGINE_ERROR
        except (ValueError, TypeError, OverflowError, msgspec.MsgspecError) as error:
            # It could not be put into a message: nor could it for another engine.
            self._legs.remove(leg.leg_id)
            raise LegInvalid(leg.leg_id, first_line(error)) from error
        return None

    def _check_leg(self, leg: Leg, facts: ReplicaFacts) -> None:
        if leg.leg_id in self._legs:
            raise ValueError(f"leg {leg.leg_id}: already running here")
        if len(leg.prompt_token_ids) >= facts.max_len_tokens:
            why = prompt_too_long_message(len(leg.prompt_token_ids), facts.max_len_tokens)
            raise LegInvalid(leg.leg_id, why)
        if leg.kind is not LegKind.LOCAL and self._settings.nixl is None:
            raise ValueError(f"leg {leg.leg_id}: a {leg.kind} leg, but this engine has no NIXL")
        kv_handle, prompt_tokens = leg.kv_handle, len(leg.prompt_token_ids)
        if kv_handle is None or facts.supports_prefix_fetch:
            return
        if kv_handle.tokens < prompt_tokens or (leg.resumed_tokens and self._supports_resume):
            raise UnusableKvHandle(
                f"leg {leg.leg_id}: its ticket is for {kv_handle.tokens} tokens of"
                f" {prompt_tokens}, of which"
                f" {leg.resumed_tokens} were generated, but this engine's connector fetches whole"
                " prompts only: leave kv_transfer_config to baton"
            )

    async def abort(self, leg_ids: Sequence[str]) -> None:
        """Stop legs and free their blocks. Returns when they can produce no further output.

        Raises:
            EngineDied: the engine lives but did not answer within its deadline.
        """
        live_ids = [leg_id for leg_id in leg_ids if leg_id in self._legs]
        if not live_ids or self._ended.is_set():
            return
        # A dead engine never answers; it cannot produce outputs either.
        fence = asyncio.ensure_future(self._fence(live_ids))
        end = asyncio.ensure_future(self._ended.wait())
        deadline_s = self._settings.reply_deadline_s
        try:
            done, _ = await asyncio.wait(
                {fence, end}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            fence.cancel()
            end.cancel()
        if not done:
            raise self._engine_died(f"no answer to an abort within {deadline_s:.0f} s")
        if fence in done:
            fence.result()
        for leg_id in live_ids:
            self._legs.remove(leg_id)

    async def _fence(self, leg_ids: list[str]) -> None:
        """Abort, and wait until `steps` has yielded all that was on its way before."""
        with suppress(EngineDeadError):
            await self._core.abort_requests_async(leg_ids)
            await self._core.is_sleeping_async()
            await self._core_outputs.fence().wait()

    async def release(self, kv_handle: KvHandle) -> None:
        """Tell the replica that issued `kv_handle` to free its blocks without pulling them.

        Best effort: when it does not get there, the issuer's lease runs out.
        """
        if self._client is None or self._closed:
            return
        try:
            request = release_request(kv_handle, f"release-{next(self._release_ids)}")
            await self._core.add_request_async(request)
        except EngineDeadError:
            log_event(logger, logging.WARNING, "ticket_not_released", {"reason": "engine_dead"})
        except (ValueError, msgspec.MsgspecError) as error:
            log_event(logger, logging.WARNING, "ticket_not_released", {"reason": str(error)})

    async def steps(self) -> AsyncGenerator[tuple[LegOutput, ...], None]:
        """Yield the outputs of each engine step that produced any; ends when the engine closes.

        Raises:
            EngineDied: the engine died.
        """
        while not self._closed:
            try:
                step = await self._core_outputs.get()
            except Exception as error:
                self._ended.set()
                if self._is_closed():
                    return
                raise self._engine_died(str(error)) from error
            outputs = self._legs.on_step(step)
            if self._series is not None:
                self._series.on_step(step)
            if outputs:
                yield outputs

    def links(self) -> tuple[LinkTotals, ...]:
        """What was pulled so far, by source; cheap, never blocks."""
        return self._legs.links()

    async def check_side_channel(self, source_id: str, address: str, deadline_s: float) -> None:
        """Ask replica `source_id` at `address` for what a pull from it needs; move no block.

        Raises:
            TransferFailed: it did not answer in time, or with something this engine cannot use.
        """
        if self._settings.nixl is None:
            raise TransferFailed(source_id, "this engine has no NIXL")
        if self._side_channel_check is not None:
            await self._side_channel_check(source_id, address, deadline_s)

    async def rank_transports(self) -> tuple[RankTransports, ...]:
        """What each worker says of what carries its pulls; those that do not answer are missing."""
        return () if self._client is None or self._closed else await query_ranks(self._core)

    def load(self) -> Load:
        """The current load; cheap, never blocks."""
        return self._legs.load()

    async def kv_events(self) -> AsyncGenerator[KvEventBatch, None]:
        """Yield what the prefix cache gained and lost since its start, until the engine closes.

        Nothing where the engine says nothing of its cache.
        """
        endpoint = self._events_endpoint
        if endpoint is None or self._facts is None or not self._facts.cache_events:
            return
        batches = subscribe(
            endpoint, replay_endpoint(endpoint), self._settings.replica_id, ended=self._ended
        )
        async with aclosing(batches):
            async for batch in batches:
                yield batch

    def process_ids(self) -> tuple[int, ...]:
        """Ids of the engine's processes that live now: EngineCore and what it started."""
        return tuple(member.pid for member in process.process_tree(self._pids))

    async def close(self) -> None:
        """Stop the engine and leave no process, port or memory behind. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._ended.set()
        if self._outputs is not None:
            self._outputs.cancel()  # before its socket is closed
        await asyncio.to_thread(self._stop_processes)
        if self._client is not None:
            await _close_context(self._client)
        self._thread.shutdown(wait=False)
        self._legs.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _stop_processes(self) -> None:
        if self._client is None and self._other_children is not None:
            # Construction goes on or has failed: whatever it has started is of no use.
            self._pids = process.child_pids() - self._other_children
        processes = process.process_tree(self._pids)
        if self._client is not None:
            self._client.shutdown(timeout=_STOP_GRACE_S)
        killed = process.kill_tree(processes, grace_s=1.0)
        if killed:
            log_event(logger, logging.WARNING, "engine_processes_killed", {"pids": killed})

    @property
    def _core(self) -> AsyncMPClient:
        if self._client is None:
            raise self._engine_died("not started")
        return self._client

    @property
    def _core_outputs(self) -> CoreOutputs:
        if self._outputs is None:
            raise self._engine_died("not started")
        return self._outputs

    def _is_closed(self) -> bool:
        """A call, so that the type checker forgets what was true before an await."""
        return self._closed

    def _engine_died(self, why: str) -> EngineDied:
        return EngineDied(self._settings.replica_id, why)


async def _close_context(client: AsyncMPClient) -> None:
    """Free the client's ZMQ context with its threads; vLLM leaves that to the garbage collector."""
    # The client closes its sockets in a callback of this loop; where its engine died, it may not.
    await asyncio.sleep(0)
    for socket in (client.input_socket, client.resources.output_socket):
        if not socket.closed:
            socket.close(linger=0)
    client.resources.ctx.term()
