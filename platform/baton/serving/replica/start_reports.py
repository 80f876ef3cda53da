"""Progress of starting processes, for `baton up`.

Theory of operation. A process that starts cannot answer calls. It writes its progress into the
store of Ray's head, one line per deployment and node, and deletes the line at the end. Each line
has a number that increases; a line with a constant number is of a killed process, and is not shown.
A permanent failure goes under another name and ends `baton up`, while Ray Serve would retry.
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
"""With one poll per second, output appears every 5 s at least."""
_POLL_PERIOD_S = 1.0
_STALE_S = 20.0
"""A live process writes every few seconds."""


class StartReporter:
    """Reports one process' start; calls block for milliseconds."""

    def __init__(self, deployment: str, node: str, store: Store | None = None) -> None:
        self._source_id = f"{deployment}@{node}"
        self._node = node
        self._store = store or HeadStore()
        self._sequence = 0

    def progress(self, activity: str) -> None:
        """Report an activity in a few words, as `downloading org/model: 3.1 of 16.1 GB`."""
        self._sequence += 1
        fields = {"node": self._node, "what": activity, "number": self._sequence}
        self._write(_PROGRESS_PREFIX, fields)

    def failed(self, error: EngineStartFailed) -> None:
        """Report a permanent failure."""
        self._write(
            _FAILURE_PREFIX, {"node": self._node, "reason": error.why, "remedy": error.remedy}
        )

    def done(self) -> None:
        """Delete the progress line."""
        if self._sequence:
            self._log_errors(lambda: self._store.delete(_PROGRESS_PREFIX + self._source_id))

    def _write(self, kind: str, fields: dict[str, object]) -> None:
        data = json.dumps(fields).encode()
        self._log_errors(lambda: self._store.put(kind + self._source_id, data, overwrite=True))

    def _log_errors(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a boundary: progress is only shown
            fields = {"who": self._source_id, "reason": f"{type(error).__name__}: {error}"}
            log_event(_LOGGER, logging.WARNING, "start_not_reported", fields)


class _ProgressLine(NamedTuple):
    text: str
    sequence: int
    changed_at_s: float


class StartWatch:
    """Shows progress of starting processes, and ends a start that cannot succeed."""

    def __init__(self, show: Callable[[str], None], store: Store | None = None) -> None:
        self._show = show
        self._store = store or HeadStore()
        self._lines: dict[str, _ProgressLine] = {}
        self._polled_at_s = float("-inf")
        self._shown_at_s = float("-inf")

    def poll(self, now_s: float) -> None:
        """Show new progress every few seconds; call it at any rate.

        Raises:
            EngineStartFailed: a process has reported a permanent failure.
        """
        if now_s - self._polled_at_s < _POLL_PERIOD_S:
            return
        self._polled_at_s = now_s
        for key in self._store.keys(_FAILURE_PREFIX):
            if (data := self._store.get(key)) is not None:
                failure = json.loads(data)
                raise EngineStartFailed(
                    f"{failure['reason']}, on node {failure['node']}", failure["remedy"]
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
