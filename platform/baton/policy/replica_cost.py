"""What running one request on one replica is predicted to take, and what it does to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.domain.fleet import ReplicaView, Role
from baton.perf.timing import EngineTiming, delay_s
from baton.policy.hits import Hit
from baton.policy.placement import PlacementQuery

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
    """What one stream adds to each step."""
    ahead_tokens: int
    """Of the prompts ahead."""
    adapter_s: float = 0.0
    """To load the adapter, where it is not there; nothing else runs meanwhile."""
    evicts_s: float = 0.0
    """To load another again, which goes for it."""
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
        """Before it can begin with this request's prompt."""
        return self.backlog_s + self.room_wait_s + self.adapter_s


def replica_cost(  # noqa: PLR0913 - a call for each candidate: plain arguments, no object for them
    query: PlacementQuery,
    view: ReplicaView,
    timing: EngineTiming,
    *,
    output_tokens: float,
    at_s: float,
    crowd: float = 1.0,
    due_s: float | None = None,
) -> ReplicaCost:
    """Predict one replica's part, from its last report and what was sent to it since.

    `crowd` is how many requests the fleet gets for each that is sent from here: others have sent
    that much more since the report, and have seen the same report when they chose where to.
    `due_s` is how long the prompts that were sent from here will yet take, by when they were sent;
    so what was sent since the report need not be taken for untouched. None: that is not known.

    Asked for every candidate of every request, hence plain sums and few calls.
    """
    load, facts = view.load, view.facts
    hit = query.hits.of(facts.replica_id)
    hit_tokens = usable_tokens(hit, query.prompt_tokens, facts.block_size_tokens)
    uncached = query.prompt_tokens - hit_tokens
    running = _streams(view, crowd)
    # Blocks in use are what its streams attend to, about; those it is yet to run bring theirs.
    attended = query.prompt_tokens + int(output_tokens / 2)
    if facts.role is Role.PREFILL:
        context = running * attended
    else:
        context = int(load.kv_used_fraction * facts.kv_blocks) * facts.block_size_tokens
        if running > load.running_requests:
            context += (running - load.running_requests) * attended
    step_s = timing.step_s(running=running + 1, context_tokens=context)
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
        timing.decode_request_s(context_tokens=attended),
        load.queued_tokens + unseen,
    )
    if query.adapter is not None and not view.has_adapter(query.adapter):
        cost.adapter_s = adapter_load_s(view)
        if len(load.adapters.loaded) + len(view.unseen_adapters) >= facts.adapter_slots:
            cost.evicts_s = cost.adapter_s
    return cost


def adapter_load_s(view: ReplicaView) -> float:
    """What loading one adapter takes on a replica: what it has taken so far, on average."""
    adapters = view.load.adapters
    return adapters.busy_s / adapters.loads if adapters.loads else _ADAPTER_S


def compare(costs: Sequence[ReplicaCost], *, reuses: float) -> None:
    """Fill in what can only be said of replicas beside each other, among which one is chosen.

    `own_s` and `join_s`: a stream too many does not stay one for its whole life: as streams end,
    and the next ones are placed elsewhere, loads even out. Of S streams of L seconds each, one
    ends every L / S seconds, so an excess of e is gone after about e + 1 of these: a difference
    lasts for the fraction (e + 1) / (S + 1) of a stream's life, and only that much of it is the
    choice's own doing.

    `displaced_s`: what a replica computes though another holds it is stored a second time, and
    drives out as much that was stored before. Of each token that is stored, `reuses` are saved
    before it goes; so many, with the streams that they would have delayed, are lost. Likewise the
    adapter that goes for this one's.
    """
    streams = most_held = 0
    for cost in costs:
        streams += cost.running
        most_held = max(most_held, cost.hit_tokens)
    mean = streams / max(1, len(costs))
    for cost in costs:
        excess = cost.running - mean
        lasts = (excess + 1 if excess > 0 else 1) / (streams + 1)
        step_s = cost.step_s - (1 - lasts) * excess * cost.stream_s
        cost.own_s = cost.output_tokens * step_s if step_s > 0 else 0.0
        cost.join_s = lasts * cost.output_tokens * cost.stream_s
        cost.displaced_s = cost.evicts_s
        if reuses and (twice := most_held - cost.hit_tokens):
            cost.displaced_s += reuses * delay_s(cost.timing, twice) * (1 + cost.running)


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
