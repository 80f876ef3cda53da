"""What every engine does that has a smaller budget for steps that streams wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from operator import sub

from baton.domain.fleet import StepTotals
from baton.domain.handoff import Leg, LegKind
from baton.domain.value import evolve
from tests.contracts.engine_contract import DEADLINE_S, POLL_S, EngineListener

PROMPT_TOKENS = 600
MAX_BATCHED_TOKENS = 1024
DECODE_STEP_TOKENS = 64

MakeLeg = Callable[[str, tuple[int, ...], int], Leg]
"""A leg with this id that is computed where it is, for this prompt, of so many tokens."""


async def check_smaller_chunks_beside_streams(listener: EngineListener, make_leg: MakeLeg) -> None:
    """The engine has both budgets as above, and nothing cached."""
    facts = listener.facts
    assert facts.max_batched_tokens == MAX_BATCHED_TOKENS
    assert facts.max_batched_tokens_while_decoding == DECODE_STEP_TOKENS
    alone, beside, again = (
        tuple(range(first, first + PROMPT_TOKENS)) for first in (1000, 2000, 3000)
    )
    assert (await _steps_for(listener, make_leg("alone", alone, 1))).prefill_steps == 1

    await listener.engine.submit(make_leg("stream", tuple(range(500, 510)), 1500))
    await listener.wait_started("stream")
    chunks = -(-PROMPT_TOKENS // (DECODE_STEP_TOKENS - 1))
    steps = await _steps_for(listener, make_leg("beside", beside, 1))
    assert steps.prefill_steps == chunks
    # Steps that both prefill and decode are as many as the two counts exceed the steps by.
    mixed_steps = steps.prefill_steps + steps.decode_steps - steps.steps
    assert mixed_steps == chunks, "the stream has a token of each step that computes the prompt"
    await listener.engine.abort(["stream"])

    # Its blocks are to be fetched: it ends with its first token, and nobody waits for another.
    ends = evolve(make_leg("ends", again, 1), kind=LegKind.PREFILL)
    assert (await _steps_for(listener, ends)).prefill_steps == 1


async def _steps_for(listener: EngineListener, leg: Leg) -> StepTotals:
    """What the engine did while it ran the leg; nobody else has a prompt meanwhile."""
    before = listener.engine.load().steps
    await listener.run(leg)
    after = await _totals(listener, before.prefill_tokens + len(leg.prompt_token_ids))
    return StepTotals(*map(sub, after, before))


async def _totals(listener: EngineListener, prefill_tokens: int) -> StepTotals:
    """The engine's, when they tell of so many tokens of prompts."""
    for _ in range(int(DEADLINE_S / POLL_S)):  # a report may follow its step, and no event tells
        if listener.engine.load().steps.prefill_tokens >= prefill_tokens:
            break
        await asyncio.sleep(POLL_S)
    totals = listener.engine.load().steps
    assert totals.prefill_tokens == prefill_tokens
    return totals
