"""Logs of baton's processes on all nodes of a cluster, read over Ray.

Theory of operation: an actor on each node reads the files with `log_files` and remembers how far;
all actors end with their driver. All nodes are asked at once, within one deadline. A node that does
not answer is reported once, and asked nothing else until it does. Nodes that share a folder of
logs, as several on one machine do, count as one. An answer holds the newest 4 MiB of a node's
lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from baton.serving.operator.log_files import LogFiles, LogLine, LogQuery, last_lines
from baton.serving.ray.context import logs_folder

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

_ANSWER_TIMEOUT_S = 20.0
_MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""Of one answer; some 10,000 events."""
FolderId = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBatch:
    """The answer of a node."""

    folder: FolderId
    """Identifies a folder of logs, wherever it is seen from."""
    lines: tuple[LogLine, ...]
    omitted_lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFailure:
    """Why a node gave no answer."""

    reason: str


class ClusterReader(Protocol):
    """Reads on every node."""

    def nodes(self) -> Mapping[str, str]:
        """The name of every live node, by its id."""
        ...

    def read(self, nodes: Iterable[str], query: LogQuery) -> Mapping[str, LogBatch | ReadFailure]:
        """New lines of these nodes."""
        ...


class NodeLogs:
    """The log files of every node."""

    def __init__(self, reader: ClusterReader, on_warning: Callable[[str], None]) -> None:
        self._reader = reader
        self._on_warning = on_warning
        self._last_warnings: dict[str, str] = {}
        self._nodes_by_folder: dict[FolderId, list[str]] = {}
        """The nodes that share a folder; the first of them is asked."""

    def read(self, query: LogQuery) -> list[LogLine]:
        """New lines of all nodes that answer, in the order of time."""
        names = self._reader.nodes()
        vanished = {
            folder_nodes[0] for folder_nodes in self._nodes_by_folder.values()
        } - names.keys()
        self._nodes_by_folder = {
            folder: folder_nodes
            for folder, folder_nodes in self._nodes_by_folder.items()
            if folder_nodes[0] not in vanished
        }
        duplicates = {
            node for folder_nodes in self._nodes_by_folder.values() for node in folder_nodes[1:]
        }
        answers = self._reader.read([node for node in names if node not in duplicates], query)
        batches: list[tuple[str, LogBatch]] = []
        for node, answer in answers.items():
            if isinstance(answer, ReadFailure):
                self._warn_once(node, f"node {names[node]}: {answer.reason}; its lines are missing")
                continue
            self._warn_once(node, "")
            folder_nodes = self._nodes_by_folder.setdefault(answer.folder, [])
            if node not in folder_nodes:
                folder_nodes.append(node)
            if folder_nodes[0] == node:
                batches.append((node, answer))
        return sorted(
            (line for node, batch in batches for line in self._labelled_lines(node, batch, names)),
            key=lambda line: line.timestamp,
        )

    def _labelled_lines(
        self, node: str, batch: LogBatch, names: Mapping[str, str]
    ) -> Iterable[LogLine]:
        node_names = dict.fromkeys(
            names[other] for other in self._nodes_by_folder[batch.folder] if other in names
        )
        name = " or ".join(node_names)
        if batch.omitted_lines:
            self._on_warning(
                f"node {names[node]}: {batch.omitted_lines} older lines are left out, for it"
                " has more"
                f" than {_MAX_ANSWER_BYTES // 1024**2} MiB; ask for fewer with --replica,"
                " --level or -n"
            )
        return (replace(line, node=name) for line in batch.lines)

    def _warn_once(self, node: str, warning: str) -> None:
        if warning != self._last_warnings.get(node, ""):
            self._last_warnings[node] = warning
            if warning:
                self._on_warning(warning)


class NodeReader:
    """Reads on one node, as an actor of Ray's."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = logs_folder() if folder is None else folder
        self._files = LogFiles(self._folder)
        self._has_read = False

    def read(self, query: LogQuery) -> LogBatch:
        """New lines of this node."""
        lines = self._files.read(query)
        if not self._has_read:
            lines, self._has_read = last_lines(lines, query), True
        size_chars, first = 0, len(lines)
        while (
            first and (size_chars := size_chars + len(lines[first - 1].text)) <= _MAX_ANSWER_BYTES
        ):
            first -= 1
        folder_stat = self._folder.stat()
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return LogBatch(
            folder=(machine, folder_stat.st_dev, folder_stat.st_ino),
            lines=tuple(lines[first:]),
            omitted_lines=first,
        )


@dataclass(slots=True)
class RayClusterReader:
    """A `NodeReader` on every node of the connected cluster."""

    _actors: dict[str, ActorHandle[Any]] = field(default_factory=dict)
    _pending: dict[str, ObjectRef[LogBatch]] = field(default_factory=dict)
    _failed: dict[str, ReadFailure] = field(default_factory=dict)

    def nodes(self) -> Mapping[str, str]:
        """The address of every live node, by its id."""
        import ray

        return {
            str(node["NodeID"]): str(node["NodeManagerAddress"])
            for node in ray.nodes()
            if node["Alive"]
        }

    def read(self, nodes: Iterable[str], query: LogQuery) -> Mapping[str, LogBatch | ReadFailure]:
        """New lines of these nodes, within the deadline."""
        import ray

        answers: dict[str, LogBatch | ReadFailure] = {}
        pending = {}
        for node in nodes:
            if node in self._failed:
                answers[node] = self._failed[node]
                continue
            if node not in self._pending:
                self._pending[node] = self._actor(node).read.remote(query)
            pending[node] = self._pending[node]
        if not pending:
            return answers
        ready, _ = ray.wait(
            list(pending.values()), num_returns=len(pending), timeout=_ANSWER_TIMEOUT_S
        )
        for node, ref in pending.items():
            if ref not in ready:
                answers[node] = ReadFailure(reason=f"no answer within {_ANSWER_TIMEOUT_S:.0f} s")
                continue
            del self._pending[node]
            try:
                answers[node] = ray.get(ref, timeout=_ANSWER_TIMEOUT_S)
            except ray.exceptions.RayError as error:
                reason = str(error).strip().rpartition("\n")[2]
                answers[node] = self._failed[node] = ReadFailure(
                    reason=f"its logs cannot be read: {reason}"
                )
        return answers

    def _actor(self, node: str) -> ActorHandle[Any]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node not in self._actors:
            affinity = NodeAffinitySchedulingStrategy(node, soft=False)
            actor_class = ray.remote(num_cpus=0)(NodeReader)
            self._actors[node] = actor_class.options(scheduling_strategy=affinity).remote()
        return self._actors[node]
