"""The failure table, on a whole fleet of simulated engines over the real link."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import pytest

from baton.control.state.limits import CoordinatorLimits
from baton.domain.cache import CacheChangeKind, unpack_hashes
from baton.domain.errors import NoCapacity, RequestInvalid
from baton.domain.events import CacheChanged, LinksReported, SideChannelChecked
from baton.domain.fleet import LinkTotals
from baton.domain.handoff import HandoffMode, RouteReason
from baton.domain.names.addresses import parse_address
from baton.domain.request import LocalOnlyReason, Phase, Request
from baton.engine.sim import SimSettings, expected_tokens
from baton.policy.placement.port import Disaggregate
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root
from baton.policy.resilience.circuit_breakers import CircuitState
from baton.runtime.process.sockets import create_bound_socket
from tests.fakes.fleet_rig import ENGINE, Fleet, running_fleet
from tests.fakes.machine import require_ipv6

EARLY_OR_LATE = pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
"""Whether whoever prefills gives the first token."""
SLOW = replace(ENGINE, decode_step_s=0.02)
SLOW_PULL = replace(ENGINE, transfer_setup_s=30.0)
SLOWER_PULL = replace(ENGINE, transfer_setup_s=0.02)
SLOW_PREFILL = replace(ENGINE, prefill_tokens_per_s=10.0)


def assert_complete(fleet: Fleet, request: Request) -> None:
    """The client got the very tokens that one undisturbed engine would have given."""
    assert fleet.clients.tokens[request.request_id] == list(
        expected_tokens(request.prompt_token_ids, request.max_tokens, model="tiny", settings=ENGINE)
    )
    assert fleet.clients.records[request.request_id].outcome is Phase.FINISHED


async def test_prefill_and_decode_run_on_their_pools_and_the_blocks_move() -> None:
    async with running_fleet() as fleet:
        request = fleet.send_request("r")
        await fleet.clients.wait_ended(1)
        assert_complete(fleet, request)
        (route,) = fleet.clients.records["r"].routes
        assert (route.prefill_replica_id, route.decode_replica_id) == ("p0", "d0")
        legs = fleet.clients.records["r"].legs
        assert [leg.replica_id for leg in legs] == ["p0", "d0"]
        assert all(leg.engine_times is not None and leg.engine_times.compute_s > 0 for leg in legs)
        moved = fleet.engines["d0"].load().transfers
        assert moved.pulls == 1
        assert moved.moved_bytes == fleet.clients.records["r"].handed_off_blocks * (
            ENGINE.kv_block_bytes
        )
        await fleet.wait_freed()


async def test_many_streams_share_a_fleet() -> None:
    async with running_fleet(prefill=2, decode=2) as fleet:
        requests = [fleet.send_request(f"r{i}", prompt_tokens=10 + i) for i in range(40)]
        await fleet.clients.wait_ended(40)
        for request in requests:
            assert_complete(fleet, request)
        used = {r.routes[-1].decode_replica_id for r in fleet.clients.records.values()}
        assert used == {"d0", "d1"}
        await fleet.wait_freed()
        assert all(v.inflight_legs == 0 for v in fleet.driver.fleet().replicas.values())


async def test_clients_may_get_the_token_that_ends_their_prefill_before_the_blocks_move() -> None:
    early = CoordinatorLimits(early_first_token=True)
    async with running_fleet(prefill=2, decode=2, settings=SLOWER_PULL, limits=early) as fleet:
        requests = [fleet.send_request(f"r{i}", prompt_tokens=10 + i) for i in range(40)]
        requests += [
            fleet.send_request(f"one{i}", prompt_tokens=50 + i, max_tokens=1) for i in range(4)
        ]
        await fleet.clients.wait_ended(44)
        for request in requests:
            assert_complete(fleet, request)
            record = fleet.clients.records[request.request_id]
            assert record.first_token_at_s is not None
            if request.max_tokens > 1:
                assert record.first_token_at_s == record.prefill_done_at_s
                assert record.max_itl_s >= SLOWER_PULL.transfer_setup_s
        pulls = sum(fleet.engines[name].load().transfers.pulls for name in ("d0", "d1"))
        assert pulls == 40, "a first token that is the last moves nothing"
        await fleet.wait_freed()
        assert all(v.inflight_legs == 0 for v in fleet.driver.fleet().replicas.values())


@pytest.mark.parametrize(
    ("phase", "settings"),
    [
        (Phase.PREFILL, SLOW_PREFILL),
        (Phase.TRANSFER, SLOW_PULL),
        (Phase.DECODE, SLOW),
    ],
)
@EARLY_OR_LATE
async def test_a_client_that_leaves_frees_both_engines_within_a_second(
    phase: Phase, settings: object, *, early: bool
) -> None:
    limits = CoordinatorLimits(transfer_deadline_s=60.0, early_first_token=early)
    async with running_fleet(settings=settings, limits=limits) as fleet:  # type: ignore[arg-type]
        fleet.send_request("r", max_tokens=1000)
        await fleet.wait_until(lambda: fleet.driver.phases()["r"] is phase)
        fleet.driver.on_abort(("r",))
        await fleet.wait_freed(timeout_s=1.0)
        assert fleet.clients.records["r"].outcome is Phase.CANCELLED
        assert all(v.inflight_legs == 0 for v in fleet.driver.fleet().replicas.values())


@EARLY_OR_LATE
async def test_a_decode_engine_that_dies_mid_stream_costs_no_token(*, early: bool) -> None:
    limits = CoordinatorLimits(early_first_token=early)
    async with running_fleet(decode=2, settings=SLOW, limits=limits) as fleet:
        requests = [fleet.send_request(f"r{i}", max_tokens=40) for i in range(8)]
        await fleet.clients.wait_until(
            lambda: all(len(fleet.clients.tokens.get(r.request_id, ())) >= 3 for r in requests)
        )
        fleet.engines["d0"].die()
        await fleet.clients.wait_ended(8)
        for request in requests:
            assert_complete(fleet, request)
        resumed = [r for r in fleet.clients.records.values() if r.resumes]
        assert resumed, "no stream ran on the replica that died"
        assert fleet.clients.errors == {}


@EARLY_OR_LATE
async def test_a_source_that_dies_during_the_transfer_only_delays(*, early: bool) -> None:
    async with running_fleet(
        settings=replace(SLOW_PULL, transfer_setup_s=3.0),
        limits=CoordinatorLimits(transfer_deadline_s=0.3, early_first_token=early),
    ) as fleet:
        request = fleet.send_request("r")
        await fleet.wait_until(lambda: fleet.driver.phases()["r"] is Phase.TRANSFER)
        fleet.engines["p0"].die()
        await fleet.clients.wait_ended(1)
        assert_complete(fleet, request)


async def test_a_frozen_engine_is_given_up_and_its_stream_goes_on() -> None:
    async with running_fleet(
        decode=2, settings=SLOW, limits=CoordinatorLimits(stall_timeout_s=0.3)
    ) as fleet:
        request = fleet.send_request("r", max_tokens=30)
        await fleet.clients.wait_until(lambda: len(fleet.clients.tokens.get("r", ())) >= 3)
        (route,) = [v.replica_id for v in fleet.driver.fleet().replicas.values() if v.inflight_legs]
        fleet.engines[route].freeze()
        await fleet.clients.wait_ended(1)
        assert_complete(fleet, request)
        assert fleet.clients.records["r"].resumes == 1
        fleet.engines[route].thaw()
        await fleet.wait_freed(timeout_s=5.0)


async def test_without_any_replica_a_request_is_refused_within_its_queue_deadline() -> None:
    async with running_fleet(
        prefill=0, decode=0, limits=CoordinatorLimits(queue_timeout_s=0.05)
    ) as fleet:
        fleet.send_request("r")
        await fleet.clients.wait_ended(1, timeout_s=2.0)
        assert isinstance(fleet.clients.errors["r"], NoCapacity)


async def test_a_dead_prefill_pool_degrades_to_local() -> None:
    async with running_fleet() as fleet:
        fleet.engines["p0"].die()
        await fleet.wait_until(lambda: "p0" not in fleet.driver.fleet().replicas)
        request = fleet.send_request("r")
        await fleet.clients.wait_ended(1)
        assert_complete(fleet, request)
        assert fleet.clients.records["r"].routes[0].reason is RouteReason.NO_PREFILL_REPLICA


async def test_a_draining_replica_finishes_its_streams_and_gets_no_more() -> None:
    async with running_fleet(prefill=0, decode=2, settings=SLOW) as fleet:
        old = fleet.send_request("old", max_tokens=30)
        await fleet.clients.wait_until(lambda: len(fleet.clients.tokens.get("old", ())) >= 2)
        (name,) = [v.replica_id for v in fleet.driver.fleet().replicas.values() if v.inflight_legs]
        fleet.hosts[name].drain()
        await fleet.wait_until(lambda: fleet.driver.fleet().replicas[name].draining)
        new = fleet.send_request("new")
        await fleet.clients.wait_ended(2)
        assert_complete(fleet, old)
        assert_complete(fleet, new)
        assert fleet.clients.records["new"].routes[-1].decode_replica_id != name
        await asyncio.wait_for(fleet.hosts[name].drained.wait(), 5.0)


async def test_a_prompt_that_no_engine_takes_fails_at_once() -> None:
    async with running_fleet() as fleet:
        fleet.send_request(
            "r", prompt_tokens=ENGINE.max_len_tokens + 1, local_only=LocalOnlyReason.FAN_OUT
        )
        await fleet.clients.wait_ended(1, timeout_s=5.0)
        assert fleet.clients.records["r"].outcome is Phase.FAILED


# ---------------------------------------------------------------------- requests that are wrong

WRONG = 2
"""A token that is in no other prompt."""


@pytest.mark.parametrize("disaggregate", [Disaggregate.ALWAYS, Disaggregate.NEVER])
async def test_a_request_that_engines_find_invalid_is_answered_once_and_fails_no_other(
    disaggregate: Disaggregate,
) -> None:
    settings = replace(SLOW, invalid_token_id=WRONG)
    async with running_fleet(
        prefill=2, decode=2, settings=settings, disaggregate=disaggregate
    ) as fleet:
        stream = fleet.send_request("stream", max_tokens=40)
        for number in range(12):
            fleet.driver.on_request(
                Request(
                    request_id=f"wrong{number}",
                    prompt_token_ids=(5, 6, WRONG, *range(7, 60)),
                    max_tokens=8,
                    arrived_at_s=0.0,
                )
            )
        await fleet.clients.wait_ended(13)
        assert_complete(fleet, stream)
        for number in range(12):
            error = fleet.clients.errors[f"wrong{number}"]
            assert isinstance(error, RequestInvalid)
            assert f"token {WRONG} cannot be had" in str(error)
            record = fleet.clients.records[f"wrong{number}"]
            assert (len(record.legs), record.resumes) == (1, 0)
        assert set(fleet.coordinator.circuits(asyncio.get_running_loop().time()).values()) <= {
            CircuitState.CLOSED
        }
        assert not any(tries for _, tries in fleet.coordinator.retry_totals().retries)
        await fleet.wait_freed()


async def test_a_prompt_that_no_engine_has_room_for_is_answered_as_such() -> None:
    async with running_fleet() as fleet:
        most = ENGINE.max_len_tokens
        fleet.send_request("long", prompt_tokens=most + 3)
        await fleet.clients.wait_ended(1)
        error = fleet.clients.errors["long"]
        assert isinstance(error, RequestInvalid)
        assert f"has {most + 3} tokens, expected fewer than {most}" in str(error)
        assert len(fleet.clients.records["long"].legs) == 1


# ---------- what simulated engines say of their caches and transfers, over the real link
def told(fleet: Fleet, replica_id: str) -> set[int]:
    """The blocks that a replica has said it stored."""
    return {
        block
        for event in fleet.events
        if isinstance(event, CacheChanged) and event.replica_id == replica_id
        for change in event.update.changes
        if change.kind is CacheChangeKind.STORED
        for block in unpack_hashes(change.packed_hashes)
    }


async def test_both_replicas_of_a_handoff_tell_that_they_hold_the_prompt() -> None:
    async with running_fleet() as fleet:
        request = fleet.send_request("r", prompt_tokens=64)
        root = chain_root(model="tiny", block_size_tokens=ENGINE.block_size_tokens)
        hashes = chain_hashes(root, request.prompt_token_ids, ENGINE.block_size_tokens)
        for name in ("p0", "d0"):
            await fleet.wait_until(lambda name=name: set(hashes) <= told(fleet, name))  # type: ignore[misc]


async def test_the_pulling_replica_tells_from_where_and_how_much() -> None:
    async with running_fleet() as fleet:
        fleet.send_request("r", prompt_tokens=64)
        await fleet.wait_until(lambda: any(isinstance(e, LinksReported) for e in fleet.events))
        (reported,) = [e for e in fleet.events if isinstance(e, LinksReported)]
        assert reported.replica_id == "d0"
        (link,) = reported.links
        assert (link.source_id, link.pulls, link.failures) == ("p0", 1, 0)
        assert link.moved_bytes == 64 // ENGINE.block_size_tokens * ENGINE.kv_block_bytes
        assert isinstance(link, LinkTotals)


def checks(fleet: Fleet) -> list[bool]:
    return [event.is_reachable for event in fleet.events if isinstance(event, SideChannelChecked)]


async def test_a_decode_replica_can_tell_a_live_side_channel_from_a_dead_one() -> None:
    async with running_fleet(prefill=2) as fleet:
        for name, alive in (("p0", True), ("p1", False)):
            address = fleet.driver.fleet().replicas[name].facts.side_channel
            if not alive:
                fleet.engines[name].die()
            before = len(checks(fleet))
            fleet.link.check_side_channel("d0", name, address)
            await fleet.wait_until(lambda n=before: len(checks(fleet)) > n)  # type: ignore[misc]
            assert checks(fleet)[-1] is alive


async def test_a_leg_that_waits_to_pull_does_not_pass_for_a_failed_transfer() -> None:
    settings = replace(ENGINE, transfer_setup_s=0.3, max_pulls=1)
    limits = CoordinatorLimits(transfer_deadline_s=1.0)  # the last one waits for longer than that
    async with running_fleet(settings=settings, limits=limits) as fleet:
        for n in range(5):
            fleet.send_request(f"r{n}", prompt_tokens=20 + n)
        await fleet.clients.wait_ended(5)
        for record in fleet.clients.records.values():
            assert record.outcome is Phase.FINISHED
            assert [route.mode for route in record.routes] == [HandoffMode.PULL]
        assert fleet.engines["d0"].load().transfers.pulls == 5
        await fleet.wait_freed()


# ---------- a fleet whose link and side channels are at addresses of IPv6
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
def test_a_listener_on_all_addresses_is_reached_by_ipv4_too(host: str) -> None:
    with create_bound_socket(host, 0) as made:
        made.listen()
        port = made.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), 5):
            pass


def test_a_used_ipv6_port_is_not_given_twice() -> None:
    with create_bound_socket("::1", 0) as made:
        made.listen()
        port = made.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            create_bound_socket("::1", port)


# ---------- a drain over the real link: what takes too long there goes on elsewhere
SOON = CoordinatorLimits(drain_timeout_s=0.05, max_drain_migrations=2)


async def test_streams_leave_a_replica_that_drains_and_have_the_tokens_that_were_due() -> None:
    async with running_fleet(
        prefill=0, decode=2, limits=SOON, disaggregate=Disaggregate.NEVER
    ) as fleet:
        asked = [fleet.send_request(f"r{number}", max_tokens=600) for number in range(6)]
        tokens, records = fleet.clients.tokens, fleet.clients.records
        await fleet.clients.wait_until(
            lambda: all(tokens.get(request.request_id) for request in asked)
        )
        fleet.hosts["d0"].drain()
        await asyncio.wait_for(fleet.hosts["d0"].drained.wait(), 10.0)
        await fleet.clients.wait_ended(6)
        assert not fleet.clients.errors
        assert {record.outcome for record in records.values()} == {Phase.FINISHED}
        moved = [record for record in records.values() if record.resumes]
        assert {record.routes[-1].decode_replica_id for record in moved} == {"d1"}
        for request in asked:
            due = expected_tokens(request.prompt_token_ids, 600, model="tiny", settings=ENGINE)
            assert tokens[request.request_id] == list(due)
        await fleet.wait_freed()
