"""Several who keep records: each is told of every one, and none can hurt another."""

from __future__ import annotations

import pytest

from baton.domain.commands import RequestRecord
from baton.telemetry.requests.recorders import Recorders
from tests.telemetry.test_promises import RECORD


class Keeper:
    def __init__(self, error: Exception | None = None) -> None:
        self.kept: list[RequestRecord] = []
        self._error = error

    def record(self, record: RequestRecord) -> None:
        self.kept.append(record)
        if self._error is not None:
            raise self._error


def test_one_that_fails_keeps_no_record_from_the_others_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, broken, last = Keeper(), Keeper(ZeroDivisionError("no")), Keeper()
    recorders = Recorders(first, broken, last)
    for _ in range(3):
        recorders.record(RECORD)
    assert len(first.kept) == len(broken.kept) == len(last.kept) == 3
    assert recorders.failures == 3
    assert [record.message for record in caplog.records] == ["Keeper cannot keep request r"]


def test_each_that_fails_is_said(caplog: pytest.LogCaptureFixture) -> None:
    recorders = Recorders(Keeper(ValueError("a")), Keeper(ValueError("b")))
    recorders.record(RECORD)
    recorders.record(RECORD)
    assert len(caplog.records) == 2
