"""What baton's processes on all nodes of a cluster have logged, read over Ray.

Theory of operation: an actor on each node reads the files there as `log_files` does, and keeps how
far it has come; all of them end with the driver that started them. Each time everybody is asked at
once, within one deadline. Who does not answer is said once, and is not asked anything else until it
has; who comes later is asked from then on. Nodes that share a folder of logs, as several on one
machine do, are one. An answer holds the newest 4 MiB of what a node has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from baton.serving.operator.log_files import LogFiles, LogLine, LogOrder, last_lines
from baton.serving.ray.context import logs_folder

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

_ANSWER_S = 20.0
"""A node may have to start a worker process first."""
_MOST_BYTES = 4 * 1024 * 1024
"""Of one answer; some 10,000 events."""
Folder = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one node answers."""

    folder: Folder
    """By which a folder of logs is known, wherever it is seen from."""
    lines: tuple[LogLine, ...]
    left_out: int = 0
    """Older lines, for which there was no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """Why a node gave no answer."""

    why: str


class Readers(Protocol):
    """Those who read on each node."""

    def nodes(self) -> Mapping[str, str]:
        """The name of every node that is there, by its id."""
        ...

    def read(self, nodes: Iterable[str], order: LogOrder) -> Mapping[str, Batch | Unread]:
        """What is new on these nodes."""
        ...


class NodeLogs:
    """The log files of every node; `read` gives what is new."""

    def __init__(self, readers: Readers, tell: Callable[[str], None]) -> None:
        self._readers = readers
        self._tell = tell
        self._told: dict[str, str] = {}
        self._sharers: dict[Folder, list[str]] = {}
        """The nodes that have a folder; the first of them is asked for it."""

    def read(self, order: LogOrder) -> list[LogLine]:
        """New lines of all nodes that answer, in the order of their time."""
        names = self._readers.nodes()
        gone = {sharers[0] for sharers in self._sharers.values()} - names.keys()
        self._sharers = {
            folder: sharers for folder, sharers in self._sharers.items() if sharers[0] not in gone
        }
        others = {node for sharers in self._sharers.values() for node in sharers[1:]}
        answers = self._readers.read([node for node in names if node not in others], order)
        batches: list[tuple[str, Batch]] = []
        for node, answer in answers.items():
            if isinstance(answer, Unread):
                self._say(node, f"node {names[node]}: {answer.why}; its lines are missing")
                continue
            self._say(node, "")
            sharers = self._sharers.setdefault(answer.folder, [])
            if node not in sharers:
                sharers.append(node)
            if sharers[0] == node:
                batches.append((node, answer))
        return sorted(
            (line for node, batch in batches for line in self._named(node, batch, names)),
            key=lambda line: line.at,
        )

    def _named(self, node: str, batch: Batch, names: Mapping[str, str]) -> Iterable[LogLine]:
        sharers = dict.fromkeys(names[one] for one in self._sharers[batch.folder] if one in names)
        name = " or ".join(sharers)
        if batch.left_out:
            self._tell(
                f"node {names[node]}: {batch.left_out} older lines are left out, for it has more"
                f" than {_MOST_BYTES // 1024**2} MiB; ask for fewer with --replica, --level or -n"
            )
        return (replace(line, node=name) for line in batch.lines)

    def _say(self, node: str, what: str) -> None:
        if what != self._told.get(node, ""):
            self._told[node] = what
            if what:
                self._tell(what)


class NodeReader:
    """Reads on one node, as an actor of Ray's."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = logs_folder() if folder is None else folder
        self._files = LogFiles(self._folder)
        self._has_read = False

    def read(self, order: LogOrder) -> Batch:
        """What is new here."""
        lines = self._files.read(order)
        if not self._has_read:
            lines, self._has_read = last_lines(lines, order), True
        size, first = 0, len(lines)
        while first and (size := size + len(lines[first - 1].text)) <= _MOST_BYTES:
            first -= 1
        found = self._folder.stat()
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return Batch(
            folder=(machine, found.st_dev, found.st_ino), lines=tuple(lines[first:]), left_out=first
        )


@dataclass(slots=True)
class RayReaders:
    """A `NodeReader` on every node of the cluster that this process is connected to."""

    _actors: dict[str, ActorHandle[Any]] = field(default_factory=dict)
    _asked: dict[str, ObjectRef[Batch]] = field(default_factory=dict)
    """What was not answered yet."""
    _lost: dict[str, Unread] = field(default_factory=dict)
    """Nodes on which nobody can read."""

    def nodes(self) -> Mapping[str, str]:
        """The name of every node that is there, by its id: its address."""
        import ray

        return {
            str(node["NodeID"]): str(node["NodeManagerAddress"])
            for node in ray.nodes()
            if node["Alive"]
        }

    def read(self, nodes: Iterable[str], order: LogOrder) -> Mapping[str, Batch | Unread]:
        """What is new on these nodes, within the deadline."""
        import ray

        found: dict[str, Batch | Unread] = {}
        asked = {}
        for node in nodes:
            if node in self._lost:
                found[node] = self._lost[node]
                continue
            if node not in self._asked:
                self._asked[node] = self._actor(node).read.remote(order)
            asked[node] = self._asked[node]
        if not asked:
            return found
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_S)
        for node, ref in asked.items():
            if ref not in ready:
                found[node] = Unread(why=f"no answer within {_ANSWER_S:.0f} s")
                continue
            del self._asked[node]
            try:
                found[node] = ray.get(ref, timeout=_ANSWER_S)
            except ray.exceptions.RayError as error:
                why = str(error).strip().rpartition("\n")[2]
                found[node] = self._lost[node] = Unread(why=f"nobody can read there: {why}")
        return found

    def _actor(self, node: str) -> ActorHandle[Any]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node not in self._actors:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            kind = ray.remote(num_cpus=0)(NodeReader)
            self._actors[node] = kind.options(scheduling_strategy=there).remote()
        return self._actors[node]
