"""What became of requests at the door: everyone is counted there once, read or not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from baton.control.state.service_rules import ServiceRules
from baton.domain.demand import AdmissionPath, Tally
from baton.domain.errors import (
    BatonError,
    Cause,
    NotAllowed,
    PromptTooLong,
    QueueFull,
    RateLimited,
    Rejected,
)
from baton.domain.events import RequestsRejected
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.domain.tenant import RateLimit, Tenant
from baton.policy.admission.slo_classes import Comparison, SloClasses, SloRule
from tests.control.world import LIMITS, World, request

CHAT = Slo(name="default", ttft_s=1.0, tpot_s=0.1)
BOOK = SloClasses(
    classes={"default": CHAT, "batch": Slo(name="batch"), "vip": Slo(name="vip", priority=9)},
    rules=(SloRule(slo_class="batch", comparison=Comparison.AT_LEAST, prompt_tokens=1000),),
)
RULES = ServiceRules(
    slos=BOOK,
    tenants={
        "free": Tenant(name="free"),
        "slow": Tenant(name="slow", rate=RateLimit(requests_per_s=0.001, burst_s=1000.0)),
        "lab": Tenant(name="lab", slo="batch"),
    },
)


def world(*, max_queued: int = 16) -> World:
    return World(
        replace(LIMITS, max_queued_requests=max_queued, max_prompt_tokens=500), rules=RULES
    )


def admissions(at: World) -> dict[tuple[str, str, str], int]:
    return {
        (row.slo_class, str(row.outcome), str(row.reason)): row.requests
        for row in at.coordinator.admissions()
    }


def tallies(at: World) -> dict[tuple[str, str], Tally]:
    told = at.coordinator.report("c", at.now_s).tallies
    return {(tally.slo_class, tally.tenant): tally for tally in told}


def refuse(
    at: World, error: Rejected, *, tenant: str = "free", slo: str | None = None, requests: int = 1
) -> None:
    at.handle(RequestsRejected(error=error, requests=requests, tenant=tenant, slo_class=slo))


def test_immediate_and_queued_placements_are_counted_separately() -> None:
    at = world()
    at.arrive(request("waits", tenant="free"))
    at.now_s = 0.5
    at.join("m", Role.MIXED)
    at.arrive(request("goes", tenant="lab"))
    assert admissions(at) == {
        ("default", "admitted", "queued"): 1,
        ("batch", "admitted", "immediate"): 1,
    }


def test_an_admitted_request_is_counted_once_also_when_resumed() -> None:
    at = world()
    at.join_prefill_decode(prefill=1, decode=2)
    for name in ("done", "resumed", "left"):
        at.arrive(request(name))
    assert admissions(at) == {("default", "admitted", "immediate"): 3}
    at.cancel("left")
    for leg_id, (where, leg) in tuple(at.legs.items()):
        if leg.request_id == "resumed" and where == "p0":
            at.step(leg_id)
    at.disconnect("d0")
    at.disconnect("d1")
    at.run_to_end()
    assert admissions(at) == {("default", "admitted", "immediate"): 3}


def test_a_rejected_request_is_counted_with_the_reason() -> None:
    at = world(max_queued=2)
    at.arrive(request("first", tenant="lab"))
    at.arrive(request("tired", tenant="free"))
    at.arrive(request("no room", tenant="free"))
    at.cancel("tired")
    at.arrive(request("long", prompt_tokens=501, tenant="free"))
    at.arrive(request("charged", tenant="slow"))
    at.arrive(request("over its rate", tenant="slow"))
    at.arrive(request("too grand", tenant="free", slo_class="vip"))
    at.advance(LIMITS.queue_timeout_s)
    assert admissions(at) == {
        ("batch", "evicted", "no_capacity"): 1,
        ("default", "evicted", "no_capacity"): 1,  # the one that was charged
        ("default", "shed", "queue_full"): 1,
        ("default", "cancelled", "client_disconnected"): 1,
        ("default", "client_error", "prompt_too_long"): 1,
        ("default", "client_error", "rate_limited"): 1,
        ("default", "client_error", "not_allowed"): 1,
    }
    assert sum(admissions(at).values()) == len(at.records)
    barred = {name for name, record in at.records.items() if record.is_client_error}
    assert barred == {"long", "over its rate", "too grand"}


def test_admissions_add_up_to_ended_and_running_requests() -> None:
    at = world(max_queued=3)
    for number in range(8):
        at.arrive(request(f"early {number}", tenant="free"))
    at.join("m", Role.MIXED)
    for number in range(5):
        at.arrive(request(f"late {number}", tenant="lab"))
    refuse(at, QueueFull("-", 1.0, "full"), requests=4)
    assert sum(admissions(at).values()) == 8 + 5 + 4
    assert len(at.records) + len(at.coordinator.phases()) == 8 + 5


# ------------------------------------------------------------------------------- unread


def test_a_request_rejected_unread_is_a_miss_like_a_shed_one() -> None:
    at = world(max_queued=1)
    at.arrive(request("waits", tenant="free"))
    at.arrive(request("read", tenant="free"))
    read = tallies(at)["default", "free"]
    refuse(at, QueueFull("-", 1.0, "full"))
    both = tallies(at)["default", "free"]
    for name in (
        *("evaluated", "good", "shed", "excluded", "client_errors"),
        *("ttft_met", "tpot_met", "itl_met"),
    ):
        assert getattr(both, name) == 2 * getattr(read, name), name
    assert (both.evaluated, both.good) == (2, 0)
    assert admissions(at) == {("default", "shed", "queue_full"): 2}


def test_a_client_error_of_an_unread_request_is_counted_and_is_no_demand() -> None:
    at = world()
    before = at.coordinator.report("c", 0.0).demand
    refuse(at, RateLimited("-", 1.0, "used up"), tenant="slow")
    row = tallies(at)["default", "slow"]
    assert (row.client_errors, row.evaluated, row.shed) == (1, 0, 0)
    assert at.coordinator.report("c", 0.0).demand == before
    assert admissions(at) == {("default", "client_error", "rate_limited"): 1}


def test_a_request_rejected_unread_counts_recent_average_demand() -> None:
    at = world()
    at.join("m", Role.MIXED)
    at.arrive(request("r", prompt_tokens=40, max_tokens=4))
    at.run_to_end()
    before = at.coordinator.report("c", 0.0).demand
    refuse(at, QueueFull("-", 1.0, "full"), requests=3)
    after = at.coordinator.report("c", 0.0).demand
    assert after.requests - before.requests == 3
    assert after.prompt_tokens - before.prompt_tokens == 3 * 40
    assert after.output_tokens - before.output_tokens == 3 * 4


@pytest.mark.parametrize(
    ("tenant", "asked", "served_in"),
    [("free", None, "default"), ("free", "batch", "batch"), ("lab", None, "batch")],
)
def test_a_request_rejected_unread_counts_in_its_class(
    tenant: str, asked: str | None, served_in: str
) -> None:
    at = world()
    refuse(at, QueueFull("-", 1.0, "full"), tenant=tenant, slo=asked)
    assert list(tallies(at)) == [(served_in, tenant)]


def test_unread_prompts_count_as_long_as_recent_ones() -> None:
    at = World(rules=RULES)
    at.join("m", Role.MIXED)
    at.arrive(request("long", prompt_tokens=1500, tenant="free"))
    at.run_to_end()
    refuse(at, QueueFull("-", 1.0, "full"))
    told = at.coordinator.report("c", 0.0).tallies
    assert [(row.slo_class, row.pool, row.evaluated) for row in told] == [
        ("batch", "mixed", 1),
        ("batch", "", 1),
    ]


def test_a_request_rejected_unread_is_counted_by_its_first_reason() -> None:
    at = world()
    refuse(at, QueueFull("-", 1.0, "full"), tenant="lab", slo="vip")
    assert tallies(at)["batch", "lab"].shed == 1
    assert admissions(at) == {("batch", "shed", "queue_full"): 1}


def test_an_unknown_tenant_counts_as_its_fallback() -> None:
    at = world()
    for number in range(10):
        refuse(at, QueueFull("-", 1.0, "full"), tenant=f"nobody-{number}")
    assert list(tallies(at)) == [("default", "default")]


# ------------------------------------------------------------------------------- words


def errors_of_requests(root: type[BatonError]) -> list[type[BatonError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in errors_of_requests(child))]


def test_each_error_of_a_request_has_a_word_of_its_own() -> None:
    roots = (*Rejected.__subclasses__(), PromptTooLong.__mro__[1])
    kinds = [kind for root in roots for kind in errors_of_requests(root)]
    words = Counter(kind.cause for kind in kinds if not kind.__name__.startswith("_"))
    assert NotAllowed in kinds
    assert set(words.values()) == {1}
    assert set(words) == set(Cause) - {Cause.CLIENT_DISCONNECTED, Cause.OTHER}


def test_words_for_ways_in_are_none_for_being_kept_out() -> None:
    assert not {*map(str, AdmissionPath)} & {*map(str, Cause)}
