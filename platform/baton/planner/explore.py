"""Which fleets are simulated as a whole, and what becomes of the estimates that chose them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from baton.planner.problem import Question
from baton.planner.rates.arrivals import Traffic
from baton.planner.rates.measure import Measured, Task
from baton.planner.rates.trials import TURNS
from baton.planner.result import Candidate
from baton.planner.shapes.fleets import (
    Fleet,
    Key,
    Kind,
    Stock,
    cell,
    estimate,
    key,
    largest,
    smallest,
)
from baton.planner.shapes.space import Duty, Instance
from baton.planner.simulation_runner import Work
from baton.planner.verify import FleetTask, verify

_ROUNDS = 3
"""For a rate: how often counts are corrected by what a simulated fleet carried."""
STAGE = "fleets"
_CAUTION = 0.85
"""Of the estimate, where a search begins: a fleet that is asked too much takes longest to run."""


class Explorer:
    """Proposes fleets by what replicas carry alone, and has them simulated."""

    def __init__(
        self, question: Question, tasks: Sequence[Task], measured: Sequence[Measured]
    ) -> None:
        self.question = question
        self.stock = Stock.of(question.gpus, question.offers)
        done = list(zip(tasks, measured, strict=True))
        able = [(task, result) for task, result in done if result.rate_per_s > 0]
        self.rates: dict[Key, float] = {
            key(task.duty, task.instance): result.rate_per_s for task, result in able
        }
        self._e2e_s: dict[Key, float] = {
            key(task.duty, task.instance): result.at_best.e2e_s
            for task, result in able
            if result.at_best is not None
        }
        self._able = {
            duty: [task.instance for task, _ in able if task.duty is duty] for duty in Duty
        }
        self._cells: dict[str, Measured] = {}
        self.runs = 0

    def pairs(self, kind: Kind) -> list[tuple[Instance, ...]]:
        """The shapes of the pools of one kind of fleet."""
        if kind is Kind.COLOCATED:
            return [(one,) for one in self._able[Duty.BOTH]]
        return list(product(self._able[Duty.PREFILL], self._able[Duty.DECODE]))

    def explore(self, work: Work) -> list[Candidate]:
        """The fleets that were simulated, of every kind that is possible."""
        if self.question.rate_per_s is None:
            return self._simulate(work, [one for kind in Kind for one in self._most(kind)])
        return self._for_rate(work, self.question.rate_per_s)

    # -------------------------------------------------------------- proposals

    def _most(self, kind: Kind) -> list[Fleet]:
        """What should carry most, of all ways to spend what there is."""
        if self.question.gpus is None and not self.stock.by_name:
            return []
        ways = largest(kind, self.pairs(kind), self.stock)
        ranked = sorted(ways, key=lambda one: (-estimate(one, self.rates), one.gpus, one.label))
        return ranked[: self.question.effort.verified + (kind is Kind.HYBRID)]

    def least(self, kind: Kind, rate_per_s: float, *, stock: Stock | None = None) -> Fleet | None:
        """The cheapest that should carry a rate; None when what there is is too little."""
        ways = smallest(
            kind,
            self.pairs(kind),
            stock or self.stock,
            lambda fleet: estimate(fleet, self.rates) >= rate_per_s,
        )
        return min(
            ways,
            key=lambda one: (cost(one, self.question), one.gpus, one.replicas),
            default=None,
        )

    def _for_rate(self, work: Work, rate_per_s: float) -> list[Candidate]:
        """The cheapest fleet of each kind, its size corrected by what it was seen to carry."""
        seen: dict[str, Candidate] = {}
        wanted = dict.fromkeys(Kind, rate_per_s)
        for _ in range(_ROUNDS):
            proposed = {kind: self.least(kind, wanted[kind]) for kind in Kind}
            fleets = [
                fleet
                for kind, one in proposed.items()
                for fleet in (self._most(kind)[:1] if one is None else [one])
                if _name(fleet) not in seen
            ]
            if not fleets:
                break
            for done in self._simulate(work, fleets):
                seen[_name(done.fleet)] = done
                if done.rate_per_s:
                    share = done.estimate_per_s / done.rate_per_s
                    wanted[done.fleet.kind] = rate_per_s * share
        return list(seen.values())

    # -------------------------------------------------------------- simulation

    def _simulate(self, work: Work, fleets: Iterable[Fleet]) -> list[Candidate]:
        parts = {_name(fleet): (fleet, self._cell(fleet)) for fleet in fleets}
        tasks = {
            _name(part): self.task(part)
            for _, part in parts.values()
            if _name(part) not in self._cells
        }
        results = work.all(STAGE, verify, list(tasks.values()))
        self._cells |= dict(zip(tasks, results, strict=True))
        self.runs += sum(len(one.trials) for one in results)
        return [self._candidate(fleet, part) for fleet, part in parts.values()]

    def _candidate(self, fleet: Fleet, part: Fleet) -> Candidate:
        whole = estimate(fleet, self.rates)
        return Candidate(
            fleet=fleet,
            cell=part,
            factor=whole / estimate(part, self.rates),
            estimate_per_s=whole,
            measured=self._cells[_name(part)],
        )

    def task(self, part: Fleet) -> FleetTask:
        """How a fleet, or a part of one, is simulated."""
        question = self.question
        return FleetTask(
            fleet=part,
            traffic=Traffic(question.traffic, question.seed),
            classes=question.classes,
            aims=question.objectives,
            effort=question.effort,
            guess_per_s=_CAUTION * estimate(part, self.rates),
            under_way_s=self._under_way_s(part),
            seed=question.seed,
        )

    def _cell(self, fleet: Fleet) -> Fleet:
        """The largest part whose runs are not too long to be run, or else the smallest there is."""
        effort = self.question.effort
        parts = [cell(fleet, most) for most in range(effort.cell, 0, -1)]
        for part in parts:
            requests = TURNS * estimate(part, self.rates) * self._under_way_s(part)
            if requests <= effort.requests:
                return part
        return min(parts, key=lambda part: part.replicas)

    def _under_way_s(self, fleet: Fleet) -> float:
        if fleet.kind is Kind.COLOCATED:
            return self._e2e_s[key(Duty.BOTH, fleet.pools[0].instance)]
        prefill, decode = fleet.pools
        first_s = self._e2e_s[key(Duty.PREFILL, prefill.instance)]
        return first_s + self._e2e_s[key(Duty.DECODE, decode.instance)]


def in_dollars(question: Question) -> bool:
    """Whether fleets are compared by what they cost: every offer has a price, and none is free."""
    return all(one.price for one in question.offers)


def cost(fleet: Fleet, question: Question) -> float:
    """What a fleet is compared by: dollars an hour, or accelerators where a price is missing.

    All fleets of a question by the same: 4 accelerators without a price are not $4 an hour.
    """
    price = fleet.price_per_hour if in_dollars(question) else None
    return float(fleet.gpus) if price is None else price


def _name(fleet: Fleet) -> str:
    chunks = ",".join(str(pool.instance.chunk_tokens) for pool in fleet.pools)
    return f"{fleet.kind} {fleet.label} chunks {chunks}"


def best_of(
    candidates: Sequence[Candidate], question: Question
) -> tuple[Candidate | None, list[Candidate]]:
    """The one to take, and all in order.

    For a rate: the cheapest that carries it, or else what carries most. Of those that are as good
    within what is known of their rates, the simplest.
    """
    carrying = [one for one in candidates if one.rate_per_s > 0]
    rest = [one for one in candidates if not one.rate_per_s]
    rate = question.rate_per_s
    enough = [one for one in carrying if rate is not None and one.rate_per_s >= rate]
    if enough:
        ranked = sorted(
            enough, key=lambda one: (cost(one.fleet, question), _order(one), -one.rate_per_s)
        )
    else:
        top = max((one.rate_per_s for one in carrying), default=0.0)
        near = top * (1 - question.effort.precision)
        ranked = sorted(
            carrying,
            key=lambda one: (
                one.rate_per_s < near,
                _order(one) if one.rate_per_s >= near else 0,
                -one.rate_per_s,
            ),
        )
    others = sorted((one for one in carrying if one not in ranked), key=lambda x: -x.rate_per_s)
    everyone = [*ranked, *others, *rest]
    return (ranked[0] if ranked else None), everyone


_SIMPLEST = (Kind.COLOCATED, Kind.HYBRID, Kind.DISAGGREGATED)


def _order(candidate: Candidate) -> int:
    return _SIMPLEST.index(candidate.fleet.kind)


def by_kind(candidates: Iterable[Candidate]) -> Mapping[Kind, Candidate]:
    """The first candidate of each kind."""
    found: dict[Kind, Candidate] = {}
    for one in candidates:
        found.setdefault(one.fleet.kind, one)
    return found
