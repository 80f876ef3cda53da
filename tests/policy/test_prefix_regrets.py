"""When a prefix that others hold is computed once more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import Load
from baton.domain.handoff import PlacementDecision, ReplicationCredit
from baton.domain.value import evolve
from baton.policy.placement.port import PlacementContext, PlacementQuery
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.policy.prefix_cache.replication import (
    COPY_PRICE_MULTIPLE,
    CREDIT_DECAY_S,
    MAX_PREFIXES,
    NO_CREDITS,
    PrefixCredits,
    PromptCredits,
)
from tests.fakes.timings import KnownHits, placement_context, replica_view

HASHES = list(range(100, 200))
HITS = KnownHits({"held": 50})
QUERY = PlacementQuery(prompt_tokens=1600, max_tokens=100, hits=HITS)


def placed(query: PlacementQuery, around: PlacementContext) -> PlacementDecision:
    decision = PredictedPlacer().place(query, around)
    assert isinstance(decision, PlacementDecision)
    return decision


def queued(tokens: int, *, idle: Sequence[str] = ("free",)) -> PlacementContext:
    """A holder before which so many tokens queue, and replicas that are idle."""
    held = replica_view("held", load=Load(queued_tokens=tokens, queued_requests=1))
    return placement_context(held, *(replica_view(name) for name in idle))


def with_regrets(*forgone: ReplicationCredit) -> PlacementQuery:
    book = PrefixCredits()
    for credit in forgone:
        book.record(HASHES, credit, 0.0)
    return evolve(QUERY, replication_credits=PromptCredits(book, HASHES, 0.0))


# ------------------------------------------------------------------ what is decided
def test_a_request_that_queues_at_a_holder_says_what_another_would_have_spared() -> None:
    decision = placed(QUERY, queued(600))
    assert decision.route.decode_replica_id == "held"
    forgone = decision.replication_credit
    assert forgone is not None
    assert (forgone.replica_id, forgone.blocks) == ("free", 50)
    assert forgone.seconds == pytest.approx(0.06, abs=0.01)


def test_a_request_without_a_queue_forgoes_nothing() -> None:
    assert placed(QUERY, queued(0)).replication_credit is None
    assert placed(evolve(QUERY, hits=KnownHits({})), queued(600)).replication_credit is None
    both = evolve(QUERY, hits=KnownHits({"held": 50, "free": 50}))
    assert placed(both, queued(600)).replication_credit is None


def test_regrets_of_earlier_requests_pay_for_a_copy() -> None:
    decision = placed(with_regrets(ReplicationCredit("free", 50, 0.5)), queued(600))
    assert decision.route.decode_replica_id == "free"
    paid = decision.replication_credit
    assert paid is not None
    assert -0.08 < paid.seconds < 0  # what the copy took, less the wait that it saves at once


def test_a_regret_counts_for_the_replica_nearest_to_the_copy() -> None:
    query = with_regrets(ReplicationCredit("second", 50, 0.01))
    forgone = placed(query, queued(600, idle=("free", "second", "third"))).replication_credit
    assert forgone is not None
    assert forgone.replica_id == "second"


def test_too_little_that_was_forgone_pays_for_nothing() -> None:
    for forgone in (
        ReplicationCredit("free", 50, 0.001),
        ReplicationCredit("other", 50, 9.0),
        ReplicationCredit("free", 49, 9.0),
    ):
        assert placed(with_regrets(forgone), queued(600)).route.decode_replica_id == "held"


@dataclass(frozen=True)
class Room:
    """As many free blocks in each cache."""

    blocks: int

    def free_blocks(self, replica_id: str) -> int:
        del replica_id
        return self.blocks


@pytest.mark.parametrize(("free_blocks", "multiple"), [(1000, 1.0), (0, COPY_PRICE_MULTIPLE)])
def test_a_copy_costs_a_multiple_only_where_it_evicts_other_blocks(
    free_blocks: int, multiple: float
) -> None:
    around = evolve(queued(600), cache_capacity=Room(free_blocks))

    def copies(loss_s: float) -> PlacementDecision:
        query = with_regrets(ReplicationCredit("free", 50, loss_s))
        return placed(evolve(query, reuses_per_token=0.5), around)

    paid = copies(9.0).replication_credit
    assert paid is not None
    cost_s = -paid.seconds
    assert copies(0.9 * multiple * cost_s).route.decode_replica_id == "held"
    assert copies(1.1 * multiple * cost_s).route.decode_replica_id == "free"


def test_no_copy_is_made_while_no_request_queues() -> None:
    query = with_regrets(ReplicationCredit("free", 50, 9.0))
    assert placed(query, queued(0)).route.decode_replica_id == "held"


def test_no_request_becomes_late_for_others() -> None:
    placer = PredictedPlacer(PredictedOptions(ttft_slo_s=0.16))
    decision = placer.place(with_regrets(ReplicationCredit("free", 50, 9.0)), queued(600))
    assert isinstance(decision, PlacementDecision)
    assert decision.route.decode_replica_id == "held"


# ------------------------------------------------------------------ the book
def test_regrets_add_up_and_fade() -> None:
    book = PrefixCredits()
    book.record(HASHES, ReplicationCredit("a", 3, 1.0), 0.0)
    book.record(HASHES, ReplicationCredit("a", 3, 1.0), CREDIT_DECAY_S)
    name = ("a", HASHES[2])
    assert book.of(name, CREDIT_DECAY_S) == pytest.approx(1.0 + exp(-1))
    assert PromptCredits(book, HASHES, CREDIT_DECAY_S).of("a", 3) == book.of(name, CREDIT_DECAY_S)
    assert book.of(("b", HASHES[2]), 0.0) == 0


@pytest.mark.parametrize("blocks", [0, -1, 101])
def test_blocks_that_a_prompt_does_not_have_are_ignored(blocks: int) -> None:
    book = PrefixCredits()
    book.record(HASHES, ReplicationCredit("a", blocks, 1.0), 0.0)
    assert len(book) == 0
    assert PromptCredits(book, HASHES, 0.0).of("a", blocks) == 0
    assert NO_CREDITS.of("a", blocks) == 0


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(-5, 5)), max_size=50))
def test_a_regret_is_never_negative(notes: list[tuple[int, float]]) -> None:
    book = PrefixCredits()
    for at_s, (blocks, seconds) in enumerate(notes):
        book.record(HASHES, ReplicationCredit("a", blocks, seconds), float(at_s))
        assert book.of(("a", HASHES[blocks - 1]), float(at_s)) >= 0


def test_the_table_is_bounded_and_forgets_the_oldest_change() -> None:
    book = PrefixCredits()
    for number in range(MAX_PREFIXES + 10):
        book.record([number], ReplicationCredit("a", 1, 1.0), 0.0)
    assert len(book) == MAX_PREFIXES
    assert book.of(("a", 0), 0.0) == 0
    assert book.of(("a", MAX_PREFIXES + 9), 0.0) == 1.0
