"""Replays a trace against a live endpoint, in open loop: requests do not wait for answers.

How it is sent, and what late sends mean, is in `drive`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.bench.client.client import Api, CompletionClient, ServedModel
from baton.bench.driver import Driven, Driver
from baton.bench.load import Plan, Recorded, Source
from baton.simulator.outcome import Outcome
from baton.simulator.workloads.trace import Trace

LATE_S = 0.02
"""A send this much behind its time counts as late: about one step of an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How to replay."""

    vocabulary: int = 8_000
    max_in_flight: int = 1024
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What came of a replay."""

    outcomes: tuple[Outcome, ...]
    """Of those that ended, in order of arrival."""
    failures: Mapping[str, int]
    """Causes, and how often."""
    late_sends: int = 0
    worst_late_s: float = 0.0
    clipped_prompts: int = 0
    """Cut, since with their output they were longer than the endpoint takes."""
    too_long: int = 0
    """Left out: the output alone is longer."""
    short_answers: int = 0
    """Finished with fewer tokens than were asked for."""
    abandoned: int = 0
    """Under way, or not sent yet, when the replay was stopped."""


class Replay:
    """One replay of one trace; `run` it once."""

    def __init__(
        self,
        client: CompletionClient,
        model: ServedModel,
        trace: Trace,
        *,
        options: ReplayOptions,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        first_s = trace.requests[0].at_s if trace.requests else 0.0
        plan = Plan(
            source=Source(
                what=Recorded(trace.requests),
                api=Api.COMPLETIONS,
                seed=str(options.seed),
                texts=str(options.seed),
                block_tokens=trace.block_tokens,
                vocabulary=options.vocabulary,
            ),
            starts_s=tuple(one.at_s - first_s for one in trace.requests),
        )
        self._driver = Driver(
            client,
            model,
            plan,
            max_in_flight=options.max_in_flight,
            on_progress=lambda done: on_progress(done / len(trace)),
        )

    async def run(self, stop: asyncio.Event) -> Replayed:
        """Send everything when it is due and wait for all answers, or until `stop` is set."""
        await self._driver.prepare(stop)
        return _replayed(await self._driver.run(time.monotonic(), stop))


def _replayed(driven: Driven) -> Replayed:
    failures = Counter(one.failure for one in driven.samples if one.failure is not None)
    return Replayed(
        outcomes=tuple(one.outcome() for one in driven.samples),
        failures=dict(failures.most_common()),
        late_sends=sum(one.late_s > LATE_S for one in driven.samples),
        worst_late_s=max((one.late_s for one in driven.samples), default=0.0),
        clipped_prompts=driven.clipped_prompts,
        too_long=driven.too_long,
        short_answers=sum(one.short for one in driven.samples),
        abandoned=driven.abandoned,
    )
