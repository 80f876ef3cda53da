"""The demo's figures and the progress display."""

from __future__ import annotations

from baton.serving.operator.demo import RequestResult, summary
from baton.serving.operator.local_deployment import error_line, observability_line, progress_line


def asked(*, ok: bool = True, moved_bytes: int = 100, transfer_s: float = 0.2) -> RequestResult:
    return RequestResult(
        ok=ok,
        error="" if ok else "HTTP 500",
        ttft_s=0.5,
        tpot_s=0.01,
        prefill_replica="p",
        decode_replica="d",
        moved_bytes=moved_bytes,
        transfer_s=transfer_s,
    )


def test_the_figures_are_of_the_requests_that_succeeded() -> None:
    figures = summary([asked(), asked(transfer_s=0.4), asked(ok=False, transfer_s=9.0)])
    assert (figures["requests"], figures["ok"]) == (3, 2)
    assert figures["bytes_moved"] == 200
    assert figures["transfer_p50_s"] == 0.3


def test_nothing_moved_is_not_reported_as_a_transfer_of_no_time() -> None:
    assert summary([asked(moved_bytes=0, transfer_s=0.0)])["transfer_p50_s"] is None


def test_without_a_success_there_are_no_times() -> None:
    figures = summary([asked(ok=False)])
    assert (figures["ok"], figures["ttft_p50_s"]) == (0, None)


def test_progress_names_each_deployment_and_what_it_still_does() -> None:
    line = progress_line({"decode": {"RUNNING": 1, "STARTING": 1}, "ingress": {"RUNNING": 1}})
    assert line == "ready: ingress 1/1, decode 1/2 (starting)"


def test_the_line_of_a_traceback_that_says_what_went_wrong_is_shown() -> None:
    message = "A replica failed:\n  File x\nbaton.domain.errors.EngineStartFailed: no such model\n"
    assert error_line([message]).endswith("EngineStartFailed: no such model")
    assert error_line([]) == ""


def test_where_to_look_is_said_where_there_is_something_to_see() -> None:
    seen = {"url": "http://127.0.0.1:9400", "metrics": True, "console": True}
    assert (
        observability_line({"observability": seen})
        == "console and metrics at http://127.0.0.1:9400"
    )
    assert observability_line({"observability": seen | {"console": False}}).startswith("metrics at")
    assert observability_line({"observability": {"metrics": False, "console": False}}) == ""
    assert observability_line({}) == ""


def test_where_nothing_can_be_seen_yet_the_reason_is_said() -> None:
    seen = {"url": None, "metrics": True, "console": True, "trouble": "127.0.0.1:9400 is taken"}
    assert observability_line({"observability": seen}) == (
        "console and metrics are not there yet: 127.0.0.1:9400 is taken"
    )
