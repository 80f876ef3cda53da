"""What running one request on one replica is predicted to take, and what it does to the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.domain.fleet import ReplicaView, Role
from baton.perf.timing import EngineTiming, added_s
from baton.policy.placement.port import NO_ROOM, CacheRoom, PlacementQuery
from baton.policy.prefix_cache.hits import Hit

_ADAPTER_S = 0.5
"""To load an adapter, as long as the replica has loaded none: a guess, of the order of what reading
100 MB from a disk and unpacking them takes."""
_ROUND_TOKENS = 64
"""A prompt's attention differs by little over so many tokens."""


@dataclass(slots=True)
class ReplicaCost:
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
    output_tokens: float
    """How many it is expected to generate."""
    stream_s: float
    """What this request adds to each step, beside the streams that run there."""
    context_tokens: int
    """What a step attends to without this request."""
    attended_tokens: int
    """What this request attends to, on average over its life."""
    ahead_tokens: int
    """Of the prompts ahead."""
    adapter_s: float = 0.0
    """To load the adapter, where it is not there; nothing else runs meanwhile."""
    adapter_comes: bool = False
    """The adapter is not there yet, and will be for a leg that was sent before."""
    evicts: str | None = None
    """Another adapter, which goes for it."""
    extra_loads_s: float = 0.0
    """Loads that it brings about besides its own; see `compare`."""
    own_s: float = 0.0
    """What it will spend decoding; see `compare`."""
    join_s: float = 0.0
    """What each of those streams loses by this one beside it; see `compare`."""
    displaced_s: float = 0.0
    """Prefill that will be done again because of what its cache lets go for this prompt."""
    prompt_share: float = 0.0
    """Of its time, what prompts take from its streams; known where there is a TPOT objective."""

    @property
    def queue_s(self) -> float:
        """Before it can begin with this request: with its adapter, or else with its prompt."""
        return self.backlog_s + self.room_wait_s

    @property
    def prefilled_s(self) -> float:
        """Until its prompt is computed."""
        return self.queue_s + self.adapter_s + self.prefill_s


def replica_cost(  # noqa: PLR0913 - a call for each candidate: plain arguments, no object for them
    query: PlacementQuery,
    view: ReplicaView,
    timing: EngineTiming,
    *,
    output_tokens: float,
    at_s: float,
    crowd: float = 1.0,
    due_s: float | None = None,
    stream_context: float | None = None,
) -> ReplicaCost:
    """Predict one replica's part, from its last report and what was sent to it since.

    `crowd` is how many requests the fleet gets for each that is sent from here: others have sent
    that much more since the report, and have seen the same report when they chose where to.
    `due_s` is how long the prompts that were sent from here will yet take, by when they were sent;
    so what was sent since the report need not be taken for untouched. None: that is not known.
    `stream_context` is how many tokens each of its streams attends to; None: that is not known.

    Asked for every candidate of every request, hence plain sums and few calls.
    """
    load, facts = view.load, view.facts
    hit = query.hits.of(facts.replica_id)
    hit_tokens = usable_tokens(hit, query.prompt_tokens, facts.block_size_tokens)
    uncached = query.prompt_tokens - hit_tokens
    running = _streams(view, crowd)
    attended = query.prompt_tokens + int(output_tokens / 2)
    context = _context_tokens(view, running, attended, stream_context)
    step_s = timing.step_s(running=running + 1, context_tokens=context + attended)
    prefill_s = timing.prefill_s(uncached, running=running, context_tokens=context)
    backlog_s = 0.0
    unseen = int(view.unseen_tokens * crowd)
    if ahead := load.queued_tokens + unseen:
        all_s = timing.prefill_s(
            uncached + ahead,
            running=running,
            context_tokens=context,
            length_tokens=_length_tokens(view, uncached, ahead, crowd),
        )
        reported_s = (all_s - prefill_s) * load.queued_tokens / ahead
        done_s = max(0.0, at_s - view.load_at_s)
        if due_s is None:
            done_s = min(reported_s, done_s)
        # They share steps with this one where they fit, so only what they add counts.
        backlog_s = max(0.0, all_s - prefill_s - done_s)
    if due_s is not None:
        backlog_s = max(backlog_s, due_s)
    if running or load.running_requests:
        backlog_s += step_s / 2  # of the step under way, on average
    if hit.host_blocks:
        prefill_s += timing.host_load_s(hit.host_blocks)
    cost = ReplicaCost(
        view,
        timing,
        hit,
        hit_tokens,
        backlog_s,
        _room_wait_s(view, uncached + unseen, output_tokens * step_s),
        prefill_s,
        running,
        step_s,
        output_tokens,
        _added_s(timing, step_s, running, context, attended),
        context,
        attended,
        load.queued_tokens + unseen,
    )
    if query.adapter is not None:
        _add_adapter(cost, query.adapter)
    return cost


def _add_adapter(cost: ReplicaCost, name: str) -> None:
    """What a leg's adapter costs it: a load, and a wait where too many others run.

    An engine runs so many different ones at a time; with others a leg waits until all legs of one
    of them have ended, and takes its place in the batch as any other would.
    """
    view = cost.view
    if view.has_adapter(name):
        cost.adapter_comes = name not in view.load.adapters.loaded
    else:
        cost.adapter_s, cost.evicts = adapter_load_s(view), view.next_to_go
    most = view.facts.adapters_per_batch or view.facts.adapter_slots
    if most and name not in view.inflight_adapters and len(view.inflight_adapters) >= most:
        excess = len(view.inflight_adapters) + 1 - most
        wait_s = cost.output_tokens * cost.step_s * excess / most
        cost.room_wait_s = max(cost.room_wait_s, wait_s)


def adapter_load_s(view: ReplicaView) -> float:
    """What loading one adapter takes on a replica: what it has taken so far, on average."""
    adapters = view.load.adapters
    return adapters.busy_s / adapters.loads if adapters.loads else _ADAPTER_S


def compare(costs: Sequence[ReplicaCost], *, reuses: float, room: CacheRoom = NO_ROOM) -> None:
    """Fill in what can only be said of replicas beside each other, among which one is chosen.

    `own_s` and `join_s`: a stream too many does not stay one for its whole life: as streams end,
    and the next ones are placed elsewhere, loads even out. Of S streams of L seconds each, one
    ends every L / S seconds, so an excess of e is gone after about e + 1 of these: a difference
    lasts for the fraction (e + 1) / (S + 1) of a stream's life, and only that much of it is the
    choice's own doing. For the rest of its life a stream is one of as many as run on average, which
    attend to as much as on average. How long a step takes then is asked of the replica's timing: a
    step need not grow evenly with its streams.

    `displaced_s`: what a replica computes though another holds it is stored a second time, and
    drives out as much that was stored before, but for what there is room for. Of each token that
    is stored, `reuses` are saved before it goes; so many, with the streams that they would have
    delayed, are lost.

    `extra_loads_s`: an adapter that goes for this one's must be loaded again, unless another of
    them has it, too. And while one of them loads this one's, to load it a second time only keeps
    another replica busy.
    """
    _count_extra_loads(costs)
    streams = most_held = 0
    for cost in costs:
        streams += cost.running
        most_held = max(most_held, cost.hit_tokens)
    mean = streams / max(1, len(costs))
    mean_context = sum([cost.context_tokens for cost in costs]) // max(1, len(costs))
    for cost in costs:
        excess = cost.running - mean
        lasts = (excess + 1 if excess > 0 else 1) / (streams + 1)
        step_s = cost.step_s
        if excess:
            even_s = cost.timing.step_s(
                running=round(mean) + 1, context_tokens=mean_context + cost.attended_tokens
            )
            step_s = lasts * step_s + (1 - lasts) * even_s
        cost.own_s = cost.output_tokens * step_s
        cost.join_s = lasts * cost.output_tokens * cost.stream_s
        cost.displaced_s = cost.extra_loads_s
        if reuses and (twice := _driven_out(most_held - cost.hit_tokens, cost, room)):
            cost.displaced_s += reuses * added_s(cost.timing, twice) * (1 + cost.running)


def _driven_out(tokens: int, cost: ReplicaCost, room: CacheRoom) -> int:
    """How many tokens make way where so many are stored beside what the request brings anyway."""
    if tokens <= 0:
        return 0
    facts = cost.view.facts
    free = room.free_blocks(facts.replica_id) * facts.block_size_tokens
    return min(tokens, max(0, cost.attended_tokens - cost.hit_tokens - free))


def _context_tokens(
    view: ReplicaView, running: int, attended: int, stream_context: float | None
) -> int:
    """What the streams on a replica attend to, all together; those it is yet to run among them.

    Streams that share a prefix share its blocks, and each of them attends to all of it. So blocks
    in use say how much that is only of streams that share nothing, and stand in for it only where
    an engine does not say what its streams attend to.
    """
    facts, load = view.facts, view.load
    if facts.role is Role.PREFILL:
        return running * attended
    known = min(running, load.running_requests)
    if stream_context is not None:
        context = int(known * stream_context)
    else:
        context = int(load.kv_used_fraction * facts.kv_blocks) * facts.block_size_tokens
    return context + (running - known) * attended


def _added_s(
    timing: EngineTiming, with_s: float, running: int, context: int, attended: int
) -> float:
    """What one more stream adds to each step.

    The first one pays for what a step takes anyway, which is nothing that it adds.
    """
    if not running:
        return timing.decode_request_s(context_tokens=attended)
    return max(0.0, with_s - timing.step_s(running=running, context_tokens=context))


def _count_extra_loads(costs: Sequence[ReplicaCost]) -> None:
    if not any(cost.adapter_s for cost in costs):
        return
    comes = any(cost.adapter_comes for cost in costs)
    copies = Counter(name for cost in costs for name in cost.view.adapters)
    for cost in costs:
        is_last = cost.evicts is not None and copies[cost.evicts] <= 1
        cost.extra_loads_s = cost.adapter_s * (is_last + comes)


def usable_tokens(hit: Hit, prompt_tokens: int, block_size_tokens: int) -> int:
    """Prompt tokens that a hit saves; the last one is always computed, for the first new token."""
    return min(hit.blocks, max(0, prompt_tokens - 1) // block_size_tokens) * block_size_tokens


def _streams(view: ReplicaView, crowd: float) -> int:
    """Requests that a replica decodes for, or soon will."""
    # What runs on a prefill replica is mostly prompts: those are its queue, not its streams.
    if view.facts.role is Role.PREFILL:
        return int(view.inflight_streams * crowd)
    load = view.load
    return load.running_requests + load.pulling_requests + int(view.unseen_legs * crowd)


def _length_tokens(view: ReplicaView, uncached: int, ahead: int, crowd: float) -> int:
    """As of prompts of which one length `uncached` tokens, behind `ahead` others, take as long.

    What attention adds to a prompt of n tokens goes with n x n: ten prompts of 1,000 tokens each
    take far less than one of 10,000. With a prompt of n and a of others of m, that is a mean of
    n and m which weighs them by their tokens. Rounded, so that timings are asked the same again.
    """
    load = view.load
    others = load.queued_requests + int(view.unseen_legs * crowd)
    if view.facts.role is Role.PREFILL:
        others += load.running_requests
    mean = (uncached * uncached + ahead * ahead / max(1, others)) / (uncached + ahead)
    return max(_ROUND_TOKENS, round(mean / _ROUND_TOKENS) * _ROUND_TOKENS)


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
    tokens = new_tokens + load.queued_tokens
    wanted = load.kv_used_fraction + tokens / (facts.kv_blocks * facts.block_size_tokens)
    if wanted > 1:
        wait_s = max(wait_s, stream_s * (wanted - 1))
    return wait_s
