from __future__ import annotations

import random

import pytest

from baton.domain.fleet import Load, ReplicaFacts, ReplicaView, Role
from baton.domain.handoff import LegKind
from baton.perf.modelled import ModelledTiming
from baton.perf.step_timing import StepBatch, chunk_pairs
from baton.policy.choosing import Candidate
from baton.policy.hits import NO_HIT
from baton.policy.placement import PlacementQuery
from baton.simulator.outcome import Outcome
from baton.simulator.scenario import Run
from baton.simulator.workloads.trace import Trace, TraceRequest
from benchmarks._fidelity_mooncake import cached_fraction, compared
from benchmarks._mooncake_fleet import Node, choose_by_load, prompts_only


def _chunk(tokens: int, before: int) -> StepBatch:
    return StepBatch(
        prefill_tokens=tokens, prefill_requests=1, prefill_pairs=chunk_pairs(tokens, before)
    )


def test_a_prefill_takes_what_its_operations_take_at_half_the_peak() -> None:
    tokens, layers, hidden = 12_000, 80, 8192
    flops = layers * (4 * tokens**2 * hidden + 22 * tokens * hidden**2)
    assert Node().step_s(_chunk(tokens, 0)) == pytest.approx(flops / (8 * 312e12 * 0.5))


def test_chunks_take_together_what_the_prompt_takes_at_once() -> None:
    node = Node()
    chunks = [node.step_s(_chunk(8192, 8192 * number)) for number in range(3)]
    assert sum(chunks) == pytest.approx(node.step_s(_chunk(3 * 8192, 0)))


def test_a_decode_step_reads_the_weights_and_the_context() -> None:
    node = Node()
    few = node.step_s(StepBatch(decode_requests=1, decode_context_tokens=1000))
    many = node.step_s(StepBatch(decode_requests=1, decode_context_tokens=101_000))
    assert few == pytest.approx(0.0091, rel=0.02)
    assert many - few == pytest.approx(100_000 * 327_680 / (8 * 2.04e12 * 0.8))


def test_requests_end_with_their_first_token() -> None:
    trace = Trace(name="t", requests=(TraceRequest(0.0, 10, 7, (1,)),), block_tokens=512)
    assert prompts_only(trace).requests == (TraceRequest(0.0, 10, 1, (1,)),)


def _candidate(name: str, queued: int, unseen: int) -> Candidate:
    facts = ReplicaFacts(
        replica_id=name,
        pool="node",
        role=Role.MIXED,
        model="m",
        engine="sim",
        engine_version="1",
        block_size_tokens=512,
        kv_blocks=10,
        kv_block_bytes=1,
        max_len_tokens=1000,
        max_running_requests=10,
        max_batched_tokens=100,
        layout="one",
    )
    view = ReplicaView(
        facts=facts, load=Load(queued_tokens=queued), load_at_s=0.0, unseen_tokens=unseen
    )
    return Candidate(
        view, NO_HIT, ModelledTiming(steps=Node(), max_batched_tokens=100, host_block_s=0.0)
    )


def test_load_balance_counts_what_is_queued_and_what_was_sent_since() -> None:
    nodes = [_candidate("a", 100, 50), _candidate("b", 120, 0), _candidate("c", 0, 130)]
    query = PlacementQuery(prompt_tokens=10)
    assert choose_by_load(query, LegKind.LOCAL, nodes, random.Random(0)) == 1


def _means(**seconds: float) -> dict[str, float]:
    return {f"mooncake_{name}_ttft_mean_s": value for name, value in seconds.items()}


def test_the_order_is_the_papers_or_it_is_not() -> None:
    found = compared(_means(random=9.0, load_balance=4.0, local_cache=3.0, global_cache=2.0))
    assert found["mooncake_order_as_published"] == 1.0
    assert found["mooncake_load_balance_over_global"] == 2.0
    assert found["mooncake_load_balance_over_global_paper"] == pytest.approx(1.7166, abs=1e-4)
    found = compared(_means(random=9.0, load_balance=4.0, local_cache=2.0, global_cache=3.0))
    assert found["mooncake_order_as_published"] == 0.0


def test_the_cached_fraction_weighs_prompts_by_their_length() -> None:
    outcomes = (
        Outcome(0.0, 100, 50, 1, 0.1, 0.0, 0.1, ok=True),
        Outcome(0.0, 300, 0, 1, 0.1, 0.0, 0.1, ok=True),
    )
    run = Run(
        outcomes=outcomes,
        timeline=(),
        replica_seconds={},
        handoffs=0,
        resumes=0,
        reasons={},
        ended_at_s=1.0,
        events=0,
    )
    assert cached_fraction(run) == pytest.approx(0.125)
