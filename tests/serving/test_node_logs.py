"""Logs of several nodes: one stream with their names, and what is missing of it is said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.serving.operator.log_files import LogLine, LogQuery
from baton.serving.operator.node_logs import LogBatch, NodeLogs, NodeReader, ReadFailure

ALL = LogQuery(tail_lines=None)


def line(second: int, event: str) -> LogLine:
    at = f"2026-11-22T07:41:{second:02}.000+00:00"
    return LogLine(timestamp=at, level="info", event=event, fields={}, source="s", text=event)


def batch(folder: int, *lines: LogLine) -> LogBatch:
    return LogBatch(folder=("machine", 1, folder), lines=lines)


@dataclass
class Scripted:
    """Nodes that answer what was written down for them, round by round."""

    rounds: list[Mapping[str, LogBatch | ReadFailure]]
    asked: list[list[str]] = field(default_factory=list)

    def nodes(self) -> Mapping[str, str]:
        return {node: f"10.0.0.{node}" for node in self.rounds[0]}

    def read(self, nodes: Iterable[str], query: LogQuery) -> Mapping[str, LogBatch | ReadFailure]:
        self.asked.append(list(nodes))
        answers = self.rounds.pop(0)
        return {node: answers[node] for node in self.asked[-1]}


def test_lines_of_all_nodes_come_in_the_order_of_their_time_with_the_node() -> None:
    scripted = Scripted([{"1": batch(1, line(1, "a"), line(5, "c")), "2": batch(2, line(3, "b"))}])
    found = NodeLogs(scripted, print).read(ALL)
    assert [(other.event, other.node) for other in found] == [
        ("a", "10.0.0.1"),
        ("b", "10.0.0.2"),
        ("c", "10.0.0.1"),
    ]
    assert found[0].to_dict()["node"] == "10.0.0.1"


def test_nodes_that_share_a_folder_are_read_once() -> None:
    both = {"1": batch(7, line(1, "a")), "2": batch(7, line(1, "a"))}
    scripted = Scripted([both, both])
    logs = NodeLogs(scripted, print)
    (found,) = logs.read(ALL)
    assert found.node == "10.0.0.1 or 10.0.0.2"
    logs.read(ALL)
    assert scripted.asked == [["1", "2"], ["1"]]


def test_a_node_that_shared_a_folder_is_read_when_the_one_that_was_asked_is_gone() -> None:
    both = {"1": batch(7, line(1, "a")), "2": batch(7, line(1, "a"))}
    scripted = Scripted([both, {"2": batch(7, line(2, "b"))}])
    logs = NodeLogs(scripted, print)
    logs.read(ALL)
    (found,) = logs.read(ALL)
    assert (found.event, found.node) == ("b", "10.0.0.2")


def test_a_node_that_does_not_answer_is_said_once_until_it_does() -> None:
    silent: Mapping[str, LogBatch | ReadFailure] = {
        "1": batch(1),
        "2": ReadFailure(why="no answer within 20 s"),
    }
    scripted = Scripted([silent, silent, {"1": batch(1), "2": batch(2, line(1, "a"))}, silent])
    told: list[str] = []
    logs = NodeLogs(scripted, told.append)
    assert [logs.read(ALL) for _ in range(2)] == [[], []]
    assert told == ["node 10.0.0.2: no answer within 20 s; its lines are missing"]
    assert [other.event for other in logs.read(ALL)] == ["a"]
    logs.read(ALL)
    assert told == [told[0]] * 2


def _written(folder: Path, events: int, width: int = 1) -> NodeReader:
    path = folder / "worker-0001-01000000-1.err"
    head = ":job_id:01000000\n:actor_name:ServeReplica:baton:decode\n"
    at = "2026-11-22T07:41:00.000+00:00"
    text = "".join(f"{at} INFO     e{index} said={'x' * width}\n" for index in range(events))
    path.write_text(head + text)
    return NodeReader(folder)


def test_a_node_gives_no_more_than_is_wanted_of_it_and_then_what_is_new(tmp_path: Path) -> None:
    reader = _written(tmp_path, 9)
    first = reader.read(LogQuery(tail_lines=2))
    assert [other.event for other in first.lines] == ["e7", "e8"]
    assert first.omitted_lines == 0
    assert reader.read(LogQuery(tail_lines=2)) == LogBatch(folder=first.folder, lines=())


def test_an_answer_holds_the_newest_that_there_is_room_for(tmp_path: Path) -> None:
    reader = _written(tmp_path, 6, width=1024 * 1024)
    found = reader.read(ALL)
    assert [other.event for other in found.lines] == ["e3", "e4", "e5"]
    assert found.omitted_lines == 3
    told: list[str] = []
    NodeLogs(Scripted([{"1": found}]), told.append).read(ALL)
    assert "node 10.0.0.1: 3 older lines are left out" in told[0]
