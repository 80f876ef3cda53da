"""What `baton links` shows to a person."""

from __future__ import annotations

from baton.cli.inspect.links import text_report
from baton.cli.output import text_lines
from baton.policy.links.estimates import LinkRow, LinkState, LinkTable
from baton.serving.shared.reports import link_report

OK = LinkRow(
    source_id="p-1",
    target_id="d-1",
    state=LinkState.OK,
    why="",
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
QUARANTINED = OK._replace(state=LinkState.QUARANTINED, why="handshake timed out")


def shown(*links: LinkRow) -> list[str]:
    return list(text_lines(text_report({"links": link_report(links), "ingresses": 1})))


def test_a_pair_is_one_row_with_units() -> None:
    assert shown(OK, UNKNOWN) == [
        "pairs: 2 (1 ok, 1 unknown)",
        "links:",
        "  source  target  state    transport  GB/s  setup   p50     p99     "
        "pulls  failures  broken  probed     why",
        "  p-1     d-1     ok       cuda_ipc   187   1.2 ms  3.4 ms  1.25 s  "
        "118    2         1       3.2 s ago  -",
        "  p-1     d-2     unknown  unknown    187   1.2 ms  -       -       "
        "0      0         0       never      -",
    ]


def test_a_quarantined_pair_says_why() -> None:
    assert shown(QUARANTINED)[-1].endswith("handshake timed out")


def test_a_fleet_that_hands_nothing_over_is_said_to_have_no_pairs() -> None:
    assert shown() == ["pairs: none: nothing hands blocks over here", "links: -"]


def test_what_an_ingress_tells_of_its_links_can_be_shown() -> None:
    book = LinkTable()
    for replica_id in ("p", "d"):
        book.add_replica(replica_id)
    book.record_probe_success("p", "d", 1.0, elapsed_s=0.5, moved_bytes=1024)
    (row,) = shown(*book.rows(3.0))[3:]
    assert row.split()[:4] == ["p", "d", "ok", "unknown"]
    assert "2 s ago" in row
