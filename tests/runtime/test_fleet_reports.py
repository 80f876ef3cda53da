"""What simulated engines say of their caches and transfers, over the real link."""

from __future__ import annotations

from dataclasses import replace

from baton.control.state.limits import CoordinatorLimits
from baton.domain.cache import CacheChangeKind, unpack_hashes
from baton.domain.events import CacheChanged, LinksReported, SideChannelChecked
from baton.domain.fleet import LinkTotals
from baton.domain.handoff import HandoffMode
from baton.domain.request import Phase
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root
from tests.fakes.fleet_rig import ENGINE, Fleet, running_fleet


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
