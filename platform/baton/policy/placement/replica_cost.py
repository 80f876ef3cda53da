"""The predicted cost of one request on one replica, and its effect on other requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from baton.domain.fleet import ReplicaFacts, ReplicaView, Role
from baton.domain.value import MutableValue
from baton.perf.timing import EngineTiming, added_prefill_s
from baton.policy.placement.port import FULL_CACHE, CacheCapacity, PlacementQuery
from baton.policy.prefix_cache.hits import NO_HIT, Hit

_DEFAULT_ADAPTER_LOAD_S = 0.5
"""To load an adapter, as long as the replica has loaded none: a guess, about the time to read 100
MB from a disk and unpack them."""
_ROUND_TOKENS = 64
"""A prompt's attention differs by little over this number of tokens."""


class ReplicaCost(MutableValue, kw_only=False):
    """One replica's part in one request, in predicted seconds."""

    view: ReplicaView
    timing: EngineTiming
    hit: Hit
    hit_tokens: int
    """Prompt tokens that it need not compute."""
    backlog_s: float
    """Until the prompts ahead are computed."""
    capacity_wait_s: float
    """Until there is a place in the batch, and blocks."""
    prefill_s: float
    """To compute what it does not hold of the prompt."""
    running_streams: int
    """Streams that it runs, or soon will."""
    step_s: float
    """One decode step with this request among them."""
    output_tokens: float
    """How many it is expected to generate."""
    step_increase_s: float
    """The time that this request adds to each step, beside the streams that run there."""
    context_tokens: int
    """The tokens that a step attends to without this request."""
    attended_tokens: int
    """The tokens that this request attends to, on average over its life."""
    ahead_tokens: int
    """Of the prompts ahead."""
    adapter_load_s: float = 0.0
    """To load the adapter, where it is not there; nothing else runs meanwhile."""
    is_adapter_loading: bool = False
    """The adapter is not there yet, and will be for a leg that was sent before."""
    evicted_adapter: str | None = None
    """Another adapter, which goes for it."""
    extra_adapter_loads_s: float = 0.0
    """Loads that it causes beyond its own; see `fill_relative_costs`."""
    own_decode_s: float = 0.0
    """Its predicted time of decoding; see `fill_relative_costs`."""
    stream_slowdown_s: float = 0.0
    """The delay of each of those streams by this request; see `fill_relative_costs`."""
    eviction_cost_s: float = 0.0
    """Prefill that will be done again because of blocks that its cache evicts for this prompt."""
    prefill_time_fraction: float = 0.0
    """Of its time, what prompts take from its streams; known where there is a TPOT objective."""

    @property
    def queue_s(self) -> float:
        """Before it can begin with this request: with its adapter, or else with its prompt."""
        return self.backlog_s + self.capacity_wait_s

    @property
    def prefill_done_s(self) -> float:
        """Until its prompt is computed."""
        return self.queue_s + self.adapter_load_s + self.prefill_s


def replica_cost(  # noqa: PLR0913 - a call for each candidate: plain arguments, no object for them
    query: PlacementQuery,
    view: ReplicaView,
    timing: EngineTiming,
    *,
    output_tokens: float,
    at_s: float,
    peer_load_factor: float = 1.0,
    prefills_done_s: float | None = None,
    stream_context: float | None = None,
) -> ReplicaCost:
    """Predict one replica's part, from its last report and the legs sent to it since.

    `peer_load_factor` is how many requests the fleet gets for each that is sent from here: others
    have sent that many more since the report, and have seen the same report. `prefills_done_s` is
    the remaining time of the prompts that were sent from here, by the time of sending. So prompts
    sent since the report need not be taken for untouched. None: that is not known. `stream_context`
    is how many tokens each of its streams attends to; None: that is not known.

    Asked for every candidate of every request, hence plain sums and few calls.
    """
    load, facts = view.load, view.facts
    hit = query.hits.of(facts.replica_id)
    hit_tokens = 0
    if hit.blocks:
        hit_tokens = usable_tokens(hit, query.prompt_tokens, facts.block_size_tokens)
    uncached_tokens = query.prompt_tokens - hit_tokens
    running = _decoding_streams(view, peer_load_factor)
    attended_tokens = query.prompt_tokens + int(output_tokens / 2)
    context_tokens = _context_tokens(view, running, attended_tokens, stream_context)
    step_s = timing.step_s(running=running + 1, context_tokens=context_tokens + attended_tokens)
    prefill_s = timing.prefill_s(uncached_tokens, running=running, context_tokens=context_tokens)
    backlog_s = 0.0
    unreported_tokens = int(view.unreported_tokens * peer_load_factor)
    if ahead_tokens := load.queued_tokens + unreported_tokens:
        total_prefill_s = timing.prefill_s(
            uncached_tokens + ahead_tokens,
            running=running,
            context_tokens=context_tokens,
            length_tokens=_mean_length_tokens(
                view, uncached_tokens, ahead_tokens, peer_load_factor
            ),
        )
        reported_s = (total_prefill_s - prefill_s) * load.queued_tokens / ahead_tokens
        done_s = max(0.0, at_s - view.load_received_at_s)
        if prefills_done_s is None:
            done_s = min(reported_s, done_s)
        # They share steps with this one where they fit, so only what they add counts.
        backlog_s = max(0.0, total_prefill_s - prefill_s - done_s)
    if prefills_done_s is not None:
        backlog_s = max(backlog_s, prefills_done_s)
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
        _capacity_wait_s(view, uncached_tokens + unreported_tokens, output_tokens * step_s),
        prefill_s,
        running,
        step_s,
        output_tokens,
        _step_increase_s(timing, step_s, running, context_tokens, attended_tokens),
        context_tokens,
        attended_tokens,
        load.queued_tokens + unreported_tokens,
    )
    if query.adapter is not None:
        _add_adapter(cost, query.adapter)
    return cost


def idle_cost(
    known: Sequence[ReplicaCost], view: ReplicaView, timing: EngineTiming
) -> ReplicaCost | None:
    """The `replica_cost` of an idle replica that `holds_nothing`, by that of another such; or None.

    With the same timing, role and room, replicas that run nothing cost the same. In a fleet with
    room most candidates are idle.
    """
    for cost in known:
        if cost.timing is timing and is_alike(view.facts, cost.view.facts):
            return ReplicaCost(
                view,
                timing,
                cost.hit,
                cost.hit_tokens,
                cost.backlog_s,
                cost.capacity_wait_s,
                cost.prefill_s,
                cost.running_streams,
                cost.step_s,
                cost.output_tokens,
                cost.step_increase_s,
                cost.context_tokens,
                cost.attended_tokens,
                cost.ahead_tokens,
            )
    return None


def holds_nothing(query: PlacementQuery, view: ReplicaView) -> bool:
    """Whether the request needs no adapter, and the replica has no block of its prompt."""
    return query.adapter is None and query.hits.of(view.facts.replica_id) is NO_HIT


def is_idle(view: ReplicaView) -> bool:
    """Whether a replica runs nothing and uses no blocks."""
    load = view.load
    return not (
        view.inflight_legs
        or load.running_requests
        or load.queued_requests
        or load.queued_tokens
        or load.pulling_requests
        or load.kv_used_fraction
        or view.unreported_legs
    )


class StreamLoad(NamedTuple):
    """The work of a replica, without the request; compared in this order."""

    streams: int
    context_tokens: int
    """That a step attends to."""
    prompt_tokens: int
    """Of the prompts ahead."""
    legs: int


NO_LOAD = StreamLoad(0, 0, 0, 0)


def stream_load(
    view: ReplicaView, attended_tokens: int, peer_load_factor: float, stream_context: float | None
) -> StreamLoad:
    """The load of one replica, in terms of `replica_cost`."""
    load, streams = view.load, _decoding_streams(view, peer_load_factor)
    return StreamLoad(
        streams,
        _context_tokens(view, streams, attended_tokens, stream_context) if streams else 0,
        load.queued_tokens + view.unreported_tokens,
        load.running_requests + load.queued_requests + load.pulling_requests + view.unreported_legs,
    )


def has_room(view: ReplicaView, load: StreamLoad, prompt_tokens: int) -> bool:
    """Whether a replica with this load has a place in the batch, and blocks, for a prompt."""
    new_tokens = prompt_tokens + view.unreported_tokens
    return load.legs < view.facts.max_running_requests and not _capacity_wait_s(
        view, new_tokens, stream_duration_s=1.0
    )


def is_alike(facts: ReplicaFacts, other: ReplicaFacts) -> bool:
    """Whether two replicas have the same part in requests, the same blocks and as much room."""
    return (
        facts.role is other.role
        and facts.layout == other.layout
        and facts.kv_blocks == other.kv_blocks
        and facts.block_size_tokens == other.block_size_tokens
        and facts.max_running_requests == other.max_running_requests
    )


def _add_adapter(cost: ReplicaCost, name: str) -> None:
    """Add the cost of a leg's adapter: a load, and a wait where too many others run.

    An engine runs a limited number of different adapters at a time. With others a leg waits until
    all legs of one of them have ended, and takes its place in the batch as any other would.
    """
    view = cost.view
    if view.has_adapter(name):
        cost.is_adapter_loading = name not in view.load.adapters.loaded
    else:
        cost.adapter_load_s, cost.evicted_adapter = adapter_load_s(view), view.adapter_to_evict
    max_adapters = view.facts.adapters_per_batch or view.facts.adapter_slots
    if (
        max_adapters
        and name not in view.inflight_adapters
        and len(view.inflight_adapters) >= max_adapters
    ):
        excess = len(view.inflight_adapters) + 1 - max_adapters
        wait_s = cost.output_tokens * cost.step_s * excess / max_adapters
        cost.capacity_wait_s = max(cost.capacity_wait_s, wait_s)


def adapter_load_s(view: ReplicaView) -> float:
    """The time to load one adapter on a replica: its average so far."""
    adapters = view.load.adapters
    return adapters.loading_s / adapters.loads if adapters.loads else _DEFAULT_ADAPTER_LOAD_S


def fill_relative_costs(
    costs: Sequence[ReplicaCost],
    *,
    reuses_per_token: float,
    cache_capacity: CacheCapacity = FULL_CACHE,
    left_out: Sequence[StreamLoad] = (),
) -> None:
    """Fill in the costs that exist only between replicas, among which one is chosen.

    Of the replicas `left_out`, which were worse, only the loads count.

    `own_decode_s` and `stream_slowdown_s`: an excess stream does not stay in excess for its whole
    life. As streams end, and the next are placed elsewhere, loads even out. Of S streams of L
    seconds each, one ends every L / S seconds, so an excess of e is gone after about e + 1 of
    these. A difference lasts for the fraction (e + 1) / (S + 1) of a stream's life, and only that
    part of it is the choice's own doing. For the rest of its life a stream runs among the average
    number of streams, with the average context. The replica's timing gives the time of such a step:
    a step need not grow evenly with its streams.

    `eviction_cost_s`: computed blocks that another replica holds are stored a second time. They
    evict as many others, beyond the free room. Of each stored token, `reuses_per_token` are saved
    before it goes; they, and the delays of streams that they would have avoided, are lost.

    `extra_adapter_loads_s`: an adapter that is evicted for this request's must be loaded again,
    unless another of the replicas has it, too. And while one of them loads this request's adapter,
    a second load of it only keeps another replica busy.
    """
    streams = context_tokens = max_hit_tokens = 0
    has_adapter_load = False
    for cost in costs:
        streams += cost.running_streams
        context_tokens += cost.context_tokens
        max_hit_tokens = max(max_hit_tokens, cost.hit_tokens)
        if cost.adapter_load_s:
            has_adapter_load = True
    if has_adapter_load:
        _count_extra_loads(costs)
    for load in left_out:
        streams += load.streams
        context_tokens += load.context_tokens
    replicas = max(1, len(costs) + len(left_out))
    mean_streams, mean_context = streams / replicas, context_tokens // replicas
    balanced_of, balanced_step_s = None, 0.0
    for cost in costs:
        excess = cost.running_streams - mean_streams
        excess_duration_fraction = (excess + 1 if excess > 0 else 1) / (streams + 1)
        step_s = cost.step_s
        if excess:
            if balanced_of is not cost.timing:  # mostly all have the same
                balanced_of = cost.timing
                balanced_step_s = balanced_of.step_s(
                    running=round(mean_streams) + 1,
                    context_tokens=mean_context + cost.attended_tokens,
                )
            step_s = (
                excess_duration_fraction * step_s + (1 - excess_duration_fraction) * balanced_step_s
            )
        cost.own_decode_s = cost.output_tokens * step_s
        cost.stream_slowdown_s = (
            excess_duration_fraction * cost.output_tokens * cost.step_increase_s
        )
        cost.eviction_cost_s = cost.extra_adapter_loads_s
        if reuses_per_token and (
            evicted_tokens := _evicted_tokens(
                max_hit_tokens - cost.hit_tokens, cost, cache_capacity
            )
        ):
            cost.eviction_cost_s += (
                reuses_per_token
                * added_prefill_s(cost.timing, evicted_tokens)
                * (1 + cost.running_streams)
            )


def _evicted_tokens(tokens: int, cost: ReplicaCost, cache_capacity: CacheCapacity) -> int:
    """How many tokens are evicted for new tokens, beyond those that the request needs anyway."""
    if tokens <= 0:
        return 0
    facts = cost.view.facts
    free_tokens = cache_capacity.free_blocks(facts.replica_id) * facts.block_size_tokens
    return min(tokens, max(0, cost.attended_tokens - cost.hit_tokens - free_tokens))


def _context_tokens(
    view: ReplicaView, running: int, attended_tokens: int, stream_context: float | None
) -> int:
    """The tokens that the streams on a replica attend to, including those it is yet to run.

    Streams that share a prefix share its blocks, and each of them attends to all of it. So blocks
    in use equal that number only for streams that share nothing. They replace it only where an
    engine does not report it.
    """
    facts, load = view.facts, view.load
    if facts.role is Role.PREFILL:
        return running * attended_tokens
    reported_streams = min(running, load.running_requests)
    if stream_context is not None:
        context = int(reported_streams * stream_context)
    else:
        context = int(load.kv_used_fraction * facts.kv_blocks) * facts.block_size_tokens
    return context + (running - reported_streams) * attended_tokens


def _step_increase_s(
    timing: EngineTiming,
    step_with_stream_s: float,
    running: int,
    context: int,
    attended_tokens: int,
) -> float:
    """The time that one more stream adds to each step.

    The first stream pays for the fixed time of a step, which it does not add.
    """
    if not running:
        return timing.decode_request_s(context_tokens=attended_tokens)
    return max(0.0, step_with_stream_s - timing.step_s(running=running, context_tokens=context))


def _count_extra_loads(costs: Sequence[ReplicaCost]) -> None:
    is_loading = any(cost.is_adapter_loading for cost in costs)
    copies = Counter(name for cost in costs for name in cost.view.expected_adapters)
    for cost in costs:
        is_last = cost.evicted_adapter is not None and copies[cost.evicted_adapter] <= 1
        cost.extra_adapter_loads_s = cost.adapter_load_s * (is_last + is_loading)


def usable_tokens(hit: Hit, prompt_tokens: int, block_size_tokens: int) -> int:
    """Prompt tokens that a hit saves; the last one is always computed, for the first new token."""
    return min(hit.blocks, max(0, prompt_tokens - 1) // block_size_tokens) * block_size_tokens


def _decoding_streams(view: ReplicaView, peer_load_factor: float) -> int:
    """Requests that a replica decodes for, or soon will."""
    # Prefill replicas run mostly prompts: those are the queue, not streams.
    if view.facts.role is Role.PREFILL:
        return int(view.inflight_streams * peer_load_factor)
    load = view.load
    return (
        load.running_requests + load.pulling_requests + int(view.unreported_legs * peer_load_factor)
    )


def _mean_length_tokens(
    view: ReplicaView, uncached_tokens: int, ahead_tokens: int, peer_load_factor: float
) -> int:
    """The length of which prompts take as long as `uncached_tokens` behind `ahead_tokens`.

    The attention of a prompt of n tokens grows with n x n: ten prompts of 1,000 tokens each take
    far less than one of 10,000. With a prompt of n and a of others of m, that is a mean of n and m
    which weighs them by their tokens. Rounded, so that timings are asked the same again.
    """
    load = view.load
    other_prompts = load.queued_requests + int(view.unreported_legs * peer_load_factor)
    if view.facts.role is Role.PREFILL:
        other_prompts += load.running_requests
    mean = (
        uncached_tokens * uncached_tokens + ahead_tokens * ahead_tokens / max(1, other_prompts)
    ) / (uncached_tokens + ahead_tokens)
    return max(_ROUND_TOKENS, round(mean / _ROUND_TOKENS) * _ROUND_TOKENS)


def _capacity_wait_s(view: ReplicaView, new_tokens: int, stream_duration_s: float) -> float:
    """Until a place in the batch, and blocks, come free, as streams of `stream_duration_s` end.

    With n places of which all are taken, one comes free every stream_s / n; likewise blocks.
    """
    facts, load = view.facts, view.load
    wait_s = 0.0
    legs = (
        load.running_requests + load.queued_requests + load.pulling_requests + view.unreported_legs
    )
    excess_legs = legs + 1 - facts.max_running_requests
    if excess_legs > 0:
        wait_s = stream_duration_s * excess_legs / facts.max_running_requests
    tokens = new_tokens + load.queued_tokens
    needed_fraction = load.kv_used_fraction + tokens / (facts.kv_blocks * facts.block_size_tokens)
    if needed_fraction > 1:
        wait_s = max(wait_s, stream_duration_s * (needed_fraction - 1))
    return wait_s
