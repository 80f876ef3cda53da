"""Admission: let a request through, hold it for a moment, or say no before any work is done.

*Theory of operation.* `decide` is asked when a request arrives, and again whenever it is first in
line and something may have come free. It is told what is predicted: how long until the first token
if the request is let in now, how long it would wait for its turn, at what pace it would get its
tokens by the time that its prompt is computed, and how many streams it would break. Then

- it is *admitted* when it is first in line, the engine has hardly a queue, and both objectives will
  be met, its own and those of streams of its priority or above;
- *held* when it will still be in time after its turn has come: a prompt that waits here can be
  overtaken by who is more urgent, one that waits inside an engine cannot;
- *shed* as soon as it is predicted to be late: its prompt is then never computed, and the client
  knows within milliseconds when to come back.

Where nothing is promised to anybody, only those are turned away who would wait in an engine's
queue for so long that they would be given up there, to be the last in another line.

An objective that a request could not meet on an idle fleet either (a prompt too long for its TTFT)
is no reason to refuse it: it is served when there is room, after those of its priority that can be
met, and waits no longer than one to whom nothing is promised.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from baton.domain.slo import Slo

_BREAKS = 0.5
"""Streams broken, as expected: from here on it is likelier than not that one is."""
_HELD_SPARE = 0.1
"""Of the TTFT: where some were held in vain of late, who is to be held must be predicted to be so
much earlier, at most, than who is let in at once. More is predicted of it, so more can go wrong."""
_HELD_KEEPS = 0.25
"""Of what is kept free for errors, what is still kept free for one who was held: the rest is there
to be used up. Found by trying, with the above and with twice the load on fleets short of either
phase: at 1, an eighth of all refusals came late, after the tenth of a second and more that it takes
a prediction to change its mind; at 0, up to 6 % of the prompts were computed in vain."""
_TURN_ERRS = 1.25
"""Turns are taken to last so much longer than predicted: who is held in vain learns late that it
must come back, and who is turned away learns at once."""


class AdmissionRule(StrEnum):
    """How it is decided who is let in."""

    PREDICTED = "predicted"
    """By the time to first token and the pace that a request is predicted to get."""
    BOUNDED = "bounded"
    """Everyone, as long as the bounded queue has room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionOptions:
    """What admission aims at."""

    rule: AdmissionRule = AdmissionRule.PREDICTED
    engine_queue_s: float = 0.05
    """How much predicted prompt work may wait inside an engine, where nobody's priority or share
    counts any more; what is beyond waits at the coordinator."""
    margin_fraction: float = 0.1
    """Of an objective: kept free, since predictions err; more of it where they are seen to."""

    def __post_init__(self) -> None:
        if self.engine_queue_s < 0:
            raise ValueError(f"admission: engine_queue_s is {self.engine_queue_s}, wanted >= 0")
        if not 0 <= self.margin_fraction < 1:
            raise ValueError(
                f"admission: margin_fraction is {self.margin_fraction}, wanted from 0 to below 1"
            )


class Reason(StrEnum):
    """Why a request was let in, held or turned away."""

    IN_TIME = "in_time"
    """It is predicted to get what it is promised."""
    NOT_JUDGED = "not_judged"
    """Nothing is promised to anybody, or nothing can be predicted."""
    TURN = "turn"
    """Others come first."""
    ENGINE_QUEUE = "engine_queue"
    """The engine that would take it has prompts enough for now."""
    PACE = "pace"
    """Streams would be too many by the time its prompt is computed."""
    BREAKS = "breaks"
    """Streams that are under way would miss their pace because of it."""
    TOO_LATE = "too_late"
    """It could not have its first token in time."""


class Prospect(NamedTuple):
    """What is predicted for one request."""

    waited_s: float
    """Since it arrived."""
    alone_s: float
    """To its first token from when its prompt is begun."""
    queue_s: float
    """Until its prompt is begun, in the engine, if it is let in now."""
    step_s: float = 0.0
    """Of that, what no queue is: the rest of the step that the engine is in."""
    turn_s: float | None = None
    """Until it is first in line; None: it is."""
    held: bool = False
    """It was held before."""
    doubt: float = 0.0
    """How much predictions for those who wait are doubted, from 0 to 1: some waited in vain."""
    idle_elsewhere: bool = False
    """Another replica would begin at once: it is to wait where it is cheaper in all, which holds
    nobody else up."""
    pace_s: float = 0.0
    """Between two of its tokens, by the time that its prompt is computed."""
    alone_pace_s: float = 0.0
    """The same on an idle fleet."""
    breaks: float = 0.0
    """How many streams of its priority or above will miss their pace because of it."""


class Admit(NamedTuple):
    """It is let in."""

    reason: Reason


class Hold(NamedTuple):
    """It waits at the coordinator."""

    reason: Reason
    ttft_s: float
    """As predicted, from its arrival on."""
    slack_s: float
    """How long it can wait from now on."""
    again_in_s: float = 0.0
    """When to ask again, if nothing comes free before."""


class Shed(NamedTuple):
    """It is turned away."""

    reason: Reason
    ttft_s: float
    """As predicted, from its arrival on."""
    limit_s: float
    """What it should have been."""
    retry_after_s: float
    """Until what is ahead of it will have become so much less that it would be in time."""


Verdict = Admit | Hold | Shed


class Limit(NamedTuple):
    """When a request's first token must come."""

    after_s: float
    """So long after its arrival, at the latest."""
    can_be_met: bool
    """Whether that is its objective, which an idle fleet would meet; or else mere patience."""
    held_s: float
    """The same for one who was held; later, or else every small change of a prediction would send
    away those who have waited."""


def limit(
    slo: Slo, alone_s: float, *, overrun_s: float, options: AdmissionOptions, patience_s: float
) -> Limit:
    """How long after its arrival a request's first token may come.

    `overrun_s` is how much later than predicted first tokens have come, all but a few of them. As
    much is kept free, but never more than half of what the request leaves: where predictions are
    that bad, nobody would be let in.
    """
    if slo.ttft_s is None:
        return Limit(patience_s + alone_s, can_be_met=True, held_s=patience_s + alone_s)
    spare_s = max(0.0, slo.ttft_s - alone_s)
    kept_s = max(slo.ttft_s * options.margin_fraction, min(overrun_s, spare_s / 2))
    if kept_s > spare_s:
        return Limit(patience_s + alone_s, can_be_met=False, held_s=patience_s + alone_s)
    return Limit(slo.ttft_s - kept_s, can_be_met=True, held_s=slo.ttft_s - _HELD_KEEPS * kept_s)


def decide(slo: Slo, seen: Prospect, latest: Limit, *, options: AdmissionOptions) -> Verdict:
    """Whether a request is let in now, waits, or is turned away."""
    latest_s = latest.held_s if seen.held else latest.after_s
    wait_s = seen.queue_s
    if seen.turn_s is not None:
        wait_s += seen.turn_s * _TURN_ERRS
    ttft_s = seen.waited_s + wait_s + seen.alone_s
    if ttft_s > latest_s and slo.promises_anything:
        return Shed(Reason.TOO_LATE, ttft_s, latest_s, ttft_s - latest_s)
    verdict = _admit_or_hold(slo, seen, latest, ttft_s=ttft_s, options=options)
    if isinstance(verdict, Admit) or seen.held or slo.ttft_s is None or not latest.can_be_met:
        return verdict
    to_hold_s = latest_s - _HELD_SPARE * seen.doubt * slo.ttft_s
    if ttft_s > to_hold_s:
        return Shed(Reason.TOO_LATE, ttft_s, to_hold_s, ttft_s - to_hold_s)
    return verdict


def decide_unpromised(ttft_s: float, *, queue_s: float, latest_s: float) -> Admit | Shed:
    """The same where nothing is promised to anybody.

    `latest_s` after it was placed a request is given up that has no first token. Who finds no queue
    is let in, however slow an engine is.
    """
    late_s = ttft_s - latest_s
    if queue_s > 0.0 and late_s > 0.0:
        return Shed(Reason.TOO_LATE, ttft_s, latest_s, late_s)
    return Admit(Reason.NOT_JUDGED)


def _admit_or_hold(
    slo: Slo, seen: Prospect, latest: Limit, *, ttft_s: float, options: AdmissionOptions
) -> Admit | Hold:
    """The verdict on one who will be in time."""
    slack_s = latest.held_s - seen.waited_s - seen.alone_s
    if seen.turn_s is not None:
        return Hold(Reason.TURN, ttft_s, slack_s)
    excess_s = seen.queue_s - seen.step_s - options.engine_queue_s
    if excess_s > 0 and not seen.idle_elsewhere:
        return Hold(Reason.ENGINE_QUEUE, ttft_s, slack_s, excess_s)
    if slo.tpot_s is not None and seen.alone_pace_s <= slo.tpot_s:
        # Only what others add to its pace is uncertain, so that is what the margin is of.
        kept_s = options.margin_fraction * (slo.tpot_s - seen.alone_pace_s)
        if seen.pace_s > slo.tpot_s - kept_s:
            return Hold(Reason.PACE, ttft_s, slack_s)
    if seen.breaks >= _BREAKS:
        return Hold(Reason.BREAKS, ttft_s, slack_s)
    return Admit(Reason.IN_TIME)
