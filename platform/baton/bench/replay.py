"""Replays a trace against a live endpoint, in open loop: requests do not wait for answers.

`bench.driver` sends them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.bench.client.client import Api, CompletionClient, ServedModel
from baton.bench.driver import LoadDriver, LoadResult
from baton.bench.load import LoadPlan, RecordedRequests, RequestSource
from baton.simulator.outcome import Outcome
from baton.simulator.workloads.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Options of a replay."""

    vocabulary: int = 8_000
    max_in_flight: int = 1024
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Results of a replay; for the counts see `LoadResult`."""

    outcomes: tuple[Outcome, ...]
    failures: Mapping[str, int]
    late_sends: int = 0
    max_late_s: float = 0.0
    truncated_prompts: int = 0
    skipped_too_long: int = 0
    short_answers: int = 0
    unfinished: int = 0


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
        plan = LoadPlan(
            source=RequestSource(
                requests=RecordedRequests(trace.requests),
                api=Api.COMPLETIONS,
                seed=str(options.seed),
                text_seed=str(options.seed),
                block_tokens=trace.block_tokens,
                vocabulary=options.vocabulary,
            ),
            starts_s=tuple(request.at_s - first_s for request in trace.requests),
        )
        self._driver = LoadDriver(
            client,
            model,
            plan,
            max_in_flight=options.max_in_flight,
            on_progress=lambda done: on_progress(done / len(trace)),
        )

    async def run(self, stop: asyncio.Event) -> ReplayResult:
        """Send everything when it is due and wait for all answers, or until `stop` is set."""
        await self._driver.prepare(stop)
        return _to_result(await self._driver.run(time.monotonic(), stop))


def _to_result(load_result: LoadResult) -> ReplayResult:
    failures = Counter(
        sample.failure for sample in load_result.samples if sample.failure is not None
    )
    return ReplayResult(
        outcomes=tuple(sample.to_outcome() for sample in load_result.samples),
        failures=dict(failures.most_common()),
        late_sends=sum(sample.is_late for sample in load_result.samples),
        max_late_s=max((sample.send_delay_s for sample in load_result.samples), default=0.0),
        truncated_prompts=load_result.truncated_prompts,
        skipped_too_long=load_result.skipped_too_long,
        short_answers=sum(sample.is_short for sample in load_result.samples),
        unfinished=load_result.unfinished,
    )
