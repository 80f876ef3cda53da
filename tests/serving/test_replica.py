"""What a replica is started with, from the configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.config import DeploymentConfig, load_config, probe_options
from baton.config.schema import Resources
from baton.runtime.replica_host import HostOptions
from baton.runtime.side_channel_checks import GRACE_S
from baton.serving.replica import host_options

CONFIGS = Path(__file__).parents[2] / "configs"


def config(*sets: str) -> DeploymentConfig:
    return load_config([CONFIGS / "sim.yaml"], env={}, sets=sets).config


def test_a_replica_pulls_checks_and_keeps_blocks_as_the_configuration_says() -> None:
    told = ("lease=40s", "max_concurrent_pulls=3", "probe.deadline=5s")
    options = host_options(config(*(f"transfer.{one}" for one in told)), "decode")
    assert options == HostOptions(lease_s=40.0, check_s=5.0, max_concurrent_pulls=3)
    unlimited = "transfer.max_concurrent_pulls=null"
    assert host_options(config(unlimited), "decode").max_concurrent_pulls is None


@pytest.mark.parametrize(("gpus", "devices"), [(0, 1.0), (1, 1.0), (8, 8.0)])
def test_a_replica_says_how_many_gpus_it_takes(gpus: int, devices: float) -> None:
    said = config()
    pool = replace(said.pools["decode"], resources=Resources(gpus=gpus))
    said = replace(said, pools={**said.pools, "decode": pool})
    assert host_options(said, "decode").devices == devices
    assert host_options(said, "prefill").devices == 1.0


@pytest.mark.parametrize("deadline", ["10ms", "2s", "60s"])
def test_a_coordinator_waits_until_a_replica_must_have_answered_a_check(deadline: str) -> None:
    said = config(f"transfer.probe.deadline={deadline}")
    probing = probe_options(said)
    assert probing.deadline_s + probing.answer_s > host_options(said, "decode").check_s + GRACE_S
