"""A pretend fleet for tests of the coordinator: it runs legs by hand and counts blocks."""

from __future__ import annotations

from collections.abc import Container, Mapping

from baton.control.coordinator import Coordinator
from baton.control.probing.prober import ProbeOptions
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.service_rules import ServiceRules
from baton.domain.cache import CacheChange, CacheChangeKind, CacheUpdate, pack_hashes
from baton.domain.commands import (
    AbortLegs,
    Command,
    Deliver,
    FailRequest,
    ReleaseLease,
    RequestRecord,
    StoreRequestRecord,
    SubmitLeg,
)
from baton.domain.errors import BatonError
from baton.domain.events import (
    CacheChanged,
    Event,
    LegFailed,
    LegsAborted,
    LoadReported,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
    RequestArrived,
    RequestsCancelled,
    RoleChanged,
    StepCompleted,
    TimerFired,
)
from baton.domain.fleet import Health, Load, LossReason, ReplicaView, Role
from baton.domain.handoff import KvHandle, Leg, LegFailure, LegKind, LegOutput, PlacementDecision
from baton.domain.request import FinishReason, LocalOnlyReason, Request
from baton.perf.timing import EngineTiming
from baton.policy.placement.port import (
    Disaggregate,
    NoRoute,
    PlacementContext,
    PlacementQuery,
    Placer,
)
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root
from baton.telemetry.requests.waterfall import waterfall
from tests.fakes.facts import replica_facts
from tests.fakes.placers import placer

LIMITS = CoordinatorLimits(max_requests=64, max_queued_requests=16, max_failures=50)


def request(  # noqa: PLR0913 - whatever a test cares about
    request_id: str,
    *,
    prompt_tokens: int = 40,
    max_tokens: int = 4,
    local_only: LocalOnlyReason | None = None,
    resumable: bool = True,
    tenant: str = "default",
    slo_class: str | None = None,
    arrived_at_s: float = 0.0,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(range(1000, 1000 + prompt_tokens)),
        max_tokens=max_tokens,
        arrived_at_s=arrived_at_s,
        local_only=local_only,
        resumable=resumable,
        tenant=tenant,
        slo_class=slo_class,
    )


class HealthCheckingPlacer:
    """A placer whose answers are checked: nobody but those of the best standing gets work."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer

    def place(
        self, query: PlacementQuery, context: PlacementContext
    ) -> PlacementDecision | NoRoute:
        decision = self._placer.place(query, context)
        if isinstance(decision, PlacementDecision):
            route = decision.route
            self._check({route.decode_replica_id, route.prefill_replica_id} - {None}, context)
        return decision

    def place_decode(
        self, query: PlacementQuery, source: ReplicaView, context: PlacementContext
    ) -> str | None:
        target = self._placer.place_decode(query, source, context)
        self._check({target} - {None}, context)
        return target

    def _check(self, chosen: set[str | None], around: PlacementContext) -> None:
        ranks = {
            name: list(Health).index(view.health)
            for name, view in around.fleet.replicas.items()
            if not view.draining
        }
        for item in chosen:
            assert item in ranks, f"{item} drains"
            assert ranks[item] == min(ranks.values()), f"{item} is chosen, others are sound"


class World:
    """Drives a `Coordinator` by hand; token number i of every request is the integer i."""

    def __init__(
        self,
        limits: CoordinatorLimits = LIMITS,
        disaggregate: Disaggregate = Disaggregate.ALWAYS,
        policy: Placer | None = None,
        probing: ProbeOptions | None = None,
        *,
        rules: ServiceRules | None = None,
        priors: Mapping[str, EngineTiming] | None = None,
    ) -> None:
        self.limits = limits
        self.coordinator = Coordinator(
            limits=limits,
            placer=HealthCheckingPlacer(policy or placer(disaggregate)),
            probing=probing,
            rules=rules,
            priors=priors,
        )
        self.now_s = 0.0
        self.requests: dict[str, Request] = {}
        self.alive: dict[str, Role] = {}
        self.legs: dict[str, tuple[str, Leg]] = {}
        self.leased: dict[str, str] = {}
        """Blocks that wait to be pulled: prefill leg id → the replica that keeps them."""
        self.tokens: dict[str, list[int]] = {}
        self.records: dict[str, RequestRecord] = {}
        self.errors: dict[str, BatonError] = {}
        self.aborting: list[tuple[str, str]] = []
        self._produced: dict[str, int] = {}
        self._leased_at_s: dict[str, float] = {}
        self.commands: list[Command] = []

    # ------------------------------------------------------------ facts told to the machine

    def handle(self, event: Event) -> list[Command]:
        commands = self.coordinator.handle(event, self.now_s)
        self.commands.extend(commands)
        for command in commands:
            self._execute(command)
        self.coordinator.check_integrity()
        return commands

    def join(
        self, replica_id: str, role: Role, *, layout: str = "same", kv_block_bytes: int = 1024
    ) -> None:
        self.alive[replica_id] = role
        facts = replica_facts(
            replica_id,
            role,
            layout=layout,
            kv_block_bytes=kv_block_bytes,
            cache_events=True,
            supports_prefix_fetch=True,
            side_channel=f"{replica_id}:1",
        )
        self.handle(ReplicaJoined(facts=facts))

    def join_prefill_decode(self, prefill: int = 1, decode: int = 1) -> None:
        for i in range(prefill):
            self.join(f"p{i}", Role.PREFILL)
        for i in range(decode):
            self.join(f"d{i}", Role.DECODE)

    def arrive(self, item: Request) -> None:
        self.requests[item.request_id] = item
        self.tokens[item.request_id] = []
        self.handle(RequestArrived(request=item))

    def cancel(self, *request_ids: str) -> None:
        self.handle(RequestsCancelled(request_ids=request_ids))

    def disconnect(self, replica_id: str, reason: LossReason = LossReason.DISCONNECTED) -> None:
        self.alive.pop(replica_id, None)
        self.legs = {k: v for k, v in self.legs.items() if v[0] != replica_id}
        self.leased = {k: v for k, v in self.leased.items() if v != replica_id}
        self.aborting = [a for a in self.aborting if a[0] != replica_id]
        self.handle(ReplicaLost(replica_id=replica_id, reason=reason))

    def drain(self, replica_id: str) -> None:
        self.handle(ReplicaDraining(replica_id=replica_id))

    def change_role(self, replica_id: str, role: Role) -> None:
        self.alive[replica_id] = role
        self.handle(RoleChanged(replica_id=replica_id, role=role))

    def load(self, replica_id: str, load: Load, *, received_legs: int | None = None) -> None:
        self.handle(LoadReported(replica_id=replica_id, load=load, received_legs=received_legs))

    def report_cached(self, replica_id: str, item: Request, *, sequence: int = 1) -> None:
        """The replica says that it holds the full blocks of a prompt."""
        root = chain_root(model="tiny", block_size_tokens=16, salt=item.cache_salt)
        hashes = pack_hashes(chain_hashes(root, item.prompt_token_ids, 16))
        change = CacheChange(CacheChangeKind.STORED, hashes)
        update = CacheUpdate(sequence, (change,))
        self.handle(CacheChanged(replica_id=replica_id, update=update))

    def fail_leg(self, leg_id: str, failure: LegFailure) -> None:
        replica_id, _ = self.legs.pop(leg_id)
        self.handle(LegFailed(replica_id=replica_id, leg_id=leg_id, failure=failure))

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        for leg_id, at_s in self._leased_at_s.items():
            if self.now_s >= at_s + self.limits.lease_s:
                self.leased.pop(leg_id, None)
        self.handle(TimerFired())

    def advance_with_heartbeats(
        self, seconds: float, *, frozen: Container[str] = (), beat_s: float = 0.25
    ) -> None:
        """Let time pass while all but the frozen say how they are, with nothing to do."""
        for _ in range(round(seconds / beat_s)):
            for replica_id in tuple(self.alive):
                if replica_id not in frozen:
                    self.load(replica_id, Load())
            self.advance(beat_s)

    def confirm_aborts(self, *, frozen: Container[str] = ()) -> None:
        pending, self.aborting = self.aborting, []
        for replica_id, leg_id in pending:
            if replica_id in frozen:
                self.aborting.append((replica_id, leg_id))
            else:
                self._abort_now(replica_id, leg_id)

    # ------------------------------------------------------------ what replicas do

    def step(self, leg_id: str, *, finish: FinishReason | None = None) -> None:
        """One engine step for one leg: its KV handle, or its next token."""
        replica_id, _ = self.legs[leg_id]
        self.handle(StepCompleted(replica_id=replica_id, outputs=(self.output(leg_id, finish),)))

    def output(self, leg_id: str, finish: FinishReason | None = None) -> LegOutput:
        replica_id, leg = self.legs[leg_id]
        if leg.kind is LegKind.PREFILL:
            del self.legs[leg_id]
            token = leg.resumed_tokens if leg.emits_first_token else 7
            if finish is not None:
                return LegOutput(leg_id, (token,) if finish is FinishReason.STOP else (), finish)
            self.leased[leg_id] = replica_id
            self._leased_at_s[leg_id] = self.now_s
            return LegOutput(leg_id, (token,), FinishReason.LENGTH, kv_handle=kv_handle_of(leg))
        if leg.kv_handle is not None:
            self.leased.pop(leg.kv_handle.params.decode(), None)
        if leg.request_id not in self.requests:  # a probe's
            del self.legs[leg_id]
            return LegOutput(leg_id, (7,), FinishReason.LENGTH)
        item = self.requests[leg.request_id]
        position = len(leg.prompt_token_ids) - len(item.prompt_token_ids)
        produced = self._produced.setdefault(leg_id, 0)
        self._produced[leg_id] = produced + 1
        if produced + 1 == leg.max_tokens:
            finish = FinishReason.LENGTH
        if finish is not None:
            del self.legs[leg_id]
        if finish not in {None, FinishReason.STOP, FinishReason.LENGTH}:
            return LegOutput(leg_id, (), finish)
        return LegOutput(leg_id, (position + produced,), finish)

    def run_to_end(self, *, rounds: int = 1000) -> None:
        """Let every leg run until nothing is left to do."""
        for _ in range(rounds):
            self.confirm_aborts()
            if not self.legs:
                return
            self.step(next(iter(self.legs)))
        raise AssertionError(f"still running after {rounds} steps: {self.coordinator.phases()}")

    # ------------------------------------------------------------ carrying out commands

    def _execute(self, command: Command) -> None:
        match command:
            case SubmitLeg():
                assert command.replica_id in self.alive, f"sent to a dead replica: {command}"
                self.legs[command.leg.leg_id] = (command.replica_id, command.leg)
            case AbortLegs():
                self.aborting.extend((command.replica_id, leg_id) for leg_id in command.leg_ids)
            case ReleaseLease():
                assert command.via_replica_id in self.alive, f"released via the dead: {command}"
                self.leased.pop(command.lease.leg_id, None)
            case Deliver():
                for delivery in command.deliveries:
                    self.tokens[delivery.request_id].extend(delivery.token_ids)
            case FailRequest():
                assert command.request_id not in self.errors, f"failed twice: {command}"
                self.errors[command.request_id] = command.error
            case StoreRequestRecord():
                record = command.record
                assert record.request_id not in self.records, f"ended twice: {record}"
                check_record(record)
                self.records[record.request_id] = record

    def _abort_now(self, replica_id: str, leg_id: str) -> None:
        if replica_id not in self.alive:
            return
        _, leg = self.legs.pop(leg_id, (replica_id, None))
        if leg is not None and leg.kv_handle is not None:
            self.leased.pop(leg.kv_handle.params.decode(), None)
        self.handle(LegsAborted(replica_id=replica_id, leg_ids=(leg_id,)))


def check_record(record: RequestRecord) -> None:
    """Legs follow each other, and the waterfall has no gap from arrival to end."""
    at_s = record.arrived_at_s
    for leg in record.legs:
        first_s = leg.ended_at_s if leg.first_output_at_s is None else leg.first_output_at_s
        assert at_s <= leg.started_at_s <= first_s <= leg.ended_at_s <= record.ended_at_s, leg
        at_s = leg.ended_at_s
    assert {leg.route_index for leg in record.legs} == set(range(len(record.routes)))
    assert sum(leg.output_tokens for leg in record.legs) == record.output_tokens
    ends_s = 0.0
    for bar in waterfall(record):
        assert bar.from_s == ends_s < bar.to_s
        ends_s = bar.to_s
    assert ends_s == record.ended_at_s - record.arrived_at_s


def kv_handle_of(leg: Leg) -> KvHandle:
    """A KV handle that names the prefill leg it came from."""
    blocks = -(-len(leg.prompt_token_ids) // 16)
    return KvHandle(tokens=len(leg.prompt_token_ids), blocks=blocks, params=leg.leg_id.encode())
