"""Gets what UCX has written about itself out of an engine process and into its log file.

Theory of operation: UCX writes its log through a buffer of 4 kB, and what it says about transports
is shorter: it would stay inside the process until that ends. UCX exports a function that empties
the buffer, and a thread of the engine process calls it once in a while. It starts with the first
agent, for only then is UCX there, and only in the processes that use it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from baton.transfer.nixl_binding import AgentConfig, Binding

FLUSH_VARIABLE = "BATON_UCX_FLUSH_S"
"""Seconds between two looks at UCX's log buffer; unset leaves it alone."""

_LIBRARY = re.compile(r"(/\S*/libucs[-.]\S*)$", re.MULTILINE)


def flush_from_first_agent(binding: Binding, interval_s: float) -> None:
    """Start flushing when `binding` creates its next agent."""
    create = binding.nixlAgent

    @functools.wraps(create, updated=("__dict__",) if hasattr(create, "__dict__") else ())
    def create_first(name: str, config: AgentConfig) -> object:
        binding.nixlAgent = create
        agent = create(name, config)
        threading.Thread(target=_flush, args=(interval_s,), name="ucx-log", daemon=True).start()
        return agent

    binding.nixlAgent = create_first


def _flush(interval_s: float) -> None:
    flush: Callable[[], object] | None = None
    while True:
        time.sleep(interval_s)
        if flush is None and (library := loaded_library()) is not None:
            flush = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).ucs_log_flush
        if flush is not None:
            flush()


def loaded_library() -> str | None:
    """The path of UCX's library in this process; None when it is not loaded."""
    found = _LIBRARY.search(Path("/proc/self/maps").read_text(encoding="utf-8"))
    return None if found is None else found[1]
