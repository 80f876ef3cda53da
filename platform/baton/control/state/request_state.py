"""The state of one request: its phase, its tokens, its legs, and the edges that it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from types import MappingProxyType
from typing import NamedTuple

from baton.control.state.admission_terms import Charge, PriorityBand
from baton.control.state.prompt_use import PromptUse, use_after_leg
from baton.domain.commands import RequestRecord
from baton.domain.handoff import (
    CacheUse,
    KvHandle,
    Lease,
    Leg,
    LegKind,
    LegTimes,
    PlacementDecision,
    Route,
)
from baton.domain.hashed_prompt import HashedPrompt, TokenIds
from baton.domain.leg_record import LegOutcome, LegRecord
from baton.domain.request import LocalOnlyReason, Phase, Request
from baton.domain.slo import NO_SLO, Slo
from baton.domain.tenant import Tenant
from baton.policy.admission.fair_queue import QueuedRequest
from baton.policy.admission.slo_evaluation import Served, evaluate_slo
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root

RUNNING_PHASES = frozenset({Phase.PREFILL, Phase.TRANSFER, Phase.DECODE})
"""Phases in which a leg runs."""
_EARLY_ENDS = frozenset({Phase.FAILED, Phase.CANCELLED})
_LEAVES_REPLICA = _EARLY_ENDS | {Phase.RESUME}

TRANSITIONS: Mapping[Phase, frozenset[Phase]] = MappingProxyType(
    {
        # A LOCAL placement and a disaggregated one both begin with PREFILL.
        # ARRIVED → FAILED: it asks for something that it may not have, now or later.
        Phase.ARRIVED: frozenset({Phase.QUEUED, Phase.PREFILL, Phase.SHED, Phase.FAILED}),
        Phase.QUEUED: _EARLY_ENDS | {Phase.PREFILL, Phase.EVICTED},
        # PREFILL → DECODE is LOCAL's edge: the first token came from the replica that prefilled.
        # PREFILL → FINISHED: the first token was also the last.
        Phase.PREFILL: _LEAVES_REPLICA | {Phase.TRANSFER, Phase.DECODE, Phase.FINISHED},
        Phase.TRANSFER: _LEAVES_REPLICA | {Phase.DECODE, Phase.FINISHED},
        Phase.DECODE: _LEAVES_REPLICA | {Phase.FINISHED},
        Phase.RESUME: _EARLY_ENDS | {Phase.QUEUED, Phase.PREFILL, Phase.EVICTED},
        Phase.FINISHED: frozenset(),
        Phase.SHED: frozenset(),
        Phase.EVICTED: frozenset(),
        Phase.FAILED: frozenset(),
        Phase.CANCELLED: frozenset(),
    }
)
"""Every edge that a request may take, and no other."""

ATTEMPT_SEPARATOR = "~"
"""Between a request's id and the number of its leg, in the id of the leg."""
_DEFAULT_TENANT = Tenant()
_NO_BAND = PriorityBand(0, is_attainable=True)

BlockFamily = tuple[str, int]
"""Model and block size: replicas of one family name blocks alike."""


class KvTransfer(NamedTuple):
    """KV blocks on their way from one replica to another."""

    leg_id: str
    """The decode leg that pulls them."""
    source_id: str
    target_id: str
    predicted_s: float = 0.0
    """Their predicted time, beside all running transfers."""


@dataclass(slots=True, kw_only=True)
class RunningLeg:
    """A leg that is not over."""

    leg: Leg
    replica_id: str
    route_index: int
    started_at_s: float
    first_output_at_s: float | None = None
    cached_tokens: int | None = None
    engine_times: LegTimes | None = None

    def note_times(self, times: LegTimes | None) -> None:
        """Its engine's times; invalid times are ignored."""
        if times is not None and _is_valid(times):
            self.engine_times = times

    def record(
        self,
        outcome: LegOutcome,
        now_s: float,
        *,
        output_tokens: int,
        last_output_at_s: float | None,
    ) -> LegRecord:
        """Record its end, with the tokens it gave to the client, the last of them then."""
        kv_handle = self.leg.kv_handle
        return LegRecord(
            leg_id=self.leg.leg_id,
            kind=self.leg.kind,
            replica_id=self.replica_id,
            route_index=self.route_index,
            started_at_s=self.started_at_s,
            first_output_at_s=self.first_output_at_s,
            last_output_at_s=last_output_at_s if output_tokens else None,
            ended_at_s=now_s,
            prompt_tokens=len(self.leg.prompt_token_ids),
            fetched_tokens=0 if kv_handle is None else kv_handle.tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=output_tokens,
            engine_times=self.engine_times,
            outcome=outcome,
        )


@dataclass(slots=True, kw_only=True)
class RequestState:
    """One request in flight. The tokens in `generated` have been delivered to the client."""

    request: Request
    tenant: Tenant = _DEFAULT_TENANT
    """Whose limits and share it counts for."""
    slo: Slo = NO_SLO
    """Its objectives; settled when it arrives, even if the configuration changes later."""
    phase: Phase = Phase.ARRIVED
    generated: list[int] = field(default_factory=list)
    leg_id: str | None = None
    lease: Lease | None = None
    local_only: LocalOnlyReason | None = None
    allow_early_token: bool = False
    """Whether a replica that only prefills it gives it its first token."""
    avoid: frozenset[str] = frozenset()
    routes: list[Route] = field(default_factory=list)
    decisions: list[PlacementDecision] = field(default_factory=list)
    transfer: KvTransfer | None = None
    """The transfer that is under way for it."""
    remaining_prefill_s: float = 0.0
    """Of a transfer of a prefix only: its target's predicted time for the rest of the prompt, and
    for prompts before it; 0 where the whole prompt is handed off."""
    legs_started: int = 0
    current_leg: RunningLeg | None = None
    """The running leg."""
    leg_records: list[LegRecord] = field(default_factory=list)
    """Those that are over."""
    failures: int = 0
    resumes: int = 0
    resume_reasons: list[str] = field(default_factory=list)
    free_retry_at_tokens: int = -1
    """How many it had at its last free retry; -1: it had none. See `retries`."""
    crashes: int = 0
    """Replicas in a row that died while they ran it, and it got no further."""
    crashed_at_tokens: int = 0
    """How many it had when the last of them did."""
    was_hedged: bool = False
    """Whether another replica would be quicker was looked at, which is done once."""
    prompt_use: PromptUse | None = None
    """How much of its prompt was cached; None while no leg has reported it."""
    first_token_due_at_s: float = float("inf")
    """When the current placement should have brought its first token."""
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    max_itl_s: float = 0.0
    itl_violations: int = 0
    itl_threshold_s: float = 0.0
    charge: Charge | None = None
    """Its tenant's charge for it; None before that."""
    queued_request: QueuedRequest | None = None
    """Its place in the queue; None before its admission decision."""
    band: PriorityBand = _NO_BAND
    accepted_at_s: float = 0.0
    replica_wait_s: float = 0.0
    """How long it has waited for a replica to be there, before it was placed for the first time."""
    waiting_since_s: float | None = None
    """Since when it waits for one; None: it does not."""
    placed_at_s: float | None = None
    """When it was placed for the first time."""
    prefill_done_at_s: float | None = None
    handed_off_blocks: int = 0
    total_deadline_at_s: float = float("inf")
    request_id: str = field(init=False)
    prompt_tokens: int = field(init=False)
    """Of the client's prompt."""
    _hashes: dict[tuple[BlockFamily, int], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.prompt_tokens = len(self.request.prompt_token_ids)

    def on_replica_crashed(self) -> None:
        """The replica that runs it has died."""
        has_progressed = len(self.generated) > self.crashed_at_tokens
        self.crashes = 1 if has_progressed else self.crashes + 1
        self.crashed_at_tokens = len(self.generated)

    @property
    def priority(self) -> int:
        """Rank: higher priorities go first."""
        return self.slo.priority + self.tenant.priority

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of its prompt that no replica had to compute; None while that is unknown."""
        return None if self.prompt_use is None else self.prompt_use.cached_tokens

    def update_prompt_use(self, leg: Leg, cached_tokens: int, cache_use: CacheUse | None) -> None:
        """Take in the cached tokens that a leg's engine reports."""
        self.prompt_use = use_after_leg(
            self.prompt_use,
            leg,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=cached_tokens,
            cache_use=cache_use,
        )

    def total_replica_wait_s(self, now_s: float) -> float:
        """How long there was no replica for it, until now."""
        current_wait_s = 0.0 if self.waiting_since_s is None else now_s - self.waiting_since_s
        return self.replica_wait_s + current_wait_s

    def end_replica_wait(self, now_s: float) -> None:
        """A replica is there for it, or it waits no more."""
        self.replica_wait_s, self.waiting_since_s = self.total_replica_wait_s(now_s), None

    def transition_to(self, target: Phase) -> None:
        """Take an edge of the transition table.

        Raises:
            ValueError: there is no such edge.
        """
        if target not in TRANSITIONS[self.phase]:
            allowed = ", ".join(sorted(TRANSITIONS[self.phase])) or "none, it has ended"
            raise ValueError(
                f"request {self.request_id!r}: no edge from {self.phase} to {target}"
                f" (allowed: {allowed})"
            )
        self.phase = target

    def block_hashes(self, family: BlockFamily) -> list[int]:
        """The names of the full blocks of its prompt and its generated tokens."""
        key = family, len(self.generated)
        hashes = self._hashes.get(key)
        if hashes is None:
            model, block_size_tokens = family
            request = self.request
            root = chain_root(
                model=model,
                block_size_tokens=block_size_tokens,
                adapter=request.adapter,
                salt=request.cache_salt,
            )
            hashes = self._hashes[key] = chain_hashes(root, self.tokens(), block_size_tokens)
        return hashes

    @property
    def token_count(self) -> int:
        """How many tokens its prompt and its output so far have."""
        return self.prompt_tokens + len(self.generated)

    def tokens(self) -> TokenIds:
        """Its prompt, followed by its output so far."""
        prompt = self.request.prompt_token_ids
        if isinstance(prompt, HashedPrompt):
            return prompt.extended(len(self.generated))
        return (*prompt, *self.generated) if self.generated else prompt

    def record_itl(self, gap_s: float, gaps: int = 1) -> None:
        """Take in times between its tokens, which are alike, if above `itl_threshold_s`."""
        self.max_itl_s = self.itl_threshold_s = max(self.max_itl_s, gap_s)
        if (limit_s := self.slo.itl_p99_s) is not None:
            self.itl_violations += gaps * (gap_s > limit_s)
            self.itl_threshold_s = min(limit_s, self.max_itl_s)

    def new_leg(
        self,
        kind: LegKind,
        *,
        kv_handle: KvHandle | None = None,
        source_id: str | None = None,
        prefill_tokens: int | None = None,
        emits_first_token: bool = False,
    ) -> Leg:
        """Build the next submission: all tokens so far, or the first `prefill_tokens` of them."""
        self.legs_started += 1
        request = self.request
        generated_tokens = len(self.generated)
        tokens = self.tokens()
        return Leg(
            leg_id=f"{request.request_id}{ATTEMPT_SEPARATOR}{self.legs_started}",
            request_id=request.request_id,
            kind=kind,
            prompt_token_ids=tokens if prefill_tokens is None else tokens[:prefill_tokens],
            resumed_tokens=generated_tokens,
            max_tokens=request.max_tokens - generated_tokens,
            min_tokens=max(0, request.min_tokens - generated_tokens),
            priority=request.priority,
            kv_handle=kv_handle,
            source_id=source_id,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            emits_first_token=emits_first_token,
            payload=request.payload,
        )

    def on_leg_started(self, leg: Leg, replica_id: str, now_s: float) -> None:
        """A leg of its latest route was sent to a replica."""
        self.leg_id = leg.leg_id
        self.current_leg = RunningLeg(
            leg=leg, replica_id=replica_id, route_index=len(self.routes) - 1, started_at_s=now_s
        )

    @property
    def running_leg(self) -> RunningLeg:
        """The leg that runs."""
        assert self.current_leg is not None, f"{self.request_id} runs no leg"
        return self.current_leg

    def transfer_due_at_s(self, queued_at_s: float | None, transfer_s: float) -> float:
        """When its transfer, before which there last was a queue then, should bring a first token.

        Blocks have `transfer_s`; the rest of the prompt has its predicted time. Or else each prefix
        that is fetched for a prompt with seconds left to compute would be given up, and its link be
        blamed.
        """
        started_at_s = max(self.running_leg.started_at_s, queued_at_s or 0.0)
        return started_at_s + transfer_s + self.remaining_prefill_s

    def on_leg_ended(self, outcome: LegOutcome, now_s: float) -> None:
        """Its running leg is over."""
        running_leg = self.running_leg
        tokens = len(self.generated) - running_leg.leg.resumed_tokens
        leg_record = running_leg.record(
            outcome, now_s, output_tokens=tokens, last_output_at_s=self.last_token_at_s
        )
        self.leg_records.append(leg_record)
        self.leg_id = self.current_leg = None

    def check_integrity(self) -> None:
        """Raise AssertionError when its phase, its leg, its lease and its transfer disagree."""
        request_id, is_queued = self.request_id, self.phase is Phase.QUEUED
        running_id = None if self.current_leg is None else self.current_leg.leg.leg_id
        assert running_id == self.leg_id, (
            f"{request_id}: the record is of leg {running_id}, not {self.leg_id}"
        )
        assert is_queued or self.phase in RUNNING_PHASES, f"{request_id} rests in {self.phase}"
        assert is_queued == (self.leg_id is None), f"{request_id}: leg and phase differ"
        is_transferring = self.phase is Phase.TRANSFER
        assert (self.lease is not None) == is_transferring, (
            f"{request_id}: lease in phase {self.phase}"
        )
        assert (self.transfer is not None) == is_transferring, (
            f"{request_id}: flow in phase {self.phase}"
        )

    def record(  # noqa: PLR0913 - what the accounts know of it, each a field of the record
        self,
        outcome: Phase,
        reason: str,
        now_s: float,
        *,
        is_client_error: bool,
        gpu_s: float,
        model: str,
        pool: str,
    ) -> RequestRecord:
        """The record to keep once the request has ended, with its judgement and its cost."""
        served = Served(
            outcome,
            len(self.generated),
            self.request.arrived_at_s,
            self.first_token_at_s,
            self.last_token_at_s,
            now_s,
            self.itl_violations,
        )
        return RequestRecord(
            request_id=self.request_id,
            outcome=outcome,
            reason=reason,
            routes=tuple(self.routes),
            decisions=tuple(self.decisions),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=served.output_tokens,
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
            slo_result=evaluate_slo(served, self.slo),
            is_client_error=is_client_error,
            gpu_s=gpu_s,
            model=model,
            pool=pool,
            max_itl_s=self.max_itl_s,
            itl_violations=self.itl_violations,
            queue_wait_s=(now_s if self.placed_at_s is None else self.placed_at_s)
            - self.accepted_at_s,
            legs=tuple(self.leg_records),
            trace=self.request.trace,
        )


def _is_valid(times: LegTimes) -> bool:
    return isfinite(sum(times)) and min(times) >= 0
