"""An engine in memory that does what a test tells it to, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from baton.domain.errors import EngineDied, TransferFailed
from baton.domain.fleet import LinkTotals, Load, ReplicaFacts, Role
from baton.domain.handoff import KvHandle, Leg, LegFailure, LegKind, LegOutput
from baton.domain.kv_events import KvEvent, KvEventBatch
from baton.domain.request import FinishReason
from tests.fakes.facts import replica_facts


def make_facts(replica_id: str = "decode-1", role: Role = Role.DECODE) -> ReplicaFacts:
    sizes = {"kv_block_bytes": 4096, "max_running_requests": 256}
    return replica_facts(replica_id, role, layout="tiny/16", engine="scripted", **sizes)


def make_leg(
    leg_id: str,
    kind: LegKind = LegKind.LOCAL,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 8,
    **others: object,
) -> Leg:
    """A leg of a request of the same name, unless `others` names it."""
    fields = {"request_id": leg_id, **others}
    return Leg(
        leg_id=leg_id,
        kind=kind,
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        **fields,  # type: ignore[arg-type]  # fields of a leg
    )


def make_kv_handle(name: str = "t", tokens: int = 32) -> KvHandle:
    return KvHandle(tokens=tokens, blocks=(tokens + 15) // 16, params=name.encode())


class Watch:
    """Lets a test wait until something about an object is true, without polling."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        self._changed.set()

    async def wait_until(self, predicate: Callable[[], bool], timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not predicate():
                self._changed.clear()
                await self._changed.wait()


class ScriptedEngine:
    """Matches `ports.Engine`. With `step_s` it plays by itself: one token per leg each `step_s`.

    The token after `n` is `n + 1`, so that a test can tell a lost token from a repeated one.
    """

    def __init__(self, facts: ReplicaFacts | None = None, *, step_s: float | None = None) -> None:
        self.facts = facts or make_facts()
        self.watch = Watch()
        self.submitted: list[Leg] = []
        self.aborted: list[str] = []
        self.released: list[KvHandle] = []
        self.running: dict[str, Leg] = {}
        self.submit_result: LegFailure | Exception | None = None
        self.submit_gate = asyncio.Event()
        self.submit_gate.set()
        self.abort_gate = asyncio.Event()
        self.abort_gate.set()
        self.current_load = Load()
        self.current_links: tuple[LinkTotals, ...] = ()
        self.checks: list[tuple[str, str]] = []
        self.check_gate = asyncio.Event()
        self.check_gate.set()
        self.unreachable: dict[str, str] = {}
        """Sources whose side channel fails, and why."""
        self.closed = False
        self._step_s = step_s
        self._tokens_made: dict[str, int] = {}
        self._steps: asyncio.Queue[tuple[LegOutput, ...] | Exception | None] = asyncio.Queue()
        self._kv_batches: asyncio.Queue[KvEventBatch | None] = asyncio.Queue()
        self._kv_sequence = 0
        self._step_task: asyncio.Task[None] | None = None

    async def start(self) -> ReplicaFacts:
        if self._step_s is not None:
            self._step_task = asyncio.create_task(self._run_steps(self._step_s))
        return self.facts

    async def submit(self, leg: Leg) -> LegFailure | None:
        await self.submit_gate.wait()
        if isinstance(self.submit_result, Exception):
            raise self.submit_result
        if self.submit_result is None:
            self.submitted.append(leg)
            self.running[leg.leg_id] = leg
        self.watch.notify()
        return self.submit_result

    async def abort(self, leg_ids: Sequence[str]) -> None:
        await self.abort_gate.wait()
        for leg_id in leg_ids:
            self.running.pop(leg_id, None)
        await self._steps.join()
        self.aborted.extend(leg_ids)
        self.watch.notify()

    async def release(self, kv_handle: KvHandle) -> None:
        self.released.append(kv_handle)
        self.watch.notify()

    async def steps(self) -> AsyncIterator[tuple[LegOutput, ...]]:
        while (item := await self._steps.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
            self._steps.task_done()

    async def kv_events(self) -> AsyncIterator[KvEventBatch]:
        while (batch := await self._kv_batches.get()) is not None:
            yield batch

    def links(self) -> tuple[LinkTotals, ...]:
        return self.current_links

    async def check_side_channel(self, source_id: str, address: str, deadline_s: float) -> None:
        self.checks.append((source_id, address))
        self.watch.notify()
        try:
            async with asyncio.timeout(deadline_s):
                await self.check_gate.wait()
        except TimeoutError:
            raise TransferFailed(source_id, f"no answer within {deadline_s} s") from None
        if reason := self.unreachable.get(source_id):
            raise TransferFailed(source_id, reason)

    def load(self) -> Load:
        return self.current_load

    async def close(self) -> None:
        self.closed = True
        if self._step_task is not None:
            self._step_task.cancel()
            await asyncio.wait((self._step_task,))
        self._steps.put_nowait(None)
        self._kv_batches.put_nowait(None)

    # ------------------------------------------------------------------ what tests tell it

    def emit(self, *outputs: LegOutput) -> None:
        """Produce one engine step."""
        for output in outputs:
            if output.finish is not None:
                self.running.pop(output.leg_id, None)
        self._steps.put_nowait(outputs)

    def emit_cache_events(self, *events: KvEvent, is_lost: bool = False) -> None:
        """Tell what happened to the prefix cache; with `is_lost`, the batch never arrives."""
        batch = KvEventBatch(
            replica_id=self.facts.replica_id, sequence=self._kv_sequence, events=events
        )
        self._kv_sequence += 1
        if not is_lost:
            self._kv_batches.put_nowait(batch)

    def crash(self, reason: str = "cuda error") -> None:
        """Fail as an engine process does that was killed."""
        self._steps.put_nowait(EngineDied("scripted", reason))

    def step_all(self) -> None:
        """Produce the next token of every running leg, in one step."""
        outputs = tuple(self._next_output(leg) for leg in tuple(self.running.values()))
        if outputs:
            self.emit(*outputs)

    def _next_output(self, leg: Leg) -> LegOutput:
        count = self._tokens_made.get(leg.leg_id, 0) + 1
        self._tokens_made[leg.leg_id] = count
        finish = FinishReason.LENGTH if count >= leg.max_tokens else None
        return LegOutput(leg.leg_id, (leg.prompt_token_ids[-1] + count,), finish)

    async def _run_steps(self, step_s: float) -> None:
        while True:
            await asyncio.sleep(step_s)
            self.step_all()
