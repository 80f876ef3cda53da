"""Simulated engines and fleets in which whoever prefills gives the first token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.control.state.limits import CoordinatorLimits
from baton.domain.fleet import Role
from baton.domain.handoff import LegKind
from baton.domain.request import FinishReason
from baton.domain.value import evolve
from baton.policy.placement.port import Disaggregate
from baton.simulator.scenario import simulate
from tests.simulator import cores, v1_cores
from tests.simulator.scenes import pool, scenario, trace


def test_the_token_that_is_given_is_the_one_that_decode_would_have_drawn() -> None:
    core, other = cores.new_core(), cores.new_core(engine_id="d")
    alone = cores.new_core(engine_id="m")
    alone.add(cores.local_leg("a", max_tokens=4))
    whole = cores.tokens_of(cores.run_until_idle(alone), "a")
    core.add(evolve(cores.local_leg("p"), kind=LegKind.PREFILL, emits_first_token=True))
    (first,) = cores.run_until_idle(core)
    assert first.token_ids == whole[:1]
    assert first.kv_handle is not None
    assert first.kv_handle.tokens == len(cores.PROMPT)
    leg, ticket = cores.decode_leg("b", first.kv_handle, 3, (*cores.PROMPT, *first.token_ids))
    assert other.add(evolve(leg, resumed_tokens=1), ticket) is None


@pytest.mark.parametrize("gives_token", [False, True])
def test_only_a_token_that_is_given_may_be_the_last(*, gives_token: bool) -> None:
    core = cores.new_core(replace(cores.SETTINGS, eos_probability=1.0))
    core.add(evolve(cores.local_leg("p"), kind=LegKind.PREFILL, emits_first_token=gives_token))
    (output,) = cores.run_until_idle(core)
    assert output.finish is (FinishReason.STOP if gives_token else FinishReason.LENGTH)
    assert (output.kv_handle is None) is gives_token
    assert core.is_leased("p", 0.0) is not gives_token


@pytest.mark.parametrize(("output", "last"), [(1, True), (2, False)])
def test_a_counted_engine_knows_which_first_token_is_the_last(output: int, *, last: bool) -> None:
    core = v1_cores.new_core()
    leg = v1_cores.leg("p", output=output, kind=LegKind.PREFILL)
    core.add(evolve(leg, emits_first_token=True))
    told = v1_cores.run_until_idle(core)[-1][1]
    assert told.finish is (FinishReason.STOP if last else FinishReason.LENGTH)
    assert (told.kv_handle is None) is last


def test_first_tokens_come_sooner_and_answers_are_as_long() -> None:
    load = trace(150, rate_per_s=15.0)
    late, early = (
        simulate(
            scenario(
                pool(Role.PREFILL, 2),
                pool(Role.DECODE, 3),
                disaggregate=Disaggregate.ALWAYS,
                limits=CoordinatorLimits(early_first_token=early),
            ),
            load,
        )
        for early in (False, True)
    )
    assert all(outcome.ok for outcome in (*late.outcomes, *early.outcomes))
    assert [outcome.output_tokens for outcome in early.outcomes] == [
        outcome.output_tokens for outcome in late.outcomes
    ]
    assert late.handoffs >= early.handoffs > 100, "a first token that is the last moves nothing"
    sooner = [b.ttft_s < a.ttft_s for a, b in zip(late.outcomes, early.outcomes, strict=True)]
    assert sum(sooner) > 0.9 * len(sooner)
