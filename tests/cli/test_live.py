"""Screens that refresh: news, trouble, and when they end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest

from baton.cli.backend import AttachedDeployment, Report
from baton.cli.inspect import live_screen as live
from baton.cli.inspect.live_screen import Poller, repeat
from baton.domain.errors import ClusterFailed, DeploymentEnded, NotRunning
from tests.cli.invoked import invoke

WAIT_S = 5.0


class Script:
    """Answers in turn; when it has no more it says so, and answers nothing."""

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)
        self.over = threading.Event()
        self.gate = threading.Event()

    def __call__(self) -> object:
        if not self._answers:
            self.over.set()
            self.gate.wait(WAIT_S)
            raise NotRunning("over", "stop")
        answer = self._answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture
def asker() -> Iterator[Callable[[Script], Poller[object]]]:
    made: list[tuple[Poller[object], Script]] = []

    def make(script: Script) -> Poller[object]:
        made.append((Poller(script, 0.001), script))
        return made[-1][0]

    yield make
    for poller, script in made:
        poller.close()
        script.gate.set()


REPLACED = NotRunning("the controller is replaced", "wait")


@pytest.mark.parametrize(
    ("answers", "shown", "trouble"),
    [
        pytest.param(("first", "second"), "second", "", id="the newest answer"),
        pytest.param(("first", REPLACED), "first", REPLACED.reason, id="old numbers, and why"),
        pytest.param(("first", REPLACED, "second"), "second", "", id="trouble that is over"),
    ],
)
def test_the_screen_shows_the_newest_answer_and_why_there_is_no_newer(
    asker: Callable[[Script], Poller[object]], answers: tuple[object, ...], shown: str, trouble: str
) -> None:
    script = Script(*answers)
    one = asker(script)
    script.over.wait(WAIT_S)
    seen = one.latest(WAIT_S)
    assert seen is not None
    assert (seen.value, one.unavailable_reason) == (shown, trouble)


@pytest.mark.parametrize(
    "answers",
    [
        (NotRunning("nothing runs", "start it"),),
        ("first", DeploymentEnded("it has ended", "start one")),
        ("first", ClusterFailed("it refuses us", "name its token")),
        ("first", KeyError("a mistake of ours")),
    ],
)
def test_a_permanent_error_ends_the_screen(
    answers: tuple[object, ...], asker: Callable[[Script], Poller[object]]
) -> None:
    one, (*_, last) = asker(Script(*answers)), answers
    assert isinstance(last, Exception)
    with pytest.raises(type(last)):
        all(one.latest(0.1) for _ in range(100))


def test_no_answer_yet_is_none(asker: Callable[[Script], Poller[object]]) -> None:
    one = asker(Script())
    assert one.latest(0.001) is None


def test_repeated_reports_are_each_shown_once_and_trouble_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trouble = NotRunning("it is replaced", "wait")
    shown: list[object] = []
    repeat(Script("a", trouble, trouble, "b", KeyboardInterrupt()), shown.append, 0.0)
    assert shown == ["a", "b"]
    assert capsys.readouterr().err == "error: it is replaced; trying again\n"


class Fleet:
    """A deployment whose status is asked for three times."""

    def __init__(self) -> None:
        self.asked = 0

    @contextmanager
    def attach(self, *, address: str | None) -> Iterator[AttachedDeployment]:
        yield cast(AttachedDeployment, self)

    def status(self) -> Report:
        self.asked += 1
        if self.asked > 3:
            raise DeploymentEnded("it has ended", "start one")
        return {"number": self.asked}


def test_watching_without_a_terminal_prints_a_report_a_line_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not live.is_terminal()
    monkeypatch.setattr("baton.cli.inspect.status.parse_interval", lambda _text: 0.0)
    result = invoke(Fleet(), "status", "--watch", "-o", "json")
    assert [json.loads(line)["number"] for line in result.stdout.splitlines()] == [1, 2, 3]
    assert result.exit_code == 3
    assert result.stderr.endswith("error: it has ended\nnext: start one\n")
