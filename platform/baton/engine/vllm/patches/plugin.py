"""Setup of each engine process that baton started, before the engine runs.

Theory of operation: vLLM calls `install` (entry point group `vllm.general_plugins`) once in every
process of an engine: the client's, EngineCore, and each worker. The adapter marks its engines with
an environment variable that holds its own process' name. So `install` can tell an engine process of
baton from other engines' and from the client's process.

An engine process that outlives its parent keeps its memory and its side-channel port forever:
vLLM's own shutdown runs in the parent, and so never after SIGKILL. Linux can deliver a signal at
the parent's death instead, with two caveats:

- the signal comes when the *thread* that started the process ends, hence the adapter starts
  the engine from a thread that lives as long as the engine;
- a parent that died before the request sends nothing, hence the later check of its id.

`install` also applies the rows of `table` for engine processes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

from baton.domain.names.process_names import OWNER_ENV_VAR, process_name
from baton.engine.vllm.patches import table
from baton.engine.vllm.patches.start_phases import record_phases
from baton.engine.vllm.patches.step_budget import DECODE_BUDGET_VARIABLE

_PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""


def install() -> None:
    """Set up this process as an engine's; does nothing outside baton's engines."""
    if os.environ.get(OWNER_ENV_VAR) in {None, process_name()}:
        return
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid:
        die_with_parent(parent.pid)
    record_phases()
    for patch in (table.RANK_REPORTS, table.RESUME, table.REFUSALS, table.CACHE_REPORT):
        patch.install()
    max_num_batched_tokens_while_decoding = os.environ.get(DECODE_BUDGET_VARIABLE)
    if max_num_batched_tokens_while_decoding is not None:
        table.STEP_BUDGET.install(int(max_num_batched_tokens_while_decoding))


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent that started it dies.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
