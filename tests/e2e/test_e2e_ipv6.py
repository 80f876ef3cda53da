"""A whole baton on Ray whose nodes, endpoint and metrics have addresses of IPv6."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from baton.domain.names.addresses import format_endpoint, parse_address
from tests.e2e.deployments import Deployment, running_deployment
from tests.fakes.machine import ipv6_address_of_this_machine, require_ipv6

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def node() -> str:
    require_ipv6()
    return ipv6_address_of_this_machine()


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory, node: str) -> Iterator[Deployment]:
    settings = {
        "server.host": "::1",
        "cluster.node_address": node,
        "observability.metrics.host": "::1",
    }
    with running_deployment("sim.yaml", tmp_path_factory.mktemp("ipv6"), **settings) as deployment:
        yield deployment


def test_a_stream_is_prefilled_and_decoded_apart_over_ipv6(baton: Deployment, node: str) -> None:
    baton.assert_hands_off()
    told = baton.status()
    assert parse_address(told["endpoint"]).host == "::1"
    assert {member["node"] for member in told["members"]} == {node}


def test_its_metrics_are_found_and_scraped_over_ipv6(baton: Deployment, node: str) -> None:
    seen = baton.status()["observability"]["url"]
    assert parse_address(seen).host == "::1"
    groups = httpx.get(f"{seen}/sd", timeout=10).json()
    targets = [target for group in groups for target in group["targets"]]
    assert {parse_address(target).host for target in targets} == {"::1", node}
    for target in targets:
        at = parse_address(target)
        answer = httpx.get(format_endpoint("http", at.host, at.port) + "/metrics", timeout=10)
        assert answer.status_code == 200, target


def test_doctor_finds_nothing_wrong_with_its_addresses(baton: Deployment) -> None:
    options = baton.options
    done = baton._run_command("doctor", *options)
    assert b"[::1]" in done.stdout, done.stderr.decode()
    assert b"ValueError" not in done.stdout
