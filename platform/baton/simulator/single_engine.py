"""One counted engine alone, without a coordinator: open loop, or closed loop with clients.

Measurements of engines and simulations in papers are of this kind; `baton.simulator.scenario`
simulates fleets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from math import inf

from baton.domain.handoff import Leg, LegKind, LegOutput
from baton.domain.hashed_prompt import HashedPrompt
from baton.simulator.engine.blocks import expect
from baton.simulator.outcome import Outcome
from baton.simulator.v1.core import V1Core
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads.trace import TraceRequest, encode_output_tokens


class ServedPhases(StrEnum):
    """Phases that the engine runs."""

    BOTH = "both"
    PREFILL = "prefill"
    """Requests end with their first token and free their blocks at once."""
    DECODE = "decode"
    """The prompt's KV is present on arrival: only the last token is prefilled."""


def simulate_engine(
    settings: V1Settings,
    requests: Sequence[TraceRequest],
    *,
    block_tokens: int = 512,
    clients: int | None = None,
    think_s: float = 0.0,
    phases: ServedPhases = ServedPhases.BOTH,
) -> list[Outcome]:
    """The outcomes of the requests, in their order.

    They arrive at their `at_s`. With `clients`, a closed loop of this many clients ignores it: each
    sends its next request `think_s` after its last has ended.
    """
    if not any(request.block_ids for request in requests):
        settings = replace(settings, prefix_caching=False)  # prompts share nothing
    loop_clients = None if clients is None else _Clients(clients, think_s)
    return _SingleEngine(
        settings, requests, block_tokens=block_tokens, phase=phases, clients=loop_clients
    ).run()


class _Clients:
    def __init__(self, count: int, think_s: float) -> None:
        self.ready_at_s = deque([0.0] * count)
        self._think_s = think_s

    def on_answer(self, now_s: float) -> None:
        self.ready_at_s.append(now_s + self._think_s)


class _ActiveRequest:
    __slots__ = (
        "arrived_at_s",
        "cached_tokens",
        "first_token_at_s",
        "index",
        "last_token_at_s",
        "max_itl_s",
        "output_tokens",
    )

    def __init__(self, number: int, arrived_at_s: float) -> None:
        self.index = number
        self.arrived_at_s = arrived_at_s
        self.first_token_at_s = inf
        self.last_token_at_s = arrived_at_s
        self.output_tokens = 0
        self.cached_tokens = 0
        self.max_itl_s = 0.0

    def on_output(self, output: LegOutput, begun_at_s: float, now_s: float) -> None:
        """Count tokens, one for each step since `begun_at_s`."""
        count = len(output.token_ids)
        if not self.output_tokens:
            self.first_token_at_s = now_s
            self.cached_tokens = output.cached_tokens or 0
        else:
            step_s = (now_s - begun_at_s) / count
            gap_s = now_s - (count - 1) * step_s - self.last_token_at_s
            self.max_itl_s = max(self.max_itl_s, step_s if count > 1 else 0.0, gap_s)
        self.output_tokens += count
        self.last_token_at_s = now_s


class _SingleEngine:
    def __init__(
        self,
        settings: V1Settings,
        requests: Sequence[TraceRequest],
        *,
        block_tokens: int,
        phase: ServedPhases,
        clients: _Clients | None,
    ) -> None:
        self._core = V1Core(settings, engine_id="alone", model="alone", address="")
        self._first_token_s = settings.first_token_s
        self._requests = requests
        self._block_tokens = block_tokens
        self._phases = phase
        self._clients = clients
        self._now_s = 0.0
        self._sent_requests = 0
        self._active: dict[str, _ActiveRequest] = {}
        self._outcomes: list[Outcome] = [_REJECTED] * len(requests)

    def run(self) -> list[Outcome]:
        while True:
            self._send_due()
            begun_at_s = self._now_s
            duration_s = self._core.begin(begun_at_s, horizon_s=self._next_at_s() - begun_at_s)
            if duration_s is None:
                if self._sent_requests == len(self._requests):
                    return self._final_outcomes()
                self._now_s = max(self._now_s, self._next_at_s())
                continue
            self._run_steps(begun_at_s, begun_at_s + duration_s)

    def _run_steps(self, begun_at_s: float, ends_at_s: float) -> None:
        """Run the steps under way, with arrivals meanwhile."""
        while (next_s := self._next_at_s()) < ends_at_s:
            self._now_s = next_s
            self._send_due()
            ends_at_s = next_s + (self._core.interrupt(next_s) or 0.0)
        self._now_s = ends_at_s
        for output in self._core.finish(ends_at_s):
            active = self._active[output.leg_id]
            active.on_output(output, begun_at_s, ends_at_s)
            if output.finish is not None:
                del self._active[output.leg_id]
                self._outcomes[active.index] = self._build_outcome(active)
                self._on_answer()

    def _next_at_s(self) -> float:
        """When the next request arrives; inf if unknown or never."""
        if self._sent_requests == len(self._requests):
            return inf
        if self._clients is None:
            return self._requests[self._sent_requests].at_s
        return self._clients.ready_at_s[0] if self._clients.ready_at_s else inf

    def _send_due(self) -> None:
        while (at_s := self._next_at_s()) <= self._now_s:
            if self._clients is not None:
                self._clients.ready_at_s.popleft()
            self._send(self._sent_requests, at_s)
            self._sent_requests += 1

    def _send(self, number: int, at_s: float) -> None:
        request = self._requests[number]
        is_prefill_only, is_decode_only = (
            self._phases is ServedPhases.PREFILL,
            self._phases is ServedPhases.DECODE,
        )
        tokens = 1 if is_prefill_only else max(1, request.output_tokens)
        leg = Leg(
            leg_id=f"r{number}",
            request_id=f"r{number}",
            kind=LegKind.LOCAL,
            prompt_token_ids=HashedPrompt(
                request.block_ids,
                request.prompt_tokens,
                block_tokens=self._block_tokens,
                tail_id=number + 1,
            ),
            max_tokens=tokens,
            payload=encode_output_tokens(tokens),
        )
        active = _ActiveRequest(number, at_s)
        if (self._core.add_with_kv(leg) if is_decode_only else self._core.add(leg)) is None:
            self._active[leg.leg_id] = active
        else:
            self._outcomes[number] = self._build_outcome(active)
            self._on_answer()

    def _on_answer(self) -> None:
        if self._clients is not None:
            self._clients.on_answer(self._now_s)

    def _build_outcome(self, active: _ActiveRequest) -> Outcome:
        first_s, last_s = (
            at_s + self._first_token_s for at_s in (active.first_token_at_s, active.last_token_at_s)
        )
        return Outcome(
            arrived_at_s=active.arrived_at_s,
            prompt_tokens=self._requests[active.index].prompt_tokens,
            cached_tokens=active.cached_tokens,
            output_tokens=active.output_tokens,
            ttft_s=first_s - active.arrived_at_s,
            tpot_s=(last_s - first_s) / (active.output_tokens - 1)
            if active.output_tokens > 1
            else 0.0,
            e2e_s=last_s - active.arrived_at_s if active.output_tokens else inf,
            ok=active.output_tokens > 0,
            max_itl_s=active.max_itl_s,
        )

    def _final_outcomes(self) -> list[Outcome]:
        expect(not self._active, f"an idle engine has not ended {sorted(self._active)}")
        return self._outcomes


_REJECTED = Outcome(
    arrived_at_s=0.0,
    prompt_tokens=0,
    cached_tokens=0,
    output_tokens=0,
    ttft_s=inf,
    tpot_s=0.0,
    e2e_s=inf,
    ok=False,
)
