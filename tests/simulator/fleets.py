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


class Tokens:
    """What clients got, by request."""

    def __init__(self) -> None:
        self.of: defaultdict[str, tuple[int, ...]] = defaultdict(tuple)

    def take(self, delivery: Delivery) -> None:
        self.of[delivery.request_id] += delivery.token_ids


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
    tokens: Tokens | None = None,
) -> VirtualFleet:
    """A fleet in which everybody knows everybody."""
    made = VirtualFleet(options)
    for one in coordinators or (coordinator(),):
        made.add_coordinator(one, None if tokens is None else tokens.take)
    for role, count in replicas.items():
        for number in range(count):
            made.add_replica(f"{role}-{number}", engine, role=role, pool=str(role))
    made.run(until_s=JOINED_S)
    return made


def requests(
    count: int, *, prompt_tokens: int = 200, max_tokens: int = 8, seed: int = 0, groups: int = 0
) -> list[Request]:
    """Requests of which those of one group share three quarters of their prompt."""
    rng = random.Random(seed)
    shared = [tuple(rng.randbytes(prompt_tokens * 3 // 4)) for _ in range(groups)]
    made = []
    for number in range(count):
        stem = rng.choice(shared) if groups else ()
        prompt = stem + tuple(rng.randbytes(prompt_tokens - len(stem)))
        made.append(
            Request(
                request_id=f"r{number}",
                prompt_token_ids=prompt,
                max_tokens=max_tokens,
                arrived_at_s=JOINED_S,
            )
        )
    return made
