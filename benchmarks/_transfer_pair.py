"""Two processes with a NIXL agent each, one of which pulls from the other, as engines do."""

from __future__ import annotations

import ctypes
import logging
import mmap
import multiprocessing
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from baton.transfer import nixl_progress

if TYPE_CHECKING:
    from nixl._api import nixl_agent

End: TypeAlias = "Connection[Any, Any]"
PAGE_BYTES = 4096
_TIMEOUT_S = 60.0
_ENGINE_POLL_S = 0.0002
"""An engine looks at its transfers once per step; one that has nothing else to do steps at once."""
_PAGE_MARK = struct.Struct("<II")
"""Written into each page of the source: its piece and the piece's page."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AgentOptions:
    """How both agents of a pair are set up; distinguished by identity."""

    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int = 0
    """NIXL's `num_threads`; 0 is its default."""
    telemetry: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """One transfer: `pieces` descriptors, in an order of their own on each side."""

    pieces: int
    piece_bytes: int
    scattered: bool
    """Whether neighbours in the list are neighbours in memory: NIXL makes one piece of those."""
    hot_polling: bool

    @property
    def size_bytes(self) -> int:
        """What it moves."""
        return self.pieces * self.piece_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A memcpy inside the pulling process."""

    size_bytes: int


class TransferPair:
    """A source and a puller; usable once the `with` block is entered."""

    def __init__(self, agents: AgentOptions, capacity_bytes: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["nixl._api"])
        to_source, source_end = context.Pipe()
        self._puller, puller_end = context.Pipe()
        self._source = to_source
        self._processes = [
            context.Process(target=_source_main, args=(source_end, agents, capacity_bytes)),
            context.Process(target=_puller_main, args=(puller_end, agents, capacity_bytes)),
        ]

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        self._puller.send(_receive(self._source))
        _receive(self._puller)
        return self

    def run(self, operation: Pull | Copy) -> float:
        """Carry it out; seconds from the wish to the data being there.

        Raises:
            RuntimeError: the transfer failed or brought the wrong bytes.
        """
        self._puller.send(operation)
        answer = _receive(self._puller)
        if isinstance(answer, float):
            return answer
        raise RuntimeError(f"{operation}: {answer}")

    def pause(self) -> None:
        """Stop both processes, so that their polling does not disturb anybody."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.resume()
        for process in reversed(self._processes):
            process.kill()
            process.join()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                with suppress(ProcessLookupError):  # it has ended just now
                    os.kill(process.pid, number)


def _receive(end: End) -> object:
    if not end.poll(_TIMEOUT_S):
        raise RuntimeError(f"a process of the pair had no output for {_TIMEOUT_S} s")
    return end.recv()


def _create_agent(name: str, agents: AgentOptions) -> nixl_agent:
    os.environ.update(agents.environment)
    nixl_progress.install()
    import nixl._api as api

    logging.disable(logging.INFO)
    config = api.nixl_agent_config(num_threads=agents.threads, capture_telemetry=agents.telemetry)
    return api.nixl_agent(name, config)


def _allocate_memory(capacity_bytes: int) -> tuple[mmap.mmap, int]:
    """Private memory in pages of 4 kB, as an engine's KV cache in host memory is."""
    memory = mmap.mmap(-1, capacity_bytes)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _source_main(end: End, agents: AgentOptions, capacity_bytes: int) -> None:
    memory, address = _allocate_memory(capacity_bytes)
    for page in range(capacity_bytes // PAGE_BYTES):
        _PAGE_MARK.pack_into(memory, page * PAGE_BYTES, page, ~page & 0xFFFFFFFF)
    agent = _create_agent("source", agents)
    agent.register_memory([(address, capacity_bytes, 0, "")], "DRAM")
    end.send((agent.get_agent_metadata(), address))
    _wait_for_close(end)


def _wait_for_close(end: End) -> None:
    try:
        end.recv()
    except EOFError:
        sys.exit(0)


def _puller_main(end: End, agents: AgentOptions, capacity_bytes: int) -> None:
    puller = _Puller(agents, capacity_bytes, end)
    end.send("ready")
    while True:
        try:
            operation = end.recv()
        except EOFError:
            return
        if isinstance(operation, Copy):
            end.send(puller.copy(operation))
        elif isinstance(operation, Pull):
            end.send(puller.pull(operation))


PreparedLists: TypeAlias = tuple[object, object, list[int], list[int]]
"""NIXL's lists of the pieces here and there, and the order in which they are pulled."""


class _Puller:
    def __init__(self, agents: AgentOptions, capacity_bytes: int, end: End) -> None:
        self._memory, self._address = _allocate_memory(capacity_bytes)
        _fault_in_pages(self._memory)
        self._copy_source, self._copy_source_address = _allocate_memory(capacity_bytes)
        _fault_in_pages(self._copy_source)
        self._agent = _create_agent("puller", agents)
        self._agent.register_memory([(self._address, capacity_bytes, 0, "")], "DRAM")
        metadata, self._remote_address = end.recv()
        self._remote = self._agent.add_remote_agent(metadata)
        self._prepared: dict[Pull, PreparedLists] = {}

    def copy(self, operation: Copy) -> float:
        started_s = time.perf_counter()
        ctypes.memmove(self._address, self._copy_source_address, operation.size_bytes)
        return time.perf_counter() - started_s

    def pull(self, operation: Pull) -> float | str:
        is_first_pull = operation not in self._prepared
        if is_first_pull:
            self._prepared[operation] = self._prepare(operation)
        local, remote, local_indices, remote_indices = self._prepared[operation]
        agent = self._agent
        started_s = time.perf_counter()
        handle = agent.make_prepped_xfer(
            "READ", local, local_indices, remote, remote_indices, notif_msg=b"pulled"
        )
        state = agent.transfer(handle)
        while state not in {"DONE", "ERR"}:
            if not operation.hot_polling:
                time.sleep(_ENGINE_POLL_S)
            state = agent.check_xfer_state(handle)
        duration_s = time.perf_counter() - started_s
        agent.release_xfer_handle(handle)
        if state != "DONE":
            return f"the transfer ended in state {state}"
        wrong_piece = (
            self._first_wrong_piece(operation, local_indices, remote_indices)
            if is_first_pull
            else None
        )
        return (
            duration_s if wrong_piece is None else f"piece {wrong_piece} is not what the source has"
        )

    def _prepare(self, order: Pull) -> PreparedLists:
        """As vLLM does it: the list of all blocks once, of which each pull names some."""

        def prepare_list(name: str, address: int) -> object:
            pieces = [
                (address + number * order.piece_bytes, order.piece_bytes, 0)
                for number in range(order.pieces)
            ]
            descriptors = self._agent.get_xfer_descs(pieces, "DRAM")
            return self._agent.prep_xfer_dlist(name, descriptors)

        local_indices, remote_indices = list(range(order.pieces)), list(range(order.pieces))
        if order.scattered:
            shuffle = random.Random(1).shuffle  # noqa: S311 - the same each time
            shuffle(local_indices)
            shuffle(remote_indices)
        return (
            prepare_list("NIXL_INIT_AGENT", self._address),
            prepare_list(self._remote, self._remote_address),
            local_indices,
            remote_indices,
        )

    def _first_wrong_piece(
        self, order: Pull, here: Sequence[int], there: Sequence[int]
    ) -> int | None:
        pages = order.piece_bytes // PAGE_BYTES
        for number, (to, origin) in enumerate(zip(here, there, strict=True)):
            for page in (0, pages - 1):
                mark = _PAGE_MARK.unpack_from(self._memory, (to * pages + page) * PAGE_BYTES)
                expected_page = origin * pages + page
                if mark != (expected_page, ~expected_page & 0xFFFFFFFF):
                    return number
        return None


def _fault_in_pages(memory: mmap.mmap) -> None:
    for place in _pages(len(memory)):
        memory[place] = 1


def _pages(capacity_bytes: int) -> Iterable[int]:
    return range(0, capacity_bytes, PAGE_BYTES)
