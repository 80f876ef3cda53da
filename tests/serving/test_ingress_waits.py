"""An ingress knows for how long it waited for a core that others had."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.config import load_config
from baton.serving.ingress import deployment as ingress
from baton.serving.ingress.deployment import Ingress, waited_s
from baton.serving.ray import context as ray_context
from tests.fakes.scaled_deadline import ScaledDeadline

BUSY = "import os; os.sched_setaffinity(0, {int(__import__('sys').argv[1])})\nwhile True: pass"
BETWEEN_S = 0.2
LONG_S = 1e6
"""Longer than any test has used a processor."""
SIM = Path(__file__).parents[2] / "configs" / "sim.yaml"


@pytest.fixture
def crowded() -> Iterator[None]:
    """This thread has one core, and another process wants all of it."""
    thread, before = threading.get_native_id(), os.sched_getaffinity(0)
    core = min(before)
    os.sched_setaffinity(thread, {core})
    busy = subprocess.Popen([sys.executable, "-c", BUSY, str(core)])
    try:
        yield
    finally:
        busy.kill()
        busy.wait(timeout=30)
        os.sched_setaffinity(thread, before)


@pytest.mark.usefixtures("crowded")
def test_time_for_which_others_had_its_core_is_counted() -> None:
    thread = threading.get_native_id()
    before_s = waited_s(thread)
    deadline = ScaledDeadline(60)
    while waited_s(thread) - before_s < BETWEEN_S:
        assert not deadline.is_expired(), "it shares its core and has never waited"


def test_a_thread_of_which_nothing_is_known_has_not_waited() -> None:
    assert waited_s(0) == 0.0


@pytest.mark.parametrize("frontend", ["python", "rust"])
async def test_what_its_one_loop_waited_for_makes_an_ingress_busy(
    frontend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_context, "replica_name", lambda: "ingress-1")
    monkeypatch.setattr(ingress, "waited_s", lambda _thread_id: LONG_S)
    config = load_config([SIM], env={}, sets=[f"server.api_server={frontend}"]).config
    started = cast("Any", SimpleNamespace(_require_models=lambda: None, _config=config))
    name, needed_s, _, cores = await Ingress.resource_usage(started)
    assert name == "ingress-1"
    assert (needed_s >= LONG_S) is (frontend == "python")
    assert cores >= 1
