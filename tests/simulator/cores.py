"""Cores, legs and steps for the tests of the simulated engine without a clock."""

from __future__ import annotations

from baton.domain.handoff import KvHandle, Leg, LegKind, LegOutput
from baton.domain.value import evolve
from baton.engine.sim import SimSettings, expected_tokens
from baton.engine.sim.engine import decode_kv_handle, encode_kv_handle
from baton.simulator.engine.commands import SimKvHandle, StartPull
from baton.simulator.engine.core import SimCore

SETTINGS = SimSettings(
    max_len_tokens=200,
    block_size_tokens=4,
    kv_blocks=50,
    max_running_requests=4,
    max_waiting_requests=3,
    max_batched_tokens=16,
)
PROMPT = tuple(range(3, 33))


def new_core(settings: SimSettings = SETTINGS, engine_id: str = "e0") -> SimCore:
    return SimCore(
        settings,
        engine_id=engine_id,
        model="tiny",
        address="nowhere:1",
        encode_kv_handle=encode_kv_handle,
    )


def local_leg(leg_id: str, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 1) -> Leg:
    return Leg(
        leg_id=leg_id,
        request_id="r",
        kind=LegKind.LOCAL,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
    )


def salted_leg(leg_id: str, salt: str | None, prompt: tuple[int, ...] = PROMPT) -> Leg:
    return evolve(local_leg(leg_id, prompt), cache_salt=salt)


def decode_leg(
    leg_id: str, ticket: KvHandle, max_tokens: int = 3, prompt: tuple[int, ...] = PROMPT
) -> tuple[Leg, SimKvHandle]:
    leg = evolve(local_leg(leg_id, prompt, max_tokens), kind=LegKind.DECODE, kv_handle=ticket)
    return leg, decode_kv_handle(ticket)


def run_until_idle(core: SimCore, now_s: float = 0.0) -> list[LegOutput]:
    """Step until there is nothing to do; the outputs in order."""
    outputs: list[LegOutput] = []
    while (step := core.begin_step(now_s)) is not None:
        now_s += step.duration_s
        outputs += core.finish_step(now_s)
        core.check_integrity()
    return outputs


def run_prefill(core: SimCore, leg_id: str = "p", prompt: tuple[int, ...] = PROMPT) -> KvHandle:
    assert core.add(evolve(local_leg(leg_id, prompt), kind=LegKind.PREFILL)) is None
    (output,) = run_until_idle(core)
    assert output.kv_handle is not None
    return output.kv_handle


def tokens_of(outputs: list[LegOutput], leg_id: str) -> tuple[int, ...]:
    return tuple(token for out in outputs if out.leg_id == leg_id for token in out.token_ids)


def expected(max_tokens: int, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    """The tokens that a prompt goes on with."""
    return expected_tokens(prompt, max_tokens, model="tiny", settings=SETTINGS)


def pulled_tokens(
    leg: Leg, ticket: SimKvHandle, *, kept: bool = True, settings: SimSettings = SETTINGS
) -> tuple[int, ...]:
    """The tokens of a decode leg on an engine of its own, once it has its blocks."""
    core = new_core(settings, "target")
    assert core.add(leg, ticket) is None
    assert core.begin_step(0.0) is None
    (order,) = (command for command in core.pop_commands() if isinstance(command, StartPull))
    assert core.pull_done(leg.leg_id, blocks=order.blocks, duration_s=0.1, source_kept=kept) is None
    return tokens_of(run_until_idle(core), leg.leg_id)
