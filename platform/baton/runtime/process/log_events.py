"""Structured log events; `telemetry.logs` writes them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

FIELDS: Final = "baton_fields"
"""The attribute of a log record that holds an event's fields."""


def log_event(
    logger: logging.Logger,
    level: int,
    event: str,
    fields: Mapping[str, object],
    *,
    error: BaseException | None = None,
) -> None:
    """Write one event with its fields: numbers, enums or short strings.

    `error` adds a traceback: for unexpected errors.
    """
    logger.log(level, event, extra={FIELDS: fields}, exc_info=error)
