"""The loads of the routing benchmark: which requests, in which order, on what fleet."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from baton.domain.fleet import Role
from baton.domain.request import Request
from baton.simulator.engine.settings import SimSettings

SCENARIO = Path(__file__).parent / "scenarios" / "routing.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that share prefixes in groups, and how they arrive."""

    replicas: Mapping[Role, int]
    requests: int
    warm_up_requests: int
    """The first ones to arrive count for what is cached, and for no time."""
    groups: int
    prompt_tokens: int
    shared_tokens: int
    output_tokens: int
    clients: int | None = None
    """Closed loop: each sends its next request when the last one has ended."""
    rate_per_s: float | None = None
    """Open loop, Poisson."""
    saturating_clients: int | None = None
    """Open loop at a fraction of the throughput of a closed loop of this many."""
    load_fraction: float = 1.0
    engine: Mapping[str, int | float] = field(default_factory=dict)
    """What is different about the engines."""

    def __post_init__(self) -> None:
        modes = (self.clients, self.rate_per_s, self.saturating_clients)
        if sum(way is not None for way in modes) != 1:
            raise ValueError(
                f"workload: clients, rate_per_s and saturating_clients are {modes}, expected one"
            )

    @property
    def ideal_fraction(self) -> float:
        """What would be cached if every group were computed once and nothing were ever evicted."""
        cold = min(self.groups, self.requests)
        return self.shared_tokens / self.prompt_tokens * (1 - cold / self.requests)

    def draw_requests(self, seed: int) -> list[Request]:
        """The requests; the same for every policy."""
        rng = random.Random(f"requests/{seed}")  # noqa: S311 - a load, not a secret
        shared_prefixes = [
            tuple(rng.randbytes(self.shared_tokens)) for _ in range(max(1, self.groups))
        ]
        return [
            Request(
                request_id=f"r{number}",
                prompt_token_ids=rng.choice(shared_prefixes) + self._own_tokens(rng),
                max_tokens=self.output_tokens,
                arrived_at_s=0.0,
            )
            for number in range(self.requests)
        ]

    def _own_tokens(self, rng: random.Random) -> tuple[int, ...]:
        return tuple(rng.randbytes(self.prompt_tokens - self.shared_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The engines, and the loads by name."""

    engine: SimSettings
    workloads: Mapping[str, Workload]

    def engine_of(self, workload: Workload) -> SimSettings:
        """The engines that a load runs on."""
        return replace(self.engine, **workload.engine)  # type: ignore[arg-type]  # checked inside


def read_scenario(file: Path = SCENARIO) -> Scenario:
    """The scenario in a file.

    Raises:
        TypeError: a key is misspelt or missing.
        ValueError: a value cannot be used.
    """
    read = YAML(typ="safe").load(file)
    engine, workloads = SimSettings(**read.pop("engine")), read.pop("workloads")
    return Scenario(
        engine=engine,
        workloads={name: _workload(**keys) for name, keys in workloads.items()},
        **read,
    )


def _workload(replicas: Mapping[str, int], **keys: Any) -> Workload:  # noqa: ANN401 - as it checks
    return Workload(replicas={Role(role): count for role, count in replicas.items()}, **keys)
