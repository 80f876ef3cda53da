"""Candidates for placement with every load that a policy may look at."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from baton.domain.fleet import Load, Role
from baton.domain.handoff import HitSource, LegKind
from baton.domain.value import evolve
from baton.policy.placement.chooser import Candidate, Chooser
from baton.policy.placement.port import PlacementQuery
from baton.policy.prefix_cache.hits import NO_HIT, Hit
from tests.fakes.timings import LinearTiming, replica_view

GROUPED = PlacementQuery(prompt_tokens=3_990, max_tokens=64)
"""The workload that was measured: 3,000 of 3,990 tokens shared, in blocks of 16."""
BLOCK = 16
SHARED_BLOCKS = 187  # of the 187.5 that 3,000 tokens fill
KV_BLOCKS = 1000


def candidate(  # noqa: PLR0913 - each is a term of some formula
    replica_id: str = "a",
    *,
    hit: int = 0,
    host: int = 0,
    age_s: float = 0.0,
    used: float = 0.0,
    queued: int = 0,
    queued_tokens: int = 0,
    running: int = 0,
    pulling: int = 0,
    legs: int = 0,
    unseen_legs: int = 0,
    unseen_tokens: int = 0,
) -> Candidate:
    """A replica of 1,000 blocks of 16 tokens; `used` is in blocks."""
    load = Load(
        queued_requests=queued,
        queued_tokens=queued_tokens,
        running_requests=running,
        pulling_requests=pulling,
        kv_used_fraction=used / KV_BLOCKS,
    )
    view = replica_view(
        replica_id,
        Role.MIXED,
        load,
        inflight_legs=legs,
        unreported_legs=unseen_legs,
        unreported_tokens=unseen_tokens,
    )
    held = Hit(hit, host, HitSource.REPORTED, age_s) if hit else NO_HIT
    return Candidate(view, held, LinearTiming())


def choose(
    chooser: Chooser,
    *candidates: Candidate,
    kind: LegKind = LegKind.LOCAL,
    query: PlacementQuery = GROUPED,
    seed: int = 1,
) -> str:
    index = chooser(query, kind, candidates, Random(seed))
    assert index is not None
    return candidates[index].view.replica_id


def busier(one: Candidate) -> Candidate:
    load = one.view.load
    more = load._replace(
        queued_requests=load.queued_requests + 200,
        running_requests=load.running_requests + 200,
        queued_tokens=load.queued_tokens + 9999,
        kv_used_fraction=load.kv_used_fraction + 1,
    )
    view = evolve(
        one.view, load=more, inflight_legs=one.view.inflight_legs + 300, inflight_tokens=99_999
    )
    return one._replace(view=view)


candidates = st.builds(
    candidate,
    st.sampled_from("abcdefgh"),
    hit=st.integers(0, 300),
    age_s=st.floats(0, 9),
    used=st.integers(0, KV_BLOCKS),
    queued=st.integers(0, 9),
    queued_tokens=st.integers(0, 9999),
    running=st.integers(0, 99),
    legs=st.integers(0, 150),
    unseen_legs=st.integers(0, 9),
    unseen_tokens=st.integers(0, 9999),
)
several = st.lists(
    candidates, min_size=1, max_size=8, unique_by=lambda candidate: candidate.view.replica_id
).map(lambda found: sorted(found, key=lambda candidate: candidate.view.replica_id))
kinds = st.sampled_from(LegKind)
prompts = st.builds(PlacementQuery, prompt_tokens=st.integers(0, 5000))
