"""NIXL's progress threads: slowed down where we say so, and only there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.domain.names.process_names import OWNER_ENV_VAR, process_name
from baton.engine.vllm.core import settings
from baton.engine.vllm.patches import plugin
from baton.transfer import nixl_progress, ucx_log

IDLE_PAIR = """
import time
from baton.transfer.nixl_progress import install
install()
import nixl._api as api
agents = [api.nixl_agent(name, api.nixl_agent_config()) for name in ("a", "b")]
cpu, wall = time.process_time(), time.monotonic()
time.sleep(1.5)
print((time.process_time() - cpu) / (time.monotonic() - wall))
"""
"""Two agents that do nothing; prints the cores they use for it."""


def binding() -> SimpleNamespace:
    return SimpleNamespace(nixlAgent=lambda name, config: (name, config.pthrDelay))


def config() -> SimpleNamespace:
    return SimpleNamespace(pthrDelay=0)


def idle_cores(**variables: str) -> float:
    return float(printed(IDLE_PAIR, **variables)[-1])


def flushing_threads() -> int:
    return sum(thread.name == "ucx-log" for thread in threading.enumerate())


def printed(program: str, **variables: str) -> list[str]:
    pytest.importorskip("nixl")
    environment = {name: value for name, value in os.environ.items() if "BATON_" not in name}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | variables,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()


def test_two_idle_agents_use_next_to_nothing_where_a_delay_is_set() -> None:
    assert idle_cores(**{nixl_progress.PROGRESS_DELAY_VARIABLE: "1000"}) < 0.2


def test_two_idle_agents_burn_a_core_where_none_is_set() -> None:
    # The day this fails, NIXL no longer polls without pause, and all this can go.
    assert idle_cores() > 0.3


def test_agents_get_the_delay_that_was_set_last() -> None:
    fake = binding()
    assert nixl_progress.current_delay_us(fake) is None
    nixl_progress.set_progress_delay(fake, 1000)
    nixl_progress.set_progress_delay(fake, 5000)
    assert nixl_progress.current_delay_us(fake) == 5000
    assert fake.nixlAgent("agent", config()) == ("agent", 5000)


@pytest.mark.parametrize("value", ["0", "-5", "soon", ""])
def test_a_delay_that_is_no_time_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nixl_progress.PROGRESS_DELAY_VARIABLE, value)
    with pytest.raises(ValueError, match="expected microseconds"):
        nixl_progress.install()


@pytest.mark.parametrize("value", ["0", "0.0", "-1", "soon", "", "1.", "1e3"])
def test_an_interval_that_is_no_time_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ucx_log.FLUSH_VARIABLE, value)
    with pytest.raises(ValueError, match="expected seconds above 0"):
        nixl_progress.install()


def test_the_log_is_flushed_from_the_first_agent_on_by_one_thread() -> None:
    fake = binding()
    nixl_progress.set_progress_delay(fake, 1000)
    slowed = fake.nixlAgent
    before = flushing_threads()
    ucx_log.flush_from_first_agent(fake, 3600.0)
    assert nixl_progress.current_delay_us(fake) == 1000
    assert flushing_threads() == before
    assert [fake.nixlAgent("agent", config()) for _ in range(2)] == [("agent", 1000)] * 2
    assert flushing_threads() == before + 1
    assert fake.nixlAgent is slowed


def test_ucxs_library_is_not_looked_for_in_vain() -> None:
    program = """
import nixl._api as api
from baton.transfer.ucx_log import loaded_library
agent = api.nixl_agent("a", api.nixl_agent_config())
print(loaded_library())
"""
    assert Path(printed(program)[-1]).name.startswith("libucs")


def test_the_process_that_asks_for_an_engine_does_not_load_nixl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(nixl_progress.PROGRESS_DELAY_VARIABLE, "no number, so it would be refused")
    monkeypatch.setenv(OWNER_ENV_VAR, process_name())
    nixl_progress.install()


def test_the_engine_adapter_speaks_of_the_same_variable() -> None:
    assert settings.NIXL_DELAY_VARIABLE == nixl_progress.PROGRESS_DELAY_VARIABLE


def test_vllm_finds_both_of_our_plugins() -> None:
    found = {entry.load() for entry in entry_points(group="vllm.general_plugins")}
    assert {plugin.install, nixl_progress.install} <= found
