"""What runs inside each engine process that baton started, before the engine does.

Theory of operation: vLLM calls `install` (entry point group `vllm.general_plugins`) once in every
process that plays a part in an engine: the one that asks for it, EngineCore, and each worker. The
adapter marks its engines with an environment variable that holds its own process' name, so that
`install` can tell an engine process of ours from a stranger's and from the asking process itself.

An engine process that outlives its parent keeps its memory and its side-channel port for ever:
vLLM's own shutdown runs in the parent and so never after SIGKILL. Linux delivers a signal of our
choice at the parent's death instead. Two traps:

- the signal comes when the *thread* that started the process ends, hence the adapter starts the
  engine from a thread that lives as long as the engine;
- a parent that died before we asked sends nothing, hence the look at the parent's id afterwards.

On the same occasion rows of `table` are installed: the process learns to take up resumed legs (see
`resume_patch`), to say what is wrong
with requests that it refuses (see `refusals`), how its KV cache works (see `cache_report`), and to
keep steps short that streams wait for (see `step_budget`). Its workers say what carries their pulls
(see `rank_reports`).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

from baton.domain.names.process_names import OWNER_ENV_VAR, process_name
from baton.engine.vllm.patches import table
from baton.engine.vllm.patches.step_budget import DECODE_BUDGET_VARIABLE

_PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""


def install() -> None:
    """Make this process an engine's of ours; nothing at all outside baton's engines."""
    if os.environ.get(OWNER_ENV_VAR) in {None, process_name()}:
        return
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid:
        die_with_parent(parent.pid)
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
