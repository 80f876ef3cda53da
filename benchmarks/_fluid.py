"""A fleet as a fluid: weeks of request rates through pools of replicas, in steps of a second.

Theory of operation: no request is followed by itself. In a step requests and tokens arrive,
and each pool works off what its replicas can; the rest waits, and load that would wait too long
is rejected, as predicting admission does. An autoscaler (`control.autoscaler`, the live one) ticks
at its interval, sees what it would see, and its actions are carried out: starts take a cold start,
stops drain, flips change roles at once.

What is assumed, and what that leaves out:

- *Arrivals* are Poisson around the series' rates, and sums of independent lengths; both as normal
  variates of the right variance, drawn once and the same for every policy. The series is a straight
  line between the middles of its windows.
- *Prompts* are one queue before all replicas that prefill. Its length at the arrival is everybody's
  wait, so each step is a step of the diffusion to which a queue with many replicas tends as load
  comes near capacity (Source: Kingman 1961; Harrison, *Brownian Motion*, ch. 1). That replicas have
  queues of their own, and prompts come whole, costs a part of capacity: `usable_fraction`.
- *Streams* share their replicas' steps. A step takes time linear in the streams of a replica; the
  most that meet the TPOT objective is what a replica takes. Contexts are of mean length. Streams
  end at the rate of the end of the fluid's step, so that it may be longer than a stream lives.
- *Lengths* drift with the series, and capacities with them, where the caller gives them by time.
- Pools are walls but for flips: no prompt is deflected to a decode replica. Nothing is cached.
- Admitted requests meet their objectives. So attainment is the share that is admitted.

`benchmarks/slo.py` puts the same hours through this and through the detailed simulator.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.simulator.fleet.scaling_log import Scaler, ScalingRecorder, ScalingReport
from baton.simulator.workloads.rate_series import RateWindow, duration_s
from benchmarks._fluid_pools import FluidCapacity, FluidFleet, FluidPool, Inflow
from benchmarks._fluid_watch import FluidWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidOptions:
    """Steps of the fluid, and the objectives of requests."""

    step_s: float = 1.0
    interval_s: float = 10.0
    """Between two ticks of the autoscaler."""
    window_s: float = 30.0
    """Over which it sees rates."""
    slo: Slo = Slo(ttft_s=2.0, tpot_s=0.2)  # noqa: RUF009 - a frozen value
    margin_fraction: float = 0.1
    """Of the TTFT objective: requests that would come nearer than this are rejected."""
    overhead_s: float = 0.05
    """Of a TTFT: own prefill beyond its share of the queue, handoff, first decode step."""
    usable_fraction: float = 0.95
    """Of what replicas could do if work were spread over them without a gap."""
    prompt_cv: float = 1.5
    output_cv: float = 1.0
    """Spread of lengths; as `workloads.rate_series` draws them."""
    samples: int = 500
    """Points of the timeline."""


class FluidSample(NamedTuple):
    """The fleet at one moment."""

    at_s: float
    requests_per_s: float
    attainment: float
    """Since the sample before."""
    replicas: Mapping[Role, int]
    """That take work, by role."""
    starting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidRun:
    """What became of a series."""

    arrived: float
    good: float
    scaling: ScalingReport
    timeline: tuple[FluidSample, ...]

    @property
    def attainment(self) -> float:
        """The share of requests that met their objectives."""
        return self.good / self.arrived if self.arrived else 1.0


def inflows(
    windows: Sequence[RateWindow], options: FluidOptions, rng: random.Random, *, scale: float = 1.0
) -> list[Inflow]:
    """What arrives in each step; the same for every policy that is to be compared."""
    step_s = options.step_s
    steps = int(duration_s(windows) / step_s)
    return [
        _inflow(rate, options, rng, scale * step_s)
        for rate in rates_at(windows, [(number + 0.5) * step_s for number in range(steps)])
    ]


def flow(
    arriving: Sequence[Inflow],
    pools: Sequence[FluidPool],
    scaler: Scaler | None,
    options: FluidOptions,
    *,
    capacity_at: Callable[[float], FluidCapacity] | None = None,
) -> FluidRun:
    """Let it all flow through; without a scaler the pools stay as they are.

    Args:
        arriving: In each step.
        pools: With the capacities that stay where `capacity_at` is None.
        scaler: Ticks at the options' interval.
        options: Of the fluid.
        capacity_at: Of a replica for the requests of a time; asked before each tick.
    """
    return _Flow(pools, scaler, options, capacity_at).run(arriving)


def rates_at(windows: Sequence[RateWindow], times_s: Sequence[float]) -> Iterator[RateWindow]:
    """The series at these times since its beginning: straight lines between middles of windows."""
    first_s, whole_s = windows[0].from_s, duration_s(windows)
    ends = [*(window.from_s for window in windows[1:]), first_s + whole_s]
    middles = [
        (window.from_s + end) / 2 - first_s for window, end in zip(windows, ends, strict=True)
    ]
    for at_s in times_s:
        after = bisect_right(middles, at_s)
        if after in {0, len(windows)}:
            yield windows[max(0, after - 1)]
            continue
        left, right = windows[after - 1], windows[after]
        share = (at_s - middles[after - 1]) / (middles[after] - middles[after - 1])
        yield RateWindow(
            at_s,
            *(
                value + share * (other - value)
                for value, other in zip(left[1:], right[1:], strict=True)
            ),
        )


def _inflow(rate: RateWindow, options: FluidOptions, rng: random.Random, width_s: float) -> Inflow:
    expected = rate.rate_per_s * width_s
    requests = max(0.0, rng.gauss(expected, math.sqrt(expected)))
    spread = math.sqrt(requests)
    prompt = rate.mean_prompt_tokens * rng.gauss(requests, spread * options.prompt_cv)
    output = rate.mean_output_tokens * rng.gauss(requests, spread * options.output_cv)
    return Inflow(requests, max(requests, prompt), max(requests, output))  # a token each, at least


class _Flow:
    """One run."""

    def __init__(
        self,
        pools: Sequence[FluidPool],
        scaler: Scaler | None,
        options: FluidOptions,
        capacity_at: Callable[[float], FluidCapacity] | None,
    ) -> None:
        self._options = options
        self._capacity_at = capacity_at
        self._scaler = scaler
        self._scaling = ScalingRecorder()
        self._fleet = FluidFleet(pools, usable_fraction=options.usable_fraction)
        self._watch = FluidWatch(
            options.slo, window_s=options.window_s, overhead_s=options.overhead_s
        )
        self._arrived = self._good = 0.0
        self._samples: list[FluidSample] = []
        self._since = (0.0, 0.0)

    def run(self, arriving: Sequence[Inflow]) -> FluidRun:
        """Step by step."""
        options, fleet, step_s = self._options, self._fleet, self._options.step_s
        tick_every = max(1, round(options.interval_s / step_s))
        sample_every = max(1, len(arriving) // options.samples)
        ttft_s = options.slo.ttft_s
        kept_s = float("inf") if ttft_s is None else ttft_s * (1 - options.margin_fraction)
        longest_s = kept_s - options.overhead_s
        for number, inflow in enumerate(arriving):
            now_s = number * step_s
            if not number % tick_every:
                if self._capacity_at is not None:
                    fleet.set_capacity(self._capacity_at(now_s))
                if self._scaler is not None and number:
                    self._tick(self._scaler, now_s)
            fleet.advance(now_s)
            good = fleet.serve(inflow, step_s, longest_s)
            self._arrived += inflow.requests
            self._good += good
            self._watch.saw(inflow, good, fleet, step_s)
            if not number % sample_every:
                self._sample(now_s, inflow)
        return self._result(len(arriving) * step_s)

    def _tick(self, scaler: Scaler, now_s: float) -> None:
        tick = scaler.tick(self._watch.observation(self._fleet))
        self._scaling.record_tick(tick)
        for action in tick.actions:
            self._fleet.carry_out(action, now_s)

    def _sample(self, now_s: float, inflow: Inflow) -> None:
        fleet, (arrived, good) = self._fleet, self._since
        since = self._arrived - arrived
        roles = [fleet.roles(name) for name in fleet.pools]
        self._samples.append(
            FluidSample(
                now_s,
                inflow.requests / self._options.step_s,
                (self._good - good) / since if since else 1.0,
                {role: sum(other[role] for other in roles) for role in Role},
                sum(fleet.starting(name) for name in fleet.pools),
            )
        )
        self._since = (self._arrived, self._good)

    def _result(self, span_s: float) -> FluidRun:
        fleet = self._fleet
        scaling = self._scaling.report(
            span_s,
            replica_seconds=fleet.replica_seconds(span_s),
            gpus_per_replica={name: pool.gpus_per_replica for name, pool in fleet.pools.items()},
        )
        return FluidRun(
            arrived=self._arrived, good=self._good, scaling=scaling, timeline=tuple(self._samples)
        )
