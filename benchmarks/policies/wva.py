"""llm-d's workload variant autoscaler: a linear model of a step, and what rate it bears.

Source: llm-d-incubation/workload-variant-autoscaler, docs (ITL = alpha + beta * batch; the largest
rate a replica bears under TTFT and ITL, on average, by a queueing model; the cheapest accelerators
first), and its use of Kubernetes' autoscaler to carry it out.

    autoscaler: {policy: "benchmarks.policies.wva:Wva"}
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from baton.domain.fleet import Role
from baton.policy.scaling.desired import DesiredReplicas, ScalingReason
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.policy.scaling.options import AutoscalerOptions
from baton.policy.scaling.pools.groups import pool_groups
from benchmarks.policies.hpa import PERIOD_S, Stabilized
from benchmarks.policies.spread import spread

_MEMORY = 0.05
"""Weight of a new pair of batch and ITL: of the order of its filter's gain once it has settled."""
_TTFT_S, _TPOT_S = 2.0, 0.05
"""Where no objective is given; it cannot do without."""


class Wva:
    """Replicas = ceil(requests a second / the most that one bears).

    A decode replica bears b / (ITL(b) * output tokens), b being the batch at which ITL is the
    objective. A prefill replica is a queue of one server whose mean time in it is the TTFT
    objective: (1 - service / TTFT) / service. Lengths are means. It does not know prefill and
    decode apart; each pool is taken for a model of its own.
    """

    name = "wva"

    def __init__(self, options: AutoscalerOptions) -> None:
        self._bounds = options.bounds
        self._model = StepLine()
        self._stabilized = {role: Stabilized() for role in Role}
        self._kept: dict[str, DesiredReplicas] = {}
        self._at_s: float | None = None

    def desired(self, observation: Observation) -> Mapping[str, DesiredReplicas]:
        """Once in 15 s; the same in between."""
        self._learn(observation)
        if self._at_s is None or not 0 <= observation.at_s - self._at_s < PERIOD_S:
            self._at_s = observation.at_s
            self._kept = self._decide(observation)
        return {name: want for name, want in self._kept.items() if name in observation.pools}

    def _learn(self, observation: Observation) -> None:
        itl_s = observation.service.tpot_mean_s
        batches = [
            pool.running_requests
            for pool in observation.pools.values()
            if pool.role is not Role.PREFILL and pool.ready_replicas
        ]
        if itl_s is not None and batches:
            self._model.learn(sum(batches) / len(batches), itl_s)

    def _decide(self, observation: Observation) -> dict[str, DesiredReplicas]:
        groups = pool_groups(observation, self._bounds)
        counts: dict[Role, int] = {}
        inputs = {"alpha_s": self._model.alpha_s, "beta_s": self._model.beta_s}
        for role, pool in groups.reference_pools().items():
            have = groups.replicas(role)
            load = self._load(observation, role, pool)
            inputs[f"load_{role}"] = load or 0.0
            desired = have if load is None else max(1, math.ceil(load))
            counts[role] = self._stabilized[role].next(observation.at_s, have=have, desired=desired)
        return spread(groups, counts, reason=ScalingReason.LATENCY, inputs=inputs)

    def _load(self, observation: Observation, role: Role, pool: PoolObservation) -> float | None:
        rate, load = observation.demand.requests_per_s, 0.0
        if role is not Role.DECODE:
            if pool.prefill_tokens_per_s is None:
                return None
            service_s = (
                max(observation.demand.mean_uncached_tokens, 1.0) / pool.prefill_tokens_per_s
            )
            share = 1.0 - service_s / (observation.ttft_s or _TTFT_S)
            load += rate * service_s / max(share, 0.1)
        if role is not Role.PREFILL:
            tpot_s = observation.tpot_s or _TPOT_S
            batch = self._model.batch(tpot_s)
            if batch is None or (pool.decode_streams is not None and batch > pool.decode_streams):
                batch = pool.decode_streams  # no more than it is configured to run
            if batch is None:
                return None
            bears = batch / (self._model.itl_s(batch, tpot_s) * max(1.0, mean_output(observation)))
            load += rate / bears
        return load


class StepLine:
    """ITL = alpha + beta * batch, by exponentially forgetting least squares."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._batch = self._itl_s = self._batch2 = self._product = 0.0

    def learn(self, batch: float, itl_s: float) -> None:
        """Take in a mean batch, and the mean ITL with it."""
        self._weight += (1.0 - self._weight) * _MEMORY
        share = _MEMORY / self._weight
        self._batch += (batch - self._batch) * share
        self._itl_s += (itl_s - self._itl_s) * share
        self._batch2 += (batch * batch - self._batch2) * share
        self._product += (batch * itl_s - self._product) * share

    @property
    def beta_s(self) -> float:
        """What one more request adds; 0 while batches have not differed."""
        spread = self._batch2 - self._batch**2
        if spread <= 1e-3 * max(1.0, self._batch2):
            return 0.0
        return max(0.0, (self._product - self._batch * self._itl_s) / spread)

    @property
    def alpha_s(self) -> float:
        """A step without requests."""
        return max(0.0, self._itl_s - self.beta_s * self._batch)

    def batch(self, itl_s: float) -> float | None:
        """With which a step takes so long; None while that is unknown."""
        if self.beta_s <= 0:
            return None
        return max(1.0, (itl_s - self.alpha_s) / self.beta_s)

    def itl_s(self, batch: float, otherwise_s: float) -> float:
        """Of a batch; the objective's while nothing has been learned."""
        learned = self.alpha_s + self.beta_s * batch
        return learned if learned > 0 else otherwise_s


def mean_output(observation: Observation) -> float:
    """Tokens that a request generates."""
    return observation.demand.mean_output_tokens
