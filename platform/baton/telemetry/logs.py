"""Structured logs: one event per decision, as JSON or as text; never a prompt, a token or a key."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum

_ROOT = "baton"
_FIELDS = "baton_fields"


class LogFormat(StrEnum):
    """How log events are written."""

    JSON = "json"
    TEXT = "text"


def log_event(logger: logging.Logger, level: int, event: str, fields: Mapping[str, object]) -> None:
    """Write one event with its fields; values are numbers, enums or short strings."""
    logger.log(level, event, extra={_FIELDS: fields})


def configure_logs(log_format: LogFormat, level: str) -> None:
    """Send the events of this process to stderr in the given format; may be called again."""
    # The real stderr: in a replica, `sys.stderr` is Ray's, which walks the stack for every line.
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(_JsonLines() if log_format is LogFormat.JSON else _TextLines())
    logger = logging.getLogger(_ROOT)
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())


def _when(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, tz=UTC).isoformat(timespec="milliseconds")


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": _when(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= getattr(record, _FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, object] = getattr(record, _FIELDS, {})
        told = " ".join(f"{name}={value}" for name, value in fields.items())
        line = f"{_when(record)} {record.levelname:7} {record.getMessage()} {told}".rstrip()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line
