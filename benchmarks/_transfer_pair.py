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
_DEADLINE_S = 60.0
_ENGINE_POLL_S = 0.0002
"""An engine looks at its transfers once per step; one that has nothing else to do steps at once."""
_MARK = struct.Struct("<II")
"""Written into each page of the source: its piece and the piece's page."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Agents:
    """How both agents of a pair are set up; told apart by identity."""

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


class Pair:
    """A source and a puller; usable once the `with` block is entered."""

    def __init__(self, agents: Agents, capacity_bytes: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["nixl._api"])
        to_source, source_end = context.Pipe()
        self._puller, puller_end = context.Pipe()
        self._source = to_source
        self._processes = [
            context.Process(target=_source, args=(source_end, agents, capacity_bytes)),
            context.Process(target=_puller, args=(puller_end, agents, capacity_bytes)),
        ]

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        self._puller.send(_received(self._source))
        _received(self._puller)
        return self

    def run(self, order: Pull | Copy) -> float:
        """Carry it out; seconds from the wish to the data being there.

        Raises:
            RuntimeError: the transfer failed or brought the wrong bytes.
        """
        self._puller.send(order)
        answer = _received(self._puller)
        if isinstance(answer, float):
            return answer
        raise RuntimeError(f"{order}: {answer}")

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


def _received(end: End) -> object:
    if not end.poll(_DEADLINE_S):
        raise RuntimeError(f"a process of the pair said nothing for {_DEADLINE_S} s")
    return end.recv()


def _agent(name: str, agents: Agents) -> nixl_agent:
    os.environ.update(agents.environment)
    nixl_progress.install()
    import nixl._api as api

    logging.disable(logging.INFO)
    config = api.nixl_agent_config(num_threads=agents.threads, capture_telemetry=agents.telemetry)
    return api.nixl_agent(name, config)


def _memory(capacity_bytes: int) -> tuple[mmap.mmap, int]:
    """Private memory in pages of 4 kB, as an engine's KV cache in host memory is."""
    memory = mmap.mmap(-1, capacity_bytes)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _source(end: End, agents: Agents, capacity_bytes: int) -> None:
    memory, address = _memory(capacity_bytes)
    for page in range(capacity_bytes // PAGE_BYTES):
        _MARK.pack_into(memory, page * PAGE_BYTES, page, ~page & 0xFFFFFFFF)
    agent = _agent("source", agents)
    agent.register_memory([(address, capacity_bytes, 0, "")], "DRAM")
    end.send((agent.get_agent_metadata(), address))
    _wait_for_ever(end)


def _wait_for_ever(end: End) -> None:
    try:
        end.recv()
    except EOFError:
        sys.exit(0)


def _puller(end: End, agents: Agents, capacity_bytes: int) -> None:
    puller = _Puller(agents, capacity_bytes, end)
    end.send("ready")
    while True:
        try:
            order = end.recv()
        except EOFError:
            return
        if isinstance(order, Copy):
            end.send(puller.copy(order))
        elif isinstance(order, Pull):
            end.send(puller.pull(order))


Prepared: TypeAlias = tuple[object, object, list[int], list[int]]
"""NIXL's lists of the pieces here and there, and the order in which they are pulled."""


class _Puller:
    def __init__(self, agents: Agents, capacity_bytes: int, end: End) -> None:
        self._memory, self._address = _memory(capacity_bytes)
        _touch(self._memory)
        self._other, self._other_address = _memory(capacity_bytes)
        _touch(self._other)
        self._agent = _agent("puller", agents)
        self._agent.register_memory([(self._address, capacity_bytes, 0, "")], "DRAM")
        metadata, self._remote_address = end.recv()
        self._remote = self._agent.add_remote_agent(metadata)
        self._prepared: dict[Pull, Prepared] = {}

    def copy(self, order: Copy) -> float:
        started_s = time.perf_counter()
        ctypes.memmove(self._address, self._other_address, order.size_bytes)
        return time.perf_counter() - started_s

    def pull(self, order: Pull) -> float | str:
        new = order not in self._prepared
        if new:
            self._prepared[order] = self._prepare(order)
        local, remote, here, there = self._prepared[order]
        agent = self._agent
        started_s = time.perf_counter()
        handle = agent.make_prepped_xfer("READ", local, here, remote, there, notif_msg=b"pulled")
        state = agent.transfer(handle)
        while state not in {"DONE", "ERR"}:
            if not order.hot_polling:
                time.sleep(_ENGINE_POLL_S)
            state = agent.check_xfer_state(handle)
        took_s = time.perf_counter() - started_s
        agent.release_xfer_handle(handle)
        if state != "DONE":
            return f"the transfer ended in state {state}"
        wrong = self._first_wrong(order, here, there) if new else None
        return took_s if wrong is None else f"piece {wrong} is not what the source has"

    def _prepare(self, order: Pull) -> Prepared:
        """As vLLM does it: the list of all blocks once, of which each pull names some."""

        def listed(name: str, address: int) -> object:
            pieces = [
                (address + number * order.piece_bytes, order.piece_bytes, 0)
                for number in range(order.pieces)
            ]
            descriptors = self._agent.get_xfer_descs(pieces, "DRAM")
            return self._agent.prep_xfer_dlist(name, descriptors)

        here, there = list(range(order.pieces)), list(range(order.pieces))
        if order.scattered:
            shuffle = random.Random(1).shuffle  # noqa: S311 - the same each time
            shuffle(here)
            shuffle(there)
        return (
            listed("NIXL_INIT_AGENT", self._address),
            listed(self._remote, self._remote_address),
            here,
            there,
        )

    def _first_wrong(self, order: Pull, here: Sequence[int], there: Sequence[int]) -> int | None:
        pages = order.piece_bytes // PAGE_BYTES
        for number, (to, origin) in enumerate(zip(here, there, strict=True)):
            for page in (0, pages - 1):
                got = _MARK.unpack_from(self._memory, (to * pages + page) * PAGE_BYTES)
                wanted = origin * pages + page
                if got != (wanted, ~wanted & 0xFFFFFFFF):
                    return number
        return None


def _touch(memory: mmap.mmap) -> None:
    for place in _pages(len(memory)):
        memory[place] = 1


def _pages(capacity_bytes: int) -> Iterable[int]:
    return range(0, capacity_bytes, PAGE_BYTES)
