"""Role flips and scale-downs under load: whether any request fails, or any token comes twice.

Replicas with simulated engines run in processes of their own, in real time; two coordinators place
by predicted seconds and stream. Meanwhile one replica after another, drawn by chance, is told to be
something else (prefill, decode or mixed, without a thought for what the others are), and now and
then one is drained and stopped and another started in its place. Every stream is compared with the
very tokens that one undisturbed engine gives.

Prints one JSON object as the last line of stdout, and writes it to
`benchmarks/results/role_flips.json`.

    python -m benchmarks.role_flips [--flips 1000] [--scale-downs 20] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from baton.domain.fleet import Role
from baton.domain.request import Phase, Request
from baton.engine.sim import expected_tokens
from baton.simulator.outcome import quantile
from benchmarks._figures import rounded
from benchmarks._flip_fleet import MODEL, SETTINGS, Ingress, ReplicaProcess, Stream
from benchmarks._provenance import provenance

RESULTS = Path(__file__).parent / "results" / "role_flips.json"
_INGRESSES = 2
_FIRST = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, Role.MIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is done to how large a fleet."""

    flips: int
    scale_downs: int
    clients: int = 24
    """Of each coordinator; each asks again as soon as it is answered."""
    pause_s: float = 0.02
    """Between two flips."""
    roles: tuple[Role, ...] = _FIRST
    """One replica for each, to begin with."""
    seed: int = 0


@dataclass(slots=True)
class Tally:
    """What was done to the fleet."""

    flips: int = 0
    scale_downs: int = 0
    heard_s: list[float] = field(default_factory=list)
    """From telling a replica until a coordinator placed by its new role, for each coordinator."""
    drained_s: list[float] = field(default_factory=list)
    """From telling a replica to stop until it had."""
    restarted: int = 0
    """Replicas that answered from more than one process."""


def main() -> int:
    """Run it; returns 0 when no request failed and no token was lost or came twice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--scale-downs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    plan = Plan(flips=asked.flips, scale_downs=asked.scale_downs, seed=asked.seed)
    result = asyncio.run(measure(plan))
    whole = rounded(result | provenance(), 4)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(rounded(result, 4)))
    return 0 if is_clean(result) else 1


def is_clean(result: dict[str, object]) -> bool:
    """Whether nobody noticed anything."""
    return not any(result[one] for one in ("failed", "duplicated", "wrong", "pids_changed"))


async def measure(plan: Plan) -> dict[str, object]:
    """Flip and stop replicas under load; returns the figures."""
    began_s = time.monotonic()
    ingresses = [Ingress(f"ingress-{n}", plan.seed + n) for n in range(_INGRESSES)]
    fleet = Fleet(ingresses, plan)
    try:
        for role in plan.roles:
            await fleet.grow(role)
        async with asyncio.TaskGroup() as group:
            stop = asyncio.Event()
            for number, ingress in enumerate(ingresses):
                for client in range(plan.clients):
                    asking = requests(plan.seed, f"{number}-{client}")
                    group.create_task(_ask(ingress, asking, stop))
            await fleet.disturb()
            stop.set()
        for ingress in ingresses:
            ingress.coordinator.check_integrity()
    finally:
        await fleet.close()
    took_s = time.monotonic() - began_s
    streams = [one for ingress in ingresses for one in ingress.streams.values()]
    doubled = sum(ingress.doubled for ingress in ingresses)
    return judged(streams, doubled) | told(fleet.tally) | {"took_s": took_s, "measured": True}


async def _ask(ingress: Ingress, asking: Iterator[Request], stop: asyncio.Event) -> None:
    while not stop.is_set():
        await ingress.ask(next(asking))


def requests(seed: int, client: str) -> Iterator[Request]:
    """One client's requests: some share a beginning, most streams live through several flips."""
    rng = Random(f"{seed} {client}")  # noqa: S311 - a load
    number = 0
    while True:
        number += 1
        shared = rng.randrange(4)
        length = rng.choice((24, 120, 400, 900))
        front = [3 + shared] * min(length - 8, 320)
        yield Request(
            request_id=f"{client}-{number}",
            prompt_token_ids=(*front, *(rng.randrange(3, 90) for _ in range(length - len(front)))),
            max_tokens=rng.choice((1, 8, 40, 160)),
            arrived_at_s=time.monotonic(),
        )


class Fleet:
    """The replicas, and what is done to them."""

    def __init__(self, ingresses: Sequence[Ingress], plan: Plan) -> None:
        self.tally = Tally()
        self._ingresses = ingresses
        self._plan = plan
        self._random = Random(plan.seed)  # noqa: S311 - a load
        self._replicas: list[ReplicaProcess] = []
        self._made = 0

    async def grow(self, role: Role) -> None:
        """Start one more replica, and have every coordinator know it."""
        replica = ReplicaProcess(f"replica-{self._made}", role)
        self._made += 1
        await replica.start()
        self._replicas.append(replica)
        for ingress in self._ingresses:
            await ingress.join(replica)

    async def disturb(self) -> None:
        """Flip; and every so often stop a replica and start another."""
        plan = self._plan
        every = max(1, plan.flips // max(1, plan.scale_downs))
        for flip in range(plan.flips):
            await self._flip()
            if flip % every == every // 2 and self.tally.scale_downs < plan.scale_downs:
                await self._scale_down()
            await asyncio.sleep(plan.pause_s)

    async def _flip(self) -> None:
        replica = self._random.choice(self._replicas)
        role = self._random.choice([one for one in Role if one is not replica.role])
        began_s = time.monotonic()
        heard = [len(ingress.roles_heard) for ingress in self._ingresses]
        await replica.set_role(role)
        for ingress, before in zip(self._ingresses, heard, strict=True):
            await ingress.until(lambda i=ingress, n=before: len(i.roles_heard) > n)  # type: ignore[misc]
            at_s, who, what = ingress.roles_heard[-1]
            assert (who, what) == (replica.name, role), "another change was heard than was made"
            self.tally.heard_s.append(at_s - began_s)
        self.tally.flips += 1

    async def _scale_down(self) -> None:
        """Its streams end, or are moved; then another takes its place."""
        replica = self._random.choice(self._replicas)
        self._replicas.remove(replica)
        began_s = time.monotonic()
        await replica.stop()
        self.tally.drained_s.append(time.monotonic() - began_s)
        self.tally.restarted += len(replica.pids) > 1
        for ingress in self._ingresses:
            ingress.link.disconnect(replica.name)
        self.tally.scale_downs += 1
        await self.grow(replica.role)

    async def close(self) -> None:
        """End everything."""
        self.tally.restarted += sum(len(one.pids) > 1 for one in self._replicas)
        for ingress in self._ingresses:
            await ingress.close()
        for replica in self._replicas:
            with suppress(TimeoutError, OSError):
                await replica.stop()
            replica.kill()


# -------------------------------------------------------------------- figures


def judged(streams: Sequence[Stream], doubled: int) -> dict[str, object]:
    """How many requests went wrong, and in which way; `doubled` ended more than once."""
    kinds = Counter(judge(stream) for stream in streams)
    records = [stream.record for stream in streams if stream.record is not None]
    return {
        "requests": len(streams),
        "ok": kinds["ok"],
        "failed": kinds["failed"],
        "duplicated": kinds["duplicated"] + doubled,
        "wrong": kinds["wrong"],
        "resumes": sum(record.resumes for record in records),
        "handed_off": sum(record.prefill_done_at_s is not None for record in records),
        "tokens": sum(len(stream.tokens) for stream in streams),
    }


def judge(stream: Stream) -> str:
    """Whether a client got the tokens of an undisturbed engine, each of them once."""
    record, request = stream.record, stream.request
    if record is None or stream.error is not None or record.outcome is not Phase.FINISHED:
        return "failed"
    wanted = list(
        expected_tokens(
            request.prompt_token_ids, request.max_tokens, model=MODEL, settings=SETTINGS
        )
    )
    if stream.tokens == wanted:
        return "ok"
    return "duplicated" if len(stream.tokens) > len(wanted) else "wrong"


def told(tally: Tally) -> dict[str, object]:
    """What was done, and how long it took."""
    return {
        "flips": tally.flips,
        "scale_downs": tally.scale_downs,
        "pids_changed": tally.restarted,
        "flip_heard_p50_s": quantile(tally.heard_s, 0.5),
        "flip_heard_p99_s": quantile(tally.heard_s, 0.99),
        "drained_p50_s": quantile(tally.drained_s, 0.5),
        "drained_max_s": max(tally.drained_s, default=float("nan")),
    }


if __name__ == "__main__":
    sys.exit(main())
