"""The dashboard of placement: who runs what and why, how good predictions are, what is cached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from baton.telemetry import catalogue as c
from baton.telemetry.catalogue import TokenKind
from baton.telemetry.dashboards.choices import (
    BY_POOL,
    CLASS,
    IN_CLASS,
    IN_POOL,
    JOB,
    MODEL,
    OF_MODEL,
    POOL,
)
from baton.telemetry.dashboards.model import (
    NONE_IS_GOOD,
    Board,
    Panel,
    Query,
    Row,
    Shape,
    Unit,
)
from baton.telemetry.dashboards.promql import (
    average,
    heat,
    largest,
    quantile,
    rate,
    series,
    total,
)

_STATE: Final = "state"
_PREDICTED: Final = ("job", "model", "mode")


def board() -> Board:
    """Routing & cache."""
    return Board(
        name="routing",
        title="baton / Routing & cache",
        about="Where requests are sent and why, how right the predictions are, what caches save.",
        choices=(JOB, CLASS, MODEL, POOL),
        rows=(
            Row(title="Who runs what, and why?", panels=(*_placements(), *_door())),
            Row(title="Which replicas are counted on?", panels=tuple(_recovery())),
            Row(title="How right are the predictions?", panels=tuple(_predictions())),
            Row(title="What do caches save?", panels=tuple(_cache())),
            Row(title="Are LoRA adapters where they are needed?", panels=tuple(_adapters())),
            Row(title="Engines", panels=(*_engines(), *_steps(), *_processes())),
        ),
    )


def _placements() -> Iterator[Panel]:
    yield Panel(
        title="Placements, by mode",
        about="`pull`: prefilled on one replica and decoded on another. `local`: one runs both.",
        shape=Shape.STACK,
        queries=(Query(expr=total(rate(c.PLACEMENTS), "mode"), legend="{{mode}}"),),
        unit=Unit.REQUESTS_PER_S,
    )
    yield Panel(
        title="Placements, by reason",
        about="`local_faster`, `deflected`, `prefix_fetch`: predicted to be better."
        " `no_prefill_replica`, `no_decode_replica`, `no_link`: something is missing, see Pools &"
        " autoscaler and KV transfer.",
        shape=Shape.STACK,
        queries=(Query(expr=total(rate(c.PLACEMENTS), "reason"), legend="{{reason}}"),),
        unit=Unit.REQUESTS_PER_S,
    )
    yield Panel(
        title="Handed off",
        about="The share of placements whose blocks went from one replica to another. A fall to 0:"
        " no pair is in order, or prefill is gone.",
        shape=Shape.LINES,
        runbook="BatonNoPrefill",
        queries=(
            Query(
                expr=total(rate(c.PLACEMENTS, mode="pull")) / total(rate(c.PLACEMENTS)),
                legend="handed off",
            ),
        ),
        unit=Unit.FRACTION,
        highest=1.0,
    )


def _door() -> Iterator[Panel]:
    yield Panel(
        title="At the door",
        about="What admission decided, and why. Much that is shed as `too_late` or `breaks`: more"
        " is asked than can be promised.",
        shape=Shape.STACK,
        queries=(
            Query(
                expr=total(rate(c.ADMISSIONS, **IN_CLASS), "outcome", "reason"),
                legend="{{outcome}} {{reason}}",
            ),
        ),
        unit=Unit.REQUESTS_PER_S,
        width=12,
    )
    yield Panel(
        title="Waiting at the ingresses",
        about="Requests that admission holds until an engine has room. Long and growing: too little"
        " capacity.",
        shape=Shape.LINES,
        runbook="BatonQueueGrows",
        queries=(Query(expr=total(series(c.HELD_REQUESTS)), legend="held"),),
        unit=Unit.COUNT,
        width=6,
    )
    yield Panel(
        title="Out of reach",
        about="Replicas that Ray knows and an ingress cannot reach: check the network between"
        " them.",
        shape=Shape.NUMBERS,
        runbook="BatonReplicasUnreachable",
        queries=(Query(expr=largest(series(c.UNJOINED)), legend="most, of any ingress"),),
        unit=Unit.COUNT,
        width=6,
        steps=NONE_IS_GOOD,
    )


def _recovery() -> Iterator[Panel]:
    yield Panel(
        title="Second tries, by what was wrong",
        about="Requests that went on elsewhere. `lost` and `silent`: processes or hosts. `failed`,"
        " `stalled`, `late`, `still`: engines. `handoff`: links. `refused`: more fail than may be"
        " tried again, and their clients were told so.",
        shape=Shape.STACK,
        queries=(
            Query(expr=total(rate(c.SECOND_TRIES), "reason"), legend="{{reason}}"),
            Query(expr=total(rate(c.SECOND_TRIES_REFUSED)), legend="refused"),
        ),
        unit=Unit.REQUESTS_PER_S,
        width=12,
    )
    yield Panel(
        title="Replicas, by how far they are trusted",
        about="`open`: failed what they were given, and get nothing for a while. `half_open`: get"
        " one request, by which they are judged. The most that any ingress counts.",
        shape=Shape.LINES,
        queries=(
            Query(
                expr=largest(series(c.CIRCUITS, **IN_POOL), *BY_POOL, _STATE),
                legend="{{job}} {{pool}} {{state}}",
            ),
        ),
        unit=Unit.COUNT,
        width=12,
    )


def _predictions() -> Iterator[Panel]:
    yield Panel(
        title="Predicted over actual time to first token",
        about="1: right. Above: requests are refused or spread without need. Below: admission lets"
        " in what will be late. Far off for long: another mix than was calibrated for.",
        shape=Shape.LINES,
        runbook="BatonPredictionOff",
        queries=tuple(
            Query(
                expr=quantile(q, c.TTFT_RATIO, *_PREDICTED, **OF_MODEL),
                legend=f"{{{{job}}}} {{{{model}}}} {{{{mode}}}} p{q * 100:g}",
            )
            for q in (0.1, 0.5, 0.9)
        ),
        unit=Unit.RATIO,
        width=12,
    )
    yield Panel(
        title="Error of predicted step times",
        about="Of each pool's calibrated model, on average. Above 20 %: the model does not know"
        " what this engine does.",
        shape=Shape.LINES,
        queries=(
            Query(
                expr=average(series(c.STEP_ERROR, **IN_POOL), *BY_POOL), legend="{{job}} {{pool}}"
            ),
        ),
        unit=Unit.FRACTION,
        width=6,
    )
    yield Panel(
        title="Ratios over time",
        about="All predictions over actual times: a second band is a kind of request that is"
        " predicted wrongly.",
        shape=Shape.HEAT,
        queries=(Query(expr=heat(c.TTFT_RATIO, **OF_MODEL)),),
        unit=Unit.RATIO,
        width=6,
    )


def _cache() -> Iterator[Panel]:
    # Placement does not count what it expects by class: the three are of all of them.
    asked, found = (
        total(rate(c.TOKENS, tokens=kind)) for kind in (TokenKind.PROMPT, TokenKind.CACHED)
    )
    prompts, cached = (
        total(rate(c.TOKENS, **IN_CLASS, tokens=kind))
        for kind in (TokenKind.PROMPT, TokenKind.CACHED)
    )
    yield Panel(
        title="Prompt tokens that were cached",
        about="The share that no engine had to compute, and the share that placement expected. Both"
        " fall: prompts changed, or caches are too small. Only the first does: the index is wrong."
        " Of all classes.",
        shape=Shape.LINES,
        runbook="BatonHitsDropped",
        queries=(
            Query(expr=found / asked, legend="cached"),
            Query(expr=total(rate(c.HIT_TOKENS)) / asked, legend="expected"),
        ),
        unit=Unit.FRACTION,
        width=12,
        highest=1.0,
    )
    yield Panel(
        title="Prompt tokens",
        about="Asked for, and saved by caches.",
        shape=Shape.LINES,
        queries=(
            Query(expr=prompts, legend="prompts"),
            Query(expr=cached, legend="of them cached"),
        ),
        unit=Unit.TOKENS_PER_S,
        width=6,
    )
    yield Panel(
        title="Blocks in the prefix index",
        about="By how the index knows of them. Only predictions: engines' cache events do not"
        " come.",
        shape=Shape.STACK,
        queries=(Query(expr=total(series(c.INDEX_BLOCKS), "source"), legend="{{source}}"),),
        unit=Unit.COUNT,
        width=6,
    )


def _adapters() -> Iterator[Panel]:
    yield Panel(
        title="Adapters that are loaded",
        about="Of all replicas of a pool; one that several have counts for each. All zero: none"
        " are configured.",
        shape=Shape.LINES,
        queries=(
            Query(expr=total(series(c.ADAPTERS, **IN_POOL), *BY_POOL), legend="{{job}} {{pool}}"),
        ),
        unit=Unit.COUNT,
    )
    yield Panel(
        title="Legs with an adapter",
        about="Those that found it on their replica, and adapters that were loaded for one. Many"
        " loads for long: more adapters are in use than fit, see `engine.adapters`.",
        shape=Shape.STACK,
        queries=(
            Query(expr=total(rate(c.ADAPTER_HITS, **IN_POOL)), legend="found it"),
            Query(expr=total(rate(c.ADAPTER_LOADS, **IN_POOL)), legend="had it loaded"),
        ),
        unit=Unit.PER_S,
    )
    yield Panel(
        title="Time that loading takes",
        about="Of each replica's time, in which it computes nothing.",
        shape=Shape.LINES,
        queries=(
            Query(
                expr=total(rate(c.ADAPTER_TIME, **IN_POOL), *BY_POOL, "replica"),
                legend="{{replica}}",
            ),
        ),
        unit=Unit.FRACTION,
    )


def _engines() -> Iterator[Panel]:
    yield Panel(
        title="Tokens computed",
        about="By pool and phase: what engines did, whoever it was for.",
        shape=Shape.STACK,
        queries=(
            Query(
                expr=total(rate(c.COMPUTED, **IN_POOL), *BY_POOL, "phase"),
                legend="{{job}} {{pool}} {{phase}}",
            ),
        ),
        unit=Unit.TOKENS_PER_S,
    )
    yield Panel(
        title="Step time",
        about="Moving average of each replica. One above its peers: a slow GPU, or a neighbour.",
        shape=Shape.LINES,
        queries=(
            Query(
                expr=largest(series(c.STEP_TIME, **IN_POOL), *BY_POOL, "replica"),
                legend="{{replica}}",
            ),
        ),
        unit=Unit.SECONDS,
    )
    yield Panel(
        title="Prompt tokens that wait in engines",
        about="By replica: no class or tenant comes first there, so it should be short.",
        shape=Shape.LINES,
        queries=(
            Query(
                expr=total(series(c.QUEUED_TOKENS, **IN_POOL), *BY_POOL, "replica"),
                legend="{{replica}}",
            ),
        ),
        unit=Unit.COUNT,
    )


def _steps() -> Iterator[Panel]:
    yield Panel(
        title="Engine steps",
        about="By pool and what they did; a step that did both counts for both.",
        shape=Shape.LINES,
        queries=(
            Query(
                expr=total(rate(c.STEPS, **IN_POOL), *BY_POOL, "phase"),
                legend="{{job}} {{pool}} {{phase}}",
            ),
        ),
        unit=Unit.PER_S,
    )
    yield Panel(
        title="Time in engine steps",
        about="Of each replica's time. Uneven within a pool: prefixes or links draw work together.",
        shape=Shape.LINES,
        queries=(
            Query(
                expr=total(rate(c.BUSY, **IN_POOL), *BY_POOL, "replica"),
                legend="{{replica}}",
            ),
        ),
        unit=Unit.FRACTION,
    )
    yield Panel(
        title="Frames of the fleet link that went wrong",
        about="`bad`: could not be read. `dropped`: no room, or the session was over. Steady: the"
        " network loses, or an ingress is overloaded.",
        shape=Shape.LINES,
        queries=(
            Query(
                expr=total(rate(c.LINK_FRAMES, **IN_POOL, state="=~bad|dropped"), "state"),
                legend="{{state}}",
            ),
            Query(expr=total(rate(c.LINK_STRANGERS, **IN_POOL)), legend="strangers"),
        ),
        unit=Unit.PER_S,
    )


def _processes() -> Iterator[Panel]:
    yield Panel(
        title="Legs and coordinators",
        about="What runs on replicas for all coordinators, and how many are connected to each.",
        shape=Shape.LINES,
        queries=(
            Query(
                expr=total(series(c.LIVE_LEGS, **IN_POOL), *BY_POOL),
                legend="legs on {{job}} {{pool}}",
            ),
            Query(
                expr=largest(series(c.COORDINATORS, **IN_POOL), *BY_POOL),
                legend="coordinators of {{job}} {{pool}}",
            ),
        ),
        unit=Unit.COUNT,
    )
    yield Panel(
        title="What runs",
        about="Replicas by engine, version, model and role. Two versions: an upgrade is under way.",
        shape=Shape.TABLE,
        queries=(
            Query(
                expr=total(
                    series(c.REPLICA_INFO, **IN_POOL),
                    *BY_POOL,
                    "role",
                    "model",
                    "engine",
                    "version",
                ),
                legend="replicas",
            ),
        ),
        unit=Unit.COUNT,
        width=16,
    )
