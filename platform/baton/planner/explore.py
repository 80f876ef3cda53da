"""Choice and simulation of whole fleets, and corrections by their results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from baton.planner.problem import PlanningProblem
from baton.planner.rates.arrivals import TrafficSampler
from baton.planner.rates.measure import InstanceTask, RateSearchResult
from baton.planner.result import Candidate
from baton.planner.shapes.fleets import (
    FleetKind,
    GpuBudget,
    PlannedFleet,
    RateKey,
    estimate_rate,
    largest_fleets,
    rate_key,
    representative_part,
    smallest_fleets,
)
from baton.planner.shapes.space import Duty, EngineShape
from baton.planner.simulation_runner import SimulationRunner
from baton.planner.verify import FleetTask, measure_fleet
from baton.simulator.outcome import FILLING_RESIDENCES

_CORRECTION_ROUNDS = 3
"""For a given rate: how often replica counts are corrected by simulated rates."""
STAGE = "fleets"
_INITIAL_RATE_FRACTION = 0.85
"""Of the estimated rate, where a search begins: overloaded fleets take longest to simulate."""


class Explorer:
    """Proposes fleets by the rates of single replicas, and simulates them."""

    def __init__(
        self,
        question: PlanningProblem,
        tasks: Sequence[InstanceTask],
        measured: Sequence[RateSearchResult],
        simulated: Sequence[Candidate] = (),
    ) -> None:
        self.question = question
        self.stock = GpuBudget.from_offers(question.gpus, question.offers)
        results = list(zip(tasks, measured, strict=True))
        usable = [(task, result) for task, result in results if result.rate_per_s > 0]
        self.rates: dict[RateKey, float] = {
            rate_key(task.duty, task.engine_shape): result.rate_per_s for task, result in usable
        }
        self._e2e_s: dict[RateKey, float] = {
            rate_key(task.duty, task.engine_shape): result.best_trial.e2e_s
            for task, result in usable
            if result.best_trial is not None
        }
        self._instances_by_duty = {
            duty: [task.engine_shape for task, _ in usable if task.duty is duty] for duty in Duty
        }
        self._measured_by_name: dict[str, RateSearchResult] = {
            _fleet_name(candidate.simulated_fleet): candidate.search_result
            for candidate in simulated
        }
        self.runs = 0

    def pairs(self, kind: FleetKind) -> list[tuple[EngineShape, ...]]:
        """Shapes of the pools of one kind of fleet."""
        if kind is FleetKind.COLOCATED:
            return [(instance,) for instance in self._instances_by_duty[Duty.BOTH]]
        return list(
            product(self._instances_by_duty[Duty.PREFILL], self._instances_by_duty[Duty.DECODE])
        )

    def explore(self, runner: SimulationRunner) -> list[Candidate]:
        """The simulated fleets, of every possible kind."""
        if self.question.demand is None:
            return self._simulate(
                runner,
                [
                    largest_fleet
                    for kind in FleetKind
                    for largest_fleet in self._largest_fleets(kind)
                ],
            )
        return self._search_for_demand(runner, self.question.demand)

    # -------------------------------------------------------------- proposals

    def _largest_fleets(self, kind: FleetKind) -> list[PlannedFleet]:
        if self.question.gpus is None and not self.stock.limit_by_accelerator:
            return []
        fleets = largest_fleets(kind, self.pairs(kind), self.stock)
        ranked = sorted(
            fleets, key=lambda fleet: (-estimate_rate(fleet, self.rates), fleet.gpus, fleet.label)
        )
        return ranked[: self.question.effort.simulated_fleets + (kind is FleetKind.HYBRID)]

    def cheapest_fleet(
        self, kind: FleetKind, load: float, *, stock: GpuBudget | None = None
    ) -> PlannedFleet | None:
        """The cheapest fleet whose estimate reaches a load; None if the budget is too small."""
        fleets = smallest_fleets(
            kind,
            self.pairs(kind),
            stock or self.stock,
            lambda fleet: self._estimate_load(fleet) >= load,
        )
        return min(
            fleets,
            key=lambda fleet: (cost(fleet, self.question), fleet.gpus, fleet.replicas),
            default=None,
        )

    def _estimate_load(self, fleet: PlannedFleet) -> float:
        rate_per_s = estimate_rate(fleet, self.rates)
        return self.question.load_of(rate_per_s, self._residence_s(fleet))

    def correction(self, candidate: Candidate) -> float:
        """The estimated load of a fleet over the simulated load, which is above 0."""
        return self._estimate_load(candidate.fleet) / candidate.load(self.question)

    def _search_for_demand(self, runner: SimulationRunner, demand: float) -> list[Candidate]:
        """The cheapest fleet of each kind, its size corrected by simulated loads."""
        candidates: dict[str, Candidate] = {}
        targets = dict.fromkeys(FleetKind, demand)
        for _ in range(_CORRECTION_ROUNDS):
            proposed = {kind: self.cheapest_fleet(kind, targets[kind]) for kind in FleetKind}
            fleets = [
                fleet
                for kind, other in proposed.items()
                for fleet in (self._largest_fleets(kind)[:1] if other is None else [other])
                if _fleet_name(fleet) not in candidates
            ]
            if not fleets:
                break
            for candidate in self._simulate(runner, fleets):
                candidates[_fleet_name(candidate.fleet)] = candidate
                if candidate.rate_per_s:
                    targets[candidate.fleet.kind] = demand * self.correction(candidate)
        return list(candidates.values())

    # -------------------------------------------------------------- simulation

    def _simulate(
        self, runner: SimulationRunner, fleets: Iterable[PlannedFleet]
    ) -> list[Candidate]:
        simulated_parts = {
            _fleet_name(fleet): (fleet, self._simulated_part(fleet)) for fleet in fleets
        }
        tasks = {
            _fleet_name(part): self.task(part)
            for _, part in simulated_parts.values()
            if _fleet_name(part) not in self._measured_by_name
        }
        results = runner.run_stage(STAGE, measure_fleet, list(tasks.values()))
        self._measured_by_name |= dict(zip(tasks, results, strict=True))
        self.runs += sum(len(result.trials) for result in results)
        return [self._candidate(fleet, part) for fleet, part in simulated_parts.values()]

    def _candidate(self, fleet: PlannedFleet, simulated_fleet: PlannedFleet) -> Candidate:
        fleet_rate = estimate_rate(fleet, self.rates)
        return Candidate(
            fleet=fleet,
            simulated_fleet=simulated_fleet,
            scale_factor=fleet_rate / estimate_rate(simulated_fleet, self.rates),
            estimate_per_s=fleet_rate,
            search_result=self._measured_by_name[_fleet_name(simulated_fleet)],
        )

    def task(self, simulated_fleet: PlannedFleet) -> FleetTask:
        """The simulation task of a fleet, or of a part of one."""
        question = self.question
        return FleetTask(
            fleet=simulated_fleet,
            traffic=TrafficSampler(question.traffic, question.seed),
            classes=question.classes,
            placement_objectives=question.objectives,
            effort=question.effort,
            guess_per_s=_INITIAL_RATE_FRACTION * estimate_rate(simulated_fleet, self.rates),
            residence_s=self._residence_s(simulated_fleet),
            seed=question.seed,
        )

    def _simulated_part(self, fleet: PlannedFleet) -> PlannedFleet:
        """The largest part whose runs are no longer than those that confirm it; or the smallest."""
        effort = self.question.effort
        ranks = max(pool.engine_shape.dp for pool in fleet.pools)
        parts = [
            representative_part(fleet, most) for most in range(effort.max_simulated_replicas, 0, -1)
        ]
        for part in parts:
            in_flight = estimate_rate(part, self.rates) * self._residence_s(part)
            requests = FILLING_RESIDENCES * in_flight
            if requests <= max(effort.confirmation_requests, ranks * effort.rank_requests):
                return part
        return min(parts, key=lambda part: part.replicas)

    def _residence_s(self, fleet: PlannedFleet) -> float:
        if fleet.kind is FleetKind.COLOCATED:
            return self._e2e_s[rate_key(Duty.BOTH, fleet.pools[0].engine_shape)]
        prefill, decode = fleet.pools
        prefill_s = self._e2e_s[rate_key(Duty.PREFILL, prefill.engine_shape)]
        return prefill_s + self._e2e_s[rate_key(Duty.DECODE, decode.engine_shape)]


def has_all_prices(question: PlanningProblem) -> bool:
    """Whether fleets are compared by price: every offer has one, above 0."""
    return all(offer.price for offer in question.offers)


def cost(fleet: PlannedFleet, question: PlanningProblem) -> float:
    """Dollars per hour, or accelerators if a price is missing, for all fleets alike."""
    price = fleet.price_per_hour if has_all_prices(question) else None
    return float(fleet.gpus) if price is None else price


def _fleet_name(fleet: PlannedFleet) -> str:
    chunks = ",".join(str(pool.engine_shape.chunk_tokens) for pool in fleet.pools)
    return f"{fleet.kind} {fleet.label} chunks {chunks}"


def rank_candidates(
    candidates: Sequence[Candidate], question: PlanningProblem
) -> tuple[Candidate | None, list[Candidate]]:
    """The best candidate, and all in order.

    For a rate: the cheapest that sustains it, else the highest rate. Among rates that are equal
    within `precision`, the simplest fleet is first.
    """
    feasible = [candidate for candidate in candidates if candidate.rate_per_s > 0]
    infeasible = [candidate for candidate in candidates if not candidate.rate_per_s]
    load = {id(candidate): candidate.load(question) for candidate in feasible}
    meeting_demand = [candidate for candidate in feasible if candidate.meets_demand(question)]
    if meeting_demand:
        ranked = sorted(
            meeting_demand,
            key=lambda fleet: (cost(fleet.fleet, question), _complexity(fleet), -load[id(fleet)]),
        )
    else:
        near_best = max(load.values(), default=0.0) * (1 - question.effort.precision)
        ranked = sorted(
            feasible,
            key=lambda fleet: (
                load[id(fleet)] < near_best,
                _complexity(fleet) if load[id(fleet)] >= near_best else 0,
                -load[id(fleet)],
            ),
        )
    other_feasible = sorted(
        (candidate for candidate in feasible if candidate not in ranked),
        key=lambda fleet: -load[id(fleet)],
    )
    all_ranked = [*ranked, *other_feasible, *infeasible]
    return (ranked[0] if ranked else None), all_ranked


_BY_SIMPLICITY = (FleetKind.COLOCATED, FleetKind.HYBRID, FleetKind.DISAGGREGATED)


def _complexity(candidate: Candidate) -> int:
    return _BY_SIMPLICITY.index(candidate.fleet.kind)


def first_by_kind(candidates: Iterable[Candidate]) -> Mapping[FleetKind, Candidate]:
    """The first candidate of each kind."""
    candidates_by_kind: dict[FleetKind, Candidate] = {}
    for candidate in candidates:
        candidates_by_kind.setdefault(candidate.fleet.kind, candidate)
    return candidates_by_kind
