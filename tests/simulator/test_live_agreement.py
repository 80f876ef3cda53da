"""The simulator routes a load as a live fleet does of the very engines that it simulates.

Engines in real time behind the real link, and the simulator in virtual time, serve the same
arrivals under the same configuration. What is compared is who is handed off, and not how long it
took: that is the machine's.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from baton.config import DeploymentConfig, sim_settings
from baton.config.simulation.to_scenario import to_scenario
from baton.control.coordinator import Coordinator
from baton.domain.fleet import Role
from baton.domain.handoff import HandoffMode
from baton.domain.request import Request
from baton.runtime.link.options import LinkOptions
from baton.runtime.process.clock import MonotonicClock
from baton.simulator.scenario import simulate
from tests.fakes.fleet_rig import Fleet
from tests.simulator.test_placement import SLOW, SPLIT, Load, configured


def simulated_share(load: Load, config: DeploymentConfig) -> float:
    """Of the requests, those that were handed off."""
    run = simulate(to_scenario(config).scenario, load.trace(0), declared_tokens=load.output_tokens)
    return run.handoffs / len(run.outcomes)


async def live_share(load: Load, config: DeploymentConfig) -> float:
    """The same, of a fleet in real time."""
    (model,) = config.models.values()
    settings = sim_settings(config.pools["prefill"].engine, model, config.transfer)
    scenario, clock, rng = to_scenario(config).scenario, MonotonicClock(), random.Random(0)
    coordinator = Coordinator(
        limits=scenario.limits, rules=scenario.rules, placer=scenario.placer(), index=scenario.index
    )
    fleet = Fleet(coordinator, link=LinkOptions())
    shared = rng.choices(range(3, 93), k=load.prefix_tokens)
    try:
        for role, replicas in SPLIT.items():
            for number in range(replicas):
                await fleet.add(f"{role}-{number}", Role(role), settings)
        began_s, asked = clock.now_s(), load.trace(0).requests
        for number, other in enumerate(asked):
            own = rng.choices(range(3, 93), k=load.own_tokens)
            await asyncio.sleep(max(0.0, began_s + other.at_s - clock.now_s()))
            request = Request(
                request_id=f"r{number}",
                prompt_token_ids=(*shared, *own),
                max_tokens=load.output_tokens,
                arrived_at_s=clock.now_s(),
            )
            fleet.driver.on_request(request)
        await fleet.clients.wait_ended(len(asked), timeout_s=100.0)
        assert not fleet.clients.errors
        modes = [record.routes[-1].mode for record in fleet.clients.records.values()]
        return modes.count(HandoffMode.PULL) / len(asked)
    finally:
        await fleet.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "least", "most"),
    [
        pytest.param(Load(requests=200), 0.8, 1.0, id="long-ends"),
        pytest.param(Load(own_tokens=32, requests=200), 0.0, 0.1, id="short-ends"),
    ],
)
async def test_prompts_with_one_beginning_are_handed_off_live_as_they_are_simulated(
    load: Load, least: float, most: float
) -> None:
    config = configured(engine=SLOW)
    wanted = simulated_share(load, config)
    assert least <= wanted <= most
    assert await live_share(load, config) == pytest.approx(wanted, abs=0.2)
