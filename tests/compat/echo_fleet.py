"""A fleet in a few lines: deterministic tokens, and faults on demand."""

from __future__ import annotations

import asyncio
import queue
import time
from dataclasses import dataclass

from baton.domain.commands import Delivery
from baton.domain.errors import BatonError, NoCapacity, RateLimited
from baton.domain.request import FinishReason, Request
from baton.engine.vllm.frontend.settings import FrontendHooks
from baton.engine.vllm.wire.identity import Caller
from baton.runtime.ports import Frontend

STEP_S = 0.002
FIRST_TOKEN_ID = 300


@dataclass(slots=True)
class Stream:
    request: Request
    produced: int = 0


class EchoFleet:
    """Satisfies the frontend's hooks. One step gives every open request its next token."""

    def __init__(self) -> None:
        self.frontend: Frontend | None = None
        self.arrived: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.aborted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.rejection: BatonError | None = None
        self.admits_before_rejection = 0
        """How often it is asked in vain before that counts."""
        self.rejected: list[int] = []
        """How many were refused, each time that any were."""
        self.is_healthy = True
        self.is_paused = False
        self.free_slots = 1000
        self.fail_with: BatonError | None = None
        self.fail_after_tokens = 0
        self.fail_only_first = False
        self.rejected_tenants: frozenset[str] = frozenset()
        self.longest_step_gap_s = 0.0
        self._streams: dict[str, Stream] = {}

    def reset(self) -> None:
        self.rejection = self.fail_with = None
        self.admits_before_rejection, self.rejected = 0, []
        self.fail_only_first = False
        self.free_slots = 1000
        self.rejected_tenants = frozenset()
        self.is_healthy, self.is_paused, self.fail_after_tokens = True, False, 0
        self.arrived = queue.SimpleQueue()
        self.aborted = queue.SimpleQueue()

    def hooks(self) -> FrontendHooks:
        return FrontendHooks(
            on_request=self.on_request,
            on_abort=self.on_abort,
            admit=self.admit,
            healthy=self.healthy,
        )

    @property
    def open_requests(self) -> int:
        return len(self._streams)

    def on_request(self, request: Request) -> None:
        self._streams[request.request_id] = Stream(request)
        self.arrived.put(request)

    def on_abort(self, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            self._streams.pop(request_id, None)
            self.aborted.put(request_id)

    def admit(self, n: int, caller: Caller) -> BatonError | None:
        error = self._rejection_of(n, caller)
        if error is not None:
            self.rejected.append(n)
        return error

    def _rejection_of(self, n: int, caller: Caller) -> BatonError | None:
        tenant = caller.tenant
        if tenant in self.rejected_tenants:
            return RateLimited("-", 2.2, f"tenant {tenant} has used up its requests")
        if n > self.free_slots:
            return NoCapacity("-", 1.0, f"no room for {n}")
        self.admits_before_rejection -= 1
        return None if self.admits_before_rejection >= 0 else self.rejection

    def healthy(self) -> bool:
        return self.is_healthy

    async def run(self) -> None:
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(STEP_S)
            now_s = time.monotonic()
            self.longest_step_gap_s = max(self.longest_step_gap_s, now_s - last_s)
            last_s = now_s
            if self._streams and not self.is_paused and self.frontend is not None:
                self._step(self.frontend)

    def _step(self, frontend: Frontend) -> None:
        deliveries = []
        for request_id, stream in list(self._streams.items()):
            if self.fail_with is not None and stream.produced >= self.fail_after_tokens:
                del self._streams[request_id]
                frontend.fail(request_id, self.fail_with)
                if self.fail_only_first:
                    self.fail_with = None
                continue
            delivery = _next(stream)
            deliveries.append(delivery)
            if delivery.finish is not None:
                del self._streams[request_id]
        frontend.deliver(deliveries)


def token_id(request: Request, index: int) -> int:
    """Depends on the prompt and the position, and on nothing else."""
    return FIRST_TOKEN_ID + (sum(request.prompt_token_ids) * 31 + index * 17) % 4000


def _next(stream: Stream) -> Delivery:
    request = stream.request
    first = stream.produced == 0
    token = token_id(request, stream.produced)
    stream.produced += 1
    return Delivery(
        request.request_id,
        (token,),
        FinishReason.LENGTH if stream.produced >= request.max_tokens else None,
        cached_tokens=0 if first else None,
    )
