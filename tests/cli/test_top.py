"""`baton top`: what a report is made of, and how it fits a screen."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import Result

from baton.cli.backend import AttachedDeployment, Report
from baton.cli.inspect.top import top_report
from baton.cli.inspect.top_screen import Frame, History, render
from baton.control.autoscaling.observer import Observer
from baton.domain.errors import NotRunning
from baton.domain.fleet import Load, Role
from baton.domain.slo import Slo
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.serving.ray.serve_control import DeploymentState
from baton.serving.scaling.reports import class_rows, pool_rows
from baton.serving.shared.reports import link_report
from baton.telemetry.requests.request_log import request_report
from tests.cli.as_shown import AsShown
from tests.cli.invoked import invoke
from tests.cli.reports import changed, replica_row
from tests.cli.test_explain_readable import RECORD
from tests.cli.test_links_readable import OK as LINK_ROW

(_IDLE,) = class_rows({"default": Slo(ttft_s=0.5, tpot_s=0.03)}, Observer(), 0.0)
CLASS = changed(
    _IDLE, attainment=0.984, window_attainment=0.9931, requests_per_s=12.4, goodput_per_s=12.2
)
(_SEEN,) = pool_rows(
    Observation(
        at_s=0.0,
        window_s=1.0,
        pools={"decode": PoolObservation(name="decode", role=Role.DECODE, decode=2, starting=1)},
    ),
    {"decode": DeploymentState(name="decode", target=3, running=2, starting=1)},
)
POOL = changed(_SEEN, busy=0.5)
VIEW = replica_row(load=Load(running_requests=12, queued_requests=1, kv_used_fraction=0.4))
OTHER_VIEW = changed(VIEW, replica_id="decode-2")
INGRESS: dict[str, Any] = {
    "healthy": True,
    "unjoined": {},
    "replicas": [VIEW, OTHER_VIEW],
    "policy": {},
}
STATUS: dict[str, Any] = {
    "endpoint": "http://127.0.0.1:8000",
    "model": "tiny",
    "up_s": 734.0,
    "generation": 3,
    "classes": [CLASS],
    "demand": {"requests_per_s": 12.6, "rejected_per_s": 0.2, "in_flight": 31, "queued": 2},
    "pools": [POOL],
    "autoscaler": {"paused_reason": ""},
    "ingresses": [INGRESS],
}
(_LINK_ROW,) = link_report([LINK_ROW])
LINK = changed(
    _LINK_ROW,
    source_id="prefill-1",
    target_id="decode-1",
    p99_s=0.01,
    pulls=10,
    moved_bytes=1_000_000_000,
    failures=0,
)
STORY = changed(
    request_report(RECORD),
    request_id="r-1",
    slo_class="default",
    first_token_s=0.9,
    ended_s=3.0,
    prefill_replica="prefill-1",
    decode_replica="decode-1",
) | {"age_s": 12.0}


def told(
    *,
    links: list[dict[str, Any]] | None = None,
    stories: int = 1,
    story: dict[str, Any] = STORY,
    **status: object,
) -> dict[str, Any]:
    rows = [LINK] if links is None else links
    return top_report(STATUS | status, {"links": rows}, {"requests": [story] * stories})


def screen(
    report: dict[str, Any], *, width: int = 80, height: int | None = 24, **frame: str
) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    how = Frame(width=width, height=height, blocks=True, **frame)
    console.print(render(report, History(), how))
    written = cast("io.StringIO", console.file).getvalue()
    return written.splitlines()


# ---------------------------------------------------------------------------------- the report


def test_goodput_is_the_part_of_ended_requests_that_met_their_objectives() -> None:
    other = CLASS | {"class": "batch", "requests_per_s": 7.6, "goodput_per_s": 2.8}
    service = told(classes=[CLASS, other])["service"]
    assert (service["goodput_per_s"], service["ended_per_s"]) == (15.0, 20.0)
    assert (service["good_fraction"], service["offered_per_s"]) == (0.75, 12.6)


def test_where_nothing_has_ended_there_is_no_share() -> None:
    idle = CLASS | {"requests_per_s": 0, "goodput_per_s": 0}
    assert told(classes=[idle], demand=None)["service"]["good_fraction"] is None


def test_a_pool_has_the_load_of_its_replicas_as_one_ingress_sees_them() -> None:
    (pool,) = told(ingresses=[INGRESS, INGRESS])["pools"]
    assert (pool["running_requests"], pool["queued_requests"]) == (24, 2)
    assert pool["kv_used_fraction"] == 0.4


def test_a_replica_that_the_first_ingress_has_not_reached_counts_as_another_one_sees_it() -> None:
    busier = VIEW | {"running_requests": 99}
    blind, sees = INGRESS | {"replicas": [VIEW]}, INGRESS | {"replicas": [busier, OTHER_VIEW]}
    (pool,) = told(ingresses=[INGRESS | {"replicas": []}, blind, sees])["pools"]
    assert (pool["running_requests"], pool["queued_requests"]) == (24, 2)


def test_the_worst_pairs_come_first_and_all_are_counted() -> None:
    slow, failed = LINK | {"p99_s": 9.0}, LINK | {"failures": 3}
    quarantined, new = LINK | {"state": "quarantined"}, LINK | {"state": "unknown", "p99_s": None}
    links = told(links=[LINK, slow, new, failed, quarantined])["links"]
    assert links["worst"] == [quarantined, new, failed, slow, LINK]
    assert links["states"] == {"ok": 3, "unknown": 1, "quarantined": 1}
    assert (links["moved_bytes"], links["failures"]) == (5_000_000_000, 3)


@pytest.mark.parametrize(
    ("status", "trouble"),
    [
        (
            {"autoscaler": {"paused_reason": "nobody reports"}},
            "the autoscaler holds still: nobody reports",
        ),
        ({"pools": [POOL | {"trouble": "it died"}]}, "pool decode: it died"),
        ({"ingresses": [INGRESS | {"healthy": False}]}, "1 of 1 ingress cannot serve"),
        ({"unresponsive_ingresses": [{"ingress": "c3d4"}]}, "no answer from ingress c3d4"),
        ({"ingresses": [INGRESS | {"unjoined": {"d": "x"}}]}, "not joined everywhere: d"),
        (
            {"ingresses": [INGRESS | {"policy": {"failures": 2}}]},
            "the placement policy failed 2 times, see 'baton status'",
        ),
    ],
)
def test_a_notice_for_an_operator_is_a_line(status: dict[str, Any], trouble: str) -> None:
    report = told(**status)
    assert report["troubles"] == [trouble]
    assert f"! {trouble}" in [line.rstrip() for line in screen(report)]


def test_request_reports_are_shortened_to_the_rows_shown() -> None:
    (slowest,) = told()["slowest"]
    assert slowest["request_id"] == "r-1"
    assert "waterfall" not in slowest


# ---------------------------------------------------------------------------------- the screen


SCREENS = {
    "a deployment that has just begun": screen(
        top_report({"ingresses": [], "model": "tiny"}, {"links": []}, {"requests": []})
    ),
    "a small screen holds everything of a small deployment": screen(
        told(stories=10), footer="Ctrl-C ends it"
    ),
    "an alarm takes the place of the foot": screen(
        told(), footer="Ctrl-C ends it", alarm="9 s old: no answer"
    ),
    "what looks like markup is shown as it is": screen(
        told(
            story=STORY | {"request_id": "[/a]", "slo_class": "[red]"},
            links=[LINK | {"source_id": "[/b]", "reason": "[/c]"}],
            classes=[CLASS | {"class": "[/d]"}],
            pools=[POOL | {"pool": "[/e]"}],
        ),
        width=160,
    ),
}


@pytest.mark.parametrize("case", SCREENS)
def test_a_screen_is_shown_as_written(case: str, as_shown: AsShown) -> None:
    as_shown("top", case, SCREENS, SCREENS[case])


def test_without_a_height_nothing_is_left_out() -> None:
    shown = "\n".join(screen(told(stories=40), width=160, height=None))
    assert shown.count("r-1") == 40
    assert "(+" not in shown


@given(
    size=st.tuples(st.integers(40, 200), st.integers(24, 60)),
    rows=st.tuples(*[st.integers(0, 12)] * 4),
    alarm=st.sampled_from(["", "old"]),
)
@settings(max_examples=20, deadline=None)
def test_no_deployment_is_too_large_for_a_screen(
    size: tuple[int, int], rows: tuple[int, int, int, int], alarm: str
) -> None:
    (width, height), (classes, pools, links, stories) = size, rows
    report = told(
        links=[LINK] * links,
        stories=stories,
        classes=[CLASS] * classes,
        pools=[POOL] * pools,
        autoscaler={"paused_reason": "x" * 300},
    )
    shown = screen(report, width=width, height=height, alarm=alarm, footer="foot")
    assert len(shown) <= height
    assert max(map(len, shown)) <= width


def test_a_line_break_in_a_name_or_a_trouble_takes_no_line() -> None:
    plain = told(links=[LINK | {"reason": "no answer"}], autoscaler={"paused_reason": "it died"})
    broken = told(
        links=[LINK | {"reason": "no\nanswer"}], autoscaler={"paused_reason": "it\r\n  died"}
    )
    assert screen(broken, width=160) == screen(plain, width=160)


def test_a_very_long_request_id_is_cut_and_pushes_nothing_off_the_screen() -> None:
    shown = "\n".join(screen(told(story=STORY | {"request_id": "chatcmpl-" + "x" * 300})))
    for word in ("chatcmpl-x", "900 ms", "3 s", "default", "missed ttft", "prefill-1"):
        assert word in shown


@pytest.mark.parametrize(
    ("tokens_per_s", "text"),
    [(800, "800"), (999.6, "1k"), (12_300, "12.3k"), (999_600, "1M"), (2e9, "2000M")],
)
def test_rates_of_tokens_are_said_in_three_digits(tokens_per_s: float, text: str) -> None:
    shown = "\n".join(screen(told(demand={"prompt_tokens_per_s": tokens_per_s}), width=160))
    assert f"tokens {text} in," in shown


def test_present_rates_come_from_two_reports_and_are_never_negative() -> None:
    history = History()
    first, second = told(), told(links=[LINK | {"moved_bytes": 3_000_000_000}])
    rates: list[float | None] = []
    for report, at_s in ((first, 10.0), (second, 12.0), (first, 14.0)):
        history.add(report, at_s)
        rates.append(history.bytes_per_s)
    assert rates == [None, 1e9, 0]


# ------------------------------------------------------------------------------------ the verb


@dataclass
class Scripted:
    """A deployment that is joined once; counts."""

    joined_times: int = 0
    asked: list[object] = field(default_factory=list)
    failure: NotRunning | None = None

    @contextmanager
    def attach(self, *, address: str | None) -> Iterator[AttachedDeployment]:
        self.joined_times += 1
        self.asked.append(address)
        if self.failure is not None:
            raise self.failure
        yield self

    def status(self) -> Report:
        return STATUS

    def links(self) -> Report:
        return {"links": [LINK]}

    def requests(self, count: int, *, order: str) -> Report:
        self.asked.append((count, order))
        return {"requests": [STORY]}


def run(*arguments: str, scripted: Scripted | None = None) -> Result:
    return invoke(scripted or Scripted(), "top", *arguments)


@pytest.mark.parametrize("arguments", [("--once",), ()])
def test_once_or_without_a_terminal_it_is_printed_once_and_plainly(
    arguments: tuple[str, ...],
) -> None:
    result = run(*arguments)
    assert result.exit_code == 0
    assert result.stdout.startswith("baton top  tiny  http://127.0.0.1:8000")
    assert "\x1b" not in result.stdout
    assert "r-1" in result.stdout


def test_json_is_the_report_of_one_look() -> None:
    report = json.loads(run("--once", "-o", "json").stdout)
    assert report["service"]["goodput_per_s"] == 12.2
    assert [row["request_id"] for row in report["slowest"]] == ["r-1"]


def test_the_slowest_requests_are_asked_for() -> None:
    scripted = Scripted()
    run("--once", "--address", "h:1", scripted=scripted)
    assert scripted.asked == ["h:1", (10, "slowest")]


@pytest.mark.parametrize("interval", ["0s", "10ms", "often"])
def test_an_interval_that_makes_no_sense_is_a_usage_error(interval: str) -> None:
    assert run("--interval", interval).exit_code == 2


def test_nothing_that_runs_is_said_with_a_next_step() -> None:
    result = run(scripted=Scripted(failure=NotRunning("nothing runs here", "start it")))
    assert (result.exit_code, result.stderr) == (3, "error: nothing runs here\nnext: start it\n")
