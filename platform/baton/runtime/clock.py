"""The live body's clock."""

from __future__ import annotations

import time


class MonotonicClock:
    """Monotonic seconds of this machine; unmoved when the wall clock jumps."""

    def now_s(self) -> float:
        """Seconds since an arbitrary moment; only differences mean something."""
        return time.monotonic()
