"""Fixtures of several files of tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cli.as_shown import AsShown
from tests.fakes.completion_server import CompletionServer


@pytest.fixture
def server() -> Iterator[CompletionServer]:
    with CompletionServer().in_thread() as running:
        yield running


@pytest.fixture
def as_shown() -> AsShown:
    return AsShown(write=os.environ.get("BATON_SHOWN") == "write")
