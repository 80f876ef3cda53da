"""Wakes an event loop at a time, to some tens of microseconds.

Event loops wait in whole milliseconds, rounded up: with those alone each request would be sent up
to one late, which is a few percent of a short time to first token. Linux's timerfd has no such
rounding, and costs nothing while it waits. Elsewhere the loop's own timers have to do.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from contextlib import suppress

_ABSOLUTE = 1
"""Source: timerfd_settime(2), TFD_TIMER_ABSTIME."""
_NS_PER_S = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


class Timer:
    """One clock for one task; made and closed in the event loop that it wakes."""

    def __init__(self) -> None:
        self._woken = asyncio.Event()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = -1
        with suppress(AttributeError):  # not Linux
            self._file = self._libc.timerfd_create(
                time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC
            )
        if self._file >= 0:
            asyncio.get_running_loop().add_reader(self._file, self._read)

    def close(self) -> None:
        """Give the timer back."""
        if self._file >= 0:
            asyncio.get_running_loop().remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def wake(self) -> None:
        """Wake who waits, now."""
        self._woken.set()

    async def sleep_until(self, at_s: float) -> None:
        """Wait for a time of the monotonic clock, or until somebody rings."""
        wait_s = at_s - time.monotonic()
        if wait_s <= 0:
            await asyncio.sleep(0)  # answers are read even while requests are behind their time
            return
        self._woken.clear()
        if self._file < 0 or not self._arm(at_s):
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._woken.wait()
            return
        await self._woken.wait()

    def _arm(self, at_s: float) -> bool:
        whole_ns = int(at_s * _NS_PER_S)
        setting = _Itimerspec(first=_Timespec(whole_ns // _NS_PER_S, whole_ns % _NS_PER_S))
        status: int = self._libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(setting), None)
        return status == 0

    def _read(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._file, 8)
        self._woken.set()
