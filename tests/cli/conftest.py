"""Fixtures of several files of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.completion_server import CompletionServer


@pytest.fixture
def server() -> Iterator[CompletionServer]:
    with CompletionServer().in_thread() as running:
        yield running
