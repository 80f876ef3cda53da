"""The story of a leg while it runs: noted when it begins, first speaks, and is over."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from baton.domain.handoff import Leg, LegTimes
from baton.domain.leg_record import LegEnd, LegStory


@dataclass(slots=True, kw_only=True)
class OpenLeg:
    """A leg that is not over."""

    leg: Leg
    replica_id: str
    placement: int
    began_at_s: float
    first_output_at_s: float | None = None
    cached_tokens: int | None = None
    times: LegTimes | None = None

    def spoke(self, now_s: float, times: LegTimes | None) -> None:
        """Its engine sent its first output."""
        self.first_output_at_s = now_s
        self.said(times)

    def said(self, times: LegTimes | None) -> None:
        """Its engine said how it spent its time; what makes no sense was not said."""
        if times is not None and _makes_sense(times):
            self.times = times

    def over(
        self, end: LegEnd, now_s: float, *, output_tokens: int, last_output_at_s: float | None
    ) -> LegStory:
        """It is over, having given so many tokens to the client, the last of them then."""
        ticket = self.leg.ticket
        return LegStory(
            leg_id=self.leg.leg_id,
            kind=self.leg.kind,
            replica_id=self.replica_id,
            placement=self.placement,
            began_at_s=self.began_at_s,
            first_output_at_s=self.first_output_at_s,
            last_output_at_s=last_output_at_s if output_tokens else None,
            ended_at_s=now_s,
            prompt_tokens=len(self.leg.prompt_token_ids),
            fetched_tokens=0 if ticket is None else ticket.tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=output_tokens,
            times=self.times,
            end=end,
        )


def _makes_sense(times: LegTimes) -> bool:
    return all(isfinite(figure) and figure >= 0 for figure in times)
