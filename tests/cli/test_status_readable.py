"""What `baton status` shows to a person."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import cast

import pytest
from rich.console import Console

from baton.cli.inspect.status import _render, text_report
from baton.cli.output import text_lines
from baton.policy.prefix_cache.index import ReplicaIndexState
from tests.cli.reports import changed, replica_row

MEMBER = {"replica_id": "decode-1", "role": "decode", "node": "10.0.0.1", "pid": 7, "link": "tcp"}
VIEW = changed(replica_row(), running_requests=2, kv_used_fraction=0.5)


def report(*views: dict[str, object]) -> dict[str, object]:
    ingress = {
        "healthy": True,
        "replicas": list(views),
        "in_flight": {"decode": 2},
        "ended": {"finished": 5, "resumes": 0},
        "unjoined": {},
    }
    return {"endpoint": "http://x", "wanted": {}, "members": [MEMBER], "ingresses": [ingress]}


def rows(shown: Mapping[str, object], name: str) -> list[dict[str, object]]:
    return cast("list[dict[str, object]]", shown[name])


def test_a_replica_is_one_row_with_its_state_and_load() -> None:
    shown = text_report(report(VIEW))
    assert shown["endpoint"] == "http://x"
    (row,) = rows(shown, "replicas")
    assert (row["replica_id"], row["state"], row["running"], row["pid"]) == (
        "decode-1",
        "ready",
        2,
        7,
    )


def test_a_member_that_no_ingress_has_reached_is_shown_as_such() -> None:
    (row,) = rows(text_report(report()), "replicas")
    assert row["state"] == "not joined"


def test_an_ingress_is_one_line() -> None:
    (row,) = rows(text_report(report(VIEW)), "ingresses")
    assert (row["in_flight"], row["ended"]) == ("2 decode", "5 finished")


def report_of(*ingresses: list[dict[str, object]]) -> dict[str, object]:
    whole = report()
    (empty,) = rows(whole, "ingresses")
    return whole | {"ingresses": [empty | {"replicas": views} for views in ingresses]}


def cache(**changes: object) -> dict[str, object]:
    state = ReplicaIndexState(
        gpu_blocks=120,
        host_blocks=0,
        predicted_blocks=7,
        sequence=3,
        in_sync=True,
        is_stale=False,
        age_s=0.2,
        gaps=0,
        dropped_blocks=0,
    )
    return asdict(state) | changes


def test_a_replica_that_only_the_second_ingress_has_reached_is_ready() -> None:
    (row,) = rows(text_report(report_of([], [VIEW])), "replicas")
    assert row["state"] == "ready"


def test_what_ingresses_differ_in_is_shown_as_the_first_sees_it() -> None:
    (row,) = rows(text_report(report_of([VIEW], [VIEW | {"running_requests": 9}])), "replicas")
    assert row["running"] == 2


def test_what_the_index_knows_of_a_replica_is_shown_with_its_age() -> None:
    (row,) = rows(text_report(report(VIEW | {"cache": cache()})), "replicas")
    shown = (row["cached_blocks"], row["sent_blocks"], row["index"])
    assert shown == ("120", 7, "in step, 200 ms old")


def test_blocks_in_the_hosts_memory_are_told_apart() -> None:
    (row,) = rows(text_report(report(VIEW | {"cache": cache(host_blocks=30)})), "replicas")
    assert row["cached_blocks"] == "120 + 30 in host"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"in_sync": False}, "out of step, 200 ms old"),
        ({"in_sync": False, "is_stale": True}, "out of step, 200 ms old"),
        ({"in_sync": False, "is_stale": True, "age_s": None}, "out of step, never reported"),
        ({"is_stale": True, "age_s": 40.0}, "stale, 40 s old"),
        ({"is_stale": True, "age_s": None}, "never reported"),
    ],
)
def test_the_index_says_what_is_wrong_with_what_it_knows(
    changes: dict[str, object], text: str
) -> None:
    (row,) = rows(text_report(report(VIEW | {"cache": cache(**changes)})), "replicas")
    assert row["index"] == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"in_sync": False}, "out of step, 200 ms old"), ({"is_stale": True}, "stale, 200 ms old")],
)
def test_an_index_is_as_good_as_that_of_the_ingress_that_knows_least(
    changes: dict[str, object], text: str
) -> None:
    good, bad = VIEW | {"cache": cache()}, VIEW | {"cache": cache(**changes)}
    for views in ((good, bad), (bad, good)):
        (row,) = rows(text_report(report_of(*([view] for view in views))), "replicas")
        assert row["index"] == text


def test_the_leases_of_all_ingresses_are_added_up() -> None:
    views = [VIEW | {"leases": 2}], [VIEW | {"leases": 3}]
    (row,) = rows(text_report(report_of(*views)), "replicas")
    assert row["leases"] == 5


def test_what_an_ingress_does_not_tell_is_not_shown() -> None:
    shown = text_report(report(VIEW))
    (row,) = rows(shown, "replicas")
    assert not {"cached_blocks", "index", "leases"} & row.keys()
    assert "predictions" not in shown


def test_the_table_of_replicas_is_one_line_a_replica_even_with_caches() -> None:
    lines = list(text_lines(text_report(report(VIEW | {"cache": cache(), "leases": 0}))))
    (line,) = [line for line in lines if "decode-1" in line]
    assert line.endswith("120            7            in step, 200 ms old  0")


def test_how_good_predictions_were_is_said_for_each_pool() -> None:
    timing = {
        "pool": "decode",
        "reports": 40,
        "predictions": 12,
        "ttft_error_fraction": 0.213,
        "ttft_bias_fraction": -0.071,
        "step_error_fraction": 0.034,
    }
    unused = timing | {"pool": "prefill", "reports": 0, "predictions": 0}
    whole = report(VIEW)
    (ingress,) = rows(whole, "ingresses")
    first, second = ingress | {"timings": [timing, unused]}, ingress | {"timings": [unused]}
    shown = text_report(whole | {"ingresses": [first, second]})
    assert rows(shown, "predictions") == [
        {
            "pool": "decode",
            "requests": 12,
            "ttft_error": "21%",
            "bias": "7% too short",
            "step_error": "3%",
        },
        {"pool": "prefill", "requests": 0, "ttft_error": "-", "bias": "-", "step_error": "-"},
    ]


def test_failures_of_a_policy_of_the_users_own_are_shown_and_none_are_not() -> None:
    (ingress,) = rows(report(VIEW), "ingresses")
    failing = {"name": "own:choose", "failures": 3, "last_failure": "KeyError: 'x'"}
    well = {"name": "own:choose", "failures": 0, "last_failure": ""}
    shown = text_report(report(VIEW) | {"ingresses": [ingress | {"policy": failing}]})
    assert shown["placement_failures"] == ["own:choose failed 3 times, the last: KeyError: 'x'"]
    healthy = text_report(report(VIEW) | {"ingresses": [ingress | {"policy": well}]})
    assert "placement_failures" not in healthy


def test_how_long_it_is_up_is_said_in_its_place() -> None:
    shown = text_report(report(VIEW) | {"up_s": 734.0})
    assert shown["up"] == "12 min 14 s"
    assert "up_s" not in shown


def test_a_screen_has_as_many_lines_as_fit_and_says_what_it_leaves_out() -> None:
    screen = Console(width=40, height=5)
    text = str(_render(screen, report(VIEW), "9 s old"))
    lines = text.splitlines()
    assert len(lines) == 5
    assert lines[-1] == "9 s old"
    assert "more lines" in lines[-2]
    assert max(map(len, lines[:-2])) <= 40


def test_nothing_that_runs_is_shown_as_nothing() -> None:
    assert text_report({"endpoint": "http://x"})["replicas"] == []
