"""Fleets in virtual time for tests."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

from baton.control.coordinator import Coordinator
from baton.control.state.limits import CoordinatorLimits
from baton.domain.commands import Delivery
from baton.domain.fleet import Role
from baton.domain.request import Request
from baton.engine.sim import SimSettings
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.simulator.fleet.engines import EngineSettings
from baton.simulator.fleet.fleet import FleetOptions, VirtualFleet

ENGINE = SimSettings(max_len_tokens=2048, kv_blocks=512)
JOINED_S = 1.0
"""By then every coordinator has heard of every replica."""


class ReceivedTokens:
    """What clients got, by request."""

    def __init__(self) -> None:
        self.by_request: defaultdict[str, tuple[int, ...]] = defaultdict(tuple)

    def on_delivery(self, delivery: Delivery) -> None:
        self.by_request[delivery.request_id] += delivery.token_ids


def coordinator(
    seed: int = 0, disaggregate: Disaggregate = Disaggregate.AUTO, **limits: float
) -> Coordinator:
    options = PredictedOptions(disaggregate=disaggregate)
    return Coordinator(
        limits=CoordinatorLimits(**limits),  # type: ignore[arg-type]  # tests name them right
        placer=PredictedPlacer(options, seed=seed),
    )


def fleet(
    *,
    replicas: Mapping[Role, int],
    engine: EngineSettings = ENGINE,
    options: FleetOptions | None = None,
    coordinators: Sequence[Coordinator] = (),
    tokens: ReceivedTokens | None = None,
) -> VirtualFleet:
    """A fleet in which everybody knows everybody."""
    virtual_fleet = VirtualFleet(options)
    for other in coordinators or (coordinator(),):
        virtual_fleet.add_coordinator(other, None if tokens is None else tokens.on_delivery)
    for role, count in replicas.items():
        for number in range(count):
            virtual_fleet.add_replica(f"{role}-{number}", engine, role=role, pool=str(role))
    virtual_fleet.run(until_s=JOINED_S)
    return virtual_fleet


def requests(
    count: int, *, prompt_tokens: int = 200, max_tokens: int = 8, seed: int = 0, groups: int = 0
) -> list[Request]:
    """Requests of which those of one group share three quarters of their prompt."""
    rng = random.Random(seed)
    shared = [tuple(rng.randbytes(prompt_tokens * 3 // 4)) for _ in range(groups)]
    batch = []
    for number in range(count):
        prefix = rng.choice(shared) if groups else ()
        prompt = prefix + tuple(rng.randbytes(prompt_tokens - len(prefix)))
        batch.append(
            Request(
                request_id=f"r{number}",
                prompt_token_ids=prompt,
                max_tokens=max_tokens,
                arrived_at_s=JOINED_S,
            )
        )
    return batch
