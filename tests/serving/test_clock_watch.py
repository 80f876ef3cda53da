"""A wall clock that is set back has Serve's timers begun anew; any other does not."""

from __future__ import annotations

import pytest

from baton.serving.controller.deployment import ClockStepGuard
from baton.serving.scaling.ports import TickInputs
from tests.serving.scaled_fleet import Clock

HOUR_S = 3600.0
LOOKS = TickInputs()


class Machine:
    """Two clocks, and what was done about them."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.step_s = 0.0
        self.begun_anew = 0
        self.fails = False
        self.watch = ClockStepGuard(self.clock, self._wall, self._begin_anew)

    def _wall(self) -> float:
        return 1e9 + self.clock.at_s + self.step_s

    async def _begin_anew(self) -> None:
        if self.fails:
            raise ConnectionError("no Serve")
        self.begun_anew += 1

    async def turn(self, *, step_s: float = 0.0) -> int:
        """Two seconds later, after a step of the wall clock: how often Serve was begun anew."""
        self.clock.at_s += 2.0
        self.step_s += step_s
        await self.watch.on_tick(LOOKS)
        return self.begun_anew


async def test_a_clock_that_is_set_back_begins_serves_timers_anew_once() -> None:
    machine = Machine()
    assert await machine.turn() == 0
    assert await machine.turn(step_s=-HOUR_S) == 1
    assert await machine.turn() == 1
    assert await machine.turn(step_s=-HOUR_S) == 2


@pytest.mark.parametrize("step_s", [HOUR_S, 0.5, -0.5])
async def test_a_clock_that_is_set_forward_or_slewed_does_not(step_s: float) -> None:
    assert await Machine().turn(step_s=step_s) == 0


async def test_what_failed_is_tried_again() -> None:
    machine = Machine()
    machine.fails = True
    with pytest.raises(ConnectionError):
        await machine.turn(step_s=-HOUR_S)
    machine.fails = False
    assert await machine.turn() == 1
