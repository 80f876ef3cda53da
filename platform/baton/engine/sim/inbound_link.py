"""The time that pulls into one simulated engine take, in real time; they share its interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from baton.simulator.engine.settings import SimSettings
from baton.simulator.network.network import Network

_TARGET = "into"
_SOURCE = "out of the source"


class InboundLink:
    """One engine's interface, inwards.

    What a source sends to others is not known here, so only the pulls of this engine share.
    """

    def __init__(self, settings: SimSettings) -> None:
        self._setup_s = settings.transfer_setup_s / settings.speed
        self._network = Network(share=settings.share_bandwidth)
        for name in (_TARGET, _SOURCE):
            self._network.connect(name, settings.wire_bytes_per_s)
        self._arrivals: dict[str, asyncio.Event] = {}
        self._keys = count()
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def transfer(self, moved_bytes: int, *, slowdown: float) -> AsyncIterator[asyncio.Event]:
        """Begin to move bytes; the event is set when they are here."""
        loop = asyncio.get_running_loop()
        key, arrived = str(next(self._keys)), asyncio.Event()
        setup = loop.call_later(
            self._setup_s * slowdown, self._begin_transfer, key, moved_bytes * slowdown, arrived
        )
        try:
            yield arrived
        finally:
            setup.cancel()
            if self._arrivals.pop(key, None) is not None:
                self._network.end(key, loop.time())
                self._set_timer()

    def _begin_transfer(self, key: str, moved_bytes: float, arrived: asyncio.Event) -> None:
        self._arrivals[key] = arrived
        now_s = asyncio.get_running_loop().time()
        self._network.begin(
            key, source_id=_SOURCE, target_id=_TARGET, moved_bytes=moved_bytes, now_s=now_s
        )
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        at_s = self._network.next_done_at_s()
        loop = asyncio.get_running_loop()
        self._timer = None if at_s is None else loop.call_at(at_s, self._on_timer)

    def _on_timer(self) -> None:
        for key in self._network.pop_done(asyncio.get_running_loop().time()):
            self._arrivals.pop(key).set()
        self._set_timer()
