from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def open_descriptors() -> Callable[[], int]:
    return lambda: len(list(Path("/proc/self/fd").iterdir()))
