"""A feed that says what a test tells it to, and how it was asked."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.console.feed import ChatTarget, ChatUnavailable, Row
from baton.console.history import History
from baton.domain.commands import RecordSelection

NO_CHAT = ChatUnavailable(reason="there is no API here")
OVERVIEW: Row = {
    "baton": "1.2.3",
    "model": "tiny",
    "generation": 2,
    "up_s": 60.0,
    "members": [
        {"replica_id": "b#p#1", "pool": "p", "role": "prefill", "node": "10.0.0.1", "pid": 1},
        {"replica_id": "b#d#2", "pool": "d", "role": "decode", "node": "10.0.0.1", "pid": 2},
    ],
    "pools": [{"pool": "d", "desired": 2, "ready": 1}, {"pool": "p", "desired": 1, "ready": 1}],
    "classes": [
        {"class": "fast", "attainment": 0.9, "requests_per_s": 4.0, "goodput_per_s": 3.0},
        {"class": "slow", "attainment": None, "requests_per_s": 0.0, "goodput_per_s": 0.0},
    ],
    "demand": {"requests_per_s": 5.0, "rejected_per_s": 0.5, "in_flight": 7, "queued": 2},
    "autoscaler": {"policy": "slo", "paused_reason": "", "last_action": None},
    "ingresses": [
        {
            "healthy": True,
            "replicas": [
                {
                    "replica_id": "b#p#1",
                    "role": "prefill",
                    "draining": True,
                    "leases": 2,
                    "kv_used_fraction": 0.5,
                    "cache": {"gpu_blocks": 9, "in_sync": False, "is_stale": False},
                }
            ],
            "timings": [],
            "unjoined": {"b#d#2": "connecting"},
            "in_flight": {"decode": 3},
            "ended": {"finished": 10},
        },
        {
            "healthy": False,
            "replicas": [{"replica_id": "b#p#1", "role": "decode", "leases": 1}],
            "timings": [],
            "unjoined": {"b#d#2": "refused"},
            "in_flight": {"decode": 4},
            "ended": {"finished": 5, "shed": 1},
        },
    ],
}


def request_report(request_id: str, **fields: object) -> Row:
    """The report of one request, as a list shows it."""
    bar = {"part": "prefill", "replica": "b#p#1", "from_s": 0.0, "to_s": 0.25, "predicted_s": None}
    return {"request_id": request_id, "outcome": "finished", "waterfall": [bar], **fields}


def tick(age_s: float, want: int = 1, *actions: str) -> Row:
    """One tick about one pool."""
    pool = {"pool": "d", "have": 1, "desired": want, "reason": "steady", "clipped_by": ""}
    return {
        "age_s": age_s,
        "policy": "slo",
        "paused_reason": "",
        "dry_run": False,
        "actions": list(actions),
        "pools": [pool],
    }


@dataclass
class ScriptedFeed:
    """Answers at once, with what its fields hold; raises `error` where there is one."""

    report: Row = field(default_factory=lambda: dict(OVERVIEW))
    pairs: list[Row] = field(default_factory=list)
    reports: list[Row] = field(default_factory=lambda: [request_report("a"), request_report("b")])
    history: list[Row] = field(default_factory=lambda: [tick(4.0), tick(2.0)])
    yaml: str = "model: tiny\n"
    errors: dict[str, Exception] = field(default_factory=dict)
    """By method."""
    hanging: set[str] = field(default_factory=set)
    """Methods that never answer."""
    calls: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    max_in_flight: int = 0
    points: History = field(default_factory=History)
    target: ChatTarget | ChatUnavailable = NO_CHAT

    def chat_target(self) -> ChatTarget | ChatUnavailable:
        return self.target

    async def overview(self) -> Row:
        await self._on_call("overview")
        return self.report

    async def links(self) -> Sequence[Row]:
        await self._on_call("links")
        return self.pairs

    async def requests(self, count: int, order: RecordSelection) -> Sequence[Row]:
        await self._on_call(f"requests {order}")
        return self.reports[:count]

    async def request(self, request_id: str) -> Sequence[Row]:
        await self._on_call("request")
        return [report for report in self.reports if report["request_id"] == request_id]

    async def ticks(self, count: int) -> Sequence[Row]:
        await self._on_call("ticks")
        return self.history[-count:]

    async def config(self) -> str:
        await self._on_call("config")
        return self.yaml

    async def _on_call(self, method: str) -> None:
        self.calls[method] += 1
        if (error := self.errors.get(method)) is not None:
            raise error
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            if method in self.hanging:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
        finally:
            self.in_flight -= 1
