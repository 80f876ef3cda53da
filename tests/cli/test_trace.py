"""`baton trace`: the waterfall of a request, and the list of requests to choose from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from typer.testing import Result

from baton.cli.backend import Report
from baton.cli.explain.trace import RequestOrder, trace_lines
from baton.domain.commands import RecordSelection
from baton.domain.errors import UnknownRequest
from tests.cli.as_shown import AsShown
from tests.cli.invoked import invoke

STORY: dict[str, Any] = {
    "request_id": "r-1",
    "outcome": "finished",
    "reason": "stop",
    "slo_class": "chat",
    "tenant": "acme",
    "verdict": "missed",
    "missed": "ttft",
    "objectives": [{"objective": "ttft", "objective_s": 0.15, "actual_s": 0.2, "met": False}],
    "prompt_tokens": 30,
    "output_tokens": 64,
    "first_token_s": 0.2,
    "ended_s": 1.0,
    "tpot_s": 0.0127,
    "worst_gap_s": 0.03,
    "predicted_ttft_s": 0.21,
    "actual_ttft_s": 0.2,
    "ttft_error_fraction": 0.05,
    "prefill_replica": "p-1",
    "decode_replica": "d-1",
    "resume_reasons": [],
    "waterfall": [
        {"part": "queue", "replica": "p-1", "from_s": 0.0, "to_s": 0.1, "predicted_s": 0.01},
        {"part": "transfer", "replica": "d-1", "from_s": 0.1, "to_s": 0.2, "predicted_s": None},
        {"part": "decode", "replica": "d-1", "from_s": 0.2, "to_s": 1.0, "predicted_s": 0.7},
    ],
    "age_s": 12.0,
}
WIDTH = 80


@dataclass
class Scripted:
    """Answers for both questions of this verb; remembers what it was asked."""

    stories: list[dict[str, Any]] = field(default_factory=lambda: [STORY])
    asked: list[object] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)

    def report(self) -> Report:
        missing = {"unanswered": self.unanswered} if self.unanswered else {}
        return {"requests": self.stories, **missing}

    def explain_route(self, request_id: str, *, address: str | None) -> Report:
        self.asked.append((request_id, address))
        if not self.stories:
            raise UnknownRequest(f"no request {request_id!r}", "ask again")
        return self.report()

    def requests(self, count: int, *, order: str, address: str | None) -> Report:
        self.asked.append((count, order, address))
        return self.report()


def run(*arguments: str, scripted: Scripted | None = None) -> Result:
    return invoke(scripted or Scripted(), "trace", *arguments)


def test_each_part_is_a_bar_from_where_the_one_before_it_ended() -> None:
    lines = list(trace_lines([STORY], WIDTH))
    queue, transfer, *_ = [line for line in lines if "█" in line]
    assert queue.index("█") == queue.index("p-1") + 5
    assert transfer.index("█") == queue.rindex("█") + 1
    assert abs(transfer.count("█") - queue.count("█")) <= 1
    assert max(map(len, lines)) <= WIDTH


QUEUE, *REST = STORY["waterfall"]
HELD = {"part": "ingress_wait", "replica": None, "from_s": 0.0, "to_s": 1.0, "predicted_s": None}
LEG = {"kind": "prefill", "replica": "p-1", "end": "done", "engine_queue_s": 0.25}
LEG |= {"prompt_tokens": 500, "cached_tokens": 480, "preemptions": 2}
CASES: dict[str, list[dict[str, Any]]] = {
    "what was broken comes first, then what each part took beside what was predicted": [STORY],
    "what no engine said is marked": [STORY | {"waterfall": [QUEUE | {"guessed": True}, *REST]}],
    "a request without a first token is one waterfall": [
        STORY | {"first_token_s": None, "waterfall": [HELD], "tpot_s": None}
    ],
    "each resume says why": [STORY | {"resume_reasons": ["p-1 was lost"]}],
    "legs are shown as engines tell of them": [STORY | {"legs": [LEG]}],
    "several answers of one request are a paragraph each": [STORY, STORY | {"request_id": "1_r-1"}],
}


@pytest.mark.parametrize("case", CASES)
def test_a_request_is_shown_as_written(case: str, as_shown: AsShown) -> None:
    as_shown("trace", case, CASES, trace_lines(CASES[case], WIDTH))


def test_a_request_is_asked_for_by_its_name() -> None:
    scripted = Scripted()
    result = run("r-1", "--address", "h:1", scripted=scripted)
    assert (result.exit_code, scripted.asked) == (0, [("r-1", "h:1")])
    assert result.stdout.startswith("r-1: finished")


def test_without_a_name_the_requests_to_choose_from_are_listed() -> None:
    scripted = Scripted()
    result = run("-n", "5", "--order", "slowest", scripted=scripted)
    assert scripted.asked == [(5, "slowest", None)]
    header, row = result.stdout.splitlines()
    assert header.split()[:2] == ["request", "ended"]
    told = " ".join(row.split())
    assert told == "r-1 12 s ago finished chat missed ttft 30+64 200 ms 1 s p-1 -> d-1"


@pytest.mark.parametrize("arguments", [(), ("r-1",)], ids=["all", "a request"])
def test_requests_without_the_answer_of_an_ingress_say_so(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, scripted=Scripted(unanswered=["one ingress did not answer"]))
    assert "warning: not all is shown: one ingress did not answer" in result.stderr
    assert "not all" not in run(*arguments).stderr


def test_nothing_to_list_is_said() -> None:
    assert run(scripted=Scripted(stories=[])).stdout == "no request has ended yet\n"


@pytest.mark.parametrize("arguments", [("r-1",), ()])
def test_json_is_the_whole_report(arguments: tuple[str, ...]) -> None:
    assert json.loads(run(*arguments, "-o", "json").stdout) == {"requests": [STORY]}


def test_an_unknown_request_id_ends_with_a_next_step() -> None:
    result = run("r-9", scripted=Scripted(stories=[]))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "next: ask again"


def test_the_orders_to_list_by_are_those_that_ingresses_know() -> None:
    assert [str(order) for order in RequestOrder] == [str(order) for order in RecordSelection]
