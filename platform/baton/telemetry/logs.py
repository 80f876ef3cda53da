"""Structured logs, as JSON or text, one event per decision; never a prompt, a token or a key."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import TextIO

from baton.runtime.process.log_events import FIELDS, log_event

__all__ = ["LogFormat", "configure_logs", "log_event"]

_ROOT_LOGGER = "baton"


class LogFormat(StrEnum):
    """The format of log events."""

    JSON = "json"
    TEXT = "text"


def configure_logs(log_format: LogFormat, level: str) -> None:
    """Send the events of this process to stderr in the given format. Idempotent."""
    # The real stderr: in a replica, `sys.stderr` is Ray's, which walks the stack for every line.
    handler = _LossyStderrHandler(sys.__stderr__)
    handler.setFormatter(_JsonLines() if log_format is LogFormat.JSON else _TextLines())
    logger = logging.getLogger(_ROOT_LOGGER)
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())


class _LossyStderrHandler(logging.StreamHandler[TextIO]):
    """Drops a line that cannot be written.

    Python's own handler would print a traceback for each, to the same stream.
    """

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - it is logging's name
        """Ignore a full disk and a closed pipe."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, tz=UTC).isoformat(timespec="milliseconds")


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return json.dumps(line, default=str, allow_nan=False)
        except ValueError:  # JSON has no NaN and no infinity
            return json.dumps(_json_safe(line), default=str)


class _TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, object] = getattr(record, FIELDS, {})
        fields_text = " ".join(f"{name}={_quote_value(value)}" for name, value in fields.items())
        head = f"{_timestamp(record)} {record.levelname:7} {record.getMessage()}"
        line = f"{head} {fields_text}".rstrip()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _json_safe(value: object) -> object:
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case Mapping():
            return {str(name): _json_safe(other) for name, other in value.items()}
        case list() | tuple():
            return [_json_safe(item) for item in value]
        case _:
            return value


def _quote_value(value: object) -> str:
    """The text, quoted if it could be read as several values or lines."""
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
