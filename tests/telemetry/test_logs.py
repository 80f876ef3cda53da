"""How log events are written."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from baton.runtime.process.log_events import log_event
from baton.telemetry.logs import LogFormat, configure_logs

LOGGER = logging.getLogger("baton.tests.logs")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    logger = logging.getLogger("baton")
    before = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate, logger.level = before


def written(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return capfd.readouterr().err.splitlines()


def test_an_event_is_a_line_of_json_with_its_fields(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logs(LogFormat.JSON, "info")
    log_event(LOGGER, logging.INFO, "pool_scaled", {"pool": "decode", "to": 3})
    log_event(LOGGER, logging.DEBUG, "leg_sent", {})
    (line,) = written(capfd)
    told = json.loads(line)
    assert (told["event"], told["level"], told["pool"], told["to"]) == (
        "pool_scaled",
        "info",
        "decode",
        3,
    )


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_values_without_json_are_logged_as_text(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logs(LogFormat.JSON, "info")
    odd = {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}, "e": LOGGER}
    log_event(LOGGER, logging.INFO, "odd", odd)
    (line,) = written(capfd)
    told = json.loads(line, parse_constant=refuse)
    assert (told["a"], told["b"], told["c"]) == ("nan", ["inf", 1.5], {"d": "-inf"})


@pytest.mark.parametrize("form", LogFormat)
def test_no_value_can_begin_a_line_of_its_own(
    form: LogFormat, capfd: pytest.CaptureFixture[str]
) -> None:
    configure_logs(form, "info")
    forged = "r\n2026-01-01 INFO forged\u2028x\x1b[2J"
    log_event(LOGGER, logging.INFO, "request_ended", {"request_id": forged, "tenant": "a b"})
    (line,) = written(capfd)
    assert "\x1b" not in line
    if form is LogFormat.TEXT:
        assert line.endswith('tenant="a b"')


def test_an_error_comes_with_where_it_was_raised(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logs(LogFormat.JSON, "info")
    try:
        refuse("why")
    except AssertionError as error:
        log_event(LOGGER, logging.ERROR, "engine_failed", {"replica": "d-1"}, error=error)
    (line,) = written(capfd)
    told = json.loads(line)
    assert told["replica"] == "d-1"
    assert "test_logs.py" in told["exception"]
    assert "AssertionError: why is no JSON" in told["exception"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is full")
def test_a_full_disk_stops_no_process_that_logs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "__stderr__", full)
        configure_logs(LogFormat.JSON, "info")
        for number in range(100):
            log_event(LOGGER, logging.INFO, "request_ended", {"number": number})
        with suppress(OSError):  # what it still holds cannot be written either
            full.close()
    assert written(capfd) == [], "nobody is told elsewhere, line after line"
