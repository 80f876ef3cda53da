"""Flushes UCX's log from an engine process into its file.

Theory of operation: UCX buffers 4 kB of its log, and its report of transports is shorter: it would
be written when the process ends. UCX exports a flush function, which a thread calls regularly from
the first agent on, when UCX is loaded.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Protocol

from baton.runtime.patch import replace_attributes
from baton.runtime.process.scratch import scratch_folder
from baton.runtime.rank_transports import LOG_VARIABLE, log_name

FLUSH_VARIABLE = "BATON_UCX_FLUSH_S"
"""Interval of flushes in seconds; unset: none."""
_LIBRARY = re.compile(r"(/\S*/libucs[-.]\S*)$", re.MULTILINE)


class AgentConfig(Protocol):
    """NIXL's `nixlAgentConfig`, as far as it matters here."""

    pthrDelay: int  # noqa: N815 - NIXL's name


class Binding(Protocol):
    """NIXL's extension module `nixl._bindings`, as far as it matters here."""

    nixlAgent: Callable[[str, AgentConfig], object]  # noqa: N815 - NIXL's name


def use_local_log_folder(environment: MutableMapping[str, str]) -> None:
    """If the folder of UCX's log is on another node, make one on this node and log there.

    Call it before UCX is loaded, which opens its log then. The folder goes with this process; after
    a kill it goes with the run directory, if there is one.
    """
    log = Path(environment.get(LOG_VARIABLE, ""))
    if log.name != log_name() or log.parent.is_dir():
        return
    folder = scratch_folder("baton-ucx-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    environment[LOG_VARIABLE] = str(folder / log_name())


def flush_from_first_agent(binding: Binding, interval_s: float) -> None:
    """Start flushing when `binding` creates its next agent."""
    create = binding.nixlAgent

    @functools.wraps(create, updated=("__dict__",) if hasattr(create, "__dict__") else ())
    def create_first(name: str, config: AgentConfig) -> object:
        replace_attributes(binding, nixlAgent=create)
        agent = create(name, config)
        threading.Thread(target=_flush, args=(interval_s,), name="ucx-log", daemon=True).start()
        return agent

    replace_attributes(binding, nixlAgent=create_first)


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
    match = _LIBRARY.search(Path("/proc/self/maps").read_text(encoding="utf-8"))
    return None if match is None else match[1]
