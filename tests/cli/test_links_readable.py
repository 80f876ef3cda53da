"""What `baton links` shows to a person."""

from __future__ import annotations

import pytest

from baton.cli.inspect.links import text_report
from baton.cli.output import text_lines
from baton.policy.links.estimates import LinkRow, LinkState, LinkTable
from baton.serving.shared.reports import link_report
from tests.cli.as_shown import AsShown

OK = LinkRow(
    source_id="p-1",
    target_id="d-1",
    state=LinkState.OK,
    reason="",
    transport="cuda_ipc",
    bytes_per_s=187_400_000_000.0,
    setup_s=0.0012,
    p50_s=0.0034,
    p99_s=1.25,
    pulls=118,
    moved_bytes=0,
    failures=2,
    handoff_failures=1,
    active_transfers=0,
    penalty=1.0,
    probe_age_s=3.2,
)
UNKNOWN = OK._replace(
    target_id="d-2",
    state=LinkState.UNKNOWN,
    transport="",
    p50_s=None,
    p99_s=None,
    pulls=0,
    failures=0,
    handoff_failures=0,
    probe_age_s=None,
)
QUARANTINED = OK._replace(state=LinkState.QUARANTINED, reason="handshake timed out")


CASES = {
    "a pair is one row with units": (OK, UNKNOWN),
    "a quarantined pair says why": (QUARANTINED,),
    "a fleet that hands nothing over has no pairs": (),
}


def shown(*links: LinkRow) -> list[str]:
    return list(text_lines(text_report({"links": link_report(links), "ingresses": 1})))


@pytest.mark.parametrize("case", CASES)
def test_pairs_are_shown_as_written(case: str, as_shown: AsShown) -> None:
    as_shown("links", case, CASES, shown(*CASES[case]))


def test_pairs_without_the_answer_of_an_ingress_say_so() -> None:
    report = {"links": [], "ingresses": 1, "unanswered": ["one ingress did not answer"]}
    assert "unanswered: one ingress did not answer" in list(text_lines(text_report(report)))


def test_links_of_an_ingress_can_be_shown() -> None:
    book = LinkTable()
    for replica_id in ("p", "d"):
        book.add_replica(replica_id)
    book.record_probe_success("p", "d", 1.0, elapsed_s=0.5, moved_bytes=1024)
    (row,) = shown(*book.rows(3.0))[3:]
    assert row.split()[:4] == ["p", "d", "ok", "unknown"]
    assert "2 s ago" in row
