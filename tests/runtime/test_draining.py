"""A drain over the real link: what takes too long there goes on elsewhere."""

from __future__ import annotations

import asyncio

from baton.control.state.limits import CoordinatorLimits
from baton.domain.request import Phase
from baton.engine.sim import expected_tokens
from baton.policy.placement.port import Disaggregate
from tests.fakes.fleet_rig import ENGINE, running_fleet

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
