"""What every test shares: which ones can run here, and how Hypothesis searches."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TRACES = "BATON_TRACES"
"""Names the folder of recorded traces; tests marked `data` are skipped without it."""

# Whoever makes an HTTP client reads the certificates of all the world: 60 ms, longer than most
# tests take, some thousand times. Tests talk to this machine alone.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).with_name("no-certificates"))

# The same examples on every run, so that a red build is red again; `BATON_HYPOTHESIS=search` looks
# for new ones. No deadline: a busy machine is not a failure.
settings.register_profile(
    "repeat",
    derandomize=True,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("BATON_HYPOTHESIS", "repeat"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with a reason, what needs something that is not here."""
    missing = {
        "real": None if importlib.util.find_spec("vllm") else "vllm is not installed",
        "data": None if os.environ.get(TRACES) else f"{TRACES} names no folder of traces",
    }
    for marker, why in missing.items():
        if why is None:
            continue
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Hear baton's loggers also where something that ran before has sent them elsewhere."""
    logger = logging.getLogger("baton")
    propagated, level = logger.propagate, logger.level
    logger.propagate = True
    logger.setLevel(logging.DEBUG)
    yield caplog
    logger.propagate = propagated
    logger.setLevel(level)
