"""A fleet whose link and side channels are at addresses of IPv6."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from baton.domain.handoff import HandoffMode
from baton.domain.names.addresses import parse_address
from baton.domain.request import Phase
from baton.engine.sim import SimSettings, expected_tokens
from baton.runtime.process.sockets import create_bound_socket
from tests.fakes.fleet_rig import ENGINE, running_fleet
from tests.fakes.machine import require_ipv6


@pytest.fixture(autouse=True)
def _needs_ipv6() -> None:
    require_ipv6()


def at_address(host: str) -> SimSettings:
    return replace(ENGINE, side_channel_host=host)


@pytest.mark.parametrize("at", ["::1", "::ffff:127.0.0.1"])
async def test_blocks_and_tokens_move_over_addresses_of_ipv6(at: str) -> None:
    async with running_fleet(prefill=1, decode=1, settings=at_address(at)) as fleet:
        for host in fleet.hosts.values():
            assert host.address.startswith("tcp://[")
            assert host.facts is not None
            assert parse_address(host.facts.side_channel).host == at
        request = fleet.send_request("r")
        await fleet.clients.wait_ended(1)
        record = fleet.clients.records["r"]
        assert (record.outcome, record.routes[-1].mode) == (Phase.FINISHED, HandoffMode.PULL)
        assert fleet.engines["d0"].load().transfers.pulls == 1
        assert fleet.clients.tokens["r"] == list(
            expected_tokens(request.prompt_token_ids, 16, model="tiny", settings=ENGINE)
        )
        await fleet.wait_freed()


async def test_side_channels_at_addresses_of_ipv6_are_checked() -> None:
    async with running_fleet(prefill=1, decode=1, settings=at_address("::1")) as fleet:
        facts = fleet.hosts["p0"].facts
        assert facts is not None
        await fleet.engines["d0"].check_side_channel("p0", facts.side_channel, 5.0)


@pytest.mark.parametrize("host", ["::", "::ffff:0.0.0.0"])
def test_who_listens_everywhere_is_reached_by_ipv4_too(host: str) -> None:
    with create_bound_socket(host, 0) as made:
        made.listen()
        port = made.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), 5):
            pass


def test_a_port_of_ipv6_that_somebody_has_is_not_given_twice() -> None:
    with create_bound_socket("::1", 0) as made:
        made.listen()
        port = made.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            create_bound_socket("::1", port)
