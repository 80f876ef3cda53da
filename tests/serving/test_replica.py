"""What a replica is started with, from the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config import DeploymentConfig, load_config, probe_options
from baton.runtime.replica_host import HostOptions
from baton.runtime.side_channel_checks import GRACE_S
from baton.serving.replica import host_options

CONFIGS = Path(__file__).parents[2] / "configs"


def config(*sets: str) -> DeploymentConfig:
    return load_config([CONFIGS / "sim.yaml"], env={}, sets=sets).config


def test_a_replica_pulls_checks_and_keeps_blocks_as_the_configuration_says() -> None:
    told = ("lease=40s", "max_concurrent_pulls=3", "probe.deadline=5s")
    options = host_options(config(*(f"transfer.{one}" for one in told)))
    assert options == HostOptions(lease_s=40.0, check_s=5.0, max_concurrent_pulls=3)
    assert host_options(config("transfer.max_concurrent_pulls=null")).max_concurrent_pulls is None


@pytest.mark.parametrize("deadline", ["10ms", "2s", "60s"])
def test_a_coordinator_waits_until_a_replica_must_have_answered_a_check(deadline: str) -> None:
    said = config(f"transfer.probe.deadline={deadline}")
    probing = probe_options(said)
    assert probing.deadline_s + probing.answer_s > host_options(said).check_s + GRACE_S
