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

from baton.config.derive.options import adapter_rules, adapter_sources, split_by_model
from baton.config.schema.deployment import DeploymentConfig
from baton.control.fleet.adapter_registry import AdapterRegistry, requestable_adapters
from baton.domain.commands import RecordSelection
from baton.domain.demand import ColdStart, CoordinatorReport
from baton.engine.vllm.gate.adapters import Administer
from baton.engine.vllm.gate.gate import AsgiApp
from baton.engine.vllm.gate.model_router import ModelRouter
from baton.serving.controller.quota_allocator import Shares
from baton.serving.ingress.model_ingress import ModelIngress
from baton.serving.shared.reports import Row
from baton.serving.store.config_participant import Switch
from baton.telemetry.requests.request_log import RequestReport

Status = dict[str, object]


class MultiModelIngress:
    """The bodies of an ingress, by model; for one model it is as if there were only that."""

    def __init__(
        self, config: DeploymentConfig, build: Callable[[str, DeploymentConfig], ModelIngress]
    ) -> None:
        """`build` builds the body of a model from the part of the configuration about it."""
        self._config = config
        self._by_model = {name: build(name, part) for name, part in split_by_model(config).items()}
        self._router: ModelRouter | None = None
        """What tells requests for different models apart; None where there is one."""
        self.generation: Callable[[], int] = lambda: 0

    @property
    def model_ingresses(self) -> tuple[ModelIngress, ...]:
        """In the order of the configuration."""
        return tuple(self._by_model.values())

    @property
    def metrics_address(self) -> str | None:
        """Where metrics are, one address for each body with a comma between; None: nowhere."""
        addresses = (ingress.telemetry.address for ingress in self.model_ingresses)
        return ",".join(address for address in addresses if address is not None) or None

    async def start(self, host: str) -> AsgiApp:
        """Bring every body up, one after the other: each imports and builds a server.

        Raises:
            EngineStartFailed: a frontend cannot be started.
        """
        apps = []
        for ingress in self.model_ingresses:
            ingress.telemetry.generation = self._current_generation
            apps.append(await ingress.start(host))
        if len(apps) == 1:
            return apps[0]
        apis: dict[str, AsgiApp] = {}
        for name, ingress in self._by_model.items():
            names = (name, *adapter_sources(self._config.models[name]))
            apis |= dict.fromkeys(names, ingress.frontend.api)
        first_frontend = self.model_ingresses[0].frontend
        self._router = ModelRouter(apis)
        return first_frontend.gate_app(self._router, healthy=self.healthy)

    async def close(self) -> None:
        """Take every body down. Idempotent."""
        for ingress in self.model_ingresses:
            await ingress.close()

    def prepare_switch(self, config: DeploymentConfig) -> Switch:
        """The way of all bodies to another configuration; whatever can fail has not.

        Raises:
            ConfigInvalid: a policy of the user's own, or key files, cannot be used.
        """
        parts = split_by_model(config)
        switches = [ingress.prepare_switch(parts[name]) for name, ingress in self._by_model.items()]

        async def switch() -> None:
            for switch in switches:
                await switch()
            self._config = config

        return switch

    def healthy(self) -> bool:
        """Whether a request for any model could be served."""
        return any(ingress.healthy() for ingress in self.model_ingresses)

    def check(self) -> None:
        """See `ModelIngress.check`.

        Raises:
            Broken: one of them is.
        """
        for ingress in self.model_ingresses:
            ingress.check()

    def status(self) -> Status:
        """One status for all: replicas and what was done together, the rest by model."""
        statuses = {name: ingress.status() for name, ingress in self._by_model.items()}
        return merge_statuses(statuses)

    def explain(self, request_id: str) -> list[RequestReport]:
        """See `ModelIngress.explain`."""
        return [story for ingress in self.model_ingresses for story in ingress.explain(request_id)]

    def requests(self, count: int, order: RecordSelection) -> list[RequestReport]:
        """See `ModelIngress.requests`; so many of each model."""
        return [
            story for ingress in self.model_ingresses for story in ingress.requests(count, order)
        ]

    def links(self) -> list[Row]:
        """See `ModelIngress.links`."""
        return [row for ingress in self.model_ingresses for row in ingress.links()]

    def set_administer(self, administer: Administer) -> None:
        """Have adapters loaded and unloaded by this."""
        self.model_ingresses[0].frontend.set_administer(administer)

    def set_adapters(self, registry: AdapterRegistry) -> None:
        """Offer what was added to each model besides what the file has."""
        rules, models = adapter_rules(self._config), dict[str, str]()
        for model, ingress in self._by_model.items():
            added = requestable_adapters(registry, model, rules)
            ingress.set_adapters(tuple(added.values()))
            models |= dict.fromkeys(added, model)
        if self._router is not None:
            self._router.set_adapters(models)

    def adapters_in_flight(self) -> Counter[str]:
        """How many requests under way need each adapter."""
        counts: Counter[str] = Counter()
        for ingress in self.model_ingresses:
            counts.update(ingress.adapters_in_flight())
        return counts

    def tallies(self) -> Mapping[str, object]:
        """What each replica has done for requests that came through here."""
        outcomes: dict[str, object] = {}
        for ingress in self.model_ingresses:
            outcomes |= ingress.telemetry.outcomes.tallies()
        return outcomes

    def reports(self) -> tuple[CoordinatorReport, ...]:
        """One of each coordinator."""
        return tuple(ingress.report() for ingress in self.model_ingresses)

    def apply_quotas(self, shares: Shares, *, at_most: bool) -> tuple[str, ...]:
        """Go by the shares that are for coordinators here; the ids of those that had one."""
        coordinator_ids = (
            ingress.apply_quotas(shares, at_most=at_most) for ingress in self.model_ingresses
        )
        return tuple(
            coordinator_id for coordinator_id in coordinator_ids if coordinator_id is not None
        )

    def record_cold_starts(self, starts: Mapping[str, ColdStart]) -> None:
        """Have each body know how long the first replica of its model takes."""
        for name, ingress in self._by_model.items():
            start = starts.get(name if len(self._by_model) > 1 else "")
            if start is not None:
                ingress.record_cold_start(start)

    def _current_generation(self) -> int:
        return self.generation()


def merge_statuses(statuses: Mapping[str, Status]) -> Status:
    """The statuses of several models as one; of one model as it is.

    Counts are added up, rows put together, and what is neither is of the first model.
    """
    first, *others = statuses.values()
    if not others:
        return first
    merged = dict(first)
    for other in others:
        merged |= {key: _merge_values(merged[key], value) for key, value in other.items()}
    by_model = {name: {"healthy": entry["healthy"]} for name, entry in statuses.items()}
    return merged | {"models": by_model}


def _merge_values(left: object, right: object) -> object:
    match left, right:
        case bool(), bool():
            return left or right
        case ((int() | float()), (int() | float())):
            return left + right
        case list(), list():
            return [*left, *right]
        case dict(), dict():
            merged = cast("dict[str, object]", left) | cast("dict[str, object]", right)
            shared = left.keys() & right.keys()
            return merged | {key: _merge_values(left[key], right[key]) for key in shared}
        case _:
            return left
