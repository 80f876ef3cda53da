"""What every test shares: which ones can run here, and how Hypothesis searches."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.fakes.scaled_deadline import slowdown
from tests.outcomes import record_outcomes

TRACES_ENV = "BATON_TRACES"
"""Names the folder of recorded traces; tests marked `data` are skipped without it."""

# Whoever makes an HTTP client reads the certificates of all the world: 60 ms, longer than most
# tests take, some thousand times. Tests talk to this machine alone.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).with_name("no-certificates"))

# The same examples on every run, so that a red build is red again; `BATON_HYPOTHESIS=search` looks
# for new ones. No deadline: a busy machine is not a failure. No lines of the code beside a failing
# example: to trace each takes longer than a test may.
settings.register_profile(
    "repeat",
    derandomize=True,
    deadline=None,
    phases=[phase for phase in Phase if phase is not Phase.explain],
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("BATON_HYPOTHESIS", "repeat"))


def pytest_configure(config: pytest.Config) -> None:
    """Keep what becomes of each test, where somebody wants to know."""
    record_outcomes(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs something that is not here; give a slow machine time to start things."""
    missing = {
        "real": None if importlib.util.find_spec("vllm") else "vllm is not installed",
        "data": None if os.environ.get(TRACES_ENV) else f"{TRACES_ENV} names no folder of traces",
    }
    for marker, reason in missing.items():
        if reason is None:
            continue
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    slowdown_factor = slowdown()
    for item in items:
        limit = item.get_closest_marker("timeout")
        is_slow = item.get_closest_marker("slow") or item.get_closest_marker("real")
        if limit is not None and is_slow is not None:
            item.add_marker(pytest.mark.timeout(limit.args[0] * slowdown_factor), append=False)


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
