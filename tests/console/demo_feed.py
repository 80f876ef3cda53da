"""A feed of a fleet that does not exist: scripted, from one seed, and moving like a real one.

What it says has the shape that a deployment's feed has: stories are told by
`telemetry.requests.request_log`, of records made here. `python -m tests.console.demo_feed` serves
the console over it.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.console.feed import Row
from baton.domain.commands import RecordSelection, RequestRecord
from baton.domain.slo import Slo
from baton.telemetry.requests.error_budget import missed_objectives
from baton.telemetry.requests.request_log import request_report, slowness
from tests.console.random_requests import CLASSES, random_record

CONFIG = """\
# resolved: this is what holds
models:
  qwen-7b:
    path: Qwen/Qwen2.5-7B-Instruct
    max_len_tokens: 32768
pools:
  prefill:
    role: prefill
    replicas: {min: 1, initial: 3, max: 8}
  decode:
    role: decode
    replicas: {min: 1, initial: 4, max: 12}
slo:
  interactive:
    ttft: 0.5
    tpot: 0.05
    attainment: 0.99
  batch:
    ttft: 10.0
    tpot: 0.2
    attainment: 0.9
autoscaler:
  policy: slo
  interval_s: 2.0
server:
  port: 8000
  keys: "(not shown)"
"""


@dataclass
class DemoFeed:
    """Six prefill and decode replicas under a load that swells and ebbs over two minutes."""

    clock: Callable[[], float] = time.monotonic
    prefill: int = 3
    decode: int = 4
    seed: int = 7
    calls: list[str] = field(default_factory=list)
    _records: deque[RequestRecord] = field(default_factory=lambda: deque(maxlen=400))
    _ended_until_s: float | None = None
    _count: int = 0

    async def overview(self) -> Row:
        self.calls.append("overview")
        now_s = self.clock()
        self._advance(now_s)
        load = load_at(now_s)
        return {
            "baton": "0.9.0",
            "model": "qwen-7b",
            "generation": 3,
            "up_s": 8100.0 + now_s % 3600,
            "members": [self._member(name) for name in self._names()],
            "pools": self._pools(load),
            "classes": [self._class(slo, load) for slo in CLASSES],
            "demand": self._demand(load),
            "autoscaler": self._autoscaler(),
            "ingresses": [self._ingress(load), self._ingress(load)],
        }

    async def links(self) -> Sequence[Row]:
        self.calls.append("links")
        names = self._names()
        sources = [name for name in names if "#prefill#" in name]
        targets = [name for name in names if "#decode#" in name]
        return [self._link(s, t) for s in sources for t in targets]

    async def requests(self, count: int, order: RecordSelection) -> Sequence[Row]:
        self.calls.append(f"requests {order}")
        now_s = self.clock()
        self._advance(now_s)
        records = list(reversed(self._records))
        if order is RecordSelection.MISSED:
            records = [record for record in records if missed_objectives(record)]
        if order is RecordSelection.SLOWEST:
            records.sort(key=slowness, reverse=True)
        return [
            request_report(record) | {"age_s": round(now_s - record.ended_at_s, 3)}
            for record in records[:count]
        ]

    async def request(self, request_id: str) -> Sequence[Row]:
        self.calls.append(f"request {request_id}")
        return [
            request_report(record) for record in self._records if record.request_id == request_id
        ]

    async def ticks(self, count: int) -> Sequence[Row]:
        self.calls.append("ticks")
        now_s = self.clock()
        last = math.floor(now_s / 2)
        return [self._tick(at, now_s) for at in range(last - count + 1, last + 1)]

    async def config(self) -> str:
        self.calls.append("config")
        return CONFIG

    # ------------------------------------------------------------------------- the fleet

    def _names(self) -> list[str]:
        sizes = {"prefill": self.prefill, "decode": self.decode}
        return [
            f"baton#{pool}#{random.Random(f'{pool}{at}').randrange(16**6):06x}"
            for pool, size in sizes.items()
            for at in range(size)
        ]

    def _member(self, replica_id: str) -> Row:
        pool = replica_id.split("#")[1]
        return {
            "replica_id": replica_id,
            "pool": pool,
            "role": pool,
            "node": "10.0.0.4",
            "pid": 4000 + len(replica_id),
        }

    def _pools(self, load: float) -> list[Row]:
        sizes = {"decode": self.decode, "prefill": self.prefill}
        return [
            {
                "pool": pool,
                "desired": size + (pool == "decode" and load > 0.9),
                "ready": size,
                "starting": int(pool == "decode" and load > 0.9),
                "draining": 0,
                "prefill": size if pool == "prefill" else 0,
                "decode": size if pool == "decode" else 0,
                "mixed": 0,
                "cold_start_s": 41.5,
                "busy": round(load * (0.93 if pool == "prefill" else 0.78), 4),
            }
            for pool, size in sizes.items()
        ]

    def _class(self, slo: Slo, load: float) -> Row:
        requests_per_s = (31.0 if slo.name == "interactive" else 9.0) * load
        overload = max(0.0, load - 0.86) * (0.4 if slo.name == "interactive" else 0.1)
        attainment = round(1.0 - 0.002 - overload, 6)
        return {
            "class": slo.name,
            "ttft_s": slo.ttft_s,
            "tpot_s": slo.tpot_s,
            "target": slo.attainment_target,
            "attainment": attainment,
            "requests_per_s": round(requests_per_s, 3),
            "goodput_per_s": round(requests_per_s * attainment, 3),
            "window_attainment": 0.9931 if slo.name == "interactive" else 0.9984,
            "refused": int(overload * 60),
            "failed": 0,
        }

    def _demand(self, load: float) -> Row:
        return {
            "requests_per_s": round(40.4 * load, 3),
            "prompt_tokens_per_s": round(28400 * load, 1),
            "output_tokens_per_s": round(7900 * load, 1),
            "refused_per_s": round(max(0.0, load - 0.9) * 8, 3),
            "attainment": round(1.0 - max(0.0, load - 0.86) * 0.3, 6),
            "in_flight": int(150 * load),
            "queued": int(max(0.0, load - 0.8) * 40),
            "slack_s": round(0.42 - 0.4 * load, 6),
            "window_s": 30.0,
        }

    def _autoscaler(self) -> Row:
        return {
            "policy": "slo: 1..8 prefill, 1..12 decode, every 2 s",
            "paused_reason": "",
            "last_action": {"age_s": 74.0, "actions": ["start 1 of decode"]},
            "overrides": [],
            "turns": 4050,
            "failed_turns": 0,
            "failed_calls": 0,
            "last_failure": "",
        }

    def _ingress(self, load: float) -> Row:
        return {
            "healthy": True,
            "replicas": [self._view(name, load) for name in self._names()],
            "timings": [
                {
                    "pool": "decode",
                    "reports": 900,
                    "step_error_fraction": 0.06,
                    "predictions": 1210,
                    "ttft_error_fraction": 0.11,
                    "ttft_bias_fraction": 0.02,
                }
            ],
            "unjoined": {},
            "in_flight": {"prefill": int(9 * load), "decode": int(66 * load)},
            "ended": {"finished": 61240, "shed": 102, "cancelled": 310, "resumes": 4},
        }

    def _view(self, replica_id: str, load: float) -> Row:
        variation = random.Random(replica_id).random()
        is_decode = "#decode#" in replica_id
        return {
            "replica_id": replica_id,
            "pool": replica_id.split("#")[1],
            "role": "decode" if is_decode else "prefill",
            "engine": "vllm 0.33.0",
            "draining": False,
            "standing": "sound",
            "running_requests": int((34 if is_decode else 3) * load * (0.8 + 0.4 * variation)),
            "queued_requests": int(4 * load * variation),
            "pulling_requests": int(2 * load * variation),
            "kv_used_fraction": round(min(0.98, (0.55 + 0.4 * variation) * load), 4),
            "step_s": round(0.021 + 0.012 * load * variation, 6),
            "inflight_legs": int(12 * load),
            "pulls": 31000,
            "moved_bytes": int(4.1e12 * (0.5 + variation)),
            "transfer_s": 312.0,
            "transfer_failures": 0,
            "expired_leases": 0,
            "void_pulls": 0,
            "load_age_s": 0.12,
            "max_running_requests": 1024,
            "max_batched_tokens": 8192,
            "max_len_tokens": 131_072,
            "kv_blocks": 18_400,
            "kv_block_bytes": 2_097_152,
            "block_size_tokens": 16,
            "cache": {"gpu_blocks": 18_400, "in_sync": True, "is_stale": False, "age_s": 0.1},
            "leases": 0 if is_decode else 2,
        }

    def _link(self, source: str, target: str) -> Row:
        rng = random.Random(source + target)
        state = "quarantined" if rng.random() > 0.93 else "ok"
        return {
            "source_id": source,
            "target_id": target,
            "state": state,
            "why": "side channel: no answer within 2 s" if state != "ok" else "",
            "transport": "rc_mlx5",
            "bytes_per_s": round(rng.uniform(8e9, 23e9)),
            "setup_s": 0.0014,
            "p50_s": 0.0061,
            "p99_s": 0.0188,
            "pulls": rng.randrange(4000, 9000),
            "moved_bytes": rng.randrange(10**11, 10**12),
            "failures": 0 if state == "ok" else 3,
            "broken_handoffs": 0 if state == "ok" else 3,
            "flows": rng.randrange(3),
            "penalty": 1.0 if state == "ok" else 18.4,
            "probed_age_s": 12.5,
        }

    def _tick(self, number: int, now_s: float) -> Row:
        load = load_at(number * 2.0)
        grows = load_at(number * 2.0 - 2) <= 0.9 < load
        shrinks = load_at(number * 2.0 - 2) > 0.9 >= load
        desired = self.decode + (load > 0.9)
        actions = ["start 1 of decode"] if grows else ["stop 1 of decode"] if shrinks else []
        return {
            "age_s": round(now_s - number * 2.0, 3),
            "policy": "slo",
            "paused_reason": "",
            "dry_run": False,
            "actions": actions,
            "pools": [
                _pool_decision("decode", desired - grows + shrinks, desired, load),
                _pool_decision("prefill", self.prefill, self.prefill, load),
            ],
        }

    # ------------------------------------------------------------------------- its requests

    def _advance(self, now_s: float) -> None:
        """Let requests end until now; the first call begins ten seconds ago."""
        self._ended_until_s = now_s - 10.0 if self._ended_until_s is None else self._ended_until_s
        while self._ended_until_s < now_s:
            self._count += 1
            draw = random.Random(self.seed * 100003 + self._count)
            self._ended_until_s += draw.expovariate(20.0 * load_at(self._ended_until_s))
            self._records.append(self._record(draw, self._ended_until_s))

    def _record(self, rng: random.Random, ended_at_s: float) -> RequestRecord:
        names = self._names()
        sources = [name for name in names if "#prefill#" in name]
        targets = [name for name in names if "#decode#" in name]
        return random_record(rng, ended_at_s, sources, targets)


def load_at(at_s: float) -> float:
    """How much is asked for, as a share of what the fleet can do."""
    return 0.78 + 0.17 * math.sin(at_s / 19.0) + 0.03 * math.sin(at_s / 2.3)


def _pool_decision(pool: str, have: int, want: int, load: float) -> Row:
    need = round(want - 1 + load * 0.8, 3)
    return {
        "pool": pool,
        "have": have,
        "desired": want,
        "asked": want,
        "reason": "demand" if want > have else "spare" if want < have else "steady",
        "why": f"{pool} needs {need:.1f} now, {need + 0.2:.1f} in 42 s, so {want} play it",
        "clipped_by": "",
        "flips": {},
        "inputs": {
            "need_now": need,
            "need_later": need + 0.2,
            "correction": 1.0,
            "prompt_tokens_per_s": round(28400 * load, 1),
            "output_tokens_per_s": round(7900 * load, 1),
            "prefill_capacity_tokens_per_s": 14000.0,
            "decode_capacity_tokens_per_s": 2350.0,
            "horizon_s": 41.5,
            "target": float(want),
        },
    }


def main() -> None:
    """Serve it until Ctrl-C."""
    import uvicorn

    from baton.console.app import console_app

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=9401)
    port = parser.parse_args().port
    config = uvicorn.Config(console_app(DemoFeed()), port=port, log_level="warning")
    asyncio.run(uvicorn.Server(config).serve())


if __name__ == "__main__":
    main()
