"""How many streams will be decoded by the time a prompt that begins now is computed.

*Theory of operation.* The present load of decode replicas is the wrong input. A prompt takes its
time; meanwhile other prompts become streams, and some of the present streams end. Admission by the
present load would admit too many requests for as long as a prompt takes, then none, and the load of
both pools would swing. So, after `horizon_s`,

    streams = present x exp(-horizon / life) + those whose prompts are being computed

since streams end at random after their mean life (exponentially distributed lengths, as in
`slo_impact`), and prompts that are ahead now are computed before. The decode replica is chosen when
the prompt is done, and is then about the idlest, hence the mean over all of them.

Source: Qin et al., Mooncake, FAST'25, early rejection based on prediction; there with one decoding
time for all.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from baton.domain.fleet import FleetView
from baton.perf.timing import EngineTiming

_NO_CAPACITY_TPOT_S = float("inf")
"""The pace of a stream for which there is no room."""


class DecodeForecast(NamedTuple):
    """Present and soon expected decode load, over all replicas that take new work."""

    replicas: int = 0
    streams: float = 0.0
    prefilling: float = 0.0
    """Requests whose prompts are computed elsewhere, or wait for it."""
    context_tokens: float = 0.0
    kv_capacity_tokens: float = 0.0
    """The KV capacity of the decode replicas, all together."""
    unstarted: float = 0.0
    """Of the streams, those whose blocks wait to be pulled, or are being pulled."""
    load_age_s: float = 0.0
    """Since the loads of the decode replicas were reported, on average."""
    sent_prompts: float = 0.0
    """Requests whose prompts are computed elsewhere, by the legs that were sent and have not ended.
    Unlike `prefilling`, without prompts that ended after the last report."""


class IncomingRequest(NamedTuple):
    """A request that is about to be admitted."""

    horizon_s: float
    """Until its prompt is computed."""
    prompt_tokens: int
    output_tokens: float
    prefill_time_fraction: float
    """Of the time of a replica that decodes, what prompts take from its streams."""


def decode_forecast(fleet: FleetView) -> DecodeForecast:
    """Look at every replica once."""
    replicas, peer_load_factor = fleet.replicas, fleet.peer_load_factor
    prefill, decode = fleet.eligible
    streams = prefilling = context_tokens = kv_capacity_tokens = 0.0
    unstarted = load_age_s = sent_prompts = 0.0
    for replica_id in prefill if decode else ():
        view = replicas[replica_id]
        load = view.load
        requests = (
            load.running_requests + load.queued_requests + view.unreported_legs * peer_load_factor
        )
        # Streams that stay where they were prefilled will not come.
        prefilling += max(0.0, requests - view.inflight_streams * peer_load_factor)
        sent_prompts += (view.inflight_legs - view.inflight_streams) * peer_load_factor
    for replica_id in decode or prefill:
        view = replicas[replica_id]
        load, facts = view.load, view.facts
        load_age_s += max(0.0, fleet.at_s - view.load_received_at_s)
        unstarted += load.queued_requests + load.pulling_requests
        unstarted += view.unreported_legs * peer_load_factor
        streams += load.running_requests
        tokens = facts.kv_blocks * facts.block_size_tokens
        context_tokens += load.kv_used_fraction * tokens
        kv_capacity_tokens += tokens
    return DecodeForecast(
        replicas=len(decode or prefill),
        streams=streams + unstarted,
        prefilling=prefilling,
        context_tokens=context_tokens,
        kv_capacity_tokens=kv_capacity_tokens,
        unstarted=unstarted,
        load_age_s=load_age_s / max(1, len(decode or prefill)),
        sent_prompts=sent_prompts,
    )


def pull_queue_s(
    forecast: DecodeForecast,
    timing: EngineTiming,
    *,
    horizon_s: float,
    transfer_s: float,
    max_pulls: int,
) -> float:
    """How long a request waits to pull its blocks, once its prompt is computed in `horizon_s`.

    A replica pulls for `max_pulls` requests at once. Each pull takes a step of the engine at least,
    since pulls begin and end between steps.
    Source: Little's law; `perf.capacity.capacity.Pulls` bounds the streams likewise.
    """
    replicas = max(1, forecast.replicas)
    if forecast.unstarted + forecast.sent_prompts < replicas * max_pulls:
        return 0.0
    step_s = timing.step_s(
        running=max(1, round((forecast.streams - forecast.unstarted) / replicas)),
        context_tokens=round(forecast.context_tokens / replicas),
    )
    pulls_per_s = replicas * max_pulls / max(step_s, transfer_s)
    unpulled = max(0.0, forecast.unstarted - pulls_per_s * forecast.load_age_s)
    ahead = unpulled + forecast.sent_prompts + 1 - replicas * max_pulls
    return max(0.0, ahead / pulls_per_s - horizon_s)


def predicted_tpot_s(
    forecast: DecodeForecast, request: IncomingRequest, timing: EngineTiming
) -> float:
    """The time between two tokens of a new request when its prompt is computed."""
    context_per_stream = request.prompt_tokens + request.output_tokens / 2
    if forecast.streams >= 1 and forecast.context_tokens > 0:
        context_per_stream = max(1.0, forecast.context_tokens / forecast.streams)
    current_streams = forecast.streams / max(1, forecast.replicas)
    step_s = timing.step_s(
        running=round(current_streams) + 1,
        context_tokens=round((current_streams + 1) * context_per_stream),
    )
    decode_time_fraction = max(0.01, 1.0 - request.prefill_time_fraction)
    stream_life_s = max(step_s, request.output_tokens * step_s / decode_time_fraction)
    surviving_streams = current_streams * exp(-request.horizon_s / stream_life_s)
    future_streams = surviving_streams + forecast.prefilling / max(1, forecast.replicas) + 1
    needed_tokens = (future_streams - 1) * context_per_stream + request.prompt_tokens
    if forecast.kv_capacity_tokens and needed_tokens > forecast.kv_capacity_tokens / max(
        1, forecast.replicas
    ):
        return _NO_CAPACITY_TPOT_S
    step_s = timing.step_s(
        running=round(future_streams), context_tokens=round(future_streams * context_per_stream)
    )
    return step_s / decode_time_fraction
