"""Several who keep the stories of ended requests, none of whom can hurt the others or a request."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton.domain.commands import RequestRecord
from baton.runtime.ports import Recorder

_LOGGER = logging.getLogger(__name__)


class Recorders:
    """Tells each of them of every record. Satisfies `ports.Recorder`."""

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders: Sequence[Recorder] = recorders
        self.failures = 0
        """How often one of them could not take a record."""
        self._logged: set[Recorder] = set()

    def record(self, record: RequestRecord) -> None:
        """Have everyone keep it; whoever cannot is passed over, and the first time it is logged."""
        for recorder in self._recorders:
            try:
                recorder.record(record)
            except Exception:
                self.failures += 1
                if recorder not in self._logged:
                    self._logged.add(recorder)
                    name = type(recorder).__name__
                    _LOGGER.exception("%s cannot keep request %s", name, record.request_id)
