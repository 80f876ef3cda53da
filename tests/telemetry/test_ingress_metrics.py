"""What an ingress measures of each request and of each step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.control.state.limits import CoordinatorLimits
from baton.domain.events import ReplicaJoined, ReplicaLost, StepCompleted
from baton.domain.fleet import LossReason
from baton.domain.handoff import HandoffMode, KvHandle, LegOutput, LegTimes
from baton.domain.leg_record import LegOutcome
from baton.domain.request import FinishReason, Phase
from baton.domain.slo import Slo
from baton.domain.value import evolve
from baton.telemetry.catalogue import (
    DURATION,
    HANDOFF_GAP,
    ITL,
    MAX_ITL,
    PLACEMENTS,
    PREDICTED_HIT_TOKENS,
    QUEUE_WAIT,
    RESUMES,
    TPOT,
    TTFT,
    TTFT_PARTS,
    TTFT_RATIO,
    Metric,
)
from baton.telemetry.metrics.ingress import IngressMetrics
from tests.fakes.facts import replica_facts
from tests.fakes.request_records import DECISION, DECODE, LOCAL, OPTION, PREFILL, RECORD

CHAT = Slo(name="chat", ttft_s=1.3, tpot_s=0.123, itl_p99_s=0.077)
GOOD = evolve(RECORD, slo=CHAT, model="tiny", pool="decode", max_itl_s=0.8, queue_wait_s=0.25)
WHOSE = ("chat", "tiny", "decode")
LIMITS = CoordinatorLimits()
TICKET = KvHandle(tokens=3, blocks=1, params=b"")


class Measured:
    """Metrics under a clock that a test moves."""

    def __init__(self, *classes: Slo, limits: CoordinatorLimits = LIMITS) -> None:
        self.now_s = 0.0
        self.metrics = IngressMetrics(classes or (CHAT,), limits, now_s=lambda: self.now_s)

    def value(self, metric: Metric, *labels: str, part: str = "") -> float | None:
        """One series, whatever its set of edges, of which there may be one; None without one."""
        values = self.by_edges(metric, *labels, part=part)
        assert len(values) <= 1, values
        return next(iter(values.values()), None)

    def by_edges(self, metric: Metric, *labels: str, part: str = "") -> dict[str | None, float]:
        """The same by set of edges."""
        name, found = f"{metric.name}{part}", {}
        for family in self.metrics.families():
            for sample in family.samples:
                of = {**sample.labels}
                edges = of.pop("edges", None)
                if sample.name == name and tuple(of.values()) == labels:
                    found[edges] = sample.value
        return found

    def step(self, replica_id: str, at_s: float, *outputs: LegOutput) -> None:
        self.now_s = at_s
        self.metrics.on_event(StepCompleted(replica_id=replica_id, outputs=outputs))


# ------------------------------------------------------------------------------- requests


def test_a_request_is_observed_once_with_its_latencies() -> None:
    at = Measured()
    at.metrics.record(GOOD)
    for metric, seconds in (
        (TTFT, 1.5),
        (TPOT, 0.75),
        (MAX_ITL, 0.8),
        (DURATION, 3.0),
        (QUEUE_WAIT, 0.25),
        (HANDOFF_GAP, 0.5),
    ):
        assert at.value(metric, *WHOSE, part="_count") == 1, metric.name
        assert at.value(metric, *WHOSE, part="_sum") == pytest.approx(seconds), metric.name


def test_one_that_got_no_token_has_no_latencies_and_one_that_was_not_placed_was_not_held() -> None:
    at = Measured()
    refused = evolve(
        GOOD,
        outcome=Phase.SHED,
        routes=(),
        decisions=(),
        legs=(),
        first_token_at_s=None,
        last_token_at_s=None,
        output_tokens=0,
    )
    at.metrics.record(refused)
    for metric in (TTFT, TPOT, MAX_ITL, DURATION, QUEUE_WAIT, HANDOFF_GAP):
        assert at.value(metric, *WHOSE, part="_count") is None, metric.name


def test_a_single_token_has_no_pace() -> None:
    at = Measured()
    at.metrics.record(evolve(GOOD, output_tokens=1, last_token_at_s=101.5))
    assert at.value(TPOT, *WHOSE, part="_count") is None
    assert at.value(MAX_ITL, *WHOSE, part="_count") is None


def test_there_is_an_edge_at_each_objective_of_each_class() -> None:
    at = Measured(CHAT, Slo(name="batch", ttft_s=33.0, tpot_s=3.3))
    at.metrics.record(GOOD)
    for metric, edges in (
        (TTFT, ("1.3", "33.0")),
        (TPOT, ("0.123", "3.3")),
        (MAX_ITL, ("0.077",)),
    ):
        for edge in edges:
            assert at.value(metric, *WHOSE, edge, part="_bucket") is not None, (metric.name, edge)


def test_there_is_an_edge_at_each_timeout_that_bounds_a_histogram() -> None:
    limits = CoordinatorLimits(
        queue_timeout_s=2.1,
        first_token_timeout_s=33.0,
        stall_timeout_s=11.0,
        resume_timeout_s=66.0,
        transfer_deadline_s=2.2,
        lease_s=34.0,
        total_timeout_s=777.0,
    )
    at = Measured(limits=limits)
    at.metrics.record(GOOD)
    for metric, edges in (
        (TTFT, ("33.0", "777.0")),
        (TPOT, ("11.0", "66.0", "33.0", "2.2", "777.0")),
        (MAX_ITL, ("11.0", "66.0", "33.0", "2.2", "777.0")),
        (DURATION, ("777.0",)),
        (QUEUE_WAIT, ("1.3", "2.1", "33.0", "777.0")),
        (HANDOFF_GAP, ("2.2", "34.0", "33.0", "777.0")),
    ):
        for edge in edges:
            assert at.value(metric, *WHOSE, edge, part="_bucket") is not None, (metric.name, edge)


def test_two_models_and_two_pools_do_not_mix() -> None:
    at = Measured()
    at.metrics.record(GOOD)
    at.metrics.record(evolve(GOOD, model="large", pool="big-decode"))
    at.metrics.record(evolve(GOOD, pool="other-decode"))
    for metric in (TTFT, TPOT, MAX_ITL, DURATION, QUEUE_WAIT, HANDOFF_GAP):
        for whose in (WHOSE, ("chat", "large", "big-decode"), ("chat", "tiny", "other-decode")):
            assert at.value(metric, *whose, part="_count") == 1, (metric.name, whose)
    assert at.value(TTFT_RATIO, "pull", "large", part="_count") == 1
    assert at.value(TTFT_PARTS, "chat", "large", "big-decode", "prefill") == pytest.approx(0.25)


def test_other_objectives_begin_new_series_and_leave_the_old_ones_as_they_are() -> None:
    at = Measured()
    at.metrics.record(GOOD)
    changed = at.metrics.set_edges([replace(CHAT, ttft_s=1.4)], LIMITS)
    assert [str(edges) for edges in changed] == [
        "baton_time_to_first_token_seconds: +1.4 s, -1.3 s",
        "baton_held_seconds: +1.4 s, -1.3 s",
    ]
    at.metrics.record(GOOD)
    assert [*at.by_edges(TTFT, *WHOSE, part="_count").values()] == [1, 1]
    assert at.value(TPOT, *WHOSE, part="_count") == 2
    assert at.value(DURATION, *WHOSE, part="_count") == 2


def test_another_timeout_begins_new_series_of_the_bounded_histograms() -> None:
    at = Measured()
    at.metrics.record(GOOD)
    changed = at.metrics.set_edges([CHAT], replace(LIMITS, stall_timeout_s=7.5))
    assert [edges.metric for edges in changed] == [TPOT, MAX_ITL, ITL]
    assert at.metrics.set_edges([CHAT], replace(LIMITS, stall_timeout_s=7.5)) == ()


def test_an_old_generation_that_is_applied_again_goes_on_counting_where_it_was() -> None:
    at = Measured()
    for classes in ([CHAT], [replace(CHAT, ttft_s=1.4)], [CHAT]):
        at.metrics.set_edges(classes, LIMITS)
        at.metrics.record(GOOD)
    assert sorted(at.by_edges(TTFT, *WHOSE, part="_count").values()) == [1, 2]


def test_where_the_time_went_adds_up_to_the_times_to_first_token() -> None:
    at = Measured()
    for _ in range(3):
        at.metrics.record(GOOD)
    parts = {
        tuple(sample.labels.values()): sample.value
        for family in at.metrics.families()
        for sample in family.samples
        if sample.name == TTFT_PARTS.name
    }
    assert {labels[:3] for labels in parts} == {WHOSE}
    assert sum(parts.values()) == pytest.approx(3 * 1.5)
    assert parts[(*WHOSE, "prefill")] == pytest.approx(3 * 0.25)


def test_placements_resumes_and_expected_hits_are_added_up() -> None:
    at = Measured()
    hit = evolve(DECISION, options=(evolve(OPTION, hit_tokens=64),))
    at.metrics.record(evolve(GOOD, decisions=(hit,)))
    at.metrics.record(evolve(GOOD, resumes=2, routes=GOOD.routes * 3, decisions=(hit,) * 3))
    assert at.value(PLACEMENTS, "pull", "disaggregated") == 4
    assert at.value(RESUMES) == 2
    assert at.value(PREDICTED_HIT_TOKENS) == 4 * 64


def test_resumes_are_told_before_there_are_any() -> None:
    assert Measured().value(RESUMES) == 0


# ------------------------------------------------------------------------------- predictions


def test_a_prediction_is_compared_with_the_result_of_the_followed_placement() -> None:
    at = Measured()
    at.metrics.record(GOOD)  # predicted 0.9375 s; it took 1.5 s
    assert at.value(TTFT_RATIO, "pull", "tiny", part="_sum") == pytest.approx(0.9375 / 1.5)


def test_a_placement_that_came_to_nothing_is_not_compared() -> None:
    at = Measured()
    broken = evolve(PREFILL, outcome=LegOutcome.FAILED, first_output_at_s=None)
    again = evolve(DECISION, at_s=101.0, options=(evolve(OPTION, mode=HandoffMode.LOCAL),))
    local = evolve(LOCAL, route_index=1, started_at_s=101.0)
    at.metrics.record(evolve(GOOD, legs=(broken, local), decisions=(DECISION, again)))
    assert at.value(TTFT_RATIO, "pull", "tiny", part="_count") is None


def test_a_request_that_was_resumed_after_its_first_token_is_compared_by_its_first_placement() -> (
    None
):
    at = Measured()
    resumed = evolve(LOCAL, route_index=1, started_at_s=103.0, first_output_at_s=104.0)
    later = evolve(DECISION, at_s=103.0)
    at.metrics.record(
        evolve(GOOD, legs=(PREFILL, DECODE, resumed), decisions=(DECISION, later), resumes=1)
    )
    assert at.value(TTFT_RATIO, "pull", "tiny", part="_sum") == pytest.approx(0.9375 / 1.5)


def test_without_a_prediction_there_is_nothing_to_compare() -> None:
    at = Measured()
    at.metrics.record(evolve(GOOD, decisions=(evolve(DECISION, options=()),)))
    assert at.value(TTFT_RATIO, "pull", "tiny", part="_count") is None


def test_with_an_early_first_token_the_handoff_is_a_gap_after_it() -> None:
    at = Measured()
    gave = evolve(PREFILL, output_tokens=1, last_output_at_s=101.0)
    rest = evolve(DECODE, output_tokens=2)
    option = evolve(DECISION.options[0], is_early_token=True)
    decision = evolve(DECISION, options=(option,))
    at.metrics.record(
        evolve(GOOD, legs=(gave, rest), first_token_at_s=101.0, decisions=(decision,))
    )
    assert at.value(TTFT, *WHOSE, part="_sum") == pytest.approx(1.0)
    assert at.value(HANDOFF_GAP, *WHOSE, part="_sum") == pytest.approx(0.5)
    took_s = 101.0 - decision.at_s
    predicted_s = option.queue_s + option.prefill_s
    assert at.value(TTFT_RATIO, "pull", "tiny", part="_sum") == pytest.approx(predicted_s / took_s)


def test_a_handoff_that_was_given_up_for_one_replica_has_no_gap() -> None:
    at = Measured()
    given_up = evolve(
        DECODE, outcome=LegOutcome.TIMED_OUT, first_output_at_s=None, ended_at_s=101.2
    )
    local = evolve(LOCAL, route_index=1, started_at_s=101.2)
    at.metrics.record(evolve(GOOD, legs=(PREFILL, given_up, local)))
    assert at.value(HANDOFF_GAP, *WHOSE, part="_count") is None


# ------------------------------------------------------------------------------- steps


def token(leg_id: str, *, first: bool = False, finish: FinishReason | None = None) -> LegOutput:
    return LegOutput(leg_id, (1,), finish, cached_tokens=0 if first else None)


def test_a_leg_that_goes_on_after_another_engines_token_begins_no_gap() -> None:
    # It does not say how many tokens were cached; its times come with its first output.
    at = joined("d")
    times = LegTimes(0.0, 0.01)
    at.step("d", 1.0, LegOutput("a", (1,), times=times))
    at.step("d", 60.0, LegOutput("b", (1,), times=times), token("a"))
    assert gaps(at) == (1, 59.0)
    at.step("d", 60.5, LegOutput("b", (1,), FinishReason.STOP, times=times))
    assert gaps(at) == (2, 59.5), "of one that was preempted the last output tells them again"


def joined(*replica_ids: str) -> Measured:
    at = Measured()
    for replica_id in replica_ids:
        at.metrics.on_event(ReplicaJoined(facts=replica_facts(replica_id, pool="decode")))
    return at


def gaps(at: Measured) -> tuple[float, float]:
    count = at.value(ITL, "decode", part="_count") or 0.0
    return count, round(at.value(ITL, "decode", part="_sum") or 0.0, 6)


def test_the_time_between_two_steps_counts_for_each_stream_that_had_a_token_before() -> None:
    at = joined("d")
    at.step("d", 1.0, token("a", first=True), token("b", first=True))
    assert gaps(at) == (0, 0)
    at.step("d", 1.02, token("a"), token("b"), token("c", first=True))
    assert gaps(at) == (2, 0.04)
    at.step("d", 1.05, token("a"), token("b"), token("c"))
    assert gaps(at) == (5, 0.13)


def test_a_prompt_that_was_computed_is_no_stream() -> None:
    at = joined("p")
    done = LegOutput("a", (7,), FinishReason.LENGTH, kv_handle=TICKET, cached_tokens=0)
    for at_s in (1.0, 2.0, 3.0):
        at.step("p", at_s, done, LegOutput("b"))
    assert gaps(at) == (0, 0)
    at.step("p", 4.0, token("c", first=True))
    at.step("p", 4.1, done)
    at.step("p", 4.3, token("c"))
    assert gaps(at) == (1, 0.3), "from its own last token, not from the prompt's end"


def test_idle_time_is_no_gap() -> None:
    at = joined("d")
    at.step("d", 1.0, token("a", first=True))
    at.step("d", 1.1, token("a", finish=FinishReason.STOP))
    at.step("d", 60.0, token("b", first=True))
    assert gaps(at) == (1, 0.1)


def test_a_restarted_replica_counts_from_zero() -> None:
    at = joined("d")
    at.step("d", 1.0, token("a", first=True))
    at.metrics.on_event(ReplicaLost(replica_id="d", reason=LossReason.DISCONNECTED))
    at.step("d", 5.0, token("a"))
    assert gaps(at) == (0, 0), "nobody knows it"
    at.metrics.on_event(ReplicaJoined(facts=replica_facts("d", pool="decode")))
    at.step("d", 9.0, token("a"))
    assert gaps(at) == (0, 0)
    at.step("d", 9.5, token("a"))
    assert gaps(at) == (1, 0.5)
