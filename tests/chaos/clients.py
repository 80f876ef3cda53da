"""Clients of a deployment while something happens to it, and what they make of it afterwards."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tests.chaos.case import Bound, Figure, Outcome
from tests.chaos.deployment_processes import DeploymentProcesses
from tests.chaos.history import Ending, Exchange, History, check_invariants, endings, longest_stall
from tests.chaos.load import HttpClient, Load

_POLL_S = 0.1
_STREAM_STARTED_STATUS = 200


@dataclass(slots=True)
class Clients:
    """Clients in open loop that go on until `stop`; use with `with`."""

    url: str
    load: Load
    exchanges: list[Exchange] = field(default_factory=list)
    """Those that were sent."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="clients", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Send no more, and wait until all that was sent has ended, or its time is up."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self.load.deadline_s + 30.0)

    def open_count(self) -> int:
        """Requests that have not ended."""
        return sum(exchange.ending is None for exchange in list(self.exchanges))

    def run_for(self, seconds: float) -> None:
        """Let them go on for a while."""
        self._stop.wait(seconds)

    def _run(self) -> None:
        asyncio.run(self._send_all())

    async def _send_all(self) -> None:
        started_s = time.monotonic()
        async with HttpClient(self.url) as client, asyncio.TaskGroup() as group:
            for exchange in self.load.plan_requests():
                while (wait_s := started_s + exchange.planned_at_s - time.monotonic()) > 0:
                    if self._stop.is_set():
                        return
                    await asyncio.sleep(min(wait_s, _POLL_S))
                self.exchanges.append(exchange)
                group.create_task(self._send(client, exchange))

    async def _send(self, client: HttpClient, exchange: Exchange) -> None:
        exchange.sent_at_s = time.monotonic()
        try:
            async with asyncio.timeout(self.load.deadline_s):
                await client.send(exchange)
        except TimeoutError:
            exchange.reason = exchange.reason or f"no end within {self.load.deadline_s:g} s"


def streams_cut_by(exchanges: Sequence[Exchange], killed_at_s: float) -> list[Exchange]:
    """Streams that ended with the ingress that they were on: begun before its end, cut by it.

    Those whose answer had not begun are none of them: another ingress is asked.
    """
    return [
        exchange
        for exchange in exchanges
        if exchange.status == _STREAM_STARTED_STATUS
        and exchange.ending in {Ending.CUT, Ending.FAILED}
        and exchange.sent_at_s <= killed_at_s
        and exchange.ended_at_s is not None
        and killed_at_s <= exchange.ended_at_s <= killed_at_s + 2.0
    ]


AUTOSCALED = {"autoscaler.policy": "slo", "autoscaler.interval": "1s"}
"""A window of rates is fifteen ticks."""
WINDOW_S = 15.0
POOLS = {"prefill": 2, "decode": 2}
START_S = 180.0


def steady_load(name: str, *, seed: int = 0, minutes: float = 10.0) -> Load:
    """Ten requests a second of half a second to a second each, for so long at most."""
    return Load(
        rate_per_s=10.0,
        requests=round(600 * minutes),
        prompt_tokens=(32, 200),
        output_tokens=(48, 96),
        seed=seed,
        deadline_s=60.0,
        name=name,
    )


@contextmanager
def running_clients(processes: DeploymentProcesses, load: Load) -> Iterator[Clients]:
    """Clients meanwhile; all has ended when this has."""
    with Clients(processes.deployment.url, load) as clients:
        clients.run_for(3.0)
        yield clients


def outcome(
    exchanges: Sequence[Exchange], bounds: Sequence[Bound], figures: dict[str, Figure]
) -> Outcome:
    """What clients saw beyond the bounds of a case."""
    invariant_bounds, note = check_invariants(
        History(exchanges=exchanges, expected_tokens=DeploymentProcesses.expected_tokens)
    )
    stall = longest_stall(exchanges)
    figures_seen: dict[str, Figure] = {"requests": len(exchanges), **endings(exchanges)}
    figures_seen["longest stall of a stream, s"] = 0.0 if stall is None else round(stall.took_s, 3)
    return Outcome(bounds=(*invariant_bounds, *bounds), figures=figures_seen | figures, note=note)
