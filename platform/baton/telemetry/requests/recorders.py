"""Several recorders of ended requests, isolated from each other."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton.domain.commands import RequestRecord
from baton.runtime.ports import Recorder

_LOGGER = logging.getLogger(__name__)


class Recorders:
    """Passes each record to all recorders. Satisfies `ports.Recorder`."""

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders: Sequence[Recorder] = recorders
        self.failures = 0
        """Records that a recorder failed to take."""
        self._logged: set[Recorder] = set()

    def record(self, record: RequestRecord) -> None:
        """Pass a record on; a failing recorder is skipped, and logged the first time."""
        for recorder in self._recorders:
            try:
                recorder.record(record)
            except Exception:
                self.failures += 1
                if recorder not in self._logged:
                    self._logged.add(recorder)
                    name = type(recorder).__name__
                    _LOGGER.exception("%s cannot keep request %s", name, record.request_id)
