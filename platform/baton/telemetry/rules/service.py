"""Alerts on requests: waits, predictions, cached prefixes, handoffs, tenants' limits, expiries.

They explain or predict bad goodput, so they are tickets. A certificate or key that is about to lock
clients out is a page. Ratios need a minimum of observations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from baton.domain.demand import AdmissionOutcome
from baton.domain.handoff import HandoffMode
from baton.telemetry.catalogue import (
    AGENT_FAILED,
    EXPIRED_LEASES,
    KEYS_EXPIRE,
    LINK_QUARANTINED,
    PLACEMENTS,
    PULL_FAILURES,
    PULLS,
    QUEUED_REQUESTS,
    REQUESTS,
    SLACK,
    TLS_EXPIRES,
    TOKENS,
    TTFT_RATIO,
    VOID_PULLS,
    Label,
    TokenKind,
)
from baton.telemetry.rules.promql import (
    ScrapeLabel,
    aggregate,
    buckets,
    join_lines,
    observations,
    on,
    parenthesize,
    series,
)
from baton.telemetry.rules.rule import Alert, Group, Record, Rule, Severity

_QUEUED: Final = "baton:held_requests:sum"
_HITS: Final = "baton:cached_prompt_tokens:ratio_rate1h"
_PROMPTS: Final = "baton:prompt_tokens:increase1h"
_POOL: Final = on(Label.POOL)
_DAY_S: Final = 86_400
_WARNING_DAYS: Final = 14
_CRITICAL_DAYS: Final = 2
_FORGOTTEN_DAYS: Final = 7


def service_groups() -> tuple[Group, ...]:
    """The alerts on requests."""
    rules = (*_queueing(), *_predictions(), *_hits(), *_handoffs(), *_tenants(), *_expiries())
    return (Group(name="baton-service", interval="30s", rules=rules),)


def _queueing() -> Iterator[Rule]:
    yield Record(name=_QUEUED, expr=aggregate("sum", series(QUEUED_REQUESTS)))
    yield Alert(
        name="BatonRequestsLate",
        severity=Severity.TICKET,
        expr=f"{aggregate('min', series(SLACK))} < 0",
        for_="5m",
        summary="requests of {{ $labels.job }} cannot meet their TTFT objective",
        description="For five minutes a request has been late, or predicted late. The most urgent"
        " request has {{ $value | humanizeDuration }} left.",
    )
    yield Alert(
        name="BatonQueueGrows",
        severity=Severity.TICKET,
        expr=join_lines(
            f"{_QUEUED} > 20",
            f"and {_QUEUED} > 1.2 * ({_QUEUED} offset 5m)",
            f"and ({_QUEUED} offset 5m) > 1.2 * ({_QUEUED} offset 10m)",
        ),
        for_="1m",
        summary="the queue at the ingresses of {{ $labels.job }} grows",
        description="{{ $value }} requests are queued: a fifth more than five minutes ago, after"
        " the same growth in the five minutes before.",
    )


def _predictions() -> Iterator[Rule]:
    ratios = buckets(TTFT_RATIO, "30m")
    by = f"{ScrapeLabel.JOB}, {Label.MODEL}, {Label.MODE}, le"
    median = f"histogram_quantile(0.5, sum by ({by}) (rate({ratios})))"
    observed = aggregate(
        "sum", f"increase({observations(TTFT_RATIO, '30m')})", Label.MODEL, Label.MODE
    )
    yield Alert(
        name="BatonPredictionOff",
        severity=Severity.TICKET,
        expr=join_lines(
            parenthesize(f"{median} > 2 or {median} < 0.5"),
            f"and {on(Label.MODEL, Label.MODE)} {observed} > 100",
        ),
        for_="30m",
        summary="TTFT predictions for {{ $labels.model }} are inaccurate"
        " ({{ $labels.job }}, mode {{ $labels.mode }})",
        description='The median of predicted over actual TTFT is {{ printf "%.2f" $value }} over'
        " half an hour. Placement, admission and the autoscaler use these predictions.",
    )


def _hits() -> Iterator[Rule]:
    cached, prompt = (
        aggregate("sum", f"increase({series(TOKENS, '1h', tokens=kind)})", Label.MODEL)
        for kind in (TokenKind.CACHED, TokenKind.PROMPT)
    )
    yield Record(name=_PROMPTS, expr=prompt)
    yield Record(name=_HITS, expr=f"{cached} / ({_PROMPTS} > 0)")
    mean_hit_ratio = f"avg_over_time({_HITS}[1d] offset 1h)"
    yield Alert(
        name="BatonHitsDropped",
        severity=Severity.TICKET,
        expr=join_lines(
            f"{_HITS} < 0.5 * {mean_hit_ratio}",
            f"and {mean_hit_ratio} > 0.1",
            f"and {_PROMPTS} > 100000",
        ),
        for_="15m",
        summary="the prefix cache hit rate of {{ $labels.model }} dropped ({{ $labels.job }})",
        description="Over the last hour {{ $value | humanizePercentage }} of prompt tokens were"
        " cached: less than half of the day before. Engines compute the other tokens again.",
    )


def _handoffs() -> Iterator[Rule]:
    pairs = aggregate("max", series(LINK_QUARANTINED), Label.SOURCE, Label.TARGET)
    yield Alert(
        name="BatonLinksQuarantined",
        severity=Severity.TICKET,
        expr=aggregate("count", f"{pairs} > 0"),
        for_="5m",
        summary="quarantined replica pairs of {{ $labels.job }}: {{ $value }}",
        description="Probes or pulls over these pairs fail, so they are unused. Requests use other"
        " pairs, or decode replicas run prefill.",
    )
    failed_agents = aggregate("max", series(AGENT_FAILED), Label.TARGET)
    yield Alert(
        name="BatonAgentBroken",
        severity=Severity.TICKET,
        expr=f"{failed_agents} > 0",
        for_="5m",
        summary="replica {{ $labels.target }} of {{ $labels.job }} cannot pull from any source",
        description="Its pulls fail from every source, and the sources serve other replicas. baton"
        " replaces such a replica within a minute: find out why this one remains.",
    )
    failed = aggregate("sum", f"increase({series(PULL_FAILURES, '10m')})", Label.POOL)
    pulled = aggregate("sum", f"increase({series(PULLS, '10m')})", Label.POOL)
    yield Alert(
        name="BatonTransfersFail",
        severity=Severity.TICKET,
        expr=join_lines(
            f"{failed} / {_POOL} ({pulled} + {_POOL} {failed}) > 0.05",
            f"and {_POOL} {failed} > 5",
        ),
        for_="5m",
        summary="pulls of KV blocks into pool {{ $labels.pool }} of {{ $labels.job }} fail",
        description="{{ $value | humanizePercentage }} of pulls failed within ten minutes. Each"
        " failure delays its request, and a replica computes the prompt again.",
    )
    expired = aggregate("sum", f"increase({series(EXPIRED_LEASES, '15m')})", Label.POOL)
    pulls = f"increase({series(PLACEMENTS, '15m', mode=HandoffMode.PULL)})"
    # A handoff may not be counted yet; 0 times the job's own leases lets a single one alert.
    handoffs = f"{aggregate('sum', pulls)} or 0 * {aggregate('max', series(EXPIRED_LEASES))}"
    yield Alert(
        name="BatonLeasesExpire",
        severity=Severity.TICKET,
        expr=join_lines(
            f"{expired} > 10",
            f"and {expired} > {on()} group_left() (0.01 * {handoffs})",
        ),
        for_="5m",
        summary="KV leases of pool {{ $labels.pool }} of {{ $labels.job }} expire without a pull",
        description='{{ printf "%.0f" $value }} leases expired within a quarter of an hour, more'
        " than one in a hundred handoffs. Their prefill was wasted.",
    )
    void_pulls = aggregate("sum", f"increase({series(VOID_PULLS, '15m')})", Label.POOL)
    yield Alert(
        name="BatonPullsVoid",
        severity=Severity.TICKET,
        expr=f"{void_pulls} > 0",
        for_="1m",
        summary="pool {{ $labels.pool }} of {{ $labels.job }} pulled KV blocks after lease expiry",
        description='{{ printf "%.0f" $value }} pulls were void within a quarter of an hour. Their'
        " blocks were discarded, so responses stay correct; each prompt was computed again.",
    )


def _tenants() -> Iterator[Rule]:
    barred, ended = (
        aggregate("sum", f"increase({selected})", Label.TENANT)
        for selected in (
            series(REQUESTS, "30m", outcome=AdmissionOutcome.CLIENT_ERROR),
            series(REQUESTS, "30m"),
        )
    )
    yield Alert(
        name="BatonTenantLimited",
        severity=Severity.TICKET,
        expr=join_lines(
            f"{barred} / {on(Label.TENANT)} {ended} > 0.1",
            f"and {on(Label.TENANT)} {barred} > 50",
        ),
        for_="15m",
        summary="tenant {{ $labels.tenant }} of {{ $labels.job }} exceeds its limits",
        description="{{ $value | humanizePercentage }} of its requests within half an hour were"
        " rejected: over its limits, not permitted, or too long. Attainment excludes them.",
    )


def _expiries() -> Iterator[Rule]:
    certificate = aggregate("min", series(TLS_EXPIRES))
    keys = aggregate("min", series(KEYS_EXPIRE), Label.TENANT)

    def before(days: int) -> str:
        # A tenant whose keys expired long ago calls no more.
        recent = f"({keys} > {-_FORGOTTEN_DAYS * _DAY_S})"
        return f"{certificate} < {days * _DAY_S}\nor {recent} < {days * _DAY_S}"

    subject = (
        "the {{ with $labels.tenant }}last API key of tenant {{ . }}{{ else }}certificate{{ end }}"
        " of {{ $labels.job }}"
    )
    description = (
        "It expires in {{ $value | humanizeDuration }}; below 0, it has expired. Clients reject"
        " the certificate, or get 401 for the key."
    )
    yield Alert(
        name="BatonCredentialsExpire",
        severity=Severity.TICKET,
        expr=join_lines(
            parenthesize(before(_WARNING_DAYS)), "unless", parenthesize(before(_CRITICAL_DAYS))
        ),
        for_="1h",
        summary=f"{subject} expires within {_WARNING_DAYS} days",
        description=description,
    )
    yield Alert(
        name="BatonCredentialsExpireSoon",
        severity=Severity.PAGE,
        expr=before(_CRITICAL_DAYS),
        for_="5m",
        summary=f"{subject} expires within {_CRITICAL_DAYS} days, or has expired",
        description=description,
    )
