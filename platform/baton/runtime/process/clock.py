"""The live body's clock."""

from __future__ import annotations

import time
from datetime import UTC, datetime


class MonotonicClock:
    """Monotonic seconds of this machine; unmoved when the wall clock jumps."""

    def now_s(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.monotonic()

    def wall_offset_s(self) -> float:
        """Seconds since 1970, less `now_s()`."""
        return datetime.now(UTC).timestamp() - time.monotonic()
