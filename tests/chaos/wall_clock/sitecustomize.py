"""Moves the wall clock of every Python process that finds this on its path.

Python imports it by its name as it starts. The file that `BATON_CHAOS_CLOCK` names says by how many
seconds; it is looked at a few times a second. The monotonic clock goes on as it is, and so does
what native code sees: a fake below that (libfaketime) makes sleeps of Python fail.
"""

from __future__ import annotations

import datetime
import os
import time
from datetime import tzinfo
from typing import Self

_FILE = os.environ.get("BATON_CHAOS_CLOCK")
_REREAD_S = 0.2
_real_time, _real_time_ns, _real_datetime = time.time, time.time_ns, datetime.datetime  # noqa: TID251
_offset_s, _read_at_s = 0.0, float("-inf")


def _offset() -> float:
    global _offset_s, _read_at_s  # noqa: PLW0603 - one clock for a process
    now_s = time.monotonic()
    if now_s - _read_at_s > _REREAD_S:
        _read_at_s = now_s
        try:
            with open(str(_FILE)) as file:  # noqa: PTH123 - nothing is imported yet
                _offset_s = float(file.read() or 0.0)
        except (OSError, ValueError):
            pass  # it is just being written
    return _offset_s


class _ShiftedDatetime(datetime.datetime):
    """A datetime whose now is moved."""

    __slots__ = ()  # as large as the real one, which native code compiled against

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        """The time, moved."""
        return cls.fromtimestamp(time.time(), tz)  # noqa: TID251 - it is what is moved

    @classmethod
    def utcnow(cls) -> Self:
        """Likewise."""
        return cls.now(datetime.UTC).replace(tzinfo=None)


if _FILE:
    time.time = lambda: _real_time() + _offset()  # noqa: TID251 - as above
    time.time_ns = lambda: _real_time_ns() + int(_offset() * 1e9)  # noqa: TID251 - as above
    datetime.datetime = _ShiftedDatetime  # type: ignore[misc]
