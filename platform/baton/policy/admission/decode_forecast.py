"""How many streams will be decoded by the time a prompt that begins now is computed.

*Theory of operation.* What decode replicas run now is the wrong thing to look at: a prompt takes
its time, and meanwhile others that are being computed become streams, and some of the present ones
end. A coordinator that lets requests in by the present load lets in too many for as long as a
prompt takes, then none, and the load of both pools swings. So, after `horizon_s`,

    streams = present x exp(-horizon / life) + those whose prompts are being computed

for streams end by chance after their mean life (lengths are taken to be exponentially distributed,
as in `promises`), and prompts that are ahead now are computed before this one. The decode replica
is chosen when the prompt is done, and is then about the idlest, hence the mean over all of them.

Source: Qin et al., Mooncake, FAST'25, early rejection based on prediction; there with one decoding
time for all.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from baton.domain.fleet import FleetView
from baton.perf.timing import EngineTiming

_FULL_PACE_S = float("inf")
"""The pace of a stream for which there is no room."""


class Outlook(NamedTuple):
    """What decodes, and what soon will, over all replicas that take new work."""

    decoders: int = 0
    streams: float = 0.0
    computing: float = 0.0
    """Requests whose prompts are computed elsewhere, or wait for it."""
    context_tokens: float = 0.0
    room_tokens: float = 0.0
    """What the KV caches of those that decode hold, all together."""


class Newcomer(NamedTuple):
    """A request that is about to be let in."""

    horizon_s: float
    """Until its prompt is computed."""
    prompt_tokens: int
    output_tokens: float
    prompt_share: float
    """Of the time of a replica that decodes, what prompts take from its streams."""


def outlook(fleet: FleetView) -> Outlook:
    """Look at every replica once."""
    replicas, crowd = fleet.replicas, fleet.crowd
    prefill, decode = fleet.roster
    streams = computing = context = room = 0.0
    for one in prefill if decode else ():
        view = replicas[one]
        load = view.load
        here = load.running_requests + load.queued_requests + view.unseen_legs * crowd
        # Streams that stay where they were prefilled will not come.
        computing += max(0.0, here - view.inflight_streams * crowd)
    for one in decode or prefill:
        view = replicas[one]
        load, facts = view.load, view.facts
        streams += load.running_requests + load.queued_requests + load.pulling_requests
        streams += view.unseen_legs * crowd
        tokens = facts.kv_blocks * facts.block_size_tokens
        context += load.kv_used_fraction * tokens
        room += tokens
    return Outlook(len(decode or prefill), streams, computing, context, room)


def pace_s(seen: Outlook, one: Newcomer, timing: EngineTiming) -> float:
    """The time between two tokens of a newcomer when its prompt is computed."""
    each = one.prompt_tokens + one.output_tokens / 2
    if seen.streams >= 1 and seen.context_tokens > 0:
        each = max(1.0, seen.context_tokens / seen.streams)
    present = seen.streams / max(1, seen.decoders)
    step_s = timing.step_s(running=round(present) + 1, context_tokens=round((present + 1) * each))
    kept = max(0.01, 1.0 - one.prompt_share)
    life_s = max(step_s, one.output_tokens * step_s / kept)
    left = present * exp(-one.horizon_s / life_s)
    then = left + seen.computing / max(1, seen.decoders) + 1
    wanted_tokens = (then - 1) * each + one.prompt_tokens
    if seen.room_tokens and wanted_tokens > seen.room_tokens / max(1, seen.decoders):
        return _FULL_PACE_S
    step_s = timing.step_s(running=round(then), context_tokens=round(then * each))
    return step_s / kept
