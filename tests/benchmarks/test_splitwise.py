from __future__ import annotations

import random

import pytest

from baton.domain.fleet import FleetView, Load, ReplicaFacts, ReplicaView, Role
from baton.domain.handoff import Decision
from baton.perf.step_timing import StepBatch
from baton.perf.tables import Curve, InterpolatedTiming
from baton.policy.placement import PlacementQuery, Surroundings
from baton.simulator.outcome import Outcome
from baton.simulator.workloads.trace import TraceRequest
from benchmarks._fidelity_splitwise import fewest
from benchmarks._splitwise_data import InChunks, curves, drawn_apart, slowdowns, worst_of
from benchmarks._splitwise_placers import LONGEST_QUEUE_TOKENS, MixedPool, pending_tokens

MACHINE = InterpolatedTiming(
    prompt=Curve([(100, 1.0), (200, 2.0), (400, 5.0)]), token=Curve([(100, 0.1), (200, 0.2)])
)


# ---------------------------------------------------------------------- what was published
def _row(size: int, batch: int, prompt_ms: float, **other: str) -> dict[str, str]:
    plain = {"model": "m", "hardware": "h", "tensor_parallel": "8", "token_time": "40"}
    sizes = {"prompt_size": str(size), "batch_size": str(batch), "prompt_time": str(prompt_ms)}
    return plain | sizes | other


def test_a_curve_has_the_median_of_rows_with_as_many_tokens() -> None:
    rows = [
        *(_row(100, 2, 200), _row(200, 1, 300), _row(200, 1, 310), _row(400, 1, 500)),
        *(_row(400, 1, 9, hardware="other"), _row(400, 1, 9, tensor_parallel="2")),
    ]
    found = curves(rows, "h", model="m")
    assert [found.prompt.at(tokens) for tokens in (200, 400)] == pytest.approx([0.3, 0.5])
    assert found.token.at(300) == pytest.approx(0.04)


def test_hardware_that_was_not_measured_is_said() -> None:
    with pytest.raises(KeyError, match="0 sizes of"):
        curves([_row(100, 1, 200)], "other", model="m")


def test_prompts_and_outputs_are_drawn_one_apart_from_the_other() -> None:
    seen = [TraceRequest(0.0, 10, 1), TraceRequest(0.0, 20, 2)]
    load = drawn_apart(seen, rate_per_s=4.0, requests=400, seed=1)
    pairs = {(one.prompt_tokens, one.output_tokens) for one in load.requests}
    assert pairs == {(10, 1), (10, 2), (20, 1), (20, 2)}
    assert load.rate_per_s == pytest.approx(4.0, rel=0.15)


def _outcome(ttft_s: float, e2e_s: float, tokens: int = 11, *, ok: bool = True) -> Outcome:
    return Outcome(0.0, 100, 0, tokens, ttft_s, 0.0, e2e_s, ok)


def test_a_request_alone_is_not_slowed_down() -> None:
    # Alone: 1 s to the first token, 0.1 s for each of the ten after it.
    ratios = slowdowns([_outcome(1.0, 2.0), _outcome(2.0, 4.2)], MACHINE)
    assert ratios["ttft"] == pytest.approx([1.0, 2.0])
    assert ratios["e2e"] == pytest.approx([1.0, 2.1])
    assert ratios["tbt"] == pytest.approx([1.0 / 11 / 0.1, 2.2 / 11 / 0.1])


def test_a_request_that_failed_is_infinitely_slow() -> None:
    ratios = slowdowns([_outcome(1.0, 2.0, ok=False)], MACHINE)
    assert {name: values[0] for name, values in ratios.items()} == dict.fromkeys(
        ratios, float("inf")
    )


def test_the_worst_of_nine_bounds_is_named() -> None:
    fine = {"ttft": [1.0] * 100, "tbt": [1.0] * 100, "e2e": [1.0] * 100}
    assert worst_of(fine) == (1 / 1.25, "tbt_p50")
    slow = fine | {"ttft": [1.0] * 89 + [4.5] * 11}
    assert worst_of(slow) == (1.5, "ttft_p90")


@pytest.mark.parametrize("guess", [1, 2, 7, 20, 33, 64])
@pytest.mark.parametrize("answer", [1, 5, 20, 21, 50])
def test_the_fewest_are_found_from_any_guess(guess: int, answer: int) -> None:
    asked: list[int] = []

    def enough(count: int) -> bool:
        asked.append(count)
        return count >= answer

    assert fewest(enough, guess=guess) == answer
    assert all(count > 0 for count in asked)
    assert len(asked) <= len(set(asked)) + 1


# ---------------------------------------------------------------------- its scheduler
def _view(name: str, role: Role, **fields: float) -> ReplicaView:
    facts = ReplicaFacts(
        replica_id=name,
        pool=role.value,
        role=role,
        model="m",
        engine="sim",
        engine_version="1",
        block_size_tokens=16,
        kv_blocks=1000,
        kv_block_bytes=1,
        max_len_tokens=100_000,
        max_running_requests=100,
        max_batched_tokens=2048,
        layout="one",
    )
    used = fields.get("used", 0.0)
    tokens = int(fields.get("tokens", 0))
    return ReplicaView(
        facts=facts,
        load=Load(kv_used_fraction=used),
        load_at_s=0.0,
        inflight_legs=int(fields.get("legs", bool(tokens))),
        inflight_tokens=tokens,
    )


def _place(
    placer: MixedPool, *views: ReplicaView, prompt_tokens: int = 1000
) -> tuple[str | None, str]:
    fleet = FleetView(at_s=0.0, replicas={view.replica_id: view for view in views})
    query = PlacementQuery(prompt_tokens=prompt_tokens)
    around = Surroundings(fleet=fleet, timings=None, links=None, due_at_s={})  # type: ignore[arg-type]  # not asked
    decision = placer.place(query, around)
    assert isinstance(decision, Decision)
    return decision.route.prefill_replica_id, decision.route.decode_replica_id


def test_the_shortest_queue_prefills_and_the_roomiest_machine_decodes() -> None:
    views = (
        *(_view("p0", Role.PREFILL, tokens=500), _view("p1", Role.PREFILL, tokens=400)),
        *(_view("t0", Role.DECODE, used=0.5), _view("t1", Role.DECODE, used=0.4)),
    )
    assert _place(MixedPool(), *views) == ("p1", "t1")


def test_a_machine_for_tokens_is_lent_while_all_queues_are_too_long_and_then_goes_back() -> None:
    placer = MixedPool()
    full = _view("p0", Role.PREFILL, tokens=LONGEST_QUEUE_TOKENS)
    t0, t1 = _view("t0", Role.DECODE), _view("t1", Role.DECODE, tokens=10)
    assert _place(placer, full, t0, t1) == ("t0", "t1")
    # Lent, it is the first choice for prompts while the pool is full, and none for decodes.
    lent = _view("t0", Role.DECODE, tokens=1000)
    assert _place(placer, full, lent, t1) == ("t0", "t1")
    free = _view("p0", Role.PREFILL)
    assert _place(placer, free, lent, t1) == ("p0", "t1")
    # Idle, it decodes again.
    assert _place(placer, free, t0, t1) == ("p0", "t0")


def test_a_machine_for_prompts_is_lent_when_none_for_tokens_has_room() -> None:
    views = (
        *(_view("p0", Role.PREFILL), _view("p1", Role.PREFILL, tokens=100, used=0.1)),
        _view("t0", Role.DECODE, used=0.99),
    )
    assert _place(MixedPool(), *views) == (None, "p0")


def test_an_empty_queue_takes_any_prompt() -> None:
    views = (_view("p0", Role.PREFILL), _view("t0", Role.DECODE))
    query_tokens = LONGEST_QUEUE_TOKENS + 1
    assert _place(MixedPool(), *views, prompt_tokens=query_tokens) == ("p0", "t0")


def test_pending_is_what_is_to_be_computed_and_one_for_each_decode() -> None:
    load = Load(queued_tokens=500, running_requests=7)
    view = _view("m0", Role.MIXED)
    assert (
        pending_tokens(ReplicaView(facts=view.facts, load=load, load_at_s=0, unseen_tokens=30))
        == 537
    )


def test_random_lent_machines_never_leave_the_fleet() -> None:
    rng, placer = random.Random(3), MixedPool()
    for _ in range(300):
        views = [
            _view(
                f"{role.value[0]}{n}",
                role,
                tokens=rng.choice((0, 0, 4000, 9000)),
                used=rng.random(),
            )
            for role in (Role.PREFILL, Role.DECODE)
            for n in range(3)
        ]
        prefill, decode = _place(placer, *views, prompt_tokens=rng.choice((10, 5000)))
        names = {view.replica_id for view in views}
        assert {prefill or decode, decode} <= names


def test_chunks_together_take_what_the_prompt_takes_at_once() -> None:
    chunked = InChunks(MACHINE)
    chunks = [(0, 150), (150, 150), (300, 100)]
    took_s = [
        chunked.step_s(StepBatch(prefill_tokens=tokens, prefill_context_tokens=before))
        for before, tokens in chunks
    ]
    assert sum(took_s) == pytest.approx(MACHINE.step_s(StepBatch(prefill_tokens=400)))
    alone = StepBatch(prefill_tokens=100, prefill_context_tokens=200)
    beside = StepBatch(prefill_tokens=90, prefill_context_tokens=200, decode_requests=10)
    assert chunked.step_s(beside) == pytest.approx(1.1 * chunked.step_s(alone))
    assert chunked.step_s(StepBatch(decode_requests=150)) == pytest.approx(0.15)
