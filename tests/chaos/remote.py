"""A part of a stage in a process of its own, and the hand that holds it.

The process carries out orders that come over a pipe, one at a time, and ends when it is told to or
when its owner is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import cast

START_S = 30.0
_ANSWER_S = 10.0
_END_S = 10.0
STOP = "stop"
"""The order to end, which every part knows."""

_PRELOADED = ["tests.chaos.replica_process", "tests.chaos.ingress_process"]
"""What processes are forked from, so that they start in milliseconds."""

CarryOut = Callable[[str, object], object]
"""Carries out an order by name, with its value; what it returns is the answer."""


class GoneError(Exception):
    """A process has ended, or does not answer."""


async def obey(orders: Connection, told: object, carry_out: CarryOut) -> None:
    """In the process: say what there is to know of it, then carry out orders to the last."""
    orders.send((0, told))
    while True:
        await _readable(orders)
        try:
            number, what, value = orders.recv()
        except (EOFError, OSError):
            return  # its owner is gone
        orders.send((number, None if what == STOP else carry_out(what, value)))
        if what == STOP:
            return


async def _readable(connection: Connection) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection.fileno())


class Remote:
    """A process, as its owner sees it. `serve` runs there, with `plan` and its end of a pipe."""

    def __init__(self, name: str, serve: Callable[..., None], plan: object) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.name = name
        self.pid = 0
        self._orders, self._theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(plan, self._theirs), daemon=True)
        self._turn = asyncio.Lock()
        self._number = 0
        """Of the last order: answers to earlier ones, that nobody waits for any more, are late."""

    @property
    def alive(self) -> bool:
        """Whether its process runs, or stands still."""
        return self._process.is_alive()

    async def begin(self) -> object:
        """Run; returns what it says of itself once it serves."""
        self._process.start()
        self._theirs.close()  # so that its end is seen here
        self.pid = self._process.pid or 0
        return await self._answer(START_S)

    async def order(
        self, order: str, value: object = None, *, within_s: float = _ANSWER_S
    ) -> object:
        """Have it do something, and get what it answers.

        Raises:
            GoneError: it has ended, or stands still.
        """
        async with self._turn:
            self._number += 1
            try:
                self._orders.send((self._number, order, value))
            except OSError as error:
                raise GoneError(f"{self.name} has ended: {error}") from error
            return await self._answer(within_s)

    async def held(self) -> dict[str, float]:
        """What it holds for anybody."""
        return cast("dict[str, float]", await self.order("held"))

    async def end(self) -> None:
        """End it, in good order where it can."""
        if self._process.pid is not None:
            try:
                await self.order(STOP, within_s=_END_S)
            except GoneError:
                self._process.kill()
            await asyncio.to_thread(self._process.join, _END_S)
            if self._process.is_alive():
                self._process.kill()
                await asyncio.to_thread(self._process.join, _END_S)
        self._orders.close()

    async def _answer(self, within_s: float) -> object:
        try:
            async with asyncio.timeout(within_s):
                while True:
                    await _readable(self._orders)
                    number, answer = self._orders.recv()
                    if number == self._number:
                        return cast("object", answer)
        except (EOFError, OSError) as error:
            why = f"{self.name} (process {self.pid}) does not answer: {error!r}"
            raise GoneError(why) from error
