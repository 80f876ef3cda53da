"""`baton trace`: the waterfall of a request, and the list of requests to choose from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from baton.cli.backend import Report
from baton.cli.explain.trace import RequestOrder, trace_lines
from baton.cli.traces import TraceUnusable, load_trace, make_workload
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
    "objectives": [{"objective": "ttft", "promised_s": 0.15, "got_s": 0.2, "met": False}],
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

    def explain_route(self, request_id: str, *, address: str | None) -> Report:
        self.asked.append((request_id, address))
        if not self.stories:
            raise UnknownRequest(f"no request {request_id!r}", "ask again")
        return {"requests": self.stories}

    def requests(self, count: int, *, order: str, address: str | None) -> Report:
        self.asked.append((count, order, address))
        return {"requests": self.stories}


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


def test_nothing_to_list_is_said() -> None:
    assert run(scripted=Scripted(stories=[])).stdout == "no request has ended yet\n"


@pytest.mark.parametrize("arguments", [("r-1",), ()])
def test_json_is_the_whole_report(arguments: tuple[str, ...]) -> None:
    assert json.loads(run(*arguments, "-o", "json").stdout) == {"requests": [STORY]}


def test_a_request_that_nobody_remembers_ends_with_a_next_step() -> None:
    result = run("r-9", scripted=Scripted(stories=[]))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "next: ask again"


def test_the_orders_to_list_by_are_those_that_ingresses_know() -> None:
    assert [str(order) for order in RequestOrder] == [str(order) for order in RecordSelection]


# -------------------------------------------------------------------- files of traces


@pytest.mark.parametrize("name", ["chat", "conv", "agents"])
def test_a_workload_has_as_many_requests_as_are_asked_for(name: str) -> None:
    for seed in range(5):
        assert len(make_workload(name, rate_per_s=4, max_requests=40, seed=seed)) == 40


def test_that_is_so_however_rarely_arrivals_happen_to_come() -> None:
    made = [
        make_workload("code-bursty", rate_per_s=1, max_requests=30, seed=seed)
        for seed in (1, 8, 10)
    ]
    assert {len(trace) for trace in made} == {30}


def test_conversations_come_at_the_rate_that_was_asked_for_from_the_beginning() -> None:
    seconds, rate_per_s = 60.0, 20.0
    made = make_workload("chat", rate_per_s=rate_per_s, duration_s=seconds)
    assert made.requests[0].at_s < 1
    assert made.requests[-1].at_s < seconds
    for start_s in (0.0, 20.0, 40.0):
        arrived = sum(start_s <= request.at_s < start_s + 20 for request in made.requests)
        assert arrived / 20 == pytest.approx(rate_per_s, rel=0.2)


def test_a_workload_ends_where_either_limit_is_reached() -> None:
    assert len(make_workload("conv", rate_per_s=10, duration_s=60, max_requests=7)) == 7
    few = make_workload("conv", rate_per_s=10, duration_s=1, max_requests=1000)
    assert 0 < len(few) < 40
    with pytest.raises(ValueError, match="expected one"):
        make_workload("conv", rate_per_s=10)


def test_more_requests_than_fit_memory_are_refused_before_they_are_made() -> None:
    with pytest.raises(TraceUnusable, match=r"1e\+09/s for 10 s are 1e\+10 requests") as caught:
        make_workload("chat", rate_per_s=1e9, duration_s=10)
    assert "--rate" in (caught.value.remedy or "")


@pytest.mark.parametrize(
    ("text", "said", "remedy"),
    [
        ("", "is empty", "another file"),
        ("\n\n", "begins with 2 blank lines", "another file"),
        (
            "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n8,2,10,4\n",
            "give a rate",
            "--rate",
        ),
        ("poems,and,prose\n1,2,3\n", "line 1: no known format", "one of these formats"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "line 2", "--skip-bad"),
    ],
)
def test_a_file_that_is_no_trace_is_told_apart_and_has_its_own_remedy(
    tmp_path: Path, text: str, said: str, remedy: str
) -> None:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceUnusable) as caught:
        load_trace(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)
    assert remedy in (caught.value.remedy or "")
