"""What the coordinator remembers of one request: its phase, its tokens, its legs, its story."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from baton.control.queue.tenant_limits import Charge
from baton.control.queue.wait_queue import Band
from baton.control.state.leg_timing import OpenLeg
from baton.control.state.prompt_use import PromptUse, with_leg
from baton.control.state.transitions import check_edge
from baton.domain.commands import RequestRecord
from baton.domain.handoff import CacheUse, Decision, Lease, Leg, LegKind, Route, Ticket
from baton.domain.hashed_prompt import Outline, TokenIds
from baton.domain.leg_record import LegEnd, LegStory
from baton.domain.request import LocalOnly, Phase, Request
from baton.domain.slo import NO_SLO, Slo
from baton.domain.tenant import Tenant
from baton.policy.admission.fair_queue import Waiting
from baton.policy.admission.slo_evaluation import Got, judge
from baton.policy.prefix_cache.block_hash import chain, chain_root

RUNS = frozenset({Phase.PREFILL, Phase.TRANSFER, Phase.DECODE})
"""Phases in which a leg runs."""
_ATTEMPT_MARK = "~"
_ANYBODY = Tenant()
_NO_BAND = Band(0, can_be_met=True)

Family = tuple[str, int]
"""Model and block size: replicas of one family name blocks alike."""


class Flow(NamedTuple):
    """KV blocks on their way from one replica to another."""

    leg_id: str
    """The decode leg that pulls them."""
    source_id: str
    target_id: str
    moves_s: float = 0.0
    """What they are predicted to take, beside all that is under way."""


def request_of(leg_id: str) -> str:
    """The id of the request that a leg belongs (or belonged) to."""
    return leg_id.rpartition(_ATTEMPT_MARK)[0]


@dataclass(slots=True, kw_only=True)
class Entry:
    """One request in flight. The tokens in `generated` have been delivered to the client."""

    request: Request
    tenant: Tenant = _ANYBODY
    """Whose limits and share it counts for."""
    slo: Slo = NO_SLO
    """What it is promised; settled when it arrives, whatever is configured later."""
    phase: Phase = Phase.ARRIVED
    generated: list[int] = field(default_factory=list)
    leg_id: str | None = None
    lease: Lease | None = None
    local_only: LocalOnly | None = None
    early: bool = False
    """Whether a replica that only prefills it gives it its first token."""
    avoid: frozenset[str] = frozenset()
    routes: list[Route] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    flow: Flow | None = None
    """The transfer that is under way for it."""
    rest_s: float = 0.0
    """Of a transfer of a prefix only: what its target is predicted to take for the rest of the
    prompt, and for those before it; 0 where the whole prompt is handed off."""
    legs_begun: int = 0
    open_leg: OpenLeg | None = None
    """The one that runs."""
    legs: list[LegStory] = field(default_factory=list)
    """Those that are over."""
    failures: int = 0
    resumes: int = 0
    resume_reasons: list[str] = field(default_factory=list)
    excused_at_tokens: int = -1
    """How many it had when it was last tried again for nothing; -1: never. See `recovery`."""
    crashes: int = 0
    """Replicas in a row that died while they ran it, and it got no further."""
    crashed_at_tokens: int = 0
    """How many it had when the last of them did."""
    hedged: bool = False
    """Whether another replica would be quicker was looked at, which is done once."""
    prompt_use: PromptUse | None = None
    """How much of its prompt was cached; None while no leg has said so."""
    first_token_due_at_s: float = float("inf")
    """When the current placement should have brought its first token."""
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    worst_gap_s: float = 0.0
    slow_gaps: int = 0
    gap_of_note_s: float = 0.0
    charge: Charge | None = None
    """What its tenant was charged for it; None before that."""
    waiting: Waiting | None = None
    """Its place in line; None while it was not asked whether it is let in."""
    band: Band = _NO_BAND
    taken_in_at_s: float = 0.0
    replica_wait_s: float = 0.0
    """How long it has waited for a replica to be there, before it was placed for the first time."""
    waits_since_s: float | None = None
    """Since when it waits for one; None: it does not."""
    placed_at_s: float | None = None
    """When it was placed for the first time."""
    prefill_done_at_s: float | None = None
    handed_off_blocks: int = 0
    total_deadline_at_s: float = float("inf")
    _hashes: dict[tuple[Family, int], list[int]] = field(default_factory=dict)

    def crashed(self) -> None:
        """The replica that runs it has died."""
        further = len(self.generated) > self.crashed_at_tokens
        self.crashes = 1 if further else self.crashes + 1
        self.crashed_at_tokens = len(self.generated)

    @property
    def priority(self) -> int:
        """Who comes first: higher ones do."""
        return self.slo.priority + self.tenant.priority

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of its prompt that no replica had to compute; None while that is unknown."""
        return None if self.prompt_use is None else self.prompt_use.cached_tokens

    def learn_use(self, leg: Leg, cached_tokens: int, cache: CacheUse | None) -> None:
        """Take in what a leg's engine says of the leg's prompt."""
        self.prompt_use = with_leg(
            self.prompt_use,
            leg,
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_tokens=cached_tokens,
            cache=cache,
        )

    def no_replica_s(self, now_s: float) -> float:
        """How long there was no replica for it, until now."""
        waits_s = 0.0 if self.waits_since_s is None else now_s - self.waits_since_s
        return self.replica_wait_s + waits_s

    def end_replica_wait(self, now_s: float) -> None:
        """A replica is there for it, or it waits no more."""
        self.replica_wait_s, self.waits_since_s = self.no_replica_s(now_s), None

    def move(self, target: Phase) -> None:
        """Take an edge of the transition table.

        Raises:
            ValueError: there is no such edge.
        """
        check_edge(self.request_id, self.phase, target)
        self.phase = target

    def hashes(self, family: Family) -> list[int]:
        """The names of the full blocks of its prompt, and of what was generated so far."""
        key = family, len(self.generated)
        known = self._hashes.get(key)
        if known is None:
            model, block_size_tokens = family
            request = self.request
            root = chain_root(
                model=model,
                block_size_tokens=block_size_tokens,
                adapter=request.adapter,
                salt=request.cache_salt,
            )
            known = self._hashes[key] = chain(root, self.tokens(), block_size_tokens)
        return known

    @property
    def token_count(self) -> int:
        """How many tokens its prompt and what was generated so far have."""
        return len(self.request.prompt_token_ids) + len(self.generated)

    def tokens(self) -> TokenIds:
        """Its prompt, followed by what was generated so far."""
        prompt = self.request.prompt_token_ids
        if isinstance(prompt, Outline):
            return prompt.extended(len(self.generated))
        return (*prompt, *self.generated) if self.generated else prompt

    def note_gap(self, gap_s: float) -> None:
        """Take in a time between two of its tokens; ones up to `gap_of_note_s` change nothing."""
        self.worst_gap_s = self.gap_of_note_s = max(self.worst_gap_s, gap_s)
        if (limit_s := self.slo.itl_p99_s) is not None:
            self.slow_gaps += gap_s > limit_s
            self.gap_of_note_s = min(limit_s, self.worst_gap_s)

    def next_leg(
        self,
        kind: LegKind,
        *,
        ticket: Ticket | None = None,
        source_id: str | None = None,
        prefill_tokens: int | None = None,
        gives_token: bool = False,
    ) -> Leg:
        """Build the next submission: all tokens so far, or the first `prefill_tokens` of them."""
        self.legs_begun += 1
        request = self.request
        done = len(self.generated)
        tokens = self.tokens()
        return Leg(
            leg_id=f"{request.request_id}{_ATTEMPT_MARK}{self.legs_begun}",
            request_id=request.request_id,
            kind=kind,
            prompt_token_ids=tokens if prefill_tokens is None else tokens[:prefill_tokens],
            resumed_tokens=done,
            max_tokens=request.max_tokens - done,
            min_tokens=max(0, request.min_tokens - done),
            priority=request.priority,
            ticket=ticket,
            source_id=source_id,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            gives_token=gives_token,
            payload=request.payload,
        )

    def leg_began(self, leg: Leg, replica_id: str, now_s: float) -> None:
        """A leg of its latest route was sent to a replica."""
        self.leg_id = leg.leg_id
        self.open_leg = OpenLeg(
            leg=leg, replica_id=replica_id, placement=len(self.routes) - 1, began_at_s=now_s
        )

    @property
    def running(self) -> OpenLeg:
        """The leg that runs."""
        assert self.open_leg is not None, f"{self.request_id} runs no leg"
        return self.open_leg

    def transfer_due_at_s(self, queued_at_s: float | None, transfer_s: float) -> float:
        """When its transfer, before which there last was a queue then, should bring a first token.

        Blocks have `transfer_s`; what is computed after them has what it is predicted to take. Or
        else each prefix that is fetched for a prompt with seconds left to compute would be given
        up, and its link be blamed.
        """
        from_s = max(self.running.began_at_s, queued_at_s or 0.0)
        return from_s + transfer_s + self.rest_s

    def leg_over(self, end: LegEnd, now_s: float) -> None:
        """Its running leg is over."""
        tokens = len(self.generated) - self.running.leg.resumed_tokens
        story = self.running.over(
            end, now_s, output_tokens=tokens, last_output_at_s=self.last_token_at_s
        )
        self.legs.append(story)
        self.leg_id = self.open_leg = None

    def check_integrity(self) -> None:
        """Raise AssertionError when its phase, its leg, its lease and its transfer disagree."""
        who, queued = self.request_id, self.phase is Phase.QUEUED
        told = None if self.open_leg is None else self.open_leg.leg.leg_id
        assert told == self.leg_id, f"{who}: the story is of leg {told}, not {self.leg_id}"
        assert queued or self.phase in RUNS, f"{who} rests in {self.phase}"
        assert queued == (self.leg_id is None), f"{who}: leg and phase differ"
        moves = self.phase is Phase.TRANSFER
        assert (self.lease is not None) == moves, f"{who}: lease in phase {self.phase}"
        assert (self.flow is not None) == moves, f"{who}: flow in phase {self.phase}"

    def record(
        self, outcome: Phase, reason: str, now_s: float, *, barred: bool, gpu_s: float
    ) -> RequestRecord:
        """The story to keep once the request has ended, with its judgement and its cost."""
        got = Got(
            outcome,
            len(self.generated),
            self.request.arrived_at_s,
            self.first_token_at_s,
            self.last_token_at_s,
            now_s,
            self.slow_gaps,
        )
        return RequestRecord(
            request_id=self.request_id,
            outcome=outcome,
            reason=reason,
            routes=tuple(self.routes),
            decisions=tuple(self.decisions),
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_tokens=self.cached_tokens,
            output_tokens=got.output_tokens,
            resumes=self.resumes,
            resume_reasons=tuple(self.resume_reasons),
            arrived_at_s=self.request.arrived_at_s,
            first_token_at_s=self.first_token_at_s,
            last_token_at_s=self.last_token_at_s,
            ended_at_s=now_s,
            prefill_done_at_s=self.prefill_done_at_s,
            handed_off_blocks=self.handed_off_blocks,
            tenant=self.tenant.name,
            slo=self.slo,
            judgement=judge(got, self.slo),
            barred=barred,
            gpu_s=gpu_s,
            worst_gap_s=self.worst_gap_s,
            slow_gaps=self.slow_gaps,
            held_s=(now_s if self.placed_at_s is None else self.placed_at_s) - self.taken_in_at_s,
            legs=tuple(self.legs),
            trace=self.request.trace,
        )
