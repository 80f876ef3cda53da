"""What running one request on one replica is predicted to take, and what it does to the others."""

from __future__ import annotations

from typing import NamedTuple

from baton.domain.fleet import ReplicaView, Role
from baton.perf.timing import EngineTiming
from baton.policy.hits import Hit
from baton.policy.placement import PlacementQuery


class ReplicaCost(NamedTuple):
    """One replica's part in one request, in predicted seconds."""

    view: ReplicaView
    timing: EngineTiming
    hit: Hit
    hit_tokens: int
    """Prompt tokens that it need not compute."""
    backlog_s: float
    """Until the prompts ahead are computed."""
    room_wait_s: float
    """Until there is a place in the batch, and blocks."""
    prefill_s: float
    """To compute what it does not hold of the prompt."""
    running: int
    """Streams that it runs, or soon will."""
    step_s: float
    """One decode step with this request among them."""
    own_s: float
    """What it will spend decoding."""
    join_s: float
    """What each of those streams loses by this one beside it, over its whole life."""

    @property
    def queue_s(self) -> float:
        """Before it can begin with this request's prompt."""
        return self.backlog_s + self.room_wait_s


def replica_cost(
    query: PlacementQuery,
    view: ReplicaView,
    timing: EngineTiming,
    *,
    output_tokens: float,
    at_s: float,
) -> ReplicaCost:
    """Predict one replica's part, from its last report and what was sent to it since.

    Asked for every candidate of every request, hence plain sums and few calls.
    """
    load, facts = view.load, view.facts
    hit = query.hits.of(view.replica_id)
    hit_tokens = usable_tokens(hit, query.prompt_tokens, facts.block_size_tokens)
    # A pure prefill replica runs nothing but prefills: those are its queue, not its streams.
    running = 0
    if facts.role is not Role.PREFILL:
        running = load.running_requests + load.pulling_requests + view.unseen_legs
    context = int(load.kv_used_fraction * facts.kv_blocks) * facts.block_size_tokens
    step_s = timing.step_s(running=running + 1, context_tokens=context)
    prefill_s = timing.prefill_s(
        query.prompt_tokens - hit_tokens, running=running, context_tokens=context
    )
    if hit.host_blocks:
        prefill_s += timing.host_load_s(hit.host_blocks)
    own_s = output_tokens * step_s
    attended = query.prompt_tokens + int(output_tokens / 2)
    return ReplicaCost(
        view,
        timing,
        hit,
        hit_tokens,
        _backlog_s(view, timing, at_s, running=running, context_tokens=context),
        _room_wait_s(view, query.prompt_tokens - hit_tokens, own_s),
        prefill_s,
        running,
        step_s,
        own_s,
        output_tokens * timing.decode_request_s(context_tokens=attended),
    )


def usable_tokens(hit: Hit, prompt_tokens: int, block_size_tokens: int) -> int:
    """Prompt tokens that a hit saves; the last one is always computed, for the first new token."""
    return min(hit.blocks, (prompt_tokens - 1) // block_size_tokens) * block_size_tokens


def delay_s(timing: EngineTiming, tokens: int) -> float:
    """How much later the steps beside it end when so many prompt tokens are computed in them."""
    return max(0.0, timing.prefill_s(tokens) - timing.prefill_s(1)) if tokens > 1 else 0.0


def _backlog_s(
    view: ReplicaView, timing: EngineTiming, at_s: float, *, running: int, context_tokens: int
) -> float:
    """Until the prompts ahead are computed: those reported, less what was done since, and ours."""
    load = view.load
    ahead = load.queued_tokens + view.unseen_tokens
    if not ahead:
        # Nobody is ahead, but a step may be under way: half of one, on average.
        busy = running or load.running_requests
        return timing.step_s(running=running, context_tokens=context_tokens) / 2 if busy else 0.0
    all_s = timing.prefill_s(ahead, running=running, context_tokens=context_tokens)
    if not load.queued_tokens:
        return all_s
    reported_s = timing.prefill_s(
        load.queued_tokens, running=running, context_tokens=context_tokens
    )
    done_s = min(reported_s, max(0.0, at_s - view.load_at_s))
    return all_s - done_s


def _room_wait_s(view: ReplicaView, new_tokens: int, stream_s: float) -> float:
    """Until a place in the batch, and blocks, come free, as streams of `stream_s` end.

    With n places of which all are taken, one comes free every stream_s / n; likewise blocks.
    """
    facts, load = view.facts, view.load
    wait_s = 0.0
    legs = load.running_requests + load.queued_requests + load.pulling_requests + view.unseen_legs
    excess_legs = legs + 1 - facts.max_running_requests
    if excess_legs > 0:
        wait_s = stream_s * excess_legs / facts.max_running_requests
    tokens = new_tokens + load.queued_tokens + view.unseen_tokens
    wanted = load.kv_used_fraction + tokens / (facts.kv_blocks * facts.block_size_tokens)
    if wanted > 1:
        wait_s = max(wait_s, stream_s * (wanted - 1))
    return wait_s
