"""The scaling loop: observe, decide, act, every few seconds.

Theory of operation. A turn asks Serve for the replicas of each pool and every ingress for its
report, feeds both to the observer, and lets the autoscaler decide. It carries out exact replica
counts with Serve, which chooses the replicas to stop (they drain themselves), and roles with
replicas. All decisions are in `control` and `policy`.

- An ingress that does not answer is *missing*; the autoscaler pauses while any is.
- A call that fails is logged, counted, and repeated in the next turn unless that decides otherwise.
  Counts are exact, so repeating one is harmless. No exception ends the task.
- A new controller can find everything again: Serve has the counts, replicas their roles, the store
  the overrides.
- The store names the loop that may act. A loop that reads another name there stops for good. A loop
  that takes over pauses for a whole window (`_LeaderHandover`).
- Listeners get reports also in a turn whose scaling fails.
- An override counts at once, without any report.
- Without automatic scaling (`ScalingPlan.is_automatic`), only overridden pools change: they return
  to their configured initial size. Replicas with another role than their pool return to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace

from baton.control.autoscaling.autoscaler import Autoscaler, Override
from baton.control.autoscaling.observer import Observer
from baton.domain.errors import ScalingRejected
from baton.policy.scaling.actions import AutoscalerTick, FlipReplicas
from baton.policy.scaling.observation import Observation
from baton.runtime.ports import Clock
from baton.runtime.process.background_task import BackgroundTask
from baton.serving.ray.serve_control import DeploymentState
from baton.serving.scaling.plan import ScalingPlan, observer_options
from baton.serving.scaling.ports import (
    ControllerStore,
    ScaledFleet,
    TickInputs,
    TickListener,
    replicas_to_flip,
)
from baton.telemetry.logs import log_event
from baton.telemetry.metrics.scaling_counters import ScalingCounters

_LOGGER = logging.getLogger(__name__)
_RETRY_REMEDY = "it is tried again with every turn; see 'baton status'"
_TICK_TIMEOUT_S = 20.0
"""Longer than any turn, unless a call hangs; also the longest wait for a turn."""


class LeadershipLost(Exception):
    """Another loop has begun; this one may not act any more."""


class ScalingLoop:
    """See the module's theory of operation."""

    def __init__(
        self,
        plan: ScalingPlan,
        *,
        fleet: ScaledFleet,
        observer: Observer,
        store: ControllerStore,
        clock: Clock,
        listeners: Sequence[TickListener] = (),
    ) -> None:
        self.counters = ScalingCounters()
        self._plan = plan
        self._autoscaler = Autoscaler(plan.policy(), plan.limits)
        self._fleet = fleet
        self._observer = observer
        self._store = store
        self._clock = clock
        self._listeners = tuple(listeners)
        self._last_states: dict[str, DeploymentState] = {}
        self._last_observation: Observation | None = None
        self._stored_overrides: dict[str, Override] | None = None
        """Overrides in the store; None until they were read."""
        self._failures: dict[str, str] = {}
        """Why the last call failed, by pool."""
        self._unknown_pools: frozenset[str] = frozenset()
        """Overridden pools whose replicas Serve does not report."""
        self._pause_reason = ""
        self._has_decided = False
        self._handover = _LeaderHandover()
        self._wake = asyncio.Event()
        self._waiters: list[asyncio.Future[str]] = []
        """Each gets why its turn failed; empty if it did not."""
        self._task = BackgroundTask("scaling", self._run)

    # ------------------------------------------------------------------ what the controller calls

    def start(self) -> None:
        """Begin to take turns. Idempotent."""
        self._task.start()

    async def stop(self) -> None:
        """Cancel the current turn and take no more. Idempotent."""
        await self._task.stop()

    @property
    def has_ended(self) -> bool:
        """Whether the task has ended without `stop`."""
        return self._task.has_ended

    def reconfigure(self, plan: ScalingPlan) -> None:
        """Use another plan from the next turn on; counts and overrides stay.

        A policy whose rules have not changed keeps its state.
        """
        if plan == self._plan:
            return
        self._plan = plan
        self._autoscaler.reconfigure(plan.policy(), plan.limits)
        self._wake.set()

    async def override(self, pool: str, replicas: int, *, for_s: float | None) -> None:
        """Override the replicas of a pool; returns when that was carried out.

        Raises:
            ScalingRejected: the pool's bounds do not allow it, or Serve rejected it.
            TimeoutError: the loop did not get to it in time.
        """
        now_s = self._clock.now_s()
        ends_at_s = None if for_s is None else now_s + for_s
        try:
            self._autoscaler.override(pool, replicas, until_s=ends_at_s, now_s=now_s)
        except ValueError as error:
            raise ScalingRejected(
                str(error), "see 'pools' and 'autoscaler' in the configuration"
            ) from error
        await self._await_next_tick(pool)

    async def release(self, pool: str) -> None:
        """Remove an override; returns when its consequences were carried out.

        Raises:
            ScalingRejected: there is no such pool, or a call failed.
            TimeoutError: the loop did not get to it in time.
        """
        if pool not in self._plan.options.bounds:
            known = ", ".join(sorted(self._plan.options.bounds))
            raise ScalingRejected(f"there is no pool {pool!r}", f"name one of {known}")
        self._autoscaler.clear_override(pool)
        await self._await_next_tick(pool)

    def overrides(self) -> dict[str, Override]:
        """The overrides that hold now, by pool."""
        now_s = self._clock.now_s()
        return {
            pool: override
            for pool, override in self._autoscaler.overrides().items()
            if not _is_expired(override, now_s)
        }

    @property
    def plan(self) -> ScalingPlan:
        """The current plan."""
        return self._plan

    @property
    def last_observation(self) -> Observation | None:
        """The observation of the last turn; None before the first."""
        return self._last_observation

    @property
    def states(self) -> Mapping[str, DeploymentState]:
        """Pools as Serve last reported them."""
        return dict(self._last_states)

    def history(self) -> tuple[AutoscalerTick, ...]:
        """The recent decisions, oldest first."""
        return self._autoscaler.history()

    # ------------------------------------------------------------------ turns

    async def claim(self) -> None:
        """Become the loop that acts."""
        self._handover.begin(had_other_leader=await self._store.claim())

    async def run_tick(self) -> None:
        """Observe, decide, act, once.

        Raises:
            LeadershipLost: another loop has begun.
        """
        self.counters.ticks += 1
        if not await self._store.is_owner():
            raise LeadershipLost
        await self._restore_overrides()
        inputs = await self._gather_inputs()
        try:
            tick, inputs = await self._decide_and_act(inputs)
        except Exception:
            await self._notify_listeners(inputs)  # quotas and usage do not depend on scaling
            raise
        await self._notify_listeners(inputs)
        self.counters.record_tick(tick)

    async def _decide_and_act(self, inputs: TickInputs) -> tuple[AutoscalerTick, TickInputs]:
        """Decide and act; the inputs are read again after an override was carried out."""
        if await self._apply_overrides(inputs.states):
            inputs = replace(inputs, states=await self._fleet.states())
        tick = self._autoscaler.tick(self._observe(inputs))
        self.counters.record_decisions(tick)
        self._log_pause(tick)
        await self._execute(tick, inputs)
        return tick, inputs

    async def _notify_listeners(self, inputs: TickInputs) -> None:
        for listener in self._listeners:
            await self._try_call(
                "", f"{type(listener).__name__} take reports", listener.on_tick(inputs)
            )

    async def _run(self) -> None:
        has_claimed = False
        while True:
            self._wake.clear()
            waiters, self._waiters = self._waiters, []
            failure = ""
            due_at_s = self._clock.now_s() + self._plan.options.interval_s
            try:
                if not has_claimed:
                    await self.claim()
                    has_claimed = True
                await self.run_tick()
            except LeadershipLost:
                log_event(_LOGGER, logging.WARNING, "scaling_superseded", {})
                return
            except Exception as error:  # the supervised boundary: logged, counted, continued
                failure = _error_text(error)
                self.counters.failed_ticks += 1
                self.counters.last_failure = f"{type(error).__name__}: {error}".removesuffix(": ")
                _LOGGER.exception("scaling_turn_failed")
            for future in waiters:
                if not future.done():
                    future.set_result(failure)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due_at_s - self._clock.now_s())):
                    await self._wake.wait()

    async def _await_next_tick(self, pool: str) -> None:
        """Wait until a turn has ended that began after this call; raise if its pool failed."""
        tick_done = asyncio.get_running_loop().create_future()
        self._waiters.append(tick_done)
        self._wake.set()
        async with asyncio.timeout(_TICK_TIMEOUT_S):
            failure = await tick_done
        if failure:
            reason = f"the controller's turn failed: {failure}"
            raise ScalingRejected(
                f"pool {pool!r} may not have been scaled yet: {reason}", _RETRY_REMEDY
            )
        unknown_size = "Ray Serve does not say how many replicas it has"
        reason = unknown_size if pool in self._unknown_pools else self._failures.get(pool, "")
        if reason:
            raise ScalingRejected(f"pool {pool!r} could not be scaled yet: {reason}", _RETRY_REMEDY)

    # ------------------------------------------------------------------ look

    async def _gather_inputs(self) -> TickInputs:
        states, collected = await asyncio.gather(
            self._fleet.states(), self._fleet.reports(), return_exceptions=True
        )
        problems: list[str] = []
        if isinstance(states, BaseException):
            problems.append(
                f"Serve does not say how many replicas there are: {_error_text(states)}"
            )
            states = {}
        if isinstance(collected, BaseException):
            collected = ((), (f"ingresses could not be asked: {_error_text(collected)}",))
        reports, unresponsive = collected
        return TickInputs(
            states=states,
            reports=reports,
            missing=(*problems, *unresponsive),
            unresponsive_ingresses=len(unresponsive),
        )

    def _observe(self, inputs: TickInputs) -> Observation:
        """The observation for the autoscaler; the last known state of unreported pools."""
        self._last_states |= inputs.states
        pools = {
            name: self._plan.pool_state(self._last_states[name])
            for name in self._plan.roles
            if name in self._last_states
        }
        unknown_pools = sorted(self._plan.roles.keys() - self._last_states.keys())
        missing = [*inputs.missing, *(f"Serve does not know pool {name}" for name in unknown_pools)]
        missing += self._handover.unmet_preconditions(
            self._clock.now_s(),
            window_s=observer_options(self._plan).window_s,
            all_reported=bool(inputs.reports) and not missing,
        )
        self._last_observation = self._observer.observe(
            inputs.reports, pools, self._clock.now_s(), missing=missing
        )
        return self._last_observation

    # ------------------------------------------------------------------ act

    async def _restore_overrides(self) -> None:
        if self._stored_overrides is not None:
            return
        stored, now_s = await self._store.load(), self._clock.now_s()
        for pool, override in stored.items():
            if _is_expired(override, now_s) or pool in self._autoscaler.overrides():
                continue
            try:
                self._autoscaler.override(
                    pool, override.replicas, until_s=override.until_s, now_s=now_s
                )
            except ValueError as error:
                fields = {"pool": pool, "replicas": override.replicas, "reason": str(error)}
                log_event(_LOGGER, logging.WARNING, "override_dropped", fields)
        self._stored_overrides = stored

    async def _apply_overrides(self, states: Mapping[str, DeploymentState]) -> bool:
        """Carry out overrides; whether anything had to be done.

        An ended override leaves its pool to the autoscaler. Without automatic scaling, the pool
        returns to its configured initial size.
        """
        overrides = self.overrides()
        stored = dict(self._stored_overrides or {})
        desired = {pool: override.replicas for pool, override in overrides.items()}
        ended_pools = stored.keys() - overrides.keys()
        if not self._plan.is_automatic:
            bounds = self._plan.options.bounds
            desired |= {pool: bounds[pool].initial for pool in ended_pools & bounds.keys()}
        has_acted = False
        for pool, replicas in sorted(desired.items()):
            if pool in states:
                has_acted |= await self._ensure_replicas(states[pool], replicas, "operator")
        self._unknown_pools = frozenset(desired.keys() - states.keys())
        unfinished = ended_pools & desired.keys() & (self._failures.keys() | self._unknown_pools)
        now_s = self._clock.now_s()
        to_store = overrides | {pool: _expire(stored[pool], now_s) for pool in unfinished}
        if to_store != stored:
            await self._store.save(to_store)
            self._stored_overrides = to_store
        return has_acted

    async def _execute(self, tick: AutoscalerTick, inputs: TickInputs) -> None:
        decisions = {decision.pool: decision for decision in tick.decisions}
        for action in tick.actions:
            if isinstance(action, FlipReplicas):
                await self._flip(action, inputs)
            elif not self._plan.is_automatic:
                continue  # overrides are applied by then
            elif (state := inputs.states.get(action.pool)) is not None:
                decision = decisions[action.pool]
                reason = f"{decision.reason}: {decision.detail}"
                await self._ensure_replicas(state, decision.target_replicas, reason)

    async def _ensure_replicas(self, state: DeploymentState, desired: int, reason: str) -> bool:
        """Set a pool's replicas; whether a call was needed and succeeded."""
        if state.target == desired:
            self._failures.pop(state.name, None)
            return False
        pool, previous = state.name, state.target
        has_scaled = await self._try_call(
            pool, f"scale to {desired}", self._fleet.scale(pool, desired)
        )
        if has_scaled:
            self.counters.record_scaling(pool, current=previous, desired=desired)
            if (last_state := self._last_states.get(pool)) is not None:
                self._last_states[pool] = replace(last_state, target=desired)
            fields = {"pool": pool, "had": previous, "desired": desired, "reason": reason}
            log_event(_LOGGER, logging.INFO, "pool_scaled", fields)
        return has_scaled

    async def _flip(self, action: FlipReplicas, inputs: TickInputs) -> None:
        replica_ids = replicas_to_flip(action, inputs.reports)
        if len(replica_ids) < action.replicas:
            fields = {"pool": action.pool, "to": str(action.role), "wanted": action.replicas}
            log_event(
                _LOGGER, logging.WARNING, "too_few_to_flip", fields | {"found": len(replica_ids)}
            )
        if not replica_ids:
            return
        call = self._fleet.set_role(action.pool, replica_ids, action.role)
        # A flip that failed shows in the next reports: replicas keep their old role.
        if await self._try_call("", f"flip {', '.join(replica_ids)} to {action.role}", call):
            self.counters.record_flip(action.pool, len(replica_ids))
            fields = {
                "pool": action.pool,
                "replicas": ",".join(replica_ids),
                "role": str(action.role),
            }
            log_event(_LOGGER, logging.INFO, "replicas_flipped", fields)

    async def _try_call(self, pool: str, action: str, call: Awaitable[None]) -> bool:
        """Await one call; whether it succeeded. A repeated failure is logged once."""
        try:
            await call
        except Exception as error:  # noqa: BLE001 - a boundary: whatever Ray raises, try again
            reason = _error_text(error)
            self.counters.failed_calls += 1
            self.counters.last_failure = f"{action}: {reason}"
            is_repeat = self._failures.get(pool) == reason
            if pool:
                self._failures[pool] = reason
            level = logging.DEBUG if is_repeat else logging.WARNING
            fields = {"pool": pool, "what": action, "reason": reason}
            log_event(_LOGGER, level, "scaling_call_failed", fields)
            return False
        self._failures.pop(pool, None)
        return True

    def _log_pause(self, tick: AutoscalerTick) -> None:
        self._has_decided = self._has_decided or not tick.paused_reason
        if tick.paused_reason != self._pause_reason:
            self._pause_reason = tick.paused_reason
            if tick.paused_reason:
                # A new loop has no previous reports to compare with: that is no fault.
                level = logging.WARNING if self._has_decided else logging.INFO
                log_event(_LOGGER, level, "scaling_held", {"reason": tick.paused_reason})
            else:
                log_event(_LOGGER, logging.INFO, "scaling_goes_on", {})


def _is_expired(override: Override, now_s: float) -> bool:
    return override.until_s is not None and override.until_s <= now_s


def _expire(override: Override, now_s: float) -> Override:
    """An ended override, as a new controller must read it: expired."""
    return override if _is_expired(override, now_s) else replace(override, until_s=now_s)


def _error_text(error: BaseException) -> str:
    """The last line of Ray's error: before it is the traceback of another process."""
    last_line = str(error).strip().rpartition("\n")[2]
    return f"{type(error).__name__}: {last_line}" if last_line else type(error).__name__


class _LeaderHandover:
    """Pauses a loop until it has observed a whole window.

    Theory of operation. Policies look back: at rates over a window, at recent needs, at a pool's
    last change. A loop that begins together with its deployment has missed nothing. A loop that
    takes over would scale by its first two seconds. Its window begins when all ingresses have
    reported for the first time.
    """

    def __init__(self) -> None:
        self._pending = False
        self._window_started_at_s: float | None = None

    def begin(self, *, had_other_leader: bool) -> None:
        """A loop begins to act; `had_other_leader` if another one acted before."""
        self._pending = self._pending or had_other_leader

    def unmet_preconditions(
        self, now_s: float, *, window_s: float, all_reported: bool
    ) -> list[str]:
        """Why it cannot decide yet; empty when it can.

        `all_reported`: all ingresses have answered by now.
        """
        if not self._pending:
            return []
        if self._window_started_at_s is None and all_reported:
            self._window_started_at_s = now_s
        if self._window_started_at_s is not None and now_s - self._window_started_at_s >= window_s:
            self._pending = False
            return []
        return [f"another controller acted until now: a whole window of {window_s:g} s is awaited"]
