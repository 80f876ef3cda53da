"""What an ingress tells when asked: who is named, what is under way, which pairs there are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from baton.control.probing.prober import ProbeOptions
from baton.control.state.service_rules import ServiceRules
from baton.domain.errors import QueueFull
from baton.domain.events import LinksReported, RequestsRejected
from baton.domain.fleet import LinkTotals, LossReason, Role
from baton.domain.handoff import LegFailure, LegKind
from baton.domain.slo import Slo
from baton.domain.tenant import Tenant
from baton.domain.value import evolve
from baton.policy.admission.slo_classes import SloClasses
from baton.policy.links.estimates import LinkCounts, LinkState
from baton.runtime.keys.api_keys import TenantKeys
from baton.telemetry import catalogue as c
from baton.telemetry.metrics.ingress import (
    AccessFacts,
    HandoffFailuresByTarget,
    IngressCollector,
    IngressFacts,
    IngressMetrics,
)
from tests.control.world import LIMITS, World, request

FULL = QueueFull("-", 1.0, "full")


class ScrapedIngress:
    """An ingress' collector over a coordinator that a test drives."""

    access = AccessFacts()

    def __init__(self, at: World, tenants: Iterable[str] = ()) -> None:
        facts = IngressFacts(lambda: at.now_s, lambda: 2, lambda: 5, lambda: self.access)
        metrics = IngressMetrics((), now_s=lambda: at.now_s)
        self.collector = IngressCollector(at.coordinator, metrics, facts, tenants=tenants)

    def __call__(self, metric: c.Metric) -> dict[tuple[str, ...], float]:
        """A metric's series, by their labels in the order of the catalogue."""
        for family in self.collector.collect():
            found = [sample for sample in family.samples if sample.name == metric.name]
            if found:
                return {
                    tuple(sample.labels[label] for label in metric.labels): sample.value
                    for sample in found
                }
        return {}


def world_of_tenants(*names: str) -> World:
    rules = ServiceRules(
        slos=SloClasses(classes={"default": Slo(ttft_s=9.0), "batch": Slo(name="batch")}),
        tenants={name: Tenant(name=name) for name in names},
    )
    return World(replace(LIMITS, max_requests=40_000, max_queued_requests=1), rules=rules)


# ------------------------------------------------------------------------------- who


def test_names_that_are_not_configured_are_one_series() -> None:
    at = world_of_tenants("acme")
    told = ScrapedIngress(at, ["acme"])
    for number in range(1000):
        event = RequestsRejected(error=FULL, requests=1, tenant=f"nobody-{number}")
        at.coordinator.handle(event, at.now_s)
    assert told(c.SLO_REQUESTS) == {("default", "default", "", ""): 1000}


def test_a_tenant_that_leaves_the_configuration_keeps_its_name_and_its_counts() -> None:
    at = world_of_tenants("acme", "lab")
    told = ScrapedIngress(at, ["acme", "lab"])
    at.handle(RequestsRejected(error=FULL, requests=3, tenant="acme"))
    told.collector.add_tenants(["lab"])
    assert told(c.SLO_REQUESTS) == {("default", "acme", "", ""): 3}


def test_no_more_tenants_are_named_than_there_is_room_for() -> None:
    at = world_of_tenants()
    told = ScrapedIngress(at, (f"tenant-{number}" for number in range(10_000)))
    assert len(told.collector._tenants) == c.MAX_LABEL_VALUES


def test_classes_stay_apart_where_there_is_no_room_for_tenants() -> None:
    at = world_of_tenants(*"ab")
    told = ScrapedIngress(at)
    for tenant in "ab":
        for slo_class in ("default", "batch"):
            at.handle(RequestsRejected(error=FULL, requests=1, tenant=tenant, slo_class=slo_class))
    assert told(c.SLO_REQUESTS) == {
        ("default", c.OTHER, "", ""): 2,
        ("batch", c.OTHER, "", ""): 2,
    }


def test_expiries_valid_keys_and_rejected_requests_are_told() -> None:
    told = ScrapedIngress(world_of_tenants("acme"), ["acme"])
    assert told(c.TLS_EXPIRES) == told(c.KEYS_EXPIRE) == {}
    told.access = AccessFacts(
        keys={
            "acme": TenantKeys(valid=2, expires_s=-5.0),
            "default": TenantKeys(valid=1, expires_s=None),
        },
        tls_expires_s=7.0,
        unauthorized={"expired": 3},
    )
    assert told(c.TLS_EXPIRES) == {(): 7.0}
    assert told(c.VALID_KEYS) == {("acme",): 2, ("default",): 1}
    assert told(c.KEYS_EXPIRE) == {("acme",): -5.0}
    assert told(c.UNAUTHORIZED) == {("expired",): 3}


# ------------------------------------------------------------------------------- what is now


def test_requests_under_way_are_told_by_phase_and_held_ones_with_their_slack() -> None:
    at = world_of_tenants()
    told = ScrapedIngress(at)
    assert told(c.IN_FLIGHT) == {
        (phase,): 0 for phase in ("queued", "prefill", "transfer", "decode")
    }
    assert told(c.SLACK) == {}
    at.arrive(request("waits"))
    at.now_s = 1.5
    assert told(c.IN_FLIGHT)["queued",] == told(c.QUEUED_REQUESTS)[()] == 1
    assert told(c.SLACK)[()] == pytest.approx(7.5)


def test_leases_are_told_by_pool_also_where_there_are_none() -> None:
    at = World()
    at.join_prefill_decode(prefill=2)
    told = ScrapedIngress(at)
    for name in "ab":
        at.arrive(request(name))
    for leg_id, (_, leg) in tuple(at.legs.items()):
        if leg.kind is LegKind.PREFILL:
            at.step(leg_id)
    assert told(c.INGRESS_KV_LEASES) == {("prefill",): 2, ("decode",): 0}
    assert told(c.IN_FLIGHT)["transfer",] == 2


def test_blocks_of_the_index_are_told_by_how_they_are_known() -> None:
    at = World()
    at.join_prefill_decode()
    told = ScrapedIngress(at)
    item = request("r", prompt_tokens=64)
    at.report_cached("p0", item)
    blocks = told(c.INDEX_BLOCKS)
    assert blocks["reported",] == 4
    assert blocks["predicted",] == 0
    at.arrive(evolve(item, request_id="other", prompt_token_ids=tuple(range(48))))
    assert told(c.INDEX_BLOCKS)["predicted",] > 0


def test_unreachable_replicas_and_the_generation_are_reported() -> None:
    told = ScrapedIngress(World())
    assert told(c.UNREACHABLE_REPLICAS) == {(): 2}
    assert told(c.INGRESS_GENERATION) == {(): 5}


def test_rare_outcomes_are_told_before_there_are_any() -> None:
    at = World()
    at.join_prefill_decode()
    at.arrive(request("r"))
    at.run_to_end()
    outcomes = {labels[-1]: value for labels, value in ScrapedIngress(at)(c.REQUESTS).items()}
    assert outcomes == {
        "finished": 1,
        "shed": 0,
        "evicted": 0,
        "failed": 0,
        "cancelled": 0,
        "client_error": 0,
    }


def test_retries_are_counted_by_reason_and_circuits_by_pool_and_state() -> None:
    at = World()
    at.join_prefill_decode(decode=2)
    told = ScrapedIngress(at)
    assert told(c.RETRIES)["engine_error",] == 0
    for number in range(3):
        at.arrive(request(f"r{number}"))
    for leg_id in tuple(at.legs):
        at.fail_leg(leg_id, LegFailure.ENGINE_ERROR)
    tries = told(c.RETRIES)
    assert (tries["engine_error",], tries["replica_lost",]) == (3, 0)
    assert told(c.RETRIES_DENIED) == {(): 0}
    assert told(c.CIRCUIT_BREAKERS) == {
        ("prefill", "closed"): 0,
        ("prefill", "open"): 1,
        ("prefill", "half_open"): 0,
        ("decode", "closed"): 2,
        ("decode", "open"): 0,
        ("decode", "half_open"): 0,
    }


# ------------------------------------------------------------------------------- links


def break_handoffs(at: World, count: int) -> None:
    """So many prompts are computed, and their blocks do not arrive."""
    for number in range(count):
        at.arrive(request(f"broken at {at.now_s} {number}", max_tokens=1))
        for kind in (LegKind.PREFILL, LegKind.DECODE):
            [leg_id] = [leg_id for leg_id, (_, leg) in at.legs.items() if leg.kind is kind]
            if kind is LegKind.PREFILL:
                at.step(leg_id)
            else:
                at.fail_leg(leg_id, LegFailure.KV_LOAD_FAILED)
        at.run_to_end()
        at.now_s += 1.0


def test_pairs_are_reported_by_state_with_their_estimates() -> None:
    at = World(probing=ProbeOptions())
    at.join_prefill_decode(prefill=2)
    told = ScrapedIngress(at)
    links = (LinkTotals("p0", pulls=3, moved_bytes=30_000, busy_s=0.3, transport="rdma"),)
    at.handle(LinksReported(replica_id="d0", links=links))
    at.coordinator.fleet_model.links.record_probe_failure("p1", "d0", at.now_s, "no answer")
    assert told(c.LINK_PAIRS) == {("unknown",): 0, ("ok",): 1, ("quarantined",): 1}
    assert told(c.LINK_QUARANTINED) == {("p0", "d0"): 0, ("p1", "d0"): 1}
    assert ("p0", "d0", "rdma") in told(c.LINK_BANDWIDTH)
    assert told(c.LINK_SETUP).keys() == told(c.LINK_QUARANTINED).keys()


def test_broken_handoffs_are_told_by_target_and_do_not_go_down_when_a_source_leaves() -> None:
    at = World()
    at.join_prefill_decode()
    told = ScrapedIngress(at)
    for broken in (1, 2):
        break_handoffs(at, 1)
        for _ in range(2):  # however often it is asked
            assert told(c.HANDOFF_FAILURES) == {("d0",): broken}
    at.join("p1", Role.PREFILL)
    at.disconnect("p0", LossReason.LEFT)
    break_handoffs(at, 1)
    assert told(c.HANDOFF_FAILURES) == {("d0",): 3}
    at.disconnect("d0", LossReason.LEFT)
    assert told(c.HANDOFF_FAILURES) == {}


def broken(*targets: str, count: int = 1) -> list[LinkCounts]:
    return [LinkCounts("p0", target, LinkState.OK, 0, count) for target in targets]


def test_failures_towards_others_do_not_decrease_when_a_replica_leaves() -> None:
    book = HandoffFailuresByTarget(max_named=2)
    assert dict(book.totals(broken(*"bcd"))) == {"b": 1, "c": 1, c.OTHER: 1}
    assert dict(book.totals(broken(*"abcd"))) == {"b": 1, "c": 1, c.OTHER: 2}
    assert dict(book.totals(broken(*"acd"))) == {"c": 1, c.OTHER: 2}
    assert dict(book.totals(broken("c", count=5))) == {"c": 5, c.OTHER: 2}
    assert dict(book.totals(broken("c", "e", "f"))) == {"c": 6, "e": 1, c.OTHER: 3}


def test_targets_beyond_those_that_are_named_keep_their_count_when_a_named_one_leaves() -> None:
    at = World()
    links = at.coordinator.fleet_model.links
    links.add_replica("p0")
    for number in range(c.MAX_LABEL_VALUES + 2):
        links.add_replica(f"d{number:03}")
        links.record_failure("p0", f"d{number:03}", 0.0)
    told = ScrapedIngress(at)
    before = told(c.HANDOFF_FAILURES)
    assert (len(before), before[c.OTHER,]) == (c.MAX_LABEL_VALUES + 1, 2)
    links.remove_replica("d000")
    after = told(c.HANDOFF_FAILURES)
    assert (len(after), after[c.OTHER,]) == (c.MAX_LABEL_VALUES, 2)


def test_of_very_many_pairs_all_are_counted_and_those_of_note_are_described() -> None:
    at = World()
    links = at.coordinator.fleet_model.links
    for number in range(30):
        links.add_replica(f"p{number}")
        links.add_replica(f"d{number}")
    for source in range(30):
        for target in range(30):
            totals = LinkTotals(f"p{source}", pulls=1, moved_bytes=source * 30 + target, busy_s=0.1)
            links.observe(f"d{target}", totals, 0.0)
    links.record_probe_failure("p0", "d0", 0.0, "no answer")
    told = ScrapedIngress(at)
    assert told(c.LINK_PAIRS)["ok",] == 899
    described = told(c.LINK_QUARANTINED)
    assert len(described) == c.MAX_LABEL_VALUES
    assert described["p0", "d0"] == 1
    assert ("p29", "d29") in described
    assert ("p1", "d1") not in described
