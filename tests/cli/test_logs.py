"""`baton logs`: what it asks for, and what a person and a program read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from typer.testing import Result

from baton.cli.inspect.logs import line_texts
from baton.domain.errors import NotRunning
from baton.serving.operator.log_files import LogLine, LogQuery
from tests.cli.invoked import invoke

LINE = LogLine(
    timestamp="2026-11-22T07:41:07.346+00:00",
    level="warning",
    event="pool_scaled",
    fields={"pool": "decode", "had": 1},
    source="controller-ctl",
    text="",
)
OTHER = LogLine(
    timestamp="", level="", event="", fields={}, source="decode-x", text="Triton is there"
)


@dataclass
class Scripted:
    """Gives some lines; remembers what it was asked."""

    lines: list[LogLine | None] = field(default_factory=lambda: [LINE, None, OTHER])
    asked: list[tuple[LogQuery, bool]] = field(default_factory=list)

    def logs(
        self,
        order: LogQuery,
        *,
        follow: bool,
        progress: Callable[[str], None],
        address: str | None = None,
    ) -> Iterator[LogLine | None]:
        self.asked.append((order, follow))
        return iter(self.lines)


def run(*arguments: str, scripted: Scripted | None = None) -> Result:
    return invoke(scripted or Scripted(), "logs", *arguments)


def test_an_event_is_a_line_with_time_process_and_text() -> None:
    result = run()
    assert result.stdout.splitlines() == [
        "07:41:07.346 WARNING controller-ctl         pool_scaled pool=decode had=1",
        "                     decode-x               Triton is there",
    ]


def test_json_is_one_object_a_line() -> None:
    first, second = (json.loads(line) for line in run("-o", "json").stdout.splitlines())
    assert (first["event"], first["source"], first["had"]) == ("pool_scaled", "controller-ctl", 1)
    assert second == {"at": None, "source": "decode-x", "text": "Triton is there"}


def test_an_exception_stands_below_its_event() -> None:
    fields = {"exception": "Traceback\nValueError: no"}
    lines = list(
        line_texts(
            LogLine(
                timestamp=LINE.timestamp,
                level="error",
                event="x",
                fields=fields,
                source="s",
                text="",
            )
        )
    )
    assert [line.strip() for line in lines[1:]] == ["Traceback", "ValueError: no"]


def test_everything_that_is_asked_for_is_passed_on() -> None:
    scripted = Scripted()
    run("--replica", "d-1", "--level", "warning", "--event", "a", "--event", "b", scripted=scripted)
    run("--ingress", "--controller", "-f", "-n", "0", "--all", "--request", "r", scripted=scripted)
    run(scripted=scripted)
    assert scripted.asked == [
        (LogQuery(replica="d-1", level="warning", events=frozenset("ab")), False),
        (
            LogQuery(
                ingress=True, controller=True, tail_lines=None, include_foreign=True, request_id="r"
            ),
            True,
        ),
        (LogQuery(), False),
    ]


def test_nothing_that_fits_is_said_and_prints_nothing() -> None:
    result = run(scripted=Scripted([]))
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "nothing that fits was logged\n"


def test_without_a_deployment_there_is_a_next_step() -> None:
    class Nothing(Scripted):
        def logs(
            self,
            order: LogQuery,
            *,
            follow: bool,
            progress: Callable[[str], None],
            address: str | None = None,
        ) -> Iterator[LogLine | None]:
            raise NotRunning("nothing runs here", "start it")

    result = run(scripted=Nothing())
    assert (result.exit_code, result.stderr) == (3, "error: nothing runs here\nnext: start it\n")
