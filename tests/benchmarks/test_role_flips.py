"""The benchmark of role flips: a small run of it, and its judge."""

from __future__ import annotations

import pytest

from baton.domain.commands import RequestRecord
from baton.domain.errors import NoCapacity
from baton.domain.fleet import Role
from baton.domain.request import Phase, Request
from baton.domain.value import evolve
from baton.engine.sim import expected_tokens
from benchmarks._flip_fleet import MODEL, SETTINGS, Stream
from benchmarks.role_flips import Plan, Tally, is_clean, judge, judged, measure, requests, told

REQUEST = Request(request_id="r", prompt_token_ids=(5, 6, 7), max_tokens=6, arrived_at_s=0.0)
WANTED = list(expected_tokens((5, 6, 7), 6, model=MODEL, settings=SETTINGS))
RECORD = RequestRecord(
    request_id="r",
    outcome=Phase.FINISHED,
    reason="length",
    routes=(),
    decisions=(),
    prompt_tokens=3,
    cached_tokens=None,
    output_tokens=6,
    resumes=0,
    arrived_at_s=0.0,
    first_token_at_s=1.0,
    last_token_at_s=2.0,
    ended_at_s=2.0,
    prefill_done_at_s=None,
    handed_off_blocks=0,
)


async def test_flips_and_a_scale_down_under_load_cost_no_request_and_no_token() -> None:
    plan = Plan(
        flips=40,
        scale_downs=1,
        clients=4,
        pause_s=0.01,
        roles=(Role.PREFILL, Role.DECODE, Role.MIXED),
        seed=7,
    )
    result = await measure(plan)
    assert is_clean(result), result
    assert (result["flips"], result["scale_downs"]) == (40, 1)
    assert result["ok"] == result["requests"]
    assert int(str(result["requests"])) >= 2 * plan.clients


@pytest.mark.parametrize(
    ("tokens", "verdict"),
    [
        (WANTED, "ok"),
        ([*WANTED[:3], WANTED[2], *WANTED[3:]], "duplicated"),
        (WANTED[:-1], "wrong"),
        ([*WANTED[:-1], WANTED[-1] + 1], "wrong"),
    ],
)
def test_a_stream_is_right_when_it_is_that_of_an_undisturbed_engine(
    tokens: list[int], verdict: str
) -> None:
    assert judge(Stream(REQUEST, tokens, RECORD)) == verdict


def test_a_request_that_ended_in_an_error_or_not_at_all_has_failed() -> None:
    assert judge(Stream(REQUEST, WANTED)) == "failed"
    assert judge(Stream(REQUEST, WANTED, RECORD, NoCapacity("r", 1.0, "nobody"))) == "failed"
    assert judge(Stream(REQUEST, WANTED, evolve(RECORD, outcome=Phase.EVICTED))) == "failed"


@pytest.mark.parametrize("what", ["failed", "duplicated", "wrong", "pids_changed"])
def test_one_of_anything_bad_is_too_many(what: str) -> None:
    good = judged([Stream(REQUEST, WANTED, RECORD)], 0) | told(Tally())
    assert is_clean(good)
    assert not is_clean(good | {what: 1})


def test_a_request_that_ended_twice_is_counted() -> None:
    assert judged([Stream(REQUEST, WANTED, RECORD)], 2)["duplicated"] == 2


def test_a_client_asks_for_the_same_again_with_the_same_seed() -> None:
    first, again, other = (requests(seed, "c") for seed in (1, 1, 2))
    asked = [[next(one).prompt_token_ids for _ in range(5)] for one in (first, again, other)]
    assert asked[0] == asked[1] != asked[2]
