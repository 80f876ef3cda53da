"""Links: learned seconds, shared NICs, failures that are paid for, and quarantine."""

from __future__ import annotations

from math import inf, nan
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.fleet import LinkTotals
from baton.policy.links.estimates import (
    LinkRow,
    LinkSettings,
    LinkState,
    LinkTable,
    LinkTransfers,
    Transfer,
)
from baton.policy.placement.port import LinkEstimates

SETTINGS = LinkSettings(setup_s=0.002, bytes_per_s=10e9)
MB = 1_000_000


def link_table(*members: str) -> LinkTable:
    links = LinkTable(SETTINGS)
    for replica_id in members or ("p0", "p1", "d0", "d1"):
        links.add_replica(replica_id)
    return links


def seconds(
    links: LinkTable, moved_bytes: int = 100 * MB, pair: tuple[str, str] = ("p0", "d0")
) -> float:
    took_s = links.transfer_s(*pair, moved_bytes)
    assert took_s is not None
    return took_s


def row(links: LinkTable, now_s: float = 0.0, pair: tuple[str, str] = ("p0", "d0")) -> LinkRow:
    (found,) = [r for r in links.rows(now_s) if (r.source_id, r.target_id) == pair]
    return found


class Puller:
    """Adds up what a target's engine counts of one source."""

    def __init__(self, setup_s: float, bytes_per_s: float, source_id: str = "p0") -> None:
        self.setup_s, self.bytes_per_s = setup_s, bytes_per_s
        self.totals = LinkTotals(source_id, transport="tcp")

    def pull(self, moved_bytes: int, *, share: float = 1.0) -> LinkTotals:
        done = self.totals
        took_s = self.setup_s + moved_bytes * share / self.bytes_per_s
        self.totals = done._replace(
            pulls=done.pulls + 1,
            moved_bytes=done.moved_bytes + moved_bytes,
            busy_s=done.busy_s + took_s,
        )
        return self.totals

    def fail(self) -> LinkTotals:
        self.totals = self.totals._replace(failures=self.totals.failures + 1)
        return self.totals


def teach(links: LinkTable, puller: Puller, *, target_id: str = "d0", pulls: int = 80) -> None:
    rng = Random(1)
    for number in range(pulls):
        totals = puller.pull(rng.randint(1, 400) * MB)
        links.observe(target_id, totals, 0.5 * number)


# -------------------------------------------------------------------- estimates


def test_placement_gets_transfer_times_from_the_link_table() -> None:
    links: LinkEstimates = link_table()
    assert links.transfer_s("p0", "d0", 0) == pytest.approx(0.002)


def test_an_unknown_link_is_estimated_by_the_prior() -> None:
    links = link_table()
    assert seconds(links, 100 * MB) == pytest.approx(0.002 + 0.01)
    assert links.state("p0", "d0") is LinkState.UNKNOWN
    assert list(links.rows(0.0)) == []


def test_setup_and_bandwidth_are_learned_from_the_engines_counters() -> None:
    links = link_table()
    teach(links, Puller(0.02, 1e9))
    learned = row(links, 40.0)
    assert learned.setup_s == pytest.approx(0.02, rel=0.1)
    assert learned.bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert seconds(links, 300 * MB) == pytest.approx(0.32, rel=0.05)


class Troubled(Puller):
    """A link of 2 ms and 10 GB/s, of which a while has been seen; from then on it may be slow."""

    def __init__(self, links: LinkTable) -> None:
        super().__init__(0.002, 10e9)
        self._links, self.now_s, self._rng = links, 0.0, Random(3)
        self.hand_over(80)

    def slow_down(self, times: float) -> None:
        self.setup_s, self.bytes_per_s = 0.002 * times, 10e9 / times

    def hand_over(self, pulls: int) -> None:
        for _ in range(pulls):
            self._tell(self._rng.randint(50, 150) * MB)

    def probe(self, probes: int) -> None:
        for _ in range(probes):
            self.now_s += 4.5
            self._tell(MB)

    def _tell(self, moved_bytes: int) -> None:
        self.now_s += 0.5
        self._links.observe("d0", self.pull(moved_bytes), self.now_s)


@pytest.mark.parametrize("probes", [0, 1, 4])
def test_a_slow_link_is_known_after_three_pulls_despite_fast_probes(
    probes: int,
) -> None:
    links = link_table()
    link = Troubled(links)
    link.slow_down(100)
    link.hand_over(3)
    link.hand_over(2)
    link.probe(probes)
    assert seconds(links, 100 * MB) == pytest.approx(1.2, rel=0.2)


def test_one_stalled_pull_makes_no_slow_link() -> None:
    links = link_table()
    link = Troubled(links)
    link.slow_down(100)
    link.hand_over(1)
    assert seconds(links, 100 * MB) == pytest.approx(0.012, rel=0.05)


def test_a_new_link_whose_first_pull_stalls_is_not_believed_to_be_slow() -> None:
    links, puller = link_table(), Puller(0.2, 0.1e9)
    links.observe("d0", puller.pull(100 * MB), 0.5)
    first_s = seconds(links, 100 * MB)
    puller.setup_s, puller.bytes_per_s = 0.002, 10e9
    links.observe("d0", puller.pull(100 * MB), 1.0)
    assert first_s < 0.5
    assert seconds(links, 100 * MB) < 0.1


def test_an_unused_slow_link_recovers_by_its_probes() -> None:
    links = link_table()
    link = Troubled(links)
    link.slow_down(100)
    link.hand_over(5)
    link.probe(4)
    slow_s = seconds(links, 100 * MB)
    link.slow_down(1)
    link.probe(4)
    assert slow_s > 1.0
    assert seconds(links, 100 * MB) < 0.02


def test_an_unprobed_slow_link_is_tried_again_in_the_end() -> None:
    links = link_table()
    link = Troubled(links)
    link.slow_down(100)
    link.hand_over(5)
    assert links.is_slow("p0", "d0")
    links.add_replica("p9")
    links.record_probe_success("p9", "d0", link.now_s + 600.0)
    assert not links.is_slow("p0", "d0")
    assert seconds(links, 100 * MB) < 0.05


def test_a_link_that_was_slow_is_known_to_be_well_after_some_pulls() -> None:
    links = link_table()
    link = Troubled(links)
    link.slow_down(100)
    link.hand_over(5)
    link.slow_down(1)
    link.hand_over(5)
    assert seconds(links, 100 * MB) == pytest.approx(0.012, rel=0.1)


def test_one_links_estimate_is_the_default_of_unknown_links() -> None:
    links = link_table()
    teach(links, Puller(0.02, 1e9))
    assert seconds(links, 300 * MB, ("p1", "d1")) == pytest.approx(0.32, rel=0.1)


def test_a_link_with_counts_of_its_own_is_not_estimated_by_others() -> None:
    links = link_table()
    teach(links, Puller(0.001, 20e9, "p1"), target_id="d1")
    teach(links, Puller(0.02, 1e9))
    assert seconds(links, 300 * MB, ("p1", "d1")) == pytest.approx(0.016, rel=0.1)


def test_lost_reports_do_not_change_the_estimate() -> None:
    links, puller = link_table(), Puller(0.02, 1e9)
    rng = Random(2)
    for number in range(240):
        totals = puller.pull(rng.randint(1, 400) * MB)
        if number % 3 == 0:
            links.observe("d0", totals, float(number))
    assert seconds(links, 300 * MB) == pytest.approx(0.32, rel=0.05)


def test_totals_that_went_back_are_a_new_base() -> None:
    links = link_table()
    links.observe("d0", LinkTotals("p0", pulls=50, moved_bytes=50 * MB, busy_s=99.0), 0.0)
    before = seconds(links)
    links.observe("d0", LinkTotals("p0", pulls=1, moved_bytes=MB, busy_s=0.5), 1.0)
    assert seconds(links) == before
    links.observe("d0", LinkTotals("p0", pulls=2, moved_bytes=2 * MB, busy_s=0.6), 2.0)
    assert seconds(links) != before


@pytest.mark.parametrize("busy_s", [nan, inf, -1.0])
def test_meaningless_totals_change_no_estimate_and_do_not_poison_what_follows(
    busy_s: float,
) -> None:
    links = link_table()
    links.observe("d0", LinkTotals("p0", pulls=1, moved_bytes=MB, busy_s=busy_s), 0.0)
    assert seconds(links) == pytest.approx(0.012)
    teach(links, Puller(0.02, 1e9))
    assert seconds(links, 300 * MB) == pytest.approx(0.32, rel=0.1)


def test_an_engine_whose_seconds_went_back_has_started_again_and_proves_nothing() -> None:
    links = link_table()
    links.observe("d0", LinkTotals("p0", failures=9, busy_s=50.0), 0.0)
    links.observe("d0", LinkTotals("p0", pulls=1, moved_bytes=MB, busy_s=0.5, failures=1), 1.0)
    assert links.state("p0", "d0") is LinkState.UNKNOWN


def test_the_transport_is_what_the_engine_says() -> None:
    links = link_table()
    links.observe("d0", LinkTotals("p0", transport="cuda_ipc"), 0.0)
    assert row(links).transport == "cuda_ipc"


def test_quantiles_are_those_of_the_last_pulls() -> None:
    links = link_table()
    puller = Puller(0.0, 1e9)
    for megabytes in (*[5_000] * 200, *range(1, 129)):
        links.observe("d0", puller.pull(megabytes * MB), 0.0)
    learned = row(links)
    assert learned.pulls == 328
    assert learned.p50_s == pytest.approx(0.065)
    assert learned.p99_s == pytest.approx(0.127)


# -------------------------------------------------------------------- flows


def begin(links: LinkTable, flow_id: str, pair: tuple[str, str], moved_bytes: int) -> None:
    links.begin_transfer(
        flow_id, source_id=pair[0], target_id=pair[1], moved_bytes=moved_bytes, now_s=0.0
    )


@pytest.mark.parametrize(
    ("pairs", "moved_bytes", "pull_s"),
    [
        ([("p0", "d1")], 500 * MB, 0.02),
        ([("p1", "d0")], 500 * MB, 0.02),
        ([("p0", "d1"), ("p1", "d0"), ("p1", "d0")], 500 * MB, 0.03),
        ([("p1", "d1"), ("d0", "p0")], 500 * MB, 0.01),
        ([("p0", "d1")], 1 * MB, 0.0101),
    ],
    ids=["same source", "same target", "busier end", "elsewhere and the other way", "small"],
)
def test_flows_that_share_an_end_share_its_bandwidth(
    pairs: list[tuple[str, str]], moved_bytes: int, pull_s: float
) -> None:
    links = link_table()
    for number, pair in enumerate(pairs):
        begin(links, f"f{number}", pair, moved_bytes)
    assert seconds(links, 100 * MB) == pytest.approx(0.002 + pull_s)


def test_counts_of_shared_nics_teach_the_unshared_bandwidth() -> None:
    links, puller = link_table(), Puller(0.002, 10e9)
    for number in range(100):
        moved_bytes = (50 + number) * MB
        begin(links, "other", ("p0", "d1"), moved_bytes)
        begin(links, "ours", ("p0", "d0"), moved_bytes)
        links.observe("d0", puller.pull(moved_bytes, share=2.0), float(number))
        links.end_transfer("ours", float(number))
        links.end_transfer("other", float(number))
    assert row(links, 100.0).bytes_per_s == pytest.approx(10e9, rel=0.05)


def test_a_share_of_the_nic_counts_only_for_the_report_after_it() -> None:
    links, puller = link_table(), Puller(0.002, 10e9)
    for number in range(200):
        moved_bytes, crowded = (50 + number % 90) * MB, number < 100
        if crowded:
            begin(links, "other", ("p0", "d1"), moved_bytes)
        begin(links, "ours", ("p0", "d0"), moved_bytes)
        share = 2.0 if crowded else 1.0
        links.observe("d0", puller.pull(moved_bytes, share=share), float(number))
        links.end_transfer("ours", float(number))
        links.end_transfer("other", float(number))
    assert row(links, 200.0).bytes_per_s == pytest.approx(10e9, rel=0.03)


class SlowFlows:
    """The twin of `LinkTransfers`: it looks through all flows each time."""

    def __init__(self) -> None:
        self.flows: dict[str, Transfer] = {}

    def beside(self, source_id: str, target_id: str, moved_bytes: int) -> int:
        out = [f.moved_bytes for f in self.flows.values() if f.source_id == source_id]
        into = [f.moved_bytes for f in self.flows.values() if f.target_id == target_id]
        return max(min(len(end) * moved_bytes, sum(end)) for end in (out, into))


IDS = st.sampled_from(["a", "b", "c"])


@given(
    steps=st.lists(st.tuples(st.sampled_from(["begin", "end"]), IDS, IDS, IDS, st.integers(0, 9)))
)
def test_flows_are_counted_as_if_looked_through_each_time(
    steps: list[tuple[str, str, str, str, int]],
) -> None:
    fast, slow = LinkTransfers(), SlowFlows()
    for what, flow_id, source_id, target_id, moved_bytes in steps:
        if what == "begin":
            fast.begin(flow_id, Transfer(source_id, target_id, moved_bytes))
            slow.flows[flow_id] = Transfer(source_id, target_id, moved_bytes)
        else:
            assert fast.end(flow_id) == slow.flows.pop(flow_id, None)
        fast.check_integrity()
        assert len(fast) == len(slow.flows)
        for name in "abc":
            for other in "abc":
                assert fast.concurrent_bytes(name, other, 4) == slow.beside(name, other, 4)


# -------------------------------------------------------------------- failures and quarantine


def test_a_failure_is_paid_for_and_the_penalty_halves_with_time() -> None:
    links = link_table()
    clean_s = seconds(links)
    assert links.record_failure("p0", "d0", 100.0) is LinkState.UNKNOWN
    assert seconds(links) == pytest.approx(4 * clean_s)
    links.end_transfer("nothing", 130.0)  # time goes on with whatever is told
    assert seconds(links) == pytest.approx(2.5 * clean_s)
    assert row(links, 130.0).penalty == pytest.approx(2.5)
    links.end_transfer("nothing", 90.0)  # ... and does not go back
    assert seconds(links) == pytest.approx(2.5 * clean_s)
    assert row(links, 130.0).handoff_failures == 1


def test_the_penalty_has_a_bound() -> None:
    links = LinkTable(LinkSettings(failures_to_quarantine=100))
    links.add_replica("p0")
    links.add_replica("d0")
    clean_s = seconds(links)
    for _ in range(20):
        links.record_failure("p0", "d0", 1.0)
    assert seconds(links) == pytest.approx(64 * clean_s)


def test_failures_on_one_link_cost_no_other() -> None:
    links = link_table()
    links.record_failure("p0", "d0", 1.0)
    assert seconds(links, pair=("p0", "d1")) == seconds(links, pair=("p1", "d0"))
    assert seconds(links, pair=("p0", "d1")) == pytest.approx(0.012)


def test_three_handoffs_that_fail_in_a_row_quarantine_a_link() -> None:
    links = link_table()
    assert links.record_failure("p0", "d0", 1.0, "timed out") is LinkState.UNKNOWN
    assert links.record_failure("p0", "d0", 2.0, "timed out") is LinkState.UNKNOWN
    assert links.record_failure("p0", "d0", 3.0, "timed out") is LinkState.QUARANTINED
    assert links.transfer_s("p0", "d0", MB) is None
    assert links.reason("p0", "d0") == "3 handoffs failed in a row: timed out"


def test_a_handoff_that_lands_breaks_the_row_of_failures() -> None:
    links = link_table()
    for number in range(10):
        links.record_failure("p0", "d0", float(number))
        links.record_failure("p0", "d0", float(number))
        begin(links, "f", ("p0", "d0"), MB)
        links.end_transfer("f", float(number), is_complete=True)
    assert links.state("p0", "d0") is LinkState.OK
    assert links.last_success_at_s("p0", "d0") == 9.0


def test_a_handoff_that_was_given_up_does_not_break_the_row() -> None:
    links = link_table()
    for number in range(3):
        begin(links, "f", ("p0", "d0"), MB)
        links.end_transfer("f", float(number))
        links.record_failure("p0", "d0", float(number))
    assert links.state("p0", "d0") is LinkState.QUARANTINED


def test_pulls_that_the_engine_counts_prove_a_link() -> None:
    links, puller = link_table(), Puller(0.01, 1e9)
    links.record_failure("p0", "d0", 0.0)
    links.record_failure("p0", "d0", 0.0)
    links.observe("d0", puller.pull(MB), 7.0)
    assert links.state("p0", "d0") is LinkState.OK
    assert links.last_success_at_s("p0", "d0") == 7.0
    assert links.record_failure("p0", "d0", 8.0) is LinkState.OK


def test_a_report_with_failures_proves_nothing() -> None:
    links, puller = link_table(), Puller(0.01, 1e9)
    puller.fail()
    links.observe("d0", puller.pull(MB), 7.0)
    assert links.state("p0", "d0") is LinkState.UNKNOWN
    assert links.last_success_at_s("p0", "d0") is None
    assert row(links, 7.0).failures == 1


def test_a_failed_probe_quarantines_a_link_at_once() -> None:
    links = link_table()
    links.record_probe_failure("p0", "d0", 5.0, "no listener")
    assert links.transfer_s("p0", "d0", MB) is None
    assert (links.state("p0", "d0"), links.reason("p0", "d0")) == (
        LinkState.QUARANTINED,
        "no listener",
    )
    assert row(links, 7.0).probe_age_s == 2.0


def test_only_a_probe_that_moved_blocks_ends_a_quarantine() -> None:
    links, puller = link_table(), Puller(0.01, 1e9)
    links.record_probe_failure("p0", "d0", 5.0, "no listener")
    links.record_probe_success("p0", "d0", 6.0)
    links.observe("d0", puller.pull(MB), 7.0)
    links.record_probe_inconclusive("p0", "d0", 8.0, "busy")
    assert (links.state("p0", "d0"), links.reason("p0", "d0")) == (
        LinkState.QUARANTINED,
        "no listener",
    )
    links.record_probe_success("p0", "d0", 9.0, elapsed_s=0.1)
    assert (links.state("p0", "d0"), links.reason("p0", "d0")) == (LinkState.OK, "")
    assert links.record_failure("p0", "d0", 10.0) is LinkState.OK


def test_a_quarantine_by_handoffs_starts_a_new_row_when_it_ends() -> None:
    links = link_table()
    for _ in range(3):
        links.record_failure("p0", "d0", 1.0)
    links.record_probe_success("p0", "d0", 2.0, elapsed_s=0.1)
    assert links.record_failure("p0", "d0", 3.0) is LinkState.OK


def test_a_probe_that_only_asked_makes_an_unknown_link_ok_but_proves_no_transfer() -> None:
    links = link_table()
    links.record_failure("p0", "d0", 1.0)
    links.record_failure("p0", "d0", 1.0)
    links.record_probe_success("p0", "d0", 2.0)
    assert links.state("p0", "d0") is LinkState.OK
    assert links.last_success_at_s("p0", "d0") is None
    assert links.record_failure("p0", "d0", 3.0) is LinkState.QUARANTINED


def test_a_probe_that_could_not_tell_leaves_the_state_and_says_why() -> None:
    links = link_table()
    links.record_probe_inconclusive("p0", "d0", 1.0, "the source is busy")
    assert links.state("p0", "d0") is LinkState.UNKNOWN
    assert links.reason("p0", "d0") == "the source is busy"
    links.record_probe_success("p0", "d0", 2.0)
    assert links.reason("p0", "d0") == ""


def test_probes_seed_the_setup_by_the_least_they_took_but_the_first() -> None:
    links = link_table()
    links.record_probe_success(
        "p0", "d0", 1.0, elapsed_s=1.5, moved_bytes=0
    )  # with the engines' handshake
    assert seconds(links, 0) == pytest.approx(0.002)
    for took_s in (0.05, 0.03, 0.2):
        links.record_probe_success("p0", "d0", 2.0, elapsed_s=took_s, moved_bytes=0)
    assert seconds(links, 0) == pytest.approx(0.03)
    assert seconds(links, 0, ("p1", "d1")) == pytest.approx(0.002)


def test_the_bytes_of_a_probe_are_not_taken_for_setup() -> None:
    links = link_table()
    for _ in range(2):
        links.record_probe_success("p0", "d0", 1.0, elapsed_s=0.05, moved_bytes=100 * MB)
    assert seconds(links, 0) == pytest.approx(0.04)


# -------------------------------------------------------------------- membership


def test_nothing_is_remembered_of_a_replica_that_left() -> None:
    links = link_table()
    teach(links, Puller(0.02, 1e9))
    links.record_probe_failure("p0", "d1", 1.0, "no listener")
    begin(links, "f", ("p0", "d1"), MB)
    links.record_probe_success("p1", "d1", 1.0)
    links.remove_replica("p0")
    links.check_integrity()
    assert [(r.source_id, r.target_id) for r in links.rows(2.0)] == [("p1", "d1")]
    assert links.transfer_s("p0", "d1", MB) is not None
    links.remove_replica("d1")
    assert list(links.rows(2.0)) == []


def test_a_flow_outlives_its_source_until_it_is_ended_and_proves_nothing_of_the_next_life() -> None:
    links = link_table()
    begin(links, "f", ("p0", "d0"), 500 * MB)
    links.remove_replica("p0")
    links.add_replica("p0")
    links.check_integrity()
    assert links.active_transfers == 1
    assert seconds(links, 100 * MB, ("p1", "d0")) == pytest.approx(0.022)
    links.end_transfer("f", 1.0, is_complete=True)
    assert links.active_transfers == 0
    assert links.state("p0", "d0") is LinkState.UNKNOWN


def test_pulls_and_probes_of_unknown_replicas_are_ignored() -> None:
    links, puller = link_table("p0", "d0"), Puller(0.02, 1e9, "stranger")
    links.observe("d0", puller.pull(MB), 1.0)
    links.record_failure("p0", "stranger", 1.0)
    links.record_probe_failure("stranger", "d0", 1.0, "late")
    links.record_probe_success("stranger", "d0", 1.0, elapsed_s=0.1)
    begin(links, "f", ("stranger", "d0"), MB)
    links.check_integrity()
    assert list(links.rows(1.0)) == []
    assert seconds(links, 100 * MB) < 0.2
    assert links.transfer_s("stranger", "d0", MB) is not None


def test_rows_come_by_source_and_target() -> None:
    links = link_table()
    for pair in (("p1", "d0"), ("p0", "d1"), ("p0", "d0")):
        links.record_probe_success(*pair, 1.0)
    assert [(r.source_id, r.target_id) for r in links.rows(2.0)] == [
        ("p0", "d0"),
        ("p0", "d1"),
        ("p1", "d0"),
    ]


def test_a_row_counts_this_coordinators_flows() -> None:
    links = link_table()
    links.record_probe_success("p0", "d0", 1.0)
    begin(links, "f", ("p0", "d0"), MB)
    begin(links, "g", ("p0", "d0"), MB)
    assert row(links).active_transfers == 2


@settings(max_examples=50)
@given(
    flows=st.lists(st.tuples(st.sampled_from("pq"), st.sampled_from("de"), st.integers(0, 10**9))),
    smaller=st.integers(0, 10**9),
    more=st.integers(0, 10**9),
)
def test_an_estimate_grows_with_the_bytes_and_with_every_flow(
    flows: list[tuple[str, str, int]], smaller: int, more: int
) -> None:
    links = link_table("p", "q", "d", "e")
    last_s = seconds(links, smaller, ("p", "d"))
    for number, (source_id, target_id, moved_bytes) in enumerate(flows):
        begin(links, str(number), (source_id, target_id), moved_bytes)
        now_s = seconds(links, smaller, ("p", "d"))
        assert now_s >= last_s
        last_s = now_s
    assert seconds(links, smaller + more, ("p", "d")) >= last_s
