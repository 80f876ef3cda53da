"""What a deployment says and asks for when its addresses are of IPv6."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest
from prometheus_client.metrics_core import Metric as Family

from baton.config import DeploymentConfig, load_config
from baton.domain.errors import ClusterFailed
from baton.domain.names.addresses import parse_address
from baton.runtime.replica_host import ReplicaHost
from baton.serving.checks.configuration import check_exposure, check_ports
from baton.serving.checks.facts import PortFact
from baton.serving.checks.result import CheckStatus
from baton.serving.cluster.local_cluster import attach
from baton.serving.doctor import check_open_ports
from baton.serving.doctor_facts import OpenPort
from baton.serving.http.metrics_endpoint import MetricsEndpoint, MetricsRenderer
from baton.serving.replica.engines import (
    ReplicaSite,
    build_engine,
    side_channel_host,
    vllm_settings,
)
from tests.fakes.machine import ipv6_address_of_this_machine, require_ipv6

CONFIGS = Path(__file__).parents[2] / "configs"


def config(*sets: str, name: str = "sim.yaml") -> DeploymentConfig:
    return load_config([CONFIGS / name], env={}, sets=sets).config


def site(host: str) -> ReplicaSite:
    return ReplicaSite(
        replica_id="p0", pool="prefill", host=host, reserve_ports=lambda _host, base, _count: base
    )


async def test_a_replica_of_a_node_with_an_ipv6_address_is_reached_there() -> None:
    require_ipv6()
    engine = build_engine(config(), site("::1"))
    host = ReplicaHost(engine, bind="tcp://[::1]:0")
    facts = await host.start()
    try:
        assert parse_address(host.address).host == "::1"
        assert parse_address(facts.side_channel).host == "::1"
    finally:
        await host.close()


@pytest.mark.parametrize("name", ["quickstart.yaml"])
def test_a_vllm_engine_has_its_side_channel_there(name: str) -> None:
    settings = vllm_settings(config(name=name), site("fd00::2"))
    assert settings.nixl is not None
    assert settings.nixl.host == "fd00::2"
    assert settings.nixl.address == f"[fd00::2]:{settings.nixl.port}"


def test_the_address_in_a_network_of_ipv6_is_found() -> None:
    own = ipv6_address_of_this_machine()
    assert side_channel_host(f"{own}/128", "10.0.0.1") == own


async def test_metrics_of_a_node_with_an_ipv6_address_can_be_scraped() -> None:
    require_ipv6()

    def nothing() -> list[Family]:
        return []

    endpoint = MetricsEndpoint(MetricsRenderer(nothing), host="::1")
    await endpoint.start()
    try:
        assert endpoint.address is not None
        assert endpoint.address.startswith("[::1]:")
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.get(f"http://{endpoint.address}/metrics")
        assert answer.status_code == 200
    finally:
        await endpoint.close()


def test_an_ipv6_address_before_a_port_has_brackets() -> None:
    taken = PortFact(key="server.port", host="::1", port=8000, free=False)
    said = check_ports((taken,))
    assert (said.status, "[::1]:8000" in said.detail) == (CheckStatus.FAIL, True)
    assert "[::]:8000 serves every client" in check_exposure(config("server.host='::'")).detail


def test_open_ports_are_those_beyond_loopback_of_either_protocol() -> None:
    others = OpenPort(address="fd00::2", port=8404, program="haproxy")
    said = check_open_ports((others,), endpoint="http://[fd00::2]:8000", metrics_url=None)
    assert (said.status, "[fd00::2]:8404" in said.detail) == (CheckStatus.FAIL, True)
    own = OpenPort(address="fd00::2", port=8000, program="haproxy")
    said = check_open_ports((own,), endpoint="http://[fd00::2]:8000", metrics_url=None)
    assert said.status is CheckStatus.PASS


@pytest.mark.parametrize("address", ["::1:6379", "fd00::2:6379", "[::1]", "head"])
def test_an_invalid_address_of_a_cluster_is_not_contacted(address: str) -> None:
    with pytest.raises(ClusterFailed, match=r"expected HOST:PORT.*correct --address"):
        attach(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_cluster_without_a_listener_is_not_waited_for(host: str) -> None:
    require_ipv6()
    with socket.socket(socket.AF_INET) as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"{host}:{closed.getsockname()[1]}"
        with pytest.raises(ClusterFailed, match=r"nothing answers at .*check the address"):
            attach(address)
