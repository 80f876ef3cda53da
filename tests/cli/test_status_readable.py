"""What `baton status` shows to a person."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from rich.console import Console

from baton.cli.inspect.status import _render, text_report
from baton.cli.output import text_lines
from baton.policy.prefix_cache.index import ReplicaIndexState
from tests.cli.as_shown import AsShown
from tests.cli.reports import changed, replica_row

MEMBER = {"replica_id": "decode-1", "role": "decode", "node": "10.0.0.1", "pid": 7, "link": "tcp"}
VIEW = changed(replica_row(), running_requests=2, kv_used_fraction=0.5)


INGRESS = {
    "ingress": "a1b2",
    "node": "10.0.0.1",
    "pid": 70,
    "generation": 3,
    "healthy": True,
    "replicas": [VIEW],
    "in_flight": {"decode": 2},
    "ended": {"finished": 5, "resumes": 0},
    "unjoined": {},
}


def report(*views: dict[str, object]) -> dict[str, object]:
    ingress = INGRESS | {"replicas": list(views)}
    return {"endpoint": "http://x", "wanted": {}, "members": [MEMBER], "ingresses": [ingress]}


def report_of(*ingresses: list[dict[str, object]], **told: object) -> dict[str, object]:
    """A report of ingresses that see these replicas and tell the same otherwise."""
    return report() | {"ingresses": [INGRESS | told | {"replicas": seen} for seen in ingresses]}


def cached(**changes: object) -> dict[str, object]:
    """The replica as an ingress shows it whose index knows something of it."""
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
    return VIEW | {"cache": asdict(state) | changes}


TIMING = {
    "pool": "decode",
    "reports": 40,
    "predictions": 12,
    "ttft_error_fraction": 0.213,
    "ttft_bias_fraction": -0.071,
    "step_error_fraction": 0.034,
}
UNUSED = TIMING | {"pool": "prefill", "reports": 0, "predictions": 0}
WELL = {"name": "own:choose", "failures": 0, "last_failure": ""}
FAILING = {"name": "own:choose", "failures": 3, "last_failure": "KeyError: 'x'"}
BEHIND, STALE = cached(in_sync=False), cached(is_stale=True)
NEVER = {"is_stale": True, "age_s": None}
POOL = {"pool": "decode", "desired": 4, "ready": 4, "starting": 0, "draining": 0}
CASES: dict[str, dict[str, object]] = {
    "a replica is one row with its state and load, an ingress one line": report(VIEW),
    "a member that no ingress has reached is not joined": report(),
    "an ingress that does not answer is a row, with its process": report(VIEW)
    | {"unresponsive_ingresses": [{"ingress": "c3d4", "node": "10.0.0.2", "pid": 71}]},
    "a controller that does not answer costs no replica": {
        name: value for name, value in report(VIEW).items() if name != "members"
    },
    "one that only the second ingress has reached is ready": report_of([], [VIEW]),
    "what ingresses differ in is shown as the first sees it": report_of(
        [VIEW], [VIEW | {"running_requests": 9}]
    ),
    "what the index knows is shown with its age": report(cached()),
    "blocks in the host's memory are told apart": report(cached(host_blocks=30)),
    "an index may be out of step": report(BEHIND),
    "an index may be stale": report(cached(is_stale=True, age_s=40.0)),
    "out of step is worse than stale": report(cached(in_sync=False, is_stale=True)),
    "out of step, and nothing was ever reported": report(cached(in_sync=False, **NEVER)),
    "in step, and nothing was ever reported": report(cached(**NEVER)),
    "of two ingresses the second is out of step": report_of([cached()], [BEHIND]),
    "of two ingresses the first is out of step": report_of([BEHIND], [cached()]),
    "of two ingresses the second is stale": report_of([cached()], [STALE]),
    "of two ingresses the first is stale": report_of([STALE], [cached()]),
    "the leases of all ingresses are added up": report_of(
        [VIEW | {"leases": 2}], [VIEW | {"leases": 3}]
    ),
    "a replica is one line even with all columns": report(cached() | {"leases": 0}),
    "how good predictions were is said for each pool": report()
    | {"ingresses": [INGRESS | {"timings": [TIMING, UNUSED]}, INGRESS | {"timings": [UNUSED]}]},
    "a policy that fails is shown": report_of([VIEW], policy=FAILING),
    "a policy that does well is not": report_of([VIEW], policy=WELL),
    "how long it is up is said in its place": report(VIEW) | {"up_s": 734.0},
    "replicas that were lost are shown with when and how": report(VIEW)
    | {
        "losses": [
            {
                "replica_id": "decode-9",
                "age_s": 190.0,
                "reason": "disconnected",
                "detail": "its connection broke; its node has died",
            }
        ]
    },
    "nodes that were lost are shown with what ran there": report(VIEW)
    | {
        "lost_nodes": [
            {
                "node": "10.0.0.2",
                "node_id": "36654b5a0ab3a63b0621",
                "age_s": 40.0,
                "reason": "health check failed due to missing too many heartbeats",
                "replicas": ["controller-x", "decode-7", "decode-8", "decode-9"],
            }
        ]
    },
    "requests that were rejected are counted by cause": report(VIEW)
    | {
        "rejections": [
            {
                "cause": "queue_full",
                "status": 429,
                "requests": 1204,
                "last_age_s": 12.0,
                "reason": "64 requests wait already",
            }
        ]
    },
    "a pool at its maximum that would have more says so": report(VIEW)
    | {
        "pools": [
            POOL | {"asked": 7, "limited_by": "max"},
            POOL | {"pool": "prefill"},
        ]
    },
    "nothing that runs is shown as nothing": {"endpoint": "http://x"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_report_is_shown_as_written(case: str, as_shown: AsShown) -> None:
    as_shown("status", case, CASES, text_lines(text_report(CASES[case])))


def test_a_screen_has_as_many_lines_as_fit_and_says_what_it_leaves_out() -> None:
    screen = Console(width=40, height=5)
    text = str(_render(screen, report(VIEW), "9 s old"))
    lines = text.splitlines()
    assert len(lines) == 5
    assert lines[-1] == "9 s old"
    assert "more lines" in lines[-2]
    assert max(map(len, lines[:-2])) <= 40
