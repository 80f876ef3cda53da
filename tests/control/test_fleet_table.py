"""The table of replicas: what reports know of, and what they cannot know yet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.loaded_adapters import LoadedAdapters
from baton.control.state.request_state import RequestState
from baton.domain.fleet import AdapterStatus, Load, ReplicaView, Role
from baton.domain.handoff import LegKind
from baton.domain.request import Request
from baton.domain.value import evolve
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root
from tests.fakes.facts import replica_facts


def table(*ids: str) -> FleetTable:
    fleet = FleetTable()
    for id_ in ids:
        fleet.add(replica_facts(id_), 0.0)
    return fleet


def view(fleet: FleetTable, replica_id: str = "a") -> ReplicaView:
    found = fleet.get(replica_id)
    assert found is not None
    return found


def unreported(fleet: FleetTable) -> tuple[int, int]:
    return view(fleet).unreported_legs, view(fleet).unreported_tokens


def test_an_ended_leg_is_not_unreported() -> None:
    fleet = table("a")
    fleet.on_leg_sent("a", "leg", 100)
    fleet.on_leg_ended("a", "leg", 100)
    assert unreported(fleet) == (0, 0)
    assert view(fleet).inflight_tokens == 0


def test_a_leg_that_never_left_is_not_counted_by_the_replica() -> None:
    fleet = table("a")
    for number in range(1, 4):
        fleet.on_leg_sent("a", f"leg{number}", number)
    fleet.on_leg_unsent("a", "leg2")
    fleet.on_leg_ended("a", "leg2", 2)
    fleet.on_load_report("a", Load(), 1.0, received_legs=1)
    assert unreported(fleet) == (1, 3)
    fleet.on_load_report("a", Load(), 2.0, received_legs=2)
    assert unreported(fleet) == (0, 0)


def test_a_replica_that_does_not_count_is_taken_to_know_all() -> None:
    fleet = table("a")
    fleet.on_leg_sent("a", "leg", 100)
    fleet.on_load_report("a", Load(), 1.0)
    assert unreported(fleet) == (0, 0)


def test_a_queue_was_last_seen_when_a_report_said_that_it_is_gone() -> None:
    fleet = table("a", "b")
    assert fleet.last_queued_at_s("a", 1.0) is None
    fleet.on_load_report("a", Load(queued_requests=2), 1.0)
    assert fleet.last_queued_at_s("a", 5.0) == 5.0
    fleet.on_load_report("a", Load(), 6.0)
    fleet.on_load_report("a", Load(), 7.0)
    assert fleet.last_queued_at_s("a", 8.0) == 6.0
    assert fleet.last_queued_at_s("b", 8.0) is None


def test_a_new_life_of_a_replica_has_had_no_queue() -> None:
    fleet = table("a")
    fleet.on_load_report("a", Load(queued_requests=2), 1.0)
    fleet.on_load_report("a", Load(), 2.0)
    fleet.remove("a")
    assert fleet.last_queued_at_s("a", 3.0) is None
    fleet.check_integrity()
    fleet.add(replica_facts("a"), 3.0)
    assert fleet.last_queued_at_s("a", 3.0) is None


def test_the_roster_follows_membership_and_draining() -> None:
    fleet = FleetTable()
    for name, role in (("d", Role.DECODE), ("p", Role.PREFILL), ("m", Role.MIXED)):
        fleet.add(replica_facts(name, role), 0.0)
    assert fleet.view(0.0).eligible == (("p",), ("d", "m"))
    fleet.mark_draining("d")
    assert fleet.view(0.0).eligible == (("p",), ("m",))
    fleet.remove("m")
    assert fleet.view(0.0).eligible == (("p",), ())


def test_the_peer_load_factor_is_all_reported_legs_per_leg_of_this_coordinator() -> None:
    fleet = table("a", "b")
    assert fleet.view(0.0).peer_load_factor == 1
    for number in range(4):
        fleet.on_leg_sent("a", f"leg{number}", 10)
    fleet.on_load_report("a", Load(running_requests=8), 1.0, received_legs=2)
    fleet.on_load_report("b", Load(queued_requests=1, pulling_requests=1), 1.0)
    assert fleet.view(0.0).peer_load_factor == 10 / 2
    fleet.on_load_report("a", Load(running_requests=2), 2.0, received_legs=4)
    fleet.remove("b")
    assert fleet.view(0.0).peer_load_factor == 1
    fleet.on_load_report("a", Load(running_requests=10_000), 3.0, received_legs=4)
    assert fleet.view(0.0).peer_load_factor == 64


def test_a_leg_that_ends_after_a_report_is_no_load_of_others() -> None:
    fleet = table("a", "b")
    for number in range(4):
        fleet.on_leg_sent("a", f"leg{number}", 10)
    fleet.on_load_report("a", Load(running_requests=4), 1.0, received_legs=4)
    for number in range(3):
        fleet.on_leg_ended("a", f"leg{number}", 10)
        assert fleet.view(0.0).peer_load_factor == 1
    fleet.check_integrity()
    fleet.on_load_report("a", Load(running_requests=3), 2.0, received_legs=4)
    assert fleet.view(0.0).peer_load_factor == 3
    fleet.remove("a")
    fleet.check_integrity()


def test_a_leg_that_ends_after_a_report_runs_no_more() -> None:
    fleet = table("a")
    for number in range(3):
        fleet.on_leg_sent("a", f"leg{number}", 10)
    fleet.on_load_report("a", Load(running_requests=5, queued_requests=1), 1.0, received_legs=2)
    fleet.on_leg_ended("a", "leg0", 10)
    assert view(fleet).load.running_requests == 4
    fleet.on_leg_ended("a", "leg2", 10)  # no report knows of it
    assert view(fleet).load.running_requests == 4
    fleet.on_load_report("a", Load(queued_requests=1), 2.0, received_legs=3)
    fleet.on_leg_ended("a", "leg1", 10)  # it waited when the report was made
    assert (view(fleet).load.running_requests, view(fleet).load.queued_requests) == (0, 1)
    fleet.check_integrity()


def test_adapters_of_legs_are_needed_until_their_legs_end() -> None:
    fleet = FleetTable()
    fleet.add(replica_facts("a", Role.MIXED), 0.0)
    fleet.on_leg_sent("a", "leg0", 10, adapter="ada")
    fleet.on_leg_sent("a", "leg1", 10, adapter="ada")
    fleet.on_load_report("a", Load(adapters=AdapterStatus(("ada",))), 1.0)
    fleet.check_integrity()
    assert fleet.view(1.0).replicas["a"].inflight_adapters == {"ada"}
    fleet.on_leg_ended("a", "leg0", 10)
    assert fleet.view(1.0).replicas["a"].inflight_adapters == {"ada"}
    fleet.on_leg_ended("a", "leg1", 10)
    fleet.check_integrity()
    assert not fleet.view(1.0).replicas["a"].inflight_adapters


def test_adapters_of_legs_that_a_replica_has_not_reported_count_as_there() -> None:
    fleet = table("a")
    fleet.on_leg_sent("a", "leg0", 10, adapter="ada")
    fleet.on_leg_sent("a", "leg1", 10, adapter="bob")
    fleet.on_leg_sent("a", "leg2", 10)
    assert fleet.view(0.0).replicas["a"].has_adapter("ada")
    fleet.on_load_report("a", Load(adapters=AdapterStatus(("cy",))), 1.0, received_legs=1)
    view = fleet.view(1.0).replicas["a"]
    assert view.unreported_adapters == {"bob"}
    assert [view.has_adapter(name) for name in ("ada", "bob", "cy")] == [False, True, True]
    fleet.on_leg_ended("a", "leg1", 10)
    assert not fleet.view(1.0).replicas["a"].has_adapter("bob")
    fleet.check_integrity()


moves = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 500)),
        st.tuples(st.just("end"), st.integers(0, 20)),
        st.tuples(st.just("unsent"), st.integers(0, 20)),
        st.tuples(st.just("report"), st.integers(0, 5)),
    ),
    max_size=40,
)


@given(moves)
def test_unreported_work_is_live_and_newer_than_the_report(
    steps: list[tuple[str, int]],
) -> None:
    fleet, sent, live, known = table("a"), [], {}, 0
    for count, (move, number) in enumerate(steps):
        if move == "begin":
            leg_id = f"leg{count}"
            sent.append(leg_id)
            live[leg_id] = number
            fleet.on_leg_sent("a", leg_id, number)
        elif move == "report":
            known = max(known, len(sent) - number)
            fleet.on_load_report(
                "a", Load(), float(count), received_legs=max(0, len(sent) - number)
            )
        elif live:
            leg_id = sorted(live)[number % len(live)]
            if move == "unsent" and sent.index(leg_id) >= known:
                fleet.on_leg_unsent("a", leg_id)
                sent.remove(leg_id)
            fleet.on_leg_ended("a", leg_id, live.pop(leg_id))
        fleet.check_integrity()
        later = {leg_id: live[leg_id] for leg_id in sent[known:] if leg_id in live}
        assert unreported(fleet) == (len(later), sum(later.values()))


# ------------------------------------------------------------------ streams and prompts


def test_a_leg_that_decodes_is_a_stream_until_it_ends() -> None:
    fleet = table("a")
    fleet.on_leg_sent("a", "stream", 100)
    fleet.on_leg_sent("a", "prompt", 100, decodes=False)
    assert (view(fleet).inflight_legs, view(fleet).inflight_streams) == (2, 1)
    fleet.on_load_report("a", Load(), 1.0)
    assert view(fleet).inflight_streams == 1  # though the report knows of it
    fleet.check_integrity()
    fleet.on_leg_ended("a", "prompt", 100)
    assert view(fleet).inflight_streams == 1
    fleet.on_leg_ended("a", "stream", 100)
    assert view(fleet).inflight_streams == 0
    fleet.check_integrity()


def test_streams_stay_counted_when_a_replica_is_flipped_or_drains() -> None:
    fleet = table("a")
    fleet.on_leg_sent("a", "stream", 100)
    fleet.change_role("a", Role.PREFILL)
    fleet.mark_draining("a")
    assert view(fleet).inflight_streams == 1
    fleet.check_integrity()


def test_a_replica_that_is_back_has_no_streams() -> None:
    fleet = table("a")
    fleet.on_leg_sent("a", "stream", 100)
    fleet.remove("a")
    fleet.add(replica_facts("a"), 1.0)
    assert view(fleet).inflight_streams == 0
    fleet.check_integrity()


# --------------------------------------------------------------------------- loaded adapters
def run_leg(book: LoadedAdapters, name: str, took_s: float = 0.5) -> None:
    """A leg comes, has its adapter loaded if need be, and is over."""
    book.on_leg_started(name)
    if not book.touch(name):
        book.on_loaded(name, took_s)
    book.on_leg_ended(name)
    book.check_integrity()


def test_a_requests_blocks_and_legs_are_those_of_its_adapter() -> None:
    plain = RequestState(
        request=Request(request_id="r", prompt_token_ids=(1,) * 32, max_tokens=1, arrived_at_s=0.0)
    )
    tuned = RequestState(request=evolve(plain.request, adapter="ada"))
    assert not set(plain.block_hashes(("m", 16))) & set(tuned.block_hashes(("m", 16)))
    root = chain_root(model="m", block_size_tokens=16, adapter="ada")
    assert tuned.block_hashes(("m", 16)) == chain_hashes(root, (1,) * 32, 16)
    legs = [request.new_leg(LegKind.LOCAL) for request in (plain, tuned)]
    assert [leg.adapter for leg in legs] == [None, "ada"]


def test_an_adapter_of_a_running_leg_outlives_an_unused_one() -> None:
    book = LoadedAdapters(2)
    book.on_leg_started("a")
    assert not book.touch("a")
    book.on_loaded("a", 0.5)
    run_leg(book, "b")
    run_leg(book, "c")
    assert book.report().loaded == ("a", "c")


def test_an_adapter_that_is_on_its_way_counts_as_there() -> None:
    book = LoadedAdapters(2)
    book.on_leg_started("a")
    book.on_leg_started("a")
    assert book.report() == AdapterStatus(("a",), hits=1, loads=0, loading_s=0.0)


def test_an_adapter_is_loaded_once_and_found_from_then_on() -> None:
    book = LoadedAdapters(2)
    for _ in range(3):
        run_leg(book, "a")
    assert book.report() == AdapterStatus(("a",), hits=2, loads=1, loading_s=0.5)


def test_legs_without_an_adapter_are_none_of_its_business() -> None:
    book = LoadedAdapters(1)
    book.on_leg_started(None)
    assert book.touch(None)
    book.on_leg_ended(None)
    assert book.report() == AdapterStatus()


@given(st.integers(1, 4), st.lists(st.sampled_from("abcdefgh"), max_size=40))
def test_it_holds_what_a_plain_list_of_the_latest_holds(slots: int, names: list[str]) -> None:
    book, latest = LoadedAdapters(slots), list[str]()
    for name in names:
        run_leg(book, name)
        latest = [*(other for other in latest if other != name), name][-slots:]
    assert list(book.report().loaded) == latest


def test_a_fleet_has_an_eligible_replica_while_one_does_not_drain() -> None:
    fleet = table()
    assert not fleet.has_eligible_replica
    fleet = table("a", "b")
    for replica_id in ("a", "b"):
        assert fleet.has_eligible_replica
        assert any(fleet.view(0.0).eligible)
        fleet.mark_draining(replica_id)
    assert not fleet.has_eligible_replica
    assert not any(fleet.view(0.0).eligible)
