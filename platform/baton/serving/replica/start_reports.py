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
_PROGRESS_PREFIX = "start/doing/"
_FAILURE_PREFIX = "start/failed/"
_DISPLAY_PERIOD_S = 4.0
"""With a look a second, no silence is longer than 5 s."""
_POLL_PERIOD_S = 1.0
_STALE_S = 20.0
"""A process that lives says something every few seconds."""


class StartReporter:
    """Says what one process does while it starts; calls block for milliseconds."""

    def __init__(self, deployment: str, node: str, store: Store | None = None) -> None:
        self._source_id = f"{deployment}@{node}"
        self._node = node
        self._store = store or HeadStore()
        self._sequence = 0

    def progress(self, activity: str) -> None:
        """It does this now: a few words, as `downloading org/model: 3.1 of 16.1 GB`."""
        self._sequence += 1
        fields = {"node": self._node, "what": activity, "number": self._sequence}
        self._write(_PROGRESS_PREFIX, fields)

    def failed(self, error: EngineStartFailed) -> None:
        """It does not start, nor will the next one."""
        self._write(_FAILURE_PREFIX, {"node": self._node, "why": error.why, "remedy": error.remedy})

    def done(self) -> None:
        """There is nothing to show any more."""
        if self._sequence:
            self._log_errors(lambda: self._store.delete(_PROGRESS_PREFIX + self._source_id))

    def _write(self, kind: str, fields: dict[str, object]) -> None:
        data = json.dumps(fields).encode()
        self._log_errors(lambda: self._store.put(kind + self._source_id, data, overwrite=True))

    def _log_errors(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a boundary: what is only shown may be missing
            fields = {"who": self._source_id, "why": f"{type(error).__name__}: {error}"}
            log_event(_LOGGER, logging.WARNING, "start_not_reported", fields)


class _ProgressLine(NamedTuple):
    text: str
    sequence: int
    changed_at_s: float


class StartWatch:
    """Shows what processes say of their start, and ends a start that cannot come to anything."""

    def __init__(self, show: Callable[[str], None], store: Store | None = None) -> None:
        self._show = show
        self._store = store or HeadStore()
        self._lines: dict[str, _ProgressLine] = {}
        self._polled_at_s = float("-inf")
        self._shown_at_s = float("-inf")

    def poll(self, now_s: float) -> None:
        """Show what is new, every few seconds; as often as wanted.

        Raises:
            EngineStartFailed: a process has said that it cannot start.
        """
        if now_s - self._polled_at_s < _POLL_PERIOD_S:
            return
        self._polled_at_s = now_s
        for key in self._store.keys(_FAILURE_PREFIX):
            if (data := self._store.get(key)) is not None:
                failure = json.loads(data)
                raise EngineStartFailed(
                    f"{failure['why']}, on node {failure['node']}", failure["remedy"]
                )
        self._lines = dict(self._read_lines(now_s))
        live_lines = [line for line in self._lines.values() if now_s - line.changed_at_s < _STALE_S]
        if live_lines and now_s - self._shown_at_s >= _DISPLAY_PERIOD_S:
            self._shown_at_s = now_s
            for text in dict.fromkeys(line.text for line in live_lines):
                self._show(text)

    def _read_lines(self, now_s: float) -> dict[str, _ProgressLine]:
        lines = {}
        for key in sorted(self._store.keys(_PROGRESS_PREFIX)):
            if (data := self._store.get(key)) is None:
                continue
            fields = json.loads(data)
            number, previous = int(fields["number"]), self._lines.get(key)
            changed_at_s = (
                now_s if previous is None or previous.sequence != number else previous.changed_at_s
            )
            text = f"{fields['what']}, on node {fields['node']}"
            lines[key] = _ProgressLine(text=text, sequence=number, changed_at_s=changed_at_s)
        return lines
