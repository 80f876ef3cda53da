"""The story of a leg while it runs: noted when it begins, first speaks, and is over."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from baton.domain.handoff import Leg, LegTimes
from baton.domain.leg_record import LegOutcome, LegRecord


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

    def first_output(self, now_s: float, times: LegTimes | None) -> None:
        """Its engine sent its first output."""
        self.first_output_at_s = now_s
        self.note_times(times)

    def note_times(self, times: LegTimes | None) -> None:
        """Its engine said how it spent its time; what makes no sense was not said."""
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
        """It is over, having given so many tokens to the client, the last of them then."""
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


def _is_valid(times: LegTimes) -> bool:
    return all(isfinite(figure) and figure >= 0 for figure in times)
