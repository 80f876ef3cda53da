"""Replicas whose processes have ended by themselves, and how, as Ray and this machine tell it.

Theory of operation: Ray keeps dead actors in its table, with the reason, but does not learn the
exit status of a worker. Two traces of a process make the reason more exact. A crash writes the
signal into the process's own log. The kernel reports a process that it killed for memory. Both are
found only for replicas on the node of the process that asks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TAIL_BYTES = 64 * 1024
_KERNEL_BYTES = 8192
"""Of one message of the kernel, at most. Source: kmsg documentation of Linux."""
_MAX_LOSSES = 10
_NODE_DIED, _WORKER_DIED = 3, 1
"""Of `ActorDiedErrorContext.reason` (Ray 2.60); others are orders to end."""
_SIGNAL = re.compile(r"\*\*\* (SIG[A-Z]+) received|Fatal Python error: (.+)")
_EXIT_CODE = re.compile(r"exit code (\d+)")
_KILLED_PID = re.compile(r"Killed process (\d+) ")
_LAST_ERROR = re.compile(r"(?:^|\s|\.)(\w*(?:Error|Exception|Failed)\b: .+)")
_NO_TRACE = (
    "ended without a message: SIGKILL, by the kernel for want of memory, or by another process"
)
_OUT_OF_MEMORY = "SIGKILL by the kernel, for want of memory (OOM kill)"

DeadActor = Mapping[str, Any]
"""A row of Ray's table of actors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoss:
    """A replica whose process ended by itself."""

    replica_id: str
    pool: str
    node: str
    pid: int
    ended_at_s: float
    """In seconds since 1970, by the clock of Ray's head."""
    how: str


def dead_actors() -> list[DeadActor]:
    """The cluster's dead actors (private API of Ray 2.60); blocks for milliseconds."""
    from ray._private.state import state

    return list(state.actor_table(None, None, "DEAD").values())


def replica_losses(
    actors: Iterable[DeadActor],
    *,
    app: str,
    pools: Iterable[str],
    last_words: Callable[[int, str], str],
) -> tuple[ReplicaLoss, ...]:
    """The newest losses among dead actors, newest first; replicas that were told to end are none.

    `last_words` has what a process of a pid and an address of a node left behind; empty for none.
    """
    prefixes = {f"SERVE_REPLICA::{app}#{pool}#": pool for pool in pools}
    rows = sorted(actors, key=lambda actor: -float(actor["EndTime"]))
    losses: list[ReplicaLoss] = []
    for actor in rows:
        head, separator, name = str(actor["Name"]).rpartition("#")
        pool = prefixes.get(head + separator)
        if pool is None or (cause := _cause(actor)) is None or len(losses) == _MAX_LOSSES:
            continue
        node, pid = str(actor["Address"]["IPAddress"]), int(actor["Pid"])
        losses.append(
            ReplicaLoss(
                replica_id=f"{pool}-{name}",
                pool=pool,
                node=node,
                pid=pid,
                ended_at_s=float(actor["EndTime"]) / 1000,
                how=cause or last_words(pid, node) or _NO_TRACE,
            )
        )
    return tuple(losses)


def _cause(actor: DeadActor) -> str | None:
    """How the process ended, if Ray knows; empty if it does not; None if it was told to end."""
    death = actor["DeathCause"]
    if death.HasField("oom_context"):
        return "ended by Ray, for its node ran out of memory"
    if not death.HasField("actor_died_error_context"):
        return None
    died = death.actor_died_error_context
    if died.reason == _NODE_DIED:
        return "its node was lost"
    if died.reason != _WORKER_DIED or "INTENDED" in died.error_message:
        return None
    code = _EXIT_CODE.search(died.error_message)
    return "" if code is None else f"exit code {code[1]}"


def local_last_words(logs: Path, node: str) -> Callable[[int, str], str]:
    """See `replica_losses`; for processes of this node, whose logs are in this folder."""

    def last_words(pid: int, of_node: str) -> str:
        if of_node != node:
            return ""
        if pid in kernel_killed_pids(Path("/dev/kmsg")):
            return _OUT_OF_MEMORY
        paths = [*logs.glob(f"worker-*-{pid}.err"), *logs.glob(f"worker-*-{pid}.out")]
        return next((words for path in paths if (words := _words_in(path))), "")

    return last_words


def _words_in(path: Path) -> str:
    """The signal, or the last error, at the end of a process's output; empty for none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:  # removed with its session
        return ""
    for line in lines:
        if (match := _SIGNAL.search(line)) is not None:
            return match[1] or match[2].strip()
    errors = (match[1].strip() for line in reversed(lines) if (match := _LAST_ERROR.search(line)))
    return next(errors, "")


def kernel_killed_pids(messages: Path) -> frozenset[int]:
    """The processes that the kernel killed for want of memory; none where it may not be read."""
    pids: set[int] = set()
    try:
        file = os.open(messages, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return frozenset()
    try:
        while message := os.read(file, _KERNEL_BYTES):
            pids |= {int(pid) for pid in _KILLED_PID.findall(message.decode(errors="replace"))}
    except OSError:  # the end of the messages, or some were overwritten
        pass
    finally:
        os.close(file)
    return frozenset(pids)
