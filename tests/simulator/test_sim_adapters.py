"""LoRA adapters in the simulated engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.handoff import Leg, LegFailure, LegKind
from baton.domain.value import evolve
from baton.simulator.engine.core import SimCore
from baton.simulator.engine.tokens import expected_tokens, model_key
from tests.simulator.cores import (
    PROMPT,
    SETTINGS,
    decode_leg,
    local_leg,
    new_core,
    pulled_tokens,
    run_until_idle,
    tokens_of,
)

ROOM = replace(SETTINGS, adapter_slots=2, adapters_per_batch=1, adapter_load_s=0.5)


def adapted(leg_id: str, adapter: str | None, *, max_tokens: int = 1) -> Leg:
    return evolve(local_leg(leg_id, max_tokens=max_tokens), adapter=adapter)


def first_step_s(core: SimCore, leg: Leg) -> float:
    assert core.add(leg) is None
    step = core.begin_step(0.0)
    assert step is not None
    core.finish_step(step.duration_s)
    run_until_idle(core)
    return step.duration_s


def test_the_first_leg_with_an_adapter_waits_for_it_and_the_next_does_not() -> None:
    core = new_core(ROOM)
    cold_s = first_step_s(core, adapted("a", "ada"))
    core.reset_cache()
    warm_s = first_step_s(core, adapted("b", "ada"))
    assert cold_s - warm_s == pytest.approx(0.5)
    told = core.load().adapters
    assert (told.loaded, told.hits, told.loads, told.loading_s) == (("ada",), 1, 1, 0.5)


def test_loading_is_no_part_of_what_steps_take() -> None:
    core = new_core(ROOM)
    cold_s = first_step_s(core, adapted("a", "ada"))
    assert core.load().steps.busy_s < cold_s - 0.4


def test_an_adapter_changes_what_is_generated() -> None:
    core = new_core(ROOM)
    for leg_id, adapter in (("none", None), ("one", "ada"), ("two", "bob")):
        core.add(adapted(leg_id, adapter, max_tokens=6))
        found = tokens_of(run_until_idle(core), leg_id)
        wanted = expected_tokens(PROMPT, 6, model=model_key("tiny", adapter), settings=ROOM)
        assert found == wanted
    assert model_key("tiny", "ada") != model_key("tiny", "bob") != model_key("tiny", None)


def test_prefixes_of_adapters_are_never_shared() -> None:
    core = new_core(ROOM)
    for leg_id, adapter in (("a", None), ("b", "ada"), ("c", "bob")):
        core.add(adapted(leg_id, adapter))
        (output,) = run_until_idle(core)
        assert output.cached_tokens == 0
    core.add(adapted("d", "ada"))
    (output,) = run_until_idle(core)
    assert output.cached_tokens == 28


def test_no_more_adapters_run_together_than_fit_and_others_pass_those_that_wait() -> None:
    core = new_core(ROOM)
    for leg_id, adapter in (("a", "ada"), ("b", "bob"), ("c", None)):
        assert core.add(adapted(leg_id, adapter, max_tokens=4)) is None
    ends = [output.leg_id for output in run_until_idle(core) if output.finish is not None]
    assert ends == ["a", "c", "b"]


def test_a_handoff_between_two_adapters_is_decoded_from_as_by_any_engine() -> None:
    prefill = new_core(ROOM, "p")
    prefill.add(evolve(adapted("p", "ada"), kind=LegKind.PREFILL))
    (output,) = run_until_idle(prefill)
    assert output.kv_handle is not None
    leg, ticket = decode_leg("d", output.kv_handle)
    for adapter, alike in (("bob", False), ("ada", True)):
        tokens = pulled_tokens(evolve(leg, adapter=adapter), ticket, settings=ROOM)
        alone = expected_tokens(PROMPT, 3, model=model_key("tiny", adapter), settings=ROOM)
        assert (tokens == alone) is alike


def test_an_engine_without_room_for_adapters_refuses_them() -> None:
    assert new_core().add(adapted("a", "ada")) is LegFailure.REJECTED


def test_cache_events_name_the_adapter() -> None:
    core = new_core(ROOM)
    core.add(adapted("a", "ada"))
    run_until_idle(core)
    assert {getattr(event, "adapter", None) for event in core.pop_events()} == {"ada"}
