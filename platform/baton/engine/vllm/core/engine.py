"""`ports.Engine` over a real vLLM engine.

Theory of operation: `start` launches EngineCore (a process with worker processes) and uses vLLM's
client over ZMQ. All outputs come in order through one socket: `core_outputs` reads it and `steps`
is the only consumer. A thread that lives as long as the engine starts the processes, because the
kernel ties them to that thread (see `patches.plugin`).

An abort is a fence. The engine does not acknowledge it, but answers a control call in order with
its outputs. After that answer a fence joins the buffered outputs; once `steps` reaches it, every
earlier output has been yielded.

A KV handle carries vLLM's `kv_transfer_params`. `release` frees blocks without a pull by a request
that is aborted on arrival.

Load comes from the scheduler's statistics of its last step (see `legs`). Transfers are those that
the NIXL connector counted; with tensor parallelism each rank's transfer counts as one pull.

Outputs wait without bound, so the consumer of `steps` must keep up.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import os
import shutil
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TypeAlias

import msgspec
import psutil
import zmq
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient, _process_utility_output
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
from baton.domain.names.addresses import format_address
from baton.domain.names.model_sources import is_path
from baton.engine.gpus import gpu_start_lock
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
from baton.engine.vllm.patches import table
from baton.engine.vllm.patches.api_server import mark_engine_dead
from baton.engine.vllm.patches.engine_reports import (
    query_ranks,
    query_resume_support,
    request_cache_report,
)
from baton.engine.vllm.patches.refusals import first_line
from baton.engine.vllm.patches.step_budget import limits_problem, scheduler_problem
from baton.engine.vllm.wire.codec import EngineCodec, UnusableKvHandle, release_request
from baton.runtime.known_adapters import KnownAdapters
from baton.runtime.process.log_events import log_event
from baton.runtime.process.owned_process import exit_text
from baton.runtime.process.scratch import scratch_folder
from baton.runtime.process.sockets import create_bound_socket
from baton.runtime.rank_transports import RankTransports

logger = logging.getLogger(__name__)
_STOP_GRACE_S = 5.0
"""From SIGTERM to SIGKILL. A worker takes seconds to unload its libraries; nothing needs them."""
SideChannelCheck: TypeAlias = Callable[[str, str, float], Awaitable[None]]
"""`(source_id, address, deadline_s)`: queries a side channel, or raises `TransferFailed`."""

# Plain integers: Python composes flags of enumerations anew for each message.
_POLLIN, _NOBLOCK = int(zmq.POLLIN), int(zmq.NOBLOCK)
_BATCH_MESSAGES = 16
"""Messages per turn of the loop."""
_KILL_WAIT_S = 5.0
"""Time for the kernel to end a killed process."""
_CPU_BLOCK_TOKENS = 32
"""Source: vLLM 0.32 refuses others ("No common block size for 16 (CPU_ATTN: [MultipleOf(32)])")."""
_ENVIRONMENT_LOCK = threading.Lock()
"""`os.environ` belongs to the whole process, so two engines cannot start at once."""


class VllmEngine:
    """A vLLM engine with its processes."""

    def __init__(
        self,
        settings: VllmEngineSettings,
        *,
        side_channel_check: SideChannelCheck | None = None,
        transport: Callable[[str], str] = lambda _source_id: "",
        series: VllmSeries | None = None,
        adapters: KnownAdapters | None = None,
    ) -> None:
        """Take dependencies that the engine cannot know by itself.

        Args:
            settings: Its configuration.
            side_channel_check: Checks a source's side channel; None: no check.
            transport: The transport of pulls from a replica; empty where unknown.
            series: Gets vLLM's statistics for Prometheus.
            adapters: Paths of adapters; None: only those of the settings.
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
        """Start the engine and return its facts.

        Raises:
            EngineStartFailed: with the cause and a remedy.
        """
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(self._thread, self._construct)
        # After a timeout no caller waits for its error.
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
        """In the engine's own thread: check, start the processes and wait for them."""
        settings = self._settings
        check_startable(settings, on_cpu=current_platform.device_type == "cpu")
        self._folder = scratch_folder("baton-kv-")
        self._events_endpoint = self._kv_events_endpoint()
        environment = engine_environment(settings, self._folder)
        try:
            with patched_environment(environment):
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
        """Engines that share a GPU start one after the other."""
        if not self._settings.shares_gpu:
            return nullcontext()
        return gpu_start_lock(os.environ, self._is_closed)

    def _launch(self) -> None:
        # No other engine starts meanwhile, so new children belong to this engine.
        self._other_children = _child_pids()
        config = engine_config(engine_arguments(self._settings, self._events_endpoint))
        self._check_budget(config)
        self._client = EngineCoreClient.make_async_mp_client(
            config, Executor.get_class(config), log_stats=True
        )
        self._pids = _child_pids() - self._other_children

    def _check_budget(self, config: VllmConfig) -> None:
        tokens = self._settings.max_batched_tokens_while_decoding
        if tokens is None:
            return
        speculative = config.speculative_config
        tokens_per_stream = 1 + (
            speculative.num_speculative_tokens or 0 if speculative is not None else 0
        )
        scheduler_config = config.scheduler_config
        reason = limits_problem(tokens, scheduler_config, tokens_per_stream=tokens_per_stream)
        reason = reason or scheduler_problem(tokens, scheduler_config.get_scheduler_cls())
        if reason is not None:
            raise ValueError(reason)

    def _kv_events_endpoint(self) -> str | None:
        if not (self._settings.kv_events and self._settings.prefix_caching):
            return None
        # A socket in a private folder: no port, and no other user of the machine can listen.
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
            # It cannot be serialized, for any engine.
            self._legs.remove(leg.leg_id)
            raise LegInvalid(leg.leg_id, first_line(error)) from error
        return None

    def _check_leg(self, leg: Leg, facts: ReplicaFacts) -> None:
        if leg.leg_id in self._legs:
            raise ValueError(f"leg {leg.leg_id}: already running here")
        if len(leg.prompt_token_ids) >= facts.max_len_tokens:
            reason = prompt_too_long_message(len(leg.prompt_token_ids), facts.max_len_tokens)
            raise LegInvalid(leg.leg_id, reason)
        if leg.kind is not LegKind.LOCAL and self._settings.nixl is None:
            raise ValueError(f"leg {leg.leg_id}: a {leg.kind} leg, but this engine has no NIXL")
        kv_handle, prompt_tokens = leg.kv_handle, len(leg.prompt_token_ids)
        if kv_handle is None or facts.supports_prefix_fetch:
            return
        if kv_handle.tokens < prompt_tokens or (leg.resumed_tokens and self._supports_resume):
            raise UnusableKvHandle(
                f"leg {leg.leg_id}: its KV handle is for {kv_handle.tokens} tokens of"
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
        """Abort, and wait until `steps` has yielded all earlier outputs."""
        with suppress(EngineDeadError):
            await self._core.abort_requests_async(leg_ids)
            await self._core.is_sleeping_async()
            await self._core_outputs.fence().wait()

    async def release(self, kv_handle: KvHandle) -> None:
        """Tell the replica that issued `kv_handle` to free its blocks without a pull.

        Best effort: if the message is lost, the issuer's lease expires.
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
                raise self._engine_died(f"{error}{_exits_text(self._client)}") from error
            outputs = self._legs.on_step(step)
            if self._series is not None:
                self._series.on_step(step)
            if outputs:
                yield outputs

    def links(self) -> tuple[LinkTotals, ...]:
        """Totals of pulls by source; cheap, never blocks."""
        return self._legs.links()

    async def check_side_channel(self, source_id: str, address: str, deadline_s: float) -> None:
        """Query the side channel of replica `source_id` as a pull does, without moving a block.

        Raises:
            TransferFailed: no answer in time, or an answer that this engine cannot use.
        """
        if self._settings.nixl is None:
            raise TransferFailed(source_id, "this engine has no NIXL")
        if self._side_channel_check is not None:
            await self._side_channel_check(source_id, address, deadline_s)

    async def rank_transports(self) -> tuple[RankTransports, ...]:
        """Each worker's report of its transports; workers without an answer are missing."""
        return () if self._client is None or self._closed else await query_ranks(self._core)

    def load(self) -> Load:
        """The current load; cheap, never blocks."""
        return self._legs.load()

    async def kv_events(self) -> AsyncGenerator[KvEventBatch, None]:
        """Yield the changes of the prefix cache since its start, until the engine closes.

        Yields nothing if the engine publishes no cache events.
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
        """Ids of the engine's live processes: EngineCore and its descendants."""
        return tuple(member.pid for member in _process_tree(self._pids))

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
            # Construction is running or has failed: its processes are of no use.
            self._pids = _child_pids() - self._other_children
        processes = _process_tree(self._pids)
        if self._client is not None:
            self._client.shutdown(timeout=_STOP_GRACE_S)
        killed = _kill_tree(processes, grace_s=1.0)
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
        """A method, so that the type checker forgets the value from before an await."""
        return self._closed

    def _engine_died(self, reason: str) -> EngineDied:
        return EngineDied(self._settings.replica_id, reason)


def _exits_text(client: AsyncMPClient | None) -> str:
    """How the engine's own processes have ended, behind a semicolon; empty if it is not known."""
    manager = None if client is None else client.resources.engine_manager
    codes = [process.exitcode for process in getattr(manager, "processes", ())]
    texts = dict.fromkeys(exit_text(code) for code in codes if code is not None)
    return "".join(f"; its process ended with {text}" for text in texts)


async def _close_context(client: AsyncMPClient) -> None:
    """Free the client's ZMQ context with its threads; vLLM leaves that to the garbage collector."""
    # The client closes its sockets in a callback of this loop, unless its engine died.
    await asyncio.sleep(0)
    for socket in (client.input_socket, client.resources.output_socket):
        if not socket.closed:
            socket.close(linger=0)
    client.resources.ctx.term()


class CoreOutputs:
    """The outputs of a client's engine; create it on the running loop before any other call.

    Theory of operation: vLLM's client reads its socket in a task, through ZMQ's futures, and queues
    the outputs for another task. That costs more than all of baton's work for a step of a few
    tokens. Here the loop's reader callback reads messages at once and wakes the task in `get`. The
    rest of the client is unchanged: this object stands in for its task, so it cancels it with its
    sockets.

    Like the client, this buffers without bound, so the consumer must keep up.
    """

    def __init__(self, client: AsyncMPClient) -> None:
        # No reference to the client: its finalizer holds this object.
        self._resources = client.resources
        self._decoder = client.decoder
        self._utility_calls = client.utility_results
        socket = client.resources.output_socket
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._pending: deque[EngineCoreOutputs | asyncio.Event] = deque()
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()  # the client reads this attribute
        table.CORE_OUTPUTS.install(client.resources, output_queue_task=self)
        self._loop.add_reader(self._fd, self._receive)
        self._loop.call_soon(self._receive)  # ZMQ signals only edges

    async def get(self) -> EngineCoreOutputs:
        """The outputs of the next step, or its statistics. For a single caller at a time.

        Raises:
            EngineDeadError: the engine died, or its client was shut down.
            Exception: a message could not be decoded.
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
        """An event that is set when the consumer has taken all earlier messages."""
        fence = asyncio.Event()
        self._pending.append(fence)
        self._wake()
        return fence

    def done(self) -> bool:
        """Whether reading has stopped."""
        return self._failure is not None

    def cancel(self) -> None:
        """Stop reading; buffered messages can still be taken. Idempotent."""
        self._stop_reading(EngineDeadError())

    def _receive(self) -> None:
        try:
            for _ in range(_BATCH_MESSAGES):
                if self.done() or not int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN:
                    return
                self._on_message(self._socket.recv_multipart(_NOBLOCK))
        except Exception as error:  # noqa: BLE001 - as vLLM's task does; the consumer gets it
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


@contextmanager
def patched_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes started inside, then restore the old values.

    vLLM has no argument for some settings (side-channel port, start method): it reads the
    environment while it constructs the engine, and its processes inherit it.
    """
    with _ENVIRONMENT_LOCK:
        previous = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in previous.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _child_pids() -> set[int]:
    """Ids of the processes that this process started through multiprocessing."""
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


def _process_tree(pids: set[int]) -> list[psutil.Process]:
    """The live processes among `pids` and their descendants."""
    processes: list[psutil.Process] = []
    for pid in pids:
        try:
            parent = psutil.Process(pid)
            processes += [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return processes


def _kill_tree(processes: list[psutil.Process], *, grace_s: float) -> list[int]:
    """Wait for processes to end, then kill the rest; blocks. Returns the ids of those killed."""
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=_KILL_WAIT_S)
    return [process.pid for process in alive]


def check_startable(settings: VllmEngineSettings, *, on_cpu: bool) -> None:
    """Check for failures that can be predicted.

    Raises:
        EngineStartFailed: with the cause and a remedy.
    """
    _check_model(settings.model_source)
    if settings.nixl is not None:
        _check_port(settings.nixl.host, settings.nixl.port)
    if on_cpu:
        _check_block_size(settings)
    if on_cpu and settings.kv_cache_bytes is not None:
        # On a GPU only its own memory counts; vLLM checks that.
        _check_memory(settings)


def _check_model(source: str) -> None:
    folder = Path(source).expanduser()
    if is_path(source) and not folder.is_dir():
        raise EngineStartFailed(
            f"model folder {source!r} does not exist", "give an existing folder or a hub id"
        )
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise EngineStartFailed(
            f"model folder {source!r} has no config.json",
            "give the folder that the model was saved into",
        )


def _check_port(host: str, port: int) -> None:
    try:
        # As ZMQ does: a port with only lingering connections is free.
        with create_bound_socket(host, port):
            pass
    except OSError as error:
        raise EngineStartFailed(
            f"NIXL side channel cannot listen on {format_address(host, port)}: {error.strerror}",
            "end the process that holds the port, or choose another host or port_base",
        ) from error


def _check_block_size(settings: VllmEngineSettings) -> None:
    block_size_tokens = settings.block_size_tokens
    if block_size_tokens is not None and block_size_tokens % _CPU_BLOCK_TOKENS:
        raise EngineStartFailed(
            f"block size of {block_size_tokens} tokens: vLLM's attention on a CPU takes"
            " multiples of"
            f" {_CPU_BLOCK_TOKENS}",
            f"choose block_size {_CPU_BLOCK_TOKENS}, 64 or 128",
        )


def _check_memory(settings: VllmEngineSettings) -> None:
    required_bytes = (
        (settings.kv_cache_bytes or 0) * settings.tensor_parallel * settings.pipeline_parallel
    )
    available_bytes = psutil.virtual_memory().available
    if required_bytes > available_bytes:
        raise EngineStartFailed(
            f"not enough memory for the KV cache: {required_bytes:,} bytes needed,"
            f" {available_bytes:,} available",
            "lower kv_cache or end other processes",
        )
