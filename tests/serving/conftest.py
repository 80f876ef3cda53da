"""Fixtures of several files of tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path has room for a socket's name behind it."""
    with tempfile.TemporaryDirectory(prefix="baton-", dir="/tmp") as path:
        yield Path(path)
