"""What `baton logs` reads: whose a file is, what an event is, and what is new."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from baton.serving.cluster.failed_start_logs import archive_logs, failures_folder, last_error
from baton.serving.operator.log_files import (
    LogFiles,
    LogLine,
    LogQuery,
    follow_lines,
    last_lines,
    parse_line,
)
from baton.serving.operator.node_logs import LogBatch, NodeLogs, NodeReader, ReadFailure
from baton.telemetry.logs import LogFormat, configure_logs, log_event

ALL = LogQuery(tail_lines=None)


def at(second: int) -> str:
    return f"2026-11-22T07:41:{second:02}.000+00:00"


def event(second: int, name: str, level: str = "info", **fields: object) -> str:
    head = {"at": at(second), "level": level, "logger": "baton.x", "event": name}
    return json.dumps(head | fields) + "\n"


class Session:
    """Log files as Ray writes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = LogFiles(folder)

    def file(self, part: str, number: int) -> Path:
        path = self.folder / f"worker-{number:04x}-01000000-{number}.err"
        if not path.exists():
            path.write_text(f":job_id:01000000\n:actor_name:ServeReplica:baton:{part}\n")
        return path

    def write(self, part: str, number: int, *lines: str) -> None:
        with self.file(part, number).open("a") as file:
            file.writelines(lines)

    def read(self, order: LogQuery = ALL) -> list[str]:
        return [f"{line.source}: {line.event or line.text}" for line in self.files.read(order)]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    session = Session(tmp_path)
    session.write("ingress", 1, event(5, "ingress_started", ingress="abc"), event(9, "a"))
    session.write("decode", 2, event(3, "replica_started", replica_id="decode-x"), event(7, "b"))
    session.write("controller", 3, event(1, "controller_started", controller="ctl"))
    return session


def test_events_of_all_processes_come_in_the_order_of_their_time(session: Session) -> None:
    assert session.read() == [
        "controller-ctl: controller_started",
        "decode-x: replica_started",
        "ingress-abc: ingress_started",
        "decode-x: b",
        "ingress-abc: a",
    ]
    assert session.files.sources == ["controller-ctl", "decode-x", "ingress-abc"]


@pytest.mark.parametrize(
    ("order", "sources"),
    [
        (LogQuery(replica="decode-x"), {"decode-x"}),
        (LogQuery(replica="decode"), {"decode-x"}),
        (LogQuery(replica="decode-y"), set()),
        (LogQuery(ingress=True), {"ingress-abc"}),
        (LogQuery(ingress=True, controller=True), {"ingress-abc", "controller-ctl"}),
        (LogQuery(replica="decode-x", controller=True), {"decode-x", "controller-ctl"}),
    ],
)
def test_only_requested_processes_are_shown(
    session: Session, order: LogQuery, sources: set[str]
) -> None:
    assert {line.source for line in session.files.read(order)} == sources


def test_processes_of_others_are_none_of_ours(session: Session, tmp_path: Path) -> None:
    (tmp_path / "worker-0009-01000000-9.err").write_text(
        ":actor_name:ServeController\n" + event(1, "x")
    )
    (tmp_path / "raylet.err").write_text(":actor_name:ServeReplica:baton:decode\n" + event(1, "x"))
    assert not [line for line in session.read() if line.endswith(": x")]


def test_only_what_is_new_comes_the_next_time_and_only_whole_lines(session: Session) -> None:
    session.read()
    assert session.read() == []
    half, rest = event(10, "late")[:20], event(10, "late")[20:]
    session.write("decode", 2, half)
    assert session.read() == []
    session.write("decode", 2, rest)
    assert session.read() == ["decode-x: late"]


def test_a_process_that_comes_later_is_found_and_gets_its_name_when_it_says_it(
    session: Session,
) -> None:
    session.read()
    session.write("prefill", 4, "loading weights\n")
    assert session.read() == []
    assert "prefill (pid 4)" in session.files.sources
    session.write("prefill", 4, event(20, "replica_started", replica_id="prefill-z"))
    assert session.read() == ["prefill-z: replica_started"]


def test_levels_events_and_requests_narrow_what_is_shown(session: Session) -> None:
    session.write("ingress", 1, event(20, "w", "warning", request_id="cmpl-r-1-0f"))
    session.write("ingress", 1, event(21, "v", request_id="cmpl-r-12-0f"))
    assert session.read(LogQuery(level="warning")) == ["ingress-abc: w"]
    other = Session(session.folder)
    assert other.read(LogQuery(events=frozenset({"a", "b"}))) == ["decode-x: b", "ingress-abc: a"]
    again = Session(session.folder)
    assert again.read(LogQuery(request_id="r-1")) == ["ingress-abc: w"]


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("r-1", True),
        ("chatcmpl-r-1~20d39a8f~my-gold-deadbeef", True),
        ("r", True),
        ("r-12", False),
        ("gold", False),
        ("20d39a8f", False),
    ],
)
def test_a_request_is_found_by_its_name_before_the_words_of_the_rust_gate(
    session: Session, named: str, *, found: bool
) -> None:
    request_id = "chatcmpl-r-1~20d39a8f~my-gold-deadbeef"
    session.write("ingress", 1, event(20, "w", request_id=request_id))
    assert session.read(LogQuery(request_id=named)) == ["ingress-abc: w"] * found


def test_output_of_other_libraries_is_shown_on_request_after_the_event_before_it(
    session: Session,
) -> None:
    session.write("decode", 2, "Triton is installed\n", event(8, "c"))
    assert "decode-x: Triton is installed" not in session.read()
    shown = Session(session.folder).read(LogQuery(include_foreign=True, replica="decode"))
    assert shown == [
        "decode-x: replica_started",
        "decode-x: b",
        "decode-x: Triton is installed",
        "decode-x: c",
    ]


def test_a_traceback_is_shown_with_its_event(session: Session) -> None:
    told = ["Traceback (most recent call last):\n", '  File "x"\n', "ValueError: no\n", "chatter\n"]
    session.write("controller", 3, f"{at(30)} ERROR   turn_failed\n", *told)
    assert session.read(LogQuery(controller=True))[1:] == [
        "controller-ctl: turn_failed",
        "controller-ctl: Traceback (most recent call last):",
        'controller-ctl:   File "x"',
        "controller-ctl: ValueError: no",
    ]


def test_the_last_lines_are_the_newest_of_all(session: Session) -> None:
    query = LogQuery(tail_lines=2)
    lines = last_lines(session.files.read(query), query)
    assert [line.event for line in lines] == ["b", "a"]


def test_following_ends_with_the_deployment_and_misses_nothing(session: Session) -> None:
    lives = iter([True, False])
    seen: list[str] = []
    for line in follow_lines(
        session.files, LogQuery(tail_lines=1), is_alive=lambda: next(lives), pause_s=0
    ):
        if line is None:
            session.write("decode", 2, event(40, "last_words"))
        else:
            seen.append(line.event)
    assert seen == ["a", "last_words"]


def test_a_truncated_file_is_read_from_its_beginning(session: Session) -> None:
    session.read()
    path = session.file("decode", 2)
    path.write_text(":actor_name:ServeReplica:baton:decode\n" + event(50, "anew"))
    assert session.read() == ["decode-x: anew"]


@pytest.mark.parametrize("log_format", LogFormat)
def test_events_are_read_as_they_are_written(
    log_format: LogFormat, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    root = logging.getLogger("baton")
    before = (root.handlers, root.propagate, root.level)
    try:
        configure_logs(log_format, "info")
        fields = {"pool": "decode", "why": "late: 2 of 3, x=1"}
        log_event(logging.getLogger("baton.test"), logging.WARNING, "pool_scaled", fields)
        logging.getLogger("baton.test").warning("the disk is slow")
    finally:
        root.handlers, root.propagate = before[0], before[1]
        root.setLevel(before[2])
    first, second = (parse_line(text, "s") for text in capsys.readouterr().err.splitlines())
    assert first is not None
    assert second is not None
    assert (first.level, first.event) == ("warning", "pool_scaled")
    assert first.fields == fields
    assert (second.event, second.fields) == ("the disk is slow", {})


@pytest.mark.parametrize("text", ["{", '{"a": 1}', "[1]", "", "2026 INFO x", "INFO 2026-11-22"])
def test_a_line_that_is_no_event_is_none(text: str) -> None:
    assert parse_line(text, "s") is None


def test_a_report_is_flat_with_process_and_time_first() -> None:
    line = parse_line(event(1, "x", pool="decode").strip(), "s")
    assert isinstance(line, LogLine)
    assert line.to_dict() == {
        "at": at(1),
        "level": "info",
        "source": "s",
        "event": "x",
        "pool": "decode",
    }


def test_a_field_of_an_event_does_not_replace_process_and_time() -> None:
    fields = {"source": "prefill-1", "target": "decode-1", "text": "x"}
    lines = [
        parse_line(event(1, "link_quarantined", **fields).strip(), "ingress-abc"),
        parse_line(
            f"{at(1)} INFO   link_quarantined source=prefill-1 target=decode-1 text=x",
            "ingress-abc",
        ),
    ]
    for line in lines:
        assert line is not None
        assert line.to_dict() == {
            "at": at(1),
            "level": "info",
            "source": "ingress-abc",
            "event": "link_quarantined",
            "event_source": "prefill-1",
            "target": "decode-1",
            "event_text": "x",
        }


def test_many_lines_stay_in_order(session: Session) -> None:
    for second in range(10, 60):
        session.write("ingress" if second % 2 else "decode", 2 - second % 2, event(second, "n"))
    times = [line.timestamp for line in session.files.read(ALL)]
    assert all(name <= other for name, other in pairwise(times))


# -------------------------------------------------------------------- logs of nodes


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
        "2": ReadFailure(reason="no answer within 20 s"),
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


# -------------------------------------------------------------------- logs that are kept


TRACE = """Traceback (most recent call last):
  File "engine.py", line 9, in start
    raise ValueError("current platform cpu does not support ray")
ValueError: current platform cpu does not support ray
"""


def kept_session(run_dir: Path, **files: str) -> Path:
    """A run directory as `LocalCluster` has it, with logs below."""
    logs = run_dir / "r" / "session_1" / "logs"
    (logs / "serve").mkdir(parents=True)
    (run_dir / "r" / "session_latest").symlink_to("session_1")
    (run_dir / "session_latest").symlink_to("r/session_latest")
    for name, text in files.items():
        (logs / name.replace("__", "/")).with_suffix(".log").write_text(text)
    return logs


def test_logs_outlive_the_folder_that_they_were_in(tmp_path: Path) -> None:
    run_dir, folder = tmp_path / "baton-a", tmp_path / "failed"
    folder.mkdir()
    kept_session(run_dir, serve__replica_x=TRACE)
    kept = archive_logs(run_dir, folder)
    assert kept == folder / "baton-a"
    assert (kept / "serve" / "replica_x.log").read_text() == TRACE
    assert last_error(kept) == "ValueError: current platform cpu does not support ray"


def test_a_start_that_logged_nothing_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "failed").mkdir()
    (tmp_path / "baton-a").mkdir()
    assert archive_logs(tmp_path / "baton-a", tmp_path / "failed") is None
    assert not list((tmp_path / "failed").iterdir())


def test_the_last_five_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "failed"
    folder.mkdir()
    for number in range(7):
        run_dir = tmp_path / f"baton-{number}"
        kept_session(run_dir, serve__replica_x=TRACE)
        kept = archive_logs(run_dir, folder)
        assert kept is not None
        os.utime(kept, (number, number))
    left = {path.name for path in folder.iterdir()}
    assert left >= {f"baton-{number}" for number in range(3, 7)}
    assert len(left) == 5


def test_the_error_of_a_replica_counts_before_rays_own(tmp_path: Path) -> None:
    logs = kept_session(
        tmp_path / "baton-a",
        serve__replica_x="RuntimeError: a worker died\n",
        serve__controller_1="ActorDiedError: The actor died unexpectedly\n",
    )
    assert last_error(logs) == "RuntimeError: a worker died"


@pytest.mark.parametrize(
    "text", ["", "all is well\n", "asyncio.exceptions.CancelledError: closing\n"]
)
def test_without_an_error_in_the_log_none_is_shown(tmp_path: Path, text: str) -> None:
    assert last_error(kept_session(tmp_path / "baton-a", serve__replica_x=text)) == ""


def test_the_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = failures_folder()
    assert folder == tmp_path / "baton" / "failed"
    assert folder.stat().st_mode & 0o077 == 0
