"""Progress of starting processes, for commands that wait for them.

Theory of operation. A process that starts cannot answer calls. It writes its phase into the store
of Ray's head, one line per process, and deletes the line at the end. A thread writes it, because an
import blocks everything else. Each line has a number that increases; a line with a constant number
is of a killed process, and is not shown. A permanent failure goes under another name and ends
`baton up`, while Ray Serve would retry.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from baton.domain.errors import EngineStartFailed
from baton.domain.names.words import few
from baton.serving.store.config_store import HeadStore, Store
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_PROGRESS_PREFIX = "start/doing/"
_FAILURE_PREFIX = "start/failed/"
_POLL_PERIOD_S = 1.0
_REPORT_PERIOD_S = 1.0
_STALE_S = 20.0
"""A live process writes every second."""
_MAX_LISTED = 8


class StartReporter:
    """Reports one process' start; calls block for milliseconds."""

    def __init__(
        self, deployment: str, node: str, store: Store | None = None, *, replica: str = ""
    ) -> None:
        self._deployment = deployment
        self._name = f"{deployment}-{replica}" if replica else deployment
        self._source_id = f"{self._name}@{node}"
        self._node = node
        self._store = store or HeadStore()
        self._sequence = 0
        self._lock = threading.Lock()

    def progress(self, activity: str) -> None:
        """Report an activity in a few words, as `downloading org/model: 3.1 of 16.1 GB`.

        The words before a colon are the phase; its seconds are counted.
        """
        with self._lock:
            self._sequence += 1
            fields = {
                "deployment": self._deployment,
                "name": self._name,
                "node": self._node,
                "what": activity,
                "number": self._sequence,
            }
            self._write(_PROGRESS_PREFIX, fields)

    @contextmanager
    def reporting(self, phase: str, phase_file: Path | None = None) -> Iterator[None]:
        """Report a phase again and again while the block runs, and delete its line at the end.

        `phase_file` names a later phase as soon as it exists.
        """
        ended = threading.Event()
        thread = threading.Thread(
            target=self._report_until, args=(ended, phase, phase_file), name="start", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.done()

    def _report_until(self, ended: threading.Event, phase: str, phase_file: Path | None) -> None:
        while True:
            self.progress(_read_phase(phase_file) or phase)
            if ended.wait(_REPORT_PERIOD_S):
                return

    def failed(self, error: EngineStartFailed) -> None:
        """Report a permanent failure."""
        self._write(
            _FAILURE_PREFIX, {"node": self._node, "reason": error.reason, "remedy": error.remedy}
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


def _read_phase(phase_file: Path | None) -> str:
    try:
        return "" if phase_file is None else phase_file.read_text()
    except FileNotFoundError:  # the engine has not begun to load
        return ""


class _Phase(NamedTuple):
    """The activity of a process."""

    deployment: str
    name: str
    activity: str
    """With the node, and figures that change."""
    sequence: int
    began_at_s: float
    changed_at_s: float

    @property
    def title(self) -> str:
        """The activity without figures."""
        return self.activity.partition(": ")[0]


class StartWatch:
    """The phases of starting processes, and the failure of a start that cannot succeed."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store or HeadStore()
        self._phases: dict[str, _Phase] = {}
        self._polled_at_s = float("-inf")
        self._unreported_since_s: dict[str, float] = {}

    def poll(self, now_s: float) -> None:
        """Read phases once a second; call it at any rate."""
        if now_s - self._polled_at_s >= _POLL_PERIOD_S:
            self._polled_at_s = now_s
            self._phases = dict(self._read_phases(now_s))

    def check(self) -> None:
        """Check that no process has reported a permanent failure.

        Raises:
            EngineStartFailed: one has.
        """
        for key in self._store.keys(_FAILURE_PREFIX):
            if (data := self._store.get(key)) is not None:
                failure = json.loads(data)
                raise EngineStartFailed(
                    f"{failure['reason']}, on node {failure['node']}", failure["remedy"]
                )

    def describe(self, starting: Mapping[str, int], now_s: float) -> str:
        """The phase of each starting process, with its seconds; empty for none.

        Args:
            starting: Starting processes by deployment, as Ray Serve counts them.
            now_s: The clock of `poll`.
        """
        live = [
            phase
            for phase in self._phases.values()
            if now_s - phase.changed_at_s < _STALE_S and starting.get(phase.deployment)
        ]
        reported = Counter(phase.deployment for phase in live)
        parts = [
            f"{phase.name} {phase.activity} ({now_s - phase.began_at_s:.0f} s)" for phase in live
        ]
        for name, count in sorted(starting.items()):
            unreported = count - reported[name]
            if unreported <= 0:
                self._unreported_since_s.pop(name, None)
                continue
            since_s = self._unreported_since_s.setdefault(name, now_s)
            subject = f"{unreported} of {name}" if unreported > 1 else name
            parts.append(f"{subject} starting ({now_s - since_s:.0f} s)")
        return few(parts, _MAX_LISTED, separator=", ")

    def _read_phases(self, now_s: float) -> Iterator[tuple[str, _Phase]]:
        for key in sorted(self._store.keys(_PROGRESS_PREFIX)):
            if (data := self._store.get(key)) is None:
                continue
            fields = json.loads(data)
            previous = self._phases.get(key)
            phase = _Phase(
                deployment=str(fields["deployment"]),
                name=str(fields["name"]),
                activity=str(fields["what"]),
                sequence=int(fields["number"]),
                began_at_s=now_s,
                changed_at_s=now_s,
            )
            if previous is not None and previous.title == phase.title:
                phase = phase._replace(began_at_s=previous.began_at_s)
            if previous is not None and previous.sequence == phase.sequence:
                phase = phase._replace(changed_at_s=previous.changed_at_s)
            yield key, phase
