"""The clients of a simulated fleet: what each of them got, and when, as one outcome a request."""

from __future__ import annotations

from collections import Counter

from baton.domain.commands import Delivery, RequestRecord
from baton.domain.handoff import HandoffMode
from baton.domain.request import Phase, Request
from baton.policy.admission.slo_classes import DEFAULT_CLASS
from baton.simulator.network.timeline import Timeline
from baton.simulator.outcome import Outcome


class _Client:
    """One request under way, from its client's side."""

    __slots__ = (
        "arrived_at_s",
        "first_token_at_s",
        "index",
        "last_token_at_s",
        "max_itl_s",
        "output_tokens",
        "prompt_tokens",
        "slo_class",
        "tenant",
    )

    def __init__(self, number: int, request: Request) -> None:
        self.index = number
        self.arrived_at_s = request.arrived_at_s
        self.prompt_tokens = len(request.prompt_token_ids)
        self.slo_class = request.slo_class or DEFAULT_CLASS
        self.tenant = request.tenant
        self.output_tokens = 0
        self.first_token_at_s = self.last_token_at_s = float("inf")
        self.max_itl_s = 0.0

    def on_tokens(self, tokens: int, now_s: float) -> None:
        """So many tokens have come. Several at once are a jump's: they came at even distances."""
        if not self.output_tokens:
            self.first_token_at_s = now_s
        elif (gap_s := (now_s - self.last_token_at_s) / tokens) > self.max_itl_s:
            self.max_itl_s = gap_s
        self.last_token_at_s = now_s
        self.output_tokens += tokens

    def outcome(self, ended_at_s: float, record: RequestRecord | None) -> Outcome:
        """What has come of it; there is no record while it is under way."""
        later_tokens = self.output_tokens - 1
        return Outcome(
            arrived_at_s=self.arrived_at_s,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=0 if record is None else record.cached_tokens or 0,
            output_tokens=self.output_tokens,
            ttft_s=self.first_token_at_s - self.arrived_at_s,
            tpot_s=(self.last_token_at_s - self.first_token_at_s) / later_tokens
            if later_tokens > 0
            else 0.0,
            e2e_s=ended_at_s - self.arrived_at_s,
            ok=record is not None and record.outcome is Phase.FINISHED,
            max_itl_s=self.max_itl_s,
            tenant=self.tenant,
            slo_class=self.slo_class if record is None else record.slo.name,
            slo_met=record is not None and record.slo_result.is_good,
        )


class Clients:
    """Everybody who has sent a request; those who were answered are kept as outcomes only."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._active: dict[str, _Client] = {}
        self._outcomes: list[Outcome | None] = []
        self.ended = 0
        self.handoffs = 0
        """Requests whose blocks went from one replica to another."""
        self.resumes = 0
        self.route_reasons: Counter[str] = Counter()
        """Why the last route of each request was chosen; the phase of those without a route."""

    @property
    def arrived(self) -> int:
        """Requests that have been sent."""
        return len(self._outcomes)

    def on_request_sent(self, request: Request) -> None:
        """A client sends a request now."""
        self._active[request.request_id] = _Client(len(self._outcomes), request)
        self._outcomes.append(None)

    def on_delivery(self, delivery: Delivery) -> None:
        """Tokens reach a client."""
        if tokens := len(delivery.token_ids):
            self._active[delivery.request_id].on_tokens(tokens, self._timeline.now_s)

    def on_record(self, record: RequestRecord) -> None:
        """A request has ended, in whichever way."""
        client = self._active.pop(record.request_id)
        self._outcomes[client.index] = client.outcome(record.ended_at_s, record)
        self.ended += 1
        self.resumes += record.resumes
        if record.routes:
            route = record.routes[-1]
            self.handoffs += route.mode is not HandoffMode.LOCAL
            self.route_reasons[str(route.reason)] += 1
        else:
            self.route_reasons[str(record.outcome)] += 1

    def outcomes(self) -> tuple[Outcome, ...]:
        """Of all that have been sent, in that order; who still waits has not been served."""
        for client in self._active.values():
            self._outcomes[client.index] = client.outcome(self._timeline.now_s, None)
        return tuple(outcome for outcome in self._outcomes if outcome is not None)
