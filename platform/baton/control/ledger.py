"""What the coordinator remembers of one request: its phase, its tokens, its legs, its story."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.control.transitions import check_edge
from baton.domain.commands import RequestRecord
from baton.domain.handoff import Lease, Leg, LegKind, Route, Ticket
from baton.domain.request import LocalOnly, Phase, Request
from baton.policy.placement import PlacementQuery

_ATTEMPT_MARK = "~"


def request_of(leg_id: str) -> str:
    """The id of the request that a leg belongs (or belonged) to."""
    return leg_id.rpartition(_ATTEMPT_MARK)[0]


@dataclass(slots=True, kw_only=True)
class Entry:
    """One request in flight. The tokens in `generated` have been delivered to the client."""

    request: Request
    phase: Phase = Phase.ARRIVED
    generated: list[int] = field(default_factory=list)
    leg_id: str | None = None
    lease: Lease | None = None
    local_only: LocalOnly | None = None
    avoid: frozenset[str] = frozenset()
    routes: list[Route] = field(default_factory=list)
    legs_begun: int = 0
    failures: int = 0
    resumes: int = 0
    cached_tokens: int | None = None
    first_token_due_at_s: float = float("inf")
    """When the current placement should have brought its first token."""
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    prefill_done_at_s: float | None = None
    handed_off_blocks: int = 0
    total_deadline_at_s: float = float("inf")
    phase_deadline_at_s: float = float("inf")

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def deadline_at_s(self) -> float:
        """When this entry must be looked at: its phase's deadline, or the request's own."""
        return min(self.total_deadline_at_s, self.phase_deadline_at_s)

    def move(self, target: Phase) -> None:
        """Take an edge of the transition table.

        Raises:
            ValueError: there is no such edge.
        """
        check_edge(self.request_id, self.phase, target)
        self.phase = target

    def query(self) -> PlacementQuery:
        """What placement must know to place (or place again) this request."""
        return PlacementQuery(
            prompt_tokens=len(self.request.prompt_token_ids) + len(self.generated),
            local_only=self.local_only,
            avoid=self.avoid,
        )

    def next_leg(self, kind: LegKind, ticket: Ticket | None = None) -> Leg:
        """Build the next submission: the prompt is followed by what was generated so far."""
        self.legs_begun += 1
        request = self.request
        done = len(self.generated)
        prompt = request.prompt_token_ids
        return Leg(
            leg_id=f"{request.request_id}{_ATTEMPT_MARK}{self.legs_begun}",
            request_id=request.request_id,
            kind=kind,
            prompt_token_ids=(*prompt, *self.generated) if done else prompt,
            resumed_tokens=done,
            max_tokens=request.max_tokens - done,
            min_tokens=max(0, request.min_tokens - done),
            priority=request.priority,
            ticket=ticket,
            payload=request.payload,
        )

    def record(self, outcome: Phase, reason: str, now_s: float) -> RequestRecord:
        """The story to keep once the request has ended."""
        return RequestRecord(
            request_id=self.request_id,
            outcome=outcome,
            reason=reason,
            routes=tuple(self.routes),
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_tokens=self.cached_tokens,
            output_tokens=len(self.generated),
            resumes=self.resumes,
            arrived_at_s=self.request.arrived_at_s,
            first_token_at_s=self.first_token_at_s,
            last_token_at_s=self.last_token_at_s,
            ended_at_s=now_s,
            prefill_done_at_s=self.prefill_done_at_s,
            handed_off_blocks=self.handed_off_blocks,
        )
