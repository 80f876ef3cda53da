"""A part of a stage in a process of its own, and the hand that holds it.

The process carries out orders that come over a pipe, one at a time, and ends at an order or
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

_PRELOADED_MODULES = ["tests.chaos.replica_process", "tests.chaos.ingress_process"]
"""What processes are forked from, so that they start in milliseconds."""

CommandHandler = Callable[[str, object], object]
"""Carries out an order by name, with its value; what it returns is the answer."""


class GoneError(Exception):
    """A process has ended, or does not answer."""


async def serve_commands(
    commands: Connection, first_answer: object, handle: CommandHandler
) -> None:
    """In the process: say what there is to know of it, then carry out orders to the last."""
    commands.send((0, first_answer))
    while True:
        await _readable(commands)
        try:
            number, command, value = commands.recv()
        except (EOFError, OSError):
            return  # its owner is gone
        commands.send((number, None if command == STOP else handle(command, value)))
        if command == STOP:
            return


async def _readable(connection: Connection) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection.fileno())


class RemoteProcess:
    """A process, as its owner sees it. `serve` runs there, with `plan` and its end of a pipe."""

    def __init__(self, name: str, serve: Callable[..., None], plan: object) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED_MODULES)
        self.name = name
        self.pid = 0
        self._commands, self._child_end = context.Pipe()
        self._process = context.Process(target=serve, args=(plan, self._child_end), daemon=True)
        self._lock = asyncio.Lock()
        self._number = 0
        """Of the last order: answers to earlier ones, whose callers are gone, are late."""

    @property
    def is_alive(self) -> bool:
        """Whether its process runs, or stands still."""
        return self._process.is_alive()

    async def start_process(self) -> object:
        """Run; returns what it says of itself once it serves."""
        self._process.start()
        self._child_end.close()  # so that its end is seen here
        self.pid = self._process.pid or 0
        return await self._wait_answer(START_S)

    async def send_command(
        self, command: str, value: object = None, *, timeout_s: float = _ANSWER_S
    ) -> object:
        """Have it do something, and get what it answers.

        Raises:
            GoneError: it has ended, or stands still.
        """
        async with self._lock:
            self._number += 1
            try:
                self._commands.send((self._number, command, value))
            except OSError as error:
                raise GoneError(f"{self.name} has ended: {error}") from error
            return await self._wait_answer(timeout_s)

    async def held_resources(self) -> dict[str, float]:
        """What it holds for anybody."""
        return cast("dict[str, float]", await self.send_command("held"))

    async def end(self) -> None:
        """End it, in good order where it can."""
        if self._process.pid is not None:
            try:
                await self.send_command(STOP, timeout_s=_END_S)
            except GoneError:
                self._process.kill()
            await asyncio.to_thread(self._process.join, _END_S)
            if self._process.is_alive():
                self._process.kill()
                await asyncio.to_thread(self._process.join, _END_S)
        self._commands.close()

    async def _wait_answer(self, timeout_s: float) -> object:
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await _readable(self._commands)
                    number, answer = self._commands.recv()
                    if number == self._number:
                        return cast("object", answer)
        except (EOFError, OSError) as error:
            reason = f"{self.name} (process {self.pid}) does not answer: {error!r}"
            raise GoneError(reason) from error
