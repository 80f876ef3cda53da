"""One ingress for several models: a body for each, and one door before them.

Theory of operation. Nothing is shared between models but what tells who may ask: each body has its
own coordinator, links to the replicas of its own pools, and API server. So one model's overload
refuses nobody who asks for another, and every part of an ingress is as it is with a single model.
The controller sees as many coordinators as there are bodies: limits of tenants are dealt out among
them as they are among ingresses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import cast

from baton.config.derive.options import adapter_rules, adapter_sources
from baton.config.derive.per_model import each_model
from baton.config.schema.deployment import DeploymentConfig
from baton.control.fleet.adapter_registry import Registry, offered
from baton.domain.commands import RecordOrder
from baton.domain.demand import ColdStart, CoordinatorReport
from baton.engine.vllm.gate.adapters import Administer
from baton.engine.vllm.gate.gate import AsgiApp
from baton.engine.vllm.gate.model_router import ModelRouter
from baton.serving.controller.quota_allocator import Shares
from baton.serving.ingress.model_ingress import IngressBody
from baton.serving.shared.reports import Row
from baton.serving.store.config_participant import Switch
from baton.telemetry.requests.request_log import Story

Status = dict[str, object]


class SeveralBodies:
    """The bodies of an ingress, by model; for one model it is as if there were only that."""

    def __init__(
        self, config: DeploymentConfig, make: Callable[[str, DeploymentConfig], IngressBody]
    ) -> None:
        """`make` builds the body of a model from the part of the configuration about it."""
        self._config = config
        self._bodies = {name: make(name, part) for name, part in each_model(config).items()}
        self._router: ModelRouter | None = None
        """What tells requests for different models apart; None where there is one."""
        self.generation: Callable[[], int] = lambda: 0

    @property
    def bodies(self) -> tuple[IngressBody, ...]:
        """In the order of the configuration."""
        return tuple(self._bodies.values())

    @property
    def metrics_address(self) -> str | None:
        """Where metrics are, one address for each body with a comma between; None: nowhere."""
        found = (body.telemetry.address for body in self.bodies)
        return ",".join(address for address in found if address is not None) or None

    async def start(self, host: str) -> AsgiApp:
        """Bring every body up, one after the other: each imports and builds a server.

        Raises:
            EngineStartFailed: a frontend cannot be started.
        """
        apps = []
        for body in self.bodies:
            body.telemetry.generation = self._present_generation
            apps.append(await body.start(host))
        if len(apps) == 1:
            return apps[0]
        apis: dict[str, AsgiApp] = {}
        for name, body in self._bodies.items():
            names = (name, *adapter_sources(self._config.models[name]))
            apis |= dict.fromkeys(names, body.frontend.api)
        first = self.bodies[0].frontend
        self._router = ModelRouter(apis)
        return first.stand_before(self._router, healthy=self.healthy)

    async def close(self) -> None:
        """Take every body down. Idempotent."""
        for body in self.bodies:
            await body.close()

    def switch_to(self, config: DeploymentConfig) -> Switch:
        """The way of all bodies to another configuration; whatever can fail has not.

        Raises:
            ConfigInvalid: a policy of the user's own, or key files, cannot be used.
        """
        parts = each_model(config)
        switches = [body.switch_to(parts[name]) for name, body in self._bodies.items()]

        async def switch() -> None:
            for one in switches:
                await one()
            self._config = config

        return switch

    def healthy(self) -> bool:
        """Whether a request for any model could be served."""
        return any(body.healthy() for body in self.bodies)

    def check(self) -> None:
        """See `IngressBody.check`.

        Raises:
            Broken: one of them is.
        """
        for body in self.bodies:
            body.check()

    def status(self) -> Status:
        """One status for all: replicas and what was done together, the rest by model."""
        told = {name: body.status() for name, body in self._bodies.items()}
        return merged_status(told)

    def explain(self, request_id: str) -> list[Story]:
        """See `IngressBody.explain`."""
        return [story for body in self.bodies for story in body.explain(request_id)]

    def requests(self, count: int, order: RecordOrder) -> list[Story]:
        """See `IngressBody.requests`; so many of each model."""
        return [story for body in self.bodies for story in body.requests(count, order)]

    def links(self) -> list[Row]:
        """See `IngressBody.links`."""
        return [row for body in self.bodies for row in body.links()]

    def administer_by(self, administer: Administer) -> None:
        """Have adapters loaded and unloaded by this."""
        self.bodies[0].frontend.administer_by(administer)

    def take_adapters(self, registry: Registry) -> None:
        """Offer what was added to each model besides what the file has."""
        rules, models = adapter_rules(self._config), dict[str, str]()
        for model, body in self._bodies.items():
            added = offered(registry, model, rules)
            body.take_adapters(tuple(added.values()))
            models |= dict.fromkeys(added, model)
        if self._router is not None:
            self._router.add_names(models)

    def adapters_in_flight(self) -> Counter[str]:
        """How many requests under way need each adapter."""
        found: Counter[str] = Counter()
        for body in self.bodies:
            found.update(body.adapters_in_flight())
        return found

    def tallies(self) -> Mapping[str, object]:
        """What each replica has done for requests that came through here."""
        found: dict[str, object] = {}
        for body in self.bodies:
            found |= body.telemetry.outcomes.tallies()
        return found

    def reports(self) -> tuple[CoordinatorReport, ...]:
        """One of each coordinator."""
        return tuple(body.report() for body in self.bodies)

    def take_quotas(self, shares: Shares, *, at_most: bool) -> tuple[str, ...]:
        """Go by the shares that are for coordinators here; the ids of those that had one."""
        taken = (body.take_quotas(shares, at_most=at_most) for body in self.bodies)
        return tuple(one for one in taken if one is not None)

    def take_starts(self, starts: Mapping[str, ColdStart]) -> None:
        """Have each body know how long the first replica of its model takes."""
        for name, body in self._bodies.items():
            start = starts.get(name if len(self._bodies) > 1 else "")
            if start is not None:
                body.take_start(start)

    def _present_generation(self) -> int:
        return self.generation()


def merged_status(told: Mapping[str, Status]) -> Status:
    """The statuses of several models as one; of one model as it is.

    Counts are added up, rows put together, and what is neither is of the first model.
    """
    first, *others = told.values()
    if not others:
        return first
    merged = dict(first)
    for other in others:
        merged |= {key: _together(merged[key], value) for key, value in other.items()}
    by_model = {name: {"healthy": one["healthy"]} for name, one in told.items()}
    return merged | {"models": by_model}


def _together(one: object, other: object) -> object:
    match one, other:
        case bool(), bool():
            return one or other
        case ((int() | float()), (int() | float())):
            return one + other
        case list(), list():
            return [*one, *other]
        case dict(), dict():
            both = cast("dict[str, object]", one) | cast("dict[str, object]", other)
            shared = one.keys() & other.keys()
            return both | {key: _together(one[key], other[key]) for key in shared}
        case _:
            return one
