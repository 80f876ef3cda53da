"""Settings with which a counted engine could not work."""

from __future__ import annotations

import pytest

from baton.simulator.v1.settings import Scheduling
from tests.simulator.v1_cores import SETTINGS, with_changes


@pytest.mark.parametrize("tokens", [0, 3, 17])
def test_a_budget_beside_streams_has_a_token_for_each_and_is_not_the_larger_one(
    tokens: int,
) -> None:
    wanted = (
        rf"^simulated engine: max_batched_tokens_while_decoding is {tokens}, expected from"
        r" max_running_requests=4"
        r" to max_batched_tokens=16$"
    )
    with pytest.raises(ValueError, match=wanted):
        with_changes(SETTINGS, max_batched_tokens_while_decoding=tokens)


@pytest.mark.parametrize("tokens", [None, 4, 16])
def test_a_budget_beside_streams_may_be_as_small_as_their_number_and_as_large_as_the_other(
    tokens: int | None,
) -> None:
    assert (
        with_changes(
            SETTINGS, max_batched_tokens_while_decoding=tokens
        ).max_batched_tokens_while_decoding
        == tokens
    )


def test_an_engine_that_cuts_no_prompt_has_no_budget_beside_streams() -> None:
    whole = with_changes(SETTINGS, scheduling=Scheduling.PREFILL_FIRST)
    wanted = (
        "^simulated engine: max_batched_tokens_while_decoding is 8, expected none with"
        " scheduling 'prefill_first',"
        " which cuts no prompt: leave one of them out$"
    )
    with pytest.raises(ValueError, match=wanted):
        with_changes(whole, max_batched_tokens_while_decoding=8)
