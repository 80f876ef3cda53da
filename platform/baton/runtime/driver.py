"""The asyncio driver: feeds the coordinator and carries out its commands.

Everything here runs synchronously on one event loop. No command waits. A failed command (a full or
broken link) becomes the next event.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import assert_never

from baton.control.coordinator import Coordinator
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.service_rules import ServiceRules
from baton.domain.commands import (
    AbortLegs,
    CheckSideChannel,
    Command,
    Deliver,
    FailRequest,
    ReleaseLease,
    ReportFailedAgent,
    StoreRequestRecord,
    SubmitLeg,
    SyncCache,
)
from baton.domain.errors import Rejected
from baton.domain.events import (
    Event,
    LegFailed,
    RequestArrived,
    RequestsCancelled,
    RequestsRejected,
    TimerFired,
)
from baton.domain.fleet import FleetView
from baton.domain.handoff import LegFailure
from baton.domain.request import Phase, Request
from baton.policy.placement.port import Placer
from baton.runtime.ports import Clock, Frontend, Recorder, ReplicaLink
from baton.runtime.process.log_events import log_event

_LOG = logging.getLogger(__name__)
_TOO_LARGE = "it is too large for a message to a replica: ask for less"


class Driver:
    """One coordinator's body; lives on the loop that it is built on."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        link: ReplicaLink,
        frontend: Frontend,
        recorder: Recorder,
        clock: Clock,
    ) -> None:
        self._coordinator = coordinator
        self._link = link
        self._frontend = frontend
        self._recorder = recorder
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = float("inf")
        self._closed = False

    def on_request(self, request: Request) -> None:
        """A client's request reached this ingress."""
        self.on_event(RequestArrived(request=request))

    def on_abort(self, request_ids: tuple[str, ...]) -> None:
        """Clients disconnected, or need no more output."""
        self.on_event(RequestsCancelled(request_ids=request_ids))

    def on_event(self, event: Event) -> None:
        """Handle one event and its consequences. Reentrant.

        Raises:
            Exception: the error of the first failed command; the others were carried out.
        """
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        failure: Exception | None = None
        try:
            while self._events:
                commands = self._coordinator.handle(self._events.popleft(), self._clock.now_s())
                for command in commands:
                    try:
                        self._execute(command)
                    except Exception as error:  # noqa: BLE001 - raised again at the end
                        _LOG.exception("a %s was not carried out", type(command).__name__)
                        failure = failure or error
        finally:
            self._handling = False
            self._set_timer()
        if failure is not None:
            raise failure

    def check_admission(
        self, requests: int, *, tenant: str, slo_class: str | None = None
    ) -> Rejected | None:
        """Why `requests` more must be refused before they are read; None: send them.

        A reason counts them as rejected: the caller refuses them and does not ask again.
        """
        now_s = self._clock.now_s()
        error = self._coordinator.rejection(requests=requests, tenant=tenant, now_s=now_s)
        if error is not None:
            self.on_event(
                RequestsRejected(error=error, requests=requests, tenant=tenant, slo_class=slo_class)
            )
        return error

    def reconfigure(
        self,
        *,
        limits: CoordinatorLimits | None = None,
        placer: Placer | None = None,
        rules: ServiceRules | None = None,
    ) -> None:
        """Use other rules from now on, also for requests in flight; None: as before."""
        self._coordinator.reconfigure(limits=limits, placer=placer, rules=rules)
        self.on_event(TimerFired())

    def fleet(self) -> FleetView:
        """The fleet as placement sees it."""
        return self._coordinator.fleet(self._clock.now_s())

    def phases(self) -> dict[str, Phase]:
        """The phase of every request in flight, by request id."""
        return self._coordinator.phases()

    def close(self) -> None:
        """Stop the timer, for good. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _execute(self, command: Command) -> None:
        match command:
            case Deliver():
                self._frontend.deliver(command.deliveries)
            case SubmitLeg():
                self._submit(command)
            case AbortLegs():
                self._link.abort(command.replica_id, command.leg_ids)
            case ReleaseLease():
                self._link.release(command.via_replica_id, command.lease.kv_handle)
            case SyncCache():
                self._link.sync_cache(command.replica_id)
            case CheckSideChannel():
                self._link.check_side_channel(
                    command.replica_id, command.source_id, command.address
                )
            case ReportFailedAgent():
                self._link.report_broken_agent(command.replica_id, command.reason)
            case FailRequest():
                self._frontend.fail(command.request_id, command.error)
            case StoreRequestRecord():
                self._recorder.record(command.record)
            case _:
                assert_never(command)

    def _submit(self, command: SubmitLeg) -> None:
        failure = self._link.submit(command.replica_id, command.leg)
        if _LOG.isEnabledFor(logging.DEBUG):
            log_event(_LOG, logging.DEBUG, "leg_sent", _leg_fields(command, failure))
        if failure is not None:
            self._events.append(
                LegFailed(
                    replica_id=command.replica_id,
                    leg_id=command.leg.leg_id,
                    failure=failure,
                    reason=_TOO_LARGE if failure is LegFailure.INVALID else "",
                    was_sent=False,
                )
            )

    def _set_timer(self) -> None:
        """Wake up at the next deadline; a timer that is already set earlier stays."""
        at_s = self._coordinator.next_deadline_at_s()
        if self._timer is not None:
            if at_s is not None and self._timer_at_s <= at_s:
                return
            self._timer.cancel()
            self._timer = None
        if at_s is not None and not self._closed:  # links part after it was closed
            delay_s = max(0.0, at_s - self._clock.now_s())
            self._timer_at_s = at_s
            self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.on_event(TimerFired())


def _leg_fields(command: SubmitLeg, failure: LegFailure | None) -> dict[str, object]:
    leg = command.leg
    return {
        "request_id": leg.request_id,
        "leg_id": leg.leg_id,
        "kind": str(leg.kind),
        "replica": command.replica_id,
        "prompt_tokens": len(leg.prompt_token_ids),
        "resumed_tokens": leg.resumed_tokens,
        "failure": failure,
    }
