"""A feed of a small fleet whose numbers move, told by the code that tells them of a real one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from baton.console.feed import ChatTarget, ChatUnavailable, Row
from baton.console.history import HISTORY_S, History
from baton.control.autoscaling.observer import Observer
from baton.domain.commands import RecordSelection, RequestRecord
from baton.domain.fleet import FleetView, Load, ReplicaView, Role
from baton.domain.handoff import (
    HandoffMode,
    HitSource,
    LegKind,
    LegTimes,
    PlacementDecision,
    Route,
    RouteOption,
    RouteReason,
)
from baton.domain.leg_record import LegOutcome, LegRecord
from baton.domain.request import Phase
from baton.domain.slo import Slo
from baton.domain.value import evolve
from baton.policy.admission.slo_evaluation import evaluate_slo
from baton.policy.links.estimates import LinkRow, LinkState
from baton.policy.scaling.actions import AutoscalerTick, ScalingDecision, StartReplicas
from baton.policy.scaling.desired import ScalingReason
from baton.policy.scaling.observation import Demand, Observation, PoolObservation, ServiceLevel
from baton.serving.ray.serve_control import DeploymentState
from baton.serving.scaling.reports import class_rows, demand_row, pool_rows, tick_rows
from baton.serving.shared.reports import fleet_report, link_report
from baton.telemetry.requests.error_budget import missed_objectives
from baton.telemetry.requests.request_log import request_report, slowness
from tests.console.scripted_feed import NO_CHAT
from tests.fakes.facts import replica_facts

SLO = Slo(name="interactive", ttft_s=0.5, tpot_s=0.05, attainment_target=0.99)
REPLICAS = {f"baton#{role}#{at}": role for role in (Role.PREFILL, Role.DECODE) for at in range(3)}
ENDED_PER_S = 20
TICK_S = 2.0
KEPT = 400
"""How many of the requests that ended last are told of."""
CONFIG = "models:\n  qwen-7b:\n    path: Qwen/Qwen2.5-7B-Instruct\n"


@dataclass
class LiveFeed:
    """Everything it says follows from the time."""

    clock: Callable[[], float] = time.monotonic
    target: ChatTarget | ChatUnavailable = NO_CHAT

    def chat_target(self) -> ChatTarget | ChatUnavailable:
        return self.target

    @cached_property
    def points(self) -> History:
        """Of the time before anybody looked; `overview` adds the others, as ticks do."""
        points, now_s = History(), self.clock()
        for tick in range(int(HISTORY_S / TICK_S), 0, -1):
            points.add(overview_at(now_s - tick * TICK_S), now_s - tick * TICK_S)
        return points

    async def overview(self) -> Row:
        now_s = self.clock()
        report = overview_at(now_s)
        self.points.add(report, now_s)
        return report | {"ingresses": [self._ingress(now_s, busy_at(now_s))]}

    async def links(self) -> Sequence[Row]:
        ok = LinkRow("", "", LinkState.OK, "", "tcp", 9e9, 0.1, 0.1, 0.2, 5, 900, 0, 0, 1, 1.0, 2.0)
        bad = ok._replace(state=LinkState.QUARANTINED, reason="side channel: no answer", failures=3)
        sources = [name for name, role in REPLICAS.items() if role is Role.PREFILL]
        targets = [name for name, role in REPLICAS.items() if role is Role.DECODE]
        pairs = [(source, target) for source in sources for target in targets]
        return link_report(
            (ok if at else bad)._replace(source_id=source, target_id=target)
            for at, (source, target) in enumerate(pairs)
        )

    async def requests(self, count: int, order: RecordSelection) -> Sequence[Row]:
        now_s = self.clock()
        records = self.records()
        if order is RecordSelection.MISSED:
            records = [record for record in records if missed_objectives(record)]
        if order is RecordSelection.SLOWEST:
            records.sort(key=slowness, reverse=True)
        return [
            request_report(record) | {"age_s": round(now_s - record.ended_at_s, 3)}
            for record in records[:count]
        ]

    async def request(self, request_id: str) -> Sequence[Row]:
        return [
            request_report(record) for record in self.records() if record.request_id == request_id
        ]

    async def ticks(self, count: int) -> Sequence[Row]:
        """Every two seconds; each tenth starts a replica."""
        now_s = self.clock()
        last = math.floor(now_s / 2)
        numbers = range(last - count + 1, last + 1)
        return tick_rows([_tick(number, is_start=number % 10 == 0) for number in numbers], now_s)

    async def config(self) -> str:
        return CONFIG

    def records(self) -> list[RequestRecord]:
        """Those that have ended, the latest first."""
        last = math.floor(self.clock() * ENDED_PER_S)
        return [self.record(number) for number in range(last, last - KEPT, -1)]

    def record(self, number: int) -> RequestRecord:
        """Every other one is handed off, every eleventh is late."""
        pull = _handed_off(number, number / ENDED_PER_S, 0.9 if number % 11 == 0 else 0.2)
        record = pull if number % 2 else _local(pull)
        return evolve(record, slo_result=evaluate_slo(record, record.slo))

    def _ingress(self, now_s: float, busy: float) -> Row:
        load = Load(running_requests=int(30 * busy), kv_used_fraction=busy, step_s=0.03 * busy)
        views = {
            name: ReplicaView(
                facts=replica_facts(name, role), load=load, load_received_at_s=now_s - 0.1
            )
            for name, role in REPLICAS.items()
        }
        cache = {"gpu_blocks": 18_400, "in_sync": True, "is_stale": False, "age_s": 0.1}
        return {
            "healthy": True,
            "replicas": fleet_report(
                FleetView(at_s=now_s, replicas=views),
                caches=dict.fromkeys(views, cache),
                leases=dict.fromkeys(views, 2),
            ),
            "timings": [],
            "unjoined": {},
            "in_flight": {"prefill": 9, "decode": int(66 * busy)},
            "ended": {"finished": 61240, "shed": 102, "cancelled": 310, "resumes": 4},
        }


def overview_at(now_s: float) -> dict[str, object]:
    """What the controller says at that time, without ingresses."""
    busy = busy_at(now_s)
    pools = {
        str(role): PoolObservation(
            name=role,
            role=role,
            prefill=3 * (role is Role.PREFILL),
            decode=3 * (role is Role.DECODE),
            utilization_fraction=busy,
        )
        for role in (Role.DECODE, Role.PREFILL)
    }
    seen = Observation(
        at_s=now_s,
        window_s=30.0,
        demand=Demand(requests_per_s=40 * busy, output_tokens_per_s=7900 * busy),
        service=ServiceLevel(attainment=busy, in_flight=int(150 * busy)),
        pools=pools,
    )
    states = {name: DeploymentState(name=name, target=4, running=3) for name in pools}
    (class_row,) = class_rows({SLO.name: SLO}, Observer(), now_s)
    moving = {
        "attainment": round(busy, 6),
        "requests_per_s": round(40 * busy, 3),
        "goodput_per_s": round(40 * busy * busy, 3),
    }
    return {
        "baton": "0.9.0",
        "model": "qwen-7b",
        "generation": 3,
        "up_s": now_s,
        "members": [
            {"replica_id": name, "pool": role, "role": role, "node": "10.0.0.4", "pid": 4000}
            for name, role in REPLICAS.items()
        ],
        "pools": pool_rows(seen, states),
        "classes": [{**class_row, **moving}],
        "demand": demand_row(seen),
        "autoscaler": {
            "policy": "slo",
            "paused_reason": "",
            "last_action": {"age_s": 74.0, "actions": ["start 1 of decode"]},
            "overrides": [],
            "turns": 4050,
            "failed_turns": 0,
            "failed_calls": 0,
            "last_failure": "",
        },
    }


def busy_at(at_s: float) -> float:
    """How much of the fleet is used."""
    return 0.78 + 0.17 * math.sin(at_s / 19.0) + 0.03 * math.sin(at_s / 2.3)


def _tick(number: int, *, is_start: bool) -> AutoscalerTick:
    decision = ScalingDecision(
        pool="decode",
        current_replicas=3 - is_start,
        target_replicas=3,
        desired_replicas=3,
        reason=ScalingReason.DEMAND if is_start else ScalingReason.STEADY,
        detail="decode needs 2.6 now, 2.8 in 42 s, so 3 play it",
        inputs={"need_now": 2.6, "need_later": 2.8, "horizon_s": 41.5, "target": 3.0},
    )
    actions = (StartReplicas(pool="decode", replicas=1),) if is_start else ()
    return AutoscalerTick(at_s=number * 2.0, policy="slo", decisions=(decision,), actions=actions)


def _handed_off(number: int, ended_s: float, prefill_s: float) -> RequestRecord:
    arrived_s = ended_s - 3.0
    prefilled_s = arrived_s + 0.05 + prefill_s
    first_s = prefilled_s + 0.04
    target = f"baton#{Role.DECODE}#{number % 3}"
    option = RouteOption(
        mode=HandoffMode.PULL,
        prefill_replica_id=f"baton#{Role.PREFILL}#{number % 3}",
        decode_replica_id=target,
        hit_tokens=320,
        hit_source=HitSource.REPORTED,
        hit_age_s=1.2,
        queue_s=0.02,
        prefill_s=prefill_s,
        transfer_s=0.01,
        decode_s=0.02,
        interference_s=0.004,
        cost_s=prefill_s + 0.054,
    )
    route = Route(
        mode=HandoffMode.PULL,
        prefill_replica_id=option.prefill_replica_id,
        decode_replica_id=target,
        reason=RouteReason.DISAGGREGATED,
    )
    other = evolve(option, mode=HandoffMode.LOCAL, prefill_replica_id=None, cost_s=1.9)
    decision = PlacementDecision(
        route=route,
        policy="predicted",
        at_s=arrived_s + 0.01,
        options=(option, other),
        options_considered=9,
    )
    prefill = LegRecord(
        leg_id="prefill",
        kind=LegKind.PREFILL,
        replica_id=str(route.prefill_replica_id),
        route_index=0,
        started_at_s=arrived_s + 0.01,
        first_output_at_s=prefilled_s,
        last_output_at_s=prefilled_s,
        ended_at_s=prefilled_s,
        prompt_tokens=900,
        fetched_tokens=0,
        cached_tokens=320,
        output_tokens=0,
        engine_times=LegTimes(0.0, prefill_s),
        outcome=LegOutcome.COMPLETED,
    )
    decode = evolve(
        prefill,
        leg_id="decode",
        kind=LegKind.DECODE,
        replica_id=target,
        started_at_s=prefilled_s,
        first_output_at_s=first_s,
        last_output_at_s=ended_s,
        ended_at_s=ended_s,
        fetched_tokens=900,
        output_tokens=100,
        engine_times=LegTimes(0.0, 0.02),
    )
    return RequestRecord(
        request_id=f"chatcmpl-{number:08x}",
        outcome=Phase.FINISHED,
        reason="stop",
        routes=(route,),
        decisions=(decision,),
        prompt_tokens=900,
        cached_tokens=320,
        output_tokens=100,
        resumes=0,
        arrived_at_s=arrived_s,
        first_token_at_s=first_s,
        last_token_at_s=ended_s,
        ended_at_s=ended_s,
        prefill_done_at_s=prefilled_s,
        handed_off_blocks=56,
        tenant="acme",
        slo=SLO,
        max_itl_s=0.064,
        queue_wait_s=0.01,
        gpu_s=prefill_s + 0.1,
        legs=(prefill, decode),
    )


def _local(pull: RequestRecord) -> RequestRecord:
    """The same request, prefilled where it is decoded, by an engine that tells no times."""
    route = evolve(
        pull.routes[0],
        mode=HandoffMode.LOCAL,
        prefill_replica_id=None,
        reason=RouteReason.LOCAL_FASTER,
    )
    _, option = pull.decisions[0].options
    prefill, decode = pull.legs
    leg = evolve(
        decode,
        kind=LegKind.LOCAL,
        started_at_s=prefill.started_at_s,
        fetched_tokens=0,
        engine_times=None,
    )
    return evolve(
        pull,
        routes=(route,),
        decisions=(evolve(pull.decisions[0], route=route, options=(option,)),),
        prefill_done_at_s=None,
        handed_off_blocks=0,
        legs=(leg,),
    )
