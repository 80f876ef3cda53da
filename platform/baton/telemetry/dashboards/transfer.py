"""The dashboard of KV transfers: which pairs there are, how fast they are, what fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from baton.telemetry import catalogue as c
from baton.telemetry.dashboards.choices import (
    BY_POOL,
    BY_SERVED,
    CLASS,
    IN_POOL,
    JOB,
    MODEL,
    OF_SERVED,
    POOL,
    SERVED,
)
from baton.telemetry.dashboards.model import (
    NONE_IS_GOOD,
    PLAIN,
    Board,
    Panel,
    Query,
    Row,
    Shape,
    Unit,
)
from baton.telemetry.dashboards.promql import (
    BAR_WINDOW,
    average,
    increase,
    largest,
    quantile,
    rate,
    series,
    total,
)

_PAIR: Final = ("source", "target")
_PULL: Final = ("source", "replica")


def board() -> Board:
    """KV transfer."""
    return Board(
        name="transfer",
        title="baton / KV transfer",
        about="How KV blocks get from replica to replica: pairs, speed, failures, leases.",
        choices=(JOB, CLASS, MODEL, POOL),
        rows=(
            Row(title="Do blocks arrive?", panels=tuple(_arrive())),
            Row(title="Pairs", panels=tuple(_pairs())),
            Row(title="How fast?", panels=tuple(_speed())),
            Row(title="Leases", panels=tuple(_leases())),
        ),
    )


def _arrive() -> Iterator[Panel]:
    yield Panel(
        title="Pairs, by state",
        about="As the ingress that is worst off sees them. `quarantined` ones are not used:"
        " requests go over others, or run local.",
        shape=Shape.NUMBERS,
        queries=(Query(expr=largest(series(c.LINK_PAIRS), "state"), legend="{{state}}"),),
        unit=Unit.COUNT,
        height=6,
        steps=PLAIN,
    )
    yield Panel(
        title="Quarantined pairs",
        when_empty="none",
        about="Probing or pulling over them fails: `baton status` says why, `baton doctor` what to"
        " do.",
        shape=Shape.TABLE,
        runbook="BatonLinksQuarantined",
        queries=(
            Query(
                expr=largest(series(c.LINK_QUARANTINED), *_PAIR) > 0,
                legend="quarantined",
            ),
        ),
        unit=Unit.COUNT,
        height=6,
    )
    yield Panel(
        title="Replicas that cannot pull",
        when_empty="none",
        about="Their pulls fail from all sources, which serve others: their transfer agents are"
        " broken. They are replaced, unless many look so at once.",
        shape=Shape.TABLE,
        runbook="BatonAgentBroken",
        queries=(Query(expr=largest(series(c.AGENT_BROKEN), "target") > 0, legend="cannot pull"),),
        unit=Unit.COUNT,
        height=6,
    )
    yield Panel(
        title="Failed pulls",
        about="By the replica that blocks were pulled from; its requests were computed again"
        " elsewhere. One source: that replica or its network. All: the fabric.",
        shape=Shape.BARS,
        runbook="BatonTransfersFail",
        queries=(
            Query(
                expr=total(increase(c.PULL_FAILURES, BAR_WINDOW, **IN_POOL), "source"),
                legend="{{source}}",
            ),
        ),
        unit=Unit.COUNT,
        height=6,
        steps=NONE_IS_GOOD,
    )


def _pairs() -> Iterator[Panel]:
    yield Panel(
        title="Bandwidth, from row to column",
        about="As estimated from what was pulled, or probed, over each pair. One slow column: that"
        " replica's NIC. One slow cell: the path between the two.",
        shape=Shape.MATRIX,
        queries=(Query(expr=largest(series(c.LINK_BANDWIDTH), *_PAIR)),),
        unit=Unit.BYTES_PER_S,
        width=12,
        matrix=_PAIR,
    )
    yield Panel(
        title="Set-up, from row to column",
        about="What a pull takes besides its bytes. The first of a pair pays a handshake.",
        shape=Shape.MATRIX,
        queries=(Query(expr=largest(series(c.LINK_SETUP), *_PAIR)),),
        unit=Unit.SECONDS,
        width=12,
        matrix=_PAIR,
    )
    yield Panel(
        title="Bandwidth, by transport",
        about="The mean of the pairs that go over each. TCP where RDMA is expected: see Transfer in"
        " the docs.",
        shape=Shape.LINES,
        queries=(
            Query(expr=average(series(c.LINK_BANDWIDTH), "transport"), legend="{{transport}}"),
        ),
        unit=Unit.BYTES_PER_S,
        width=12,
    )
    yield Panel(
        title="Handoffs that did not arrive",
        about="As coordinators see it, by the replica that should have had the blocks.",
        shape=Shape.BARS,
        queries=(
            Query(
                expr=total(increase(c.BROKEN_HANDOFFS, BAR_WINDOW), "target"), legend="{{target}}"
            ),
        ),
        unit=Unit.COUNT,
        width=12,
        steps=NONE_IS_GOOD,
    )


def _speed() -> Iterator[Panel]:
    pulled = total(rate(c.PULLED, **IN_POOL), *_PULL)
    pulls = total(rate(c.PULLS, **IN_POOL), *_PULL)
    seconds = total(rate(c.PULL_TIME, **IN_POOL), *_PULL)
    yield Panel(
        title="Moved",
        about="KV blocks by pair, per second of the clock.",
        shape=Shape.STACK,
        queries=(Query(expr=pulled, legend="{{source}} to {{replica}}"),),
        unit=Unit.BYTES_PER_S,
        width=12,
    )
    yield Panel(
        title="Speed of a pull",
        about="Bytes per second of pulling. Falls while more is moved: flows share a NIC.",
        shape=Shape.LINES,
        queries=(Query(expr=pulled / seconds, legend="{{source}} to {{replica}}"),),
        unit=Unit.BYTES_PER_S,
        width=12,
    )
    yield Panel(
        title="Pulls",
        about="By pair, per second.",
        shape=Shape.STACK,
        queries=(Query(expr=pulls, legend="{{source}} to {{replica}}"),),
        unit=Unit.PER_S,
    )
    yield Panel(
        title="Mean time of a pull",
        about="By pair; part of every handed-off request's time to first token.",
        shape=Shape.LINES,
        queries=(Query(expr=seconds / pulls, legend="{{source}} to {{replica}}"),),
        unit=Unit.SECONDS,
    )
    yield Panel(
        title="Hand-off gap",
        about="From the end of prefill to the first token: pull, queue and first step of decode.",
        shape=Shape.LINES,
        queries=tuple(
            Query(
                expr=quantile(q, c.HANDOFF_GAP, *BY_SERVED, **OF_SERVED),
                legend=f"{SERVED} p{q * 100:g}",
            )
            for q in (0.5, 0.99)
        ),
        unit=Unit.SECONDS,
    )


def _leases() -> Iterator[Panel]:
    yield Panel(
        title="Leases that wait",
        about="Blocks of finished prefills that nobody has pulled yet, as ingresses know it."
        " Growing: decode does not keep up, and prefill's caches fill.",
        shape=Shape.LINES,
        queries=(
            Query(expr=total(series(c.LEASES, **IN_POOL), *BY_POOL), legend="{{job}} {{pool}}"),
        ),
        unit=Unit.COUNT,
    )
    yield Panel(
        title="Leases that replicas keep",
        about="Tickets whose blocks may still be kept, as far as each replica can know: it learns"
        " late that they were pulled, so it counts more than ingresses do. Growing without end:"
        " nobody releases them.",
        shape=Shape.LINES,
        queries=(
            Query(
                expr=total(series(c.HELD_LEASES, **IN_POOL), *BY_POOL, "replica"),
                legend="{{replica}}",
            ),
        ),
        unit=Unit.COUNT,
    )
    yield Panel(
        title="Pulls that came too late",
        about="Blocks were read after their lease and thrown away. Any: an engine stood still.",
        shape=Shape.BARS,
        runbook="BatonPullsVoid",
        queries=(
            Query(
                expr=total(increase(c.VOID_PULLS, BAR_WINDOW, **IN_POOL), *BY_POOL),
                legend="{{job}} {{pool}}",
            ),
        ),
        unit=Unit.COUNT,
        steps=NONE_IS_GOOD,
    )
    yield Panel(
        title="Expired leases",
        about="Nobody pulled or released them in time. Any: an ingress died, or decode stalls.",
        shape=Shape.BARS,
        runbook="BatonLeasesExpire",
        queries=(
            Query(
                expr=total(increase(c.EXPIRED_LEASES, BAR_WINDOW, **IN_POOL), *BY_POOL),
                legend="{{job}} {{pool}}",
            ),
        ),
        unit=Unit.COUNT,
        steps=NONE_IS_GOOD,
    )
