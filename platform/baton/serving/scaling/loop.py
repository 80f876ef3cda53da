"""The loop that keeps pools as large as they should be: look, decide, act, every few seconds.

Theory of operation. One task takes turns. A turn asks Serve how many replicas of each pool there
are and every ingress for its report, feeds both to the observer, lets the autoscaler decide, and
carries out what it says: exact numbers of replicas for Serve, which chooses whom to stop (a replica
that is told to stop drains itself), and roles for replicas. Everything that decides is in `control`
and `policy`; this is its body.

What may fail: anything that is asked. Who does not answer is *missing*, and the autoscaler holds
still while anything is. A call that fails is logged, counted, and made again in the next turn
unless that turn wants otherwise; since counts are exact, making one twice does no harm. No
exception ends the task. Nothing is remembered that a new controller could not find again: Serve
knows the counts, replicas their roles, and an operator's overrides are in a store. The store also
names the loop that may act: a loop that reads another's name there stops for good, and one that
takes over from another holds still until it has watched for a whole window (`takeover`). Whoever
reads reports hears of them in a turn whose scaling fails, too.

An operator's word counts at once and without any report. Where nothing is scaled automatically
(`ScalingPlan.automatic`), nothing else is ever done: pools that were overridden go back to the size
that the configuration starts them with, others are left as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace

from baton.control.autoscaling.autoscaler import Autoscaler, Override
from baton.control.autoscaling.observer import Observer
from baton.domain.errors import ScalingRefused
from baton.policy.scaling.actions import FlipReplicas, Tick
from baton.policy.scaling.observation import Observation
from baton.runtime.ports import Clock
from baton.serving.ray.serve_control import DeploymentState
from baton.serving.scaling.leader_handover import Takeover
from baton.serving.scaling.plan import ScalingPlan, observer_options
from baton.serving.scaling.ports import Looks, Memory, ReportReader, ScaledFleet, whom_to_flip
from baton.telemetry.logs import log_event
from baton.telemetry.metrics.scaling_counters import ScalingCounters

_LOGGER = logging.getLogger(__name__)
_AGAIN = "it is tried again with every turn; see 'baton status'"
_TURN_S = 20.0
"""A turn takes less, or something hangs that should not; whoever waits for one waits no longer."""


class Superseded(Exception):
    """Another loop has begun; this one may not act any more."""


class ScalingLoop:
    """See the module's theory of operation."""

    def __init__(
        self,
        plan: ScalingPlan,
        *,
        fleet: ScaledFleet,
        observer: Observer,
        memory: Memory,
        clock: Clock,
        readers: Sequence[ReportReader] = (),
    ) -> None:
        self.counters = ScalingCounters()
        self._plan = plan
        self._machine = Autoscaler(plan.policy(), plan.options)
        self._fleet = fleet
        self._observer = observer
        self._memory = memory
        self._clock = clock
        self._readers = tuple(readers)
        self._known: dict[str, DeploymentState] = {}
        self._last: Observation | None = None
        self._kept: dict[str, Override] | None = None
        """Overrides as the store has them; None until they were read."""
        self._failed: dict[str, str] = {}
        """Pools for which the last call failed, and why."""
        self._unknown: frozenset[str] = frozenset()
        """Pools on which an operator's word waits until Serve says how many replicas they have."""
        self._held = ""
        self._decided = False
        self._takeover = Takeover()
        self._wake = asyncio.Event()
        self._waiting: list[asyncio.Future[str]] = []
        """Each hears why the turn failed that it waited for; nothing when it did not."""
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ what the controller calls

    def start(self) -> None:
        """Begin to take turns. Idempotent."""
        if self._task is None:
            # A context of its own: Ray would take the calls for part of the request that happens
            # to be served now, and cancel them with it.
            self._task = asyncio.create_task(
                self._run(), name="scaling", context=contextvars.Context()
            )

    async def stop(self) -> None:
        """Stop in the middle of whatever is done. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    @property
    def has_ended(self) -> bool:
        """Whether it was started and takes no more turns, though nobody stopped it."""
        return self._task is not None and self._task.done()

    def reconfigure(self, plan: ScalingPlan) -> None:
        """Go by other rules from the next turn on; counts and overrides stay.

        A policy whose rules have not changed keeps what it has learned.
        """
        if plan == self._plan:
            return
        self._plan = plan
        self._machine.reconfigure(plan.policy(), plan.options)
        self._wake.set()

    async def override(self, pool: str, replicas: int, *, for_s: float | None) -> None:
        """Have exactly so many replicas of a pool; returns when that was carried out.

        Raises:
            ScalingRefused: the pool cannot have so many, or they could not be asked for.
            TimeoutError: the loop did not get to it in time.
        """
        now_s = self._clock.now_s()
        until_s = None if for_s is None else now_s + for_s
        try:
            self._machine.override(pool, replicas, until_s=until_s, now_s=now_s)
        except ValueError as error:
            raise ScalingRefused(
                str(error), "see 'pools' and 'autoscaler' in the configuration"
            ) from error
        await self._next_turn(pool)

    async def release(self, pool: str) -> None:
        """Take an override back; returns when what follows from that was carried out.

        Raises:
            ScalingRefused: there is no such pool, or what follows could not be carried out.
            TimeoutError: the loop did not get to it in time.
        """
        if pool not in self._plan.options.bounds:
            known = ", ".join(sorted(self._plan.options.bounds))
            raise ScalingRefused(f"there is no pool {pool!r}", f"name one of {known}")
        self._machine.clear_override(pool)
        await self._next_turn(pool)

    def overrides(self) -> dict[str, Override]:
        """Those that hold now, by pool."""
        now_s = self._clock.now_s()
        return {
            pool: one for pool, one in self._machine.overrides().items() if not _is_over(one, now_s)
        }

    @property
    def plan(self) -> ScalingPlan:
        """The rules that it goes by."""
        return self._plan

    @property
    def last_seen(self) -> Observation | None:
        """What the last turn saw; None before the first."""
        return self._last

    @property
    def states(self) -> Mapping[str, DeploymentState]:
        """Pools as Serve told of them last."""
        return dict(self._known)

    def history(self) -> tuple[Tick, ...]:
        """What was decided lately, oldest first."""
        return self._machine.history()

    # ------------------------------------------------------------------ turns

    async def claim(self) -> None:
        """Be the one who acts from now on."""
        self._takeover.begin(another_acted=await self._memory.claim())

    async def turn(self) -> None:
        """Look, decide, act, once.

        Raises:
            Superseded: another loop has begun.
        """
        self.counters.turns += 1
        if not await self._memory.is_ours():
            raise Superseded
        await self._remember()
        looks = await self._look()
        try:
            tick, looks = await self._scale_by(looks)
        except Exception:
            await self._tell(looks)  # quotas and usage have no part in what failed
            raise
        await self._tell(looks)
        self.counters.turned(tick)

    async def _scale_by(self, looks: Looks) -> tuple[Tick, Looks]:
        """Decide and act; also what was seen, as it is after an operator's word was kept."""
        if await self._keep_word(looks.states):
            looks = replace(looks, states=await self._fleet.states())
        tick = self._machine.tick(self._seen(looks))
        self.counters.decided(tick)
        self._say_held(tick)
        if self._plan.automatic:
            await self._carry_out(tick, looks)
        return tick, looks

    async def _tell(self, looks: Looks) -> None:
        for reader in self._readers:
            await self._guarded("", f"{type(reader).__name__} take reports", reader.take(looks))

    async def _run(self) -> None:
        """Take turns until another loop has begun, or this one is cancelled."""
        claimed = False
        while True:
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            failed = ""
            due_at_s = self._clock.now_s() + self._plan.options.interval_s
            try:
                if not claimed:
                    await self.claim()
                    claimed = True
                await self.turn()
            except Superseded:
                log_event(_LOGGER, logging.WARNING, "scaling_superseded", {})
                return
            except Exception as error:  # the supervised boundary: logged, counted, gone on
                failed = _text(error)
                self.counters.failed_turns += 1
                self.counters.last_failure = f"{type(error).__name__}: {error}"
                _LOGGER.exception("scaling_turn_failed")
            for future in waiting:
                if not future.done():
                    future.set_result(failed)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due_at_s - self._clock.now_s())):
                    await self._wake.wait()

    async def _next_turn(self, pool: str) -> None:
        """Wait until a turn has ended that began after this call, and see what became of a pool."""
        turned = asyncio.get_running_loop().create_future()
        self._waiting.append(turned)
        self._wake.set()
        async with asyncio.timeout(_TURN_S):
            failed = await turned
        if failed:
            why = f"the controller's turn failed: {failed}"
            raise ScalingRefused(f"pool {pool!r} may not have been scaled yet: {why}", _AGAIN)
        unknown = "Ray Serve does not say how many replicas it has"
        why = unknown if pool in self._unknown else self._failed.get(pool, "")
        if why:
            raise ScalingRefused(f"pool {pool!r} could not be scaled yet: {why}", _AGAIN)

    # ------------------------------------------------------------------ look

    async def _look(self) -> Looks:
        states, told = await asyncio.gather(
            self._fleet.states(), self._fleet.reports(), return_exceptions=True
        )
        troubles: list[str] = []
        if isinstance(states, BaseException):
            troubles.append(f"Serve does not say how many replicas there are: {_text(states)}")
            states = {}
        if isinstance(told, BaseException):
            told = ((), (f"ingresses could not be asked: {_text(told)}",))
        reports, silent = told
        return Looks(
            states=states, reports=reports, missing=(*troubles, *silent), silent=len(silent)
        )

    def _seen(self, looks: Looks) -> Observation:
        """What the autoscaler sees; of pools, what was known last where Serve did not answer."""
        self._known |= looks.states
        pools = {
            name: self._plan.pool_state(self._known[name])
            for name in self._plan.roles
            if name in self._known
        }
        unknown = sorted(self._plan.roles.keys() - self._known.keys())
        missing = [*looks.missing, *(f"Serve does not know pool {name}" for name in unknown)]
        missing += self._takeover.doubts(
            self._clock.now_s(),
            window_s=observer_options(self._plan).window_s,
            heard=bool(looks.reports) and not missing,
        )
        self._last = self._observer.observe(
            looks.reports, pools, self._clock.now_s(), missing=missing
        )
        return self._last

    # ------------------------------------------------------------------ act

    async def _remember(self) -> None:
        """Take up the overrides that an earlier controller was told of."""
        if self._kept is not None:
            return
        kept, now_s = await self._memory.load(), self._clock.now_s()
        for pool, one in kept.items():
            if _is_over(one, now_s) or pool in self._machine.overrides():
                continue
            try:
                self._machine.override(pool, one.replicas, until_s=one.until_s, now_s=now_s)
            except ValueError as error:
                fields = {"pool": pool, "replicas": one.replicas, "why": str(error)}
                log_event(_LOGGER, logging.WARNING, "override_dropped", fields)
        self._kept = kept

    async def _keep_word(self, states: Mapping[str, DeploymentState]) -> bool:
        """Carry out what operators have said; whether anything had to be done.

        What an operator has taken back, or what has run out, is left to the autoscaler; where there
        is none, the pool gets the size that it is configured to start with.
        """
        overrides = self.overrides()
        kept = dict(self._kept or {})
        wanted = {pool: one.replicas for pool, one in overrides.items()}
        ended = kept.keys() - overrides.keys()
        if not self._plan.automatic:
            bounds = self._plan.options.bounds
            wanted |= {pool: bounds[pool].start for pool in ended & bounds.keys()}
        acted = False
        for pool, replicas in sorted(wanted.items()):
            if pool in states:
                acted |= await self._reach(states[pool], replicas, "operator")
        self._unknown = frozenset(wanted.keys() - states.keys())
        undone = ended & wanted.keys() & (self._failed.keys() | self._unknown)
        now_s = self._clock.now_s()
        keep = overrides | {pool: _ended(kept[pool], now_s) for pool in undone}
        if keep != kept:
            await self._memory.save(keep)
            self._kept = keep
        return acted

    async def _carry_out(self, tick: Tick, looks: Looks) -> None:
        decisions = {decision.pool: decision for decision in tick.decisions}
        for action in tick.actions:
            if isinstance(action, FlipReplicas):
                await self._flip(action, looks)
            elif (state := looks.states.get(action.pool)) is not None:
                decision = decisions[action.pool]
                why = f"{decision.reason}: {decision.why}"
                await self._reach(state, decision.want, why)

    async def _reach(self, state: DeploymentState, want: int, why: str) -> bool:
        """Have exactly so many replicas of a pool; whether that had to be said."""
        if state.target == want:
            self._failed.pop(state.name, None)
            return False
        return await self._scale(state.name, state.target, want, why)

    async def _scale(self, pool: str, had: int, want: int, why: str) -> bool:
        done = await self._guarded(pool, f"scale to {want}", self._fleet.scale(pool, want))
        if done:
            self.counters.scaled(pool, had=had, want=want)
            if (known := self._known.get(pool)) is not None:
                self._known[pool] = replace(known, target=want)
            fields = {"pool": pool, "had": had, "want": want, "why": why}
            log_event(_LOGGER, logging.INFO, "pool_scaled", fields)
        return done

    async def _flip(self, action: FlipReplicas, looks: Looks) -> None:
        chosen = whom_to_flip(action, looks.reports)
        if len(chosen) < action.replicas:
            fields = {"pool": action.pool, "to": str(action.to), "wanted": action.replicas}
            log_event(_LOGGER, logging.WARNING, "too_few_to_flip", fields | {"found": len(chosen)})
        if not chosen:
            return
        call = self._fleet.set_role(action.pool, chosen, action.to)
        # A flip that failed shows in the next reports: replicas play their old role still.
        if await self._guarded("", f"flip {', '.join(chosen)} to {action.to}", call):
            self.counters.flipped(action.pool, len(chosen))
            fields = {"pool": action.pool, "replicas": ",".join(chosen), "role": str(action.to)}
            log_event(_LOGGER, logging.INFO, "replicas_flipped", fields)

    async def _guarded(self, pool: str, what: str, call: Awaitable[None]) -> bool:
        """Make one call; whether it succeeded. What failed is said once for each reason."""
        try:
            await call
        except Exception as error:  # noqa: BLE001 - a boundary: whatever Ray raises, try again
            why = _text(error)
            self.counters.failed_calls += 1
            self.counters.last_failure = f"{what}: {why}"
            again = self._failed.get(pool) == why
            if pool:
                self._failed[pool] = why
            level = logging.DEBUG if again else logging.WARNING
            fields = {"pool": pool, "what": what, "why": why}
            log_event(_LOGGER, level, "scaling_call_failed", fields)
            return False
        self._failed.pop(pool, None)
        return True

    def _say_held(self, tick: Tick) -> None:
        self._decided = self._decided or not tick.held
        if tick.held != self._held:
            self._held = tick.held
            if tick.held:
                # The first turns of a loop have nothing to compare with: that is no trouble.
                level = logging.WARNING if self._decided else logging.INFO
                log_event(_LOGGER, level, "scaling_held", {"why": tick.held})
            else:
                log_event(_LOGGER, logging.INFO, "scaling_goes_on", {})


def _is_over(one: Override, now_s: float) -> bool:
    return one.until_s is not None and one.until_s <= now_s


def _ended(one: Override, now_s: float) -> Override:
    """An override that was taken back, as a new controller must read it: it holds no more."""
    return one if _is_over(one, now_s) else replace(one, until_s=now_s)


def _text(error: BaseException) -> str:
    """The last line of what Ray says: before it stands the traceback of another process."""
    said = str(error).strip().rpartition("\n")[2]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
