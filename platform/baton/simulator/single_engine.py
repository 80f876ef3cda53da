"""One counted engine alone, without a coordinator: open loop, or a number of clients.

What an engine does by itself is what measurements of engines show and what papers simulate; a fleet
is in `baton.simulator.scenario`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from math import inf

from baton.domain.handoff import Leg, LegKind, LegOutput
from baton.domain.hashed_prompt import Outline
from baton.simulator.engine.blocks import expect
from baton.simulator.outcome import Outcome
from baton.simulator.v1.core import V1Core
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads.trace import TraceRequest, output_payload


class Served(StrEnum):
    """Which phases of its requests an engine runs."""

    BOTH = "both"
    PREFILL = "prefill"
    """Requests end with their first token, and their blocks are free at once."""
    DECODE = "decode"
    """The prompt's KV is there on arrival: nothing is prefilled but the last token."""


def serve(
    settings: V1Settings,
    requests: Sequence[TraceRequest],
    *,
    block_tokens: int = 512,
    clients: int | None = None,
    away_s: float = 0.0,
    phase: Served = Served.BOTH,
) -> list[Outcome]:
    """What becomes of the requests, in their order.

    They arrive when they say. With `clients`, as in closed-loop benchmarks, that is ignored: so
    many are under way at a time, and each one's end is the next one's arrival, `away_s` later.
    """
    if not any(one.block_ids for one in requests):
        settings = replace(settings, prefix_caching=False)  # there is nothing to be found
    ready = None if clients is None else _Clients(clients, away_s)
    return _Alone(settings, requests, block_tokens=block_tokens, phase=phase, clients=ready).run()


class _Clients:
    """When the clients of a closed loop are ready to ask again, in order."""

    def __init__(self, count: int, away_s: float) -> None:
        self.ready_at_s = deque([0.0] * count)
        self._away_s = away_s

    def answered(self, now_s: float) -> None:
        """One of them has its answer."""
        self.ready_at_s.append(now_s + self._away_s)


class _Asked:
    """One request under way: what its client has seen."""

    __slots__ = ("arrived_at_s", "cached", "first_at_s", "last_at_s", "number", "tokens", "worst_s")

    def __init__(self, number: int, arrived_at_s: float) -> None:
        self.number = number
        self.arrived_at_s = arrived_at_s
        self.first_at_s = inf
        self.last_at_s = arrived_at_s
        self.tokens = 0
        self.cached = 0
        self.worst_s = 0.0

    def hear(self, output: LegOutput, begun_at_s: float, now_s: float) -> None:
        """Tokens have come, one by each step since `begun_at_s`."""
        count = len(output.token_ids)
        if not self.tokens:
            self.first_at_s = now_s
            self.cached = output.cached_tokens or 0
        else:
            step_s = (now_s - begun_at_s) / count
            gap_s = now_s - (count - 1) * step_s - self.last_at_s
            self.worst_s = max(self.worst_s, step_s if count > 1 else 0.0, gap_s)
        self.tokens += count
        self.last_at_s = now_s


class _Alone:
    """The engine, its clock, and who waits for it."""

    def __init__(
        self,
        settings: V1Settings,
        requests: Sequence[TraceRequest],
        *,
        block_tokens: int,
        phase: Served,
        clients: _Clients | None,
    ) -> None:
        self._core = V1Core(settings, engine_id="alone", model="alone", address="")
        self._requests = requests
        self._block_tokens = block_tokens
        self._phase = phase
        self._clients = clients
        self._now_s = 0.0
        self._sent = 0
        self._asked: dict[str, _Asked] = {}
        self._outcomes: list[Outcome] = [_REFUSED] * len(requests)

    def run(self) -> list[Outcome]:
        """Serve them all."""
        while True:
            self._send_due()
            begun_at_s = self._now_s
            took_s = self._core.begin(begun_at_s, patience_s=self._next_at_s() - begun_at_s)
            if took_s is None:
                if self._sent == len(self._requests):
                    return self._ended()
                self._now_s = max(self._now_s, self._next_at_s())
                continue
            self._compute(begun_at_s, begun_at_s + took_s)

    def _compute(self, begun_at_s: float, ends_at_s: float) -> None:
        """Let the steps pass that have begun, and those arrive who do so meanwhile."""
        while (next_s := self._next_at_s()) < ends_at_s:
            self._now_s = next_s
            self._send_due()
            ends_at_s = next_s + (self._core.interrupt(next_s) or 0.0)
        self._now_s = ends_at_s
        for output in self._core.finish(ends_at_s):
            asked = self._asked[output.leg_id]
            asked.hear(output, begun_at_s, ends_at_s)
            if output.finish is not None:
                del self._asked[output.leg_id]
                self._outcomes[asked.number] = self._outcome(asked)
                self._answered()

    def _next_at_s(self) -> float:
        """When the next request arrives, if that is known."""
        if self._sent == len(self._requests):
            return inf
        if self._clients is None:
            return self._requests[self._sent].at_s
        return self._clients.ready_at_s[0] if self._clients.ready_at_s else inf

    def _send_due(self) -> None:
        while (at_s := self._next_at_s()) <= self._now_s:
            if self._clients is not None:
                self._clients.ready_at_s.popleft()
            self._send(self._sent, at_s)
            self._sent += 1

    def _send(self, number: int, at_s: float) -> None:
        one = self._requests[number]
        prefill, decode = self._phase is Served.PREFILL, self._phase is Served.DECODE
        tokens = 1 if prefill else max(1, one.output_tokens)
        leg = Leg(
            leg_id=f"r{number}",
            request_id=f"r{number}",
            kind=LegKind.LOCAL,
            prompt_token_ids=Outline(
                one.block_ids, one.prompt_tokens, block_tokens=self._block_tokens, own=number + 1
            ),
            max_tokens=tokens,
            payload=output_payload(tokens),
        )
        asked = _Asked(number, at_s)
        if (self._core.add_with_kv(leg) if decode else self._core.add(leg)) is None:
            self._asked[leg.leg_id] = asked
        else:
            self._outcomes[number] = self._outcome(asked)
            self._answered()

    def _answered(self) -> None:
        if self._clients is not None:
            self._clients.answered(self._now_s)

    def _outcome(self, asked: _Asked) -> Outcome:
        first_s, last_s = asked.first_at_s, asked.last_at_s
        return Outcome(
            arrived_at_s=asked.arrived_at_s,
            prompt_tokens=self._requests[asked.number].prompt_tokens,
            cached_tokens=asked.cached,
            output_tokens=asked.tokens,
            ttft_s=first_s - asked.arrived_at_s,
            tpot_s=(last_s - first_s) / (asked.tokens - 1) if asked.tokens > 1 else 0.0,
            e2e_s=last_s - asked.arrived_at_s if asked.tokens else inf,
            ok=asked.tokens > 0,
            worst_gap_s=asked.worst_s,
        )

    def _ended(self) -> list[Outcome]:
        expect(not self._asked, f"an idle engine has not ended {sorted(self._asked)}")
        return self._outcomes


_REFUSED = Outcome(0.0, 0, 0, 0, inf, 0.0, inf, ok=False)
