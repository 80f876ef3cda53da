from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.control.fleet.loaded_adapters import LoadedAdapters
from baton.control.state.request_state import RequestState
from baton.domain.fleet import AdapterStatus
from baton.domain.handoff import LegKind
from baton.domain.request import Request
from baton.domain.value import evolve
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root


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


def test_an_adapter_is_loaded_once_and_found_from_then_on() -> None:
    book = LoadedAdapters(2)
    for _ in range(3):
        run_leg(book, "a")
    assert book.report() == AdapterStatus(("a",), hits=2, loads=1, loading_s=0.5)


def test_the_longest_unused_adapter_goes_for_a_new_one() -> None:
    book = LoadedAdapters(2)
    for name in ("a", "b", "a", "c"):
        run_leg(book, name)
    assert book.report().loaded == ("a", "c")


def test_an_adapter_that_a_leg_needs_outlives_one_that_nobody_does() -> None:
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
