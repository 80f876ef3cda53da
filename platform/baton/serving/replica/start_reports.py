"""What processes say of their start, for `baton up` to show before they can be asked anything.

Theory of operation. A replica that starts answers nobody. What it does meanwhile it writes into the
store of Ray's head, under its deployment and node, so that there is never more than one line of
each; it takes the line away when it is done. A number goes up with every line: a line whose number
stands still is of a process that was killed, and is not shown. What can only fail again is written
under another name, and ends `baton up` at once, while Ray Serve would go on trying.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import NamedTuple

from baton.domain.errors import EngineStartFailed
from baton.serving.store.config_store import HeadStore, Store
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_DOING = "start/doing/"
_FAILED = "start/failed/"
_SHOWN_EVERY_S = 4.0
"""With a look a second, no silence is longer than 5 s."""
_LOOKED_EVERY_S = 1.0
_STALE_S = 20.0
"""A process that lives says something every few seconds."""


class StartReporter:
    """Says what one process does while it starts; calls block for milliseconds."""

    def __init__(self, deployment: str, node: str, store: Store | None = None) -> None:
        self._who = f"{deployment}@{node}"
        self._node = node
        self._store = store or HeadStore()
        self._number = 0

    def doing(self, what: str) -> None:
        """It does this now: a few words, as `downloading org/model: 3.1 of 16.1 GB`."""
        self._number += 1
        told = {"node": self._node, "what": what, "number": self._number}
        self._write(_DOING, told)

    def failed(self, error: EngineStartFailed) -> None:
        """It does not start, nor will the next one."""
        self._write(_FAILED, {"node": self._node, "why": error.why, "remedy": error.remedy})

    def done(self) -> None:
        """There is nothing to show any more."""
        if self._number:
            self._safely(lambda: self._store.delete(_DOING + self._who))

    def _write(self, kind: str, told: dict[str, object]) -> None:
        data = json.dumps(told).encode()
        self._safely(lambda: self._store.put(kind + self._who, data, overwrite=True))

    def _safely(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a boundary: what is only shown may be missing
            fields = {"who": self._who, "why": f"{type(error).__name__}: {error}"}
            log_event(_LOGGER, logging.WARNING, "start_not_reported", fields)


class _Line(NamedTuple):
    text: str
    number: int
    since_s: float


class StartWatch:
    """Shows what processes say of their start, and ends a start that cannot come to anything."""

    def __init__(self, show: Callable[[str], None], store: Store | None = None) -> None:
        self._show = show
        self._store = store or HeadStore()
        self._lines: dict[str, _Line] = {}
        self._looked_at_s = float("-inf")
        self._shown_at_s = float("-inf")

    def look(self, now_s: float) -> None:
        """Show what is new, every few seconds; as often as wanted.

        Raises:
            EngineStartFailed: a process has said that it cannot start.
        """
        if now_s - self._looked_at_s < _LOOKED_EVERY_S:
            return
        self._looked_at_s = now_s
        for key in self._store.keys(_FAILED):
            if (data := self._store.get(key)) is not None:
                told = json.loads(data)
                raise EngineStartFailed(f"{told['why']}, on node {told['node']}", told["remedy"])
        self._lines = dict(self._read(now_s))
        live = [line for line in self._lines.values() if now_s - line.since_s < _STALE_S]
        if live and now_s - self._shown_at_s >= _SHOWN_EVERY_S:
            self._shown_at_s = now_s
            for text in dict.fromkeys(line.text for line in live):
                self._show(text)

    def _read(self, now_s: float) -> dict[str, _Line]:
        found = {}
        for key in sorted(self._store.keys(_DOING)):
            if (data := self._store.get(key)) is None:
                continue
            told = json.loads(data)
            number, before = int(told["number"]), self._lines.get(key)
            since_s = now_s if before is None or before.number != number else before.since_s
            text = f"{told['what']}, on node {told['node']}"
            found[key] = _Line(text=text, number=number, since_s=since_s)
        return found
