"""Pulls of the simulated engine: how many at a time, and leases that are renewed or lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.request import FinishReason
from baton.engine.sim import OnTransferFailure
from baton.simulator.engine.commands import FreeSource, StartPull
from baton.simulator.engine.core import SimCore
from tests.simulator.cores import (
    PROMPT,
    SETTINGS,
    decode_leg,
    expected,
    local_leg,
    new_core,
    pulled_tokens,
    run_prefill,
    run_until_idle,
    tokens_of,
)

ONE = replace(SETTINGS, max_pulls=1, max_waiting_requests=9, side_channel_deadline_s=2.0)


def prompt(number: int) -> tuple[int, ...]:
    """A prompt of four blocks that no other has the first block of."""
    return (40 + number, *PROMPT[1:16])


def with_pulls(core: SimCore, *numbers: int) -> None:
    for number in numbers:
        ticket = run_prefill(new_core(), f"p{number}", prompt(number))
        assert core.add(*decode_leg(f"d{number}", ticket, prompt=prompt(number))) is None


def pulls(core: SimCore) -> list[str]:
    """The pulls that the core has begun since this was last asked."""
    return [order.leg_id for order in core.pop_commands() if isinstance(order, StartPull)]


# ---------------------------------------------------------------------- how many at a time
def test_legs_beyond_the_limit_wait_and_others_pass_them() -> None:
    core = new_core(ONE)
    with_pulls(core, 0, 1, 2)
    core.add(local_leg("passes"))
    outputs = run_until_idle(core)
    assert pulls(core) == ["d0"]
    assert tokens_of(outputs, "passes") == expected(1)
    load = core.load()
    assert (load.pulling_requests, load.queued_requests) == (1, 2)


def test_the_next_leg_pulls_when_the_blocks_of_one_are_there_in_order_of_arrival() -> None:
    core = new_core(ONE)
    with_pulls(core, 0, 1, 2)
    for number in range(3):
        assert core.begin_step(0.0) is None
        assert pulls(core) == [f"d{number}"]
        core.pull_done(f"d{number}", blocks=4, duration_s=0.1, source_kept=True)
        outputs = run_until_idle(core)
        assert tokens_of(outputs, f"d{number}") == expected(3, prompt(number))


def test_a_failed_pull_and_an_aborted_one_let_the_next_leg_pull() -> None:
    core = new_core(ONE)
    with_pulls(core, 0, 1, 2)
    core.begin_step(0.0)
    core.pull_failed("d0")
    core.abort(["d0"])
    core.begin_step(0.0)
    core.abort(["d1"])
    core.begin_step(0.0)
    assert pulls(core) == ["d0", "d1", "d2"]


def test_a_pull_that_never_ends_holds_up_the_others_for_a_while_only() -> None:
    core = new_core(ONE)
    with_pulls(core, 0, 1)
    core.begin_step(0.0)
    assert core.next_expiry_s == 2.0  # so that somebody looks again
    assert core.begin_step(1.9) is None
    assert pulls(core) == ["d0"]
    core.begin_step(2.0)
    assert pulls(core) == ["d1"]


def test_a_leg_that_is_aborted_while_it_waits_frees_its_source_and_never_pulls() -> None:
    core = new_core(ONE)
    with_pulls(core, 0, 1)
    core.begin_step(0.0)
    core.pop_commands()
    core.abort(["d1"])
    freed = [
        order.kv_handle.leg_id for order in core.pop_commands() if isinstance(order, FreeSource)
    ]
    assert freed == ["p1"]
    core.pull_done("d0", blocks=4, duration_s=0.1, source_kept=True)
    run_until_idle(core)
    assert pulls(core) == []


# ---------------------------------------------------------------------- leases
def test_the_leases_of_legs_that_wait_or_pull_are_to_be_renewed_and_no_others() -> None:
    core = new_core(ONE)
    with_pulls(core, 0, 1)
    core.add(local_leg("l"))
    assert [ticket.leg_id for ticket in core.pending_kv_handles()] == ["p0", "p1"]
    run_until_idle(core)
    core.pull_done("d0", blocks=4, duration_s=0.1, source_kept=True)
    assert [ticket.leg_id for ticket in core.pending_kv_handles()] == ["p1"]
    core.abort(["d1"])
    assert core.pending_kv_handles() == ()


def test_a_renewed_lease_lasts_two_thirds_longer_from_then_on_and_never_ends_sooner() -> None:
    source = new_core(replace(SETTINGS, lease_s=30.0))
    run_prefill(source, "p")
    source.renew("p", 1.0)
    assert source.is_leased("p", 29.9)
    source.renew("p", 29.9)
    assert source.is_leased("p", 49.8)
    assert not source.is_leased("p", 49.95)
    source.renew("p", 50.0)  # what is lost stays lost
    assert not source.is_leased("p", 50.0)
    source.check_integrity()


def test_a_lease_that_is_renewed_does_not_keep_an_older_one() -> None:
    source = new_core(replace(SETTINGS, lease_s=30.0))
    run_prefill(source, "a", prompt(0))
    run_prefill(source, "b", prompt(1))
    source.renew("a", 20.0)
    assert not source.is_leased("b", 31.0)
    assert source.is_leased("a", 31.0)
    assert source.load().transfers.expired_leases == 1


@pytest.mark.parametrize("kept", [True, False])
def test_blocks_that_their_source_has_not_kept_are_not_decoded_from(kept: bool) -> None:  # noqa: FBT001
    leg, ticket = decode_leg("d", run_prefill(new_core()))
    assert pulled_tokens(leg, ticket, kept=kept) == expected(3)
    core = new_core()
    core.add(leg, ticket)
    core.begin_step(0.0)
    core.pull_done("d", blocks=8, duration_s=0.1, source_kept=kept)
    outputs = run_until_idle(core)
    totals = core.load().transfers
    assert (totals.pulls, totals.failures, totals.invalidated_pulls) == (1, 0, not kept)
    assert outputs[0].cached_tokens == (len(PROMPT) - 1 if kept else 0)


def test_lost_blocks_end_the_leg_where_nothing_is_to_be_computed_again() -> None:
    leg, ticket = decode_leg("d", run_prefill(new_core()))
    core = new_core(replace(SETTINGS, on_transfer_failure=OnTransferFailure.FAIL))
    core.add(leg, ticket)
    core.begin_step(0.0)
    output = core.pull_done("d", blocks=8, duration_s=0.1, source_kept=False)
    assert output is not None
    assert output.finish is FinishReason.ERROR
    assert core.load().transfers.invalidated_pulls == 1
