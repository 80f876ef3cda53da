"""Twice as much as a fleet can carry: goodput, wasted work, rejections, and tenants' shares.

*Theory of operation.* A fleet of five replicas, three that prefill and two that decode, serves
made-up conversations in virtual time (everything here is simulated). First the plateau is found:
the most requests per second that are served in time without admission, over a few rates. Then twice
that rate is offered, with admission and without: with the plain bounded queue everybody goes to an
engine, and what is late was computed for nothing. The same with a load whose bottleneck is decode,
where an admission by the present load swings; with a premium class of a sixth of the load; and
with three tenants of weights 1, 2 and 4 that ask for as much each.

With admission prompts wait at the coordinator, where priorities and shares count, and a step
computes one or two. Without it steps are fuller. So the fixed time of a step with prompts lowers
goodput most with admission.

Requests that arrive in the first seconds, and in the last ones, are not counted.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean

from baton.control.state.limits import CoordinatorLimits
from baton.control.state.service_rules import ServiceRules
from baton.domain.commands import RequestRecord
from baton.domain.fleet import Role
from baton.domain.request import Phase
from baton.domain.slo import Slo
from baton.domain.tenant import Tenant
from baton.perf.hardware.accelerators import Dtype
from baton.policy.admission.decision import AdmissionOptions, AdmissionPolicy
from baton.policy.admission.slo_classes import SloClasses
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.simulator.fleet.plans import PoolPlan, Scenario
from baton.simulator.scenario import Simulation
from baton.simulator.workloads.trace import Trace, TraceRequest
from benchmarks._slo_fleets import engine_settings

SLO = Slo(ttft_s=1.0, tpot_s=0.05)
PREMIUM = replace(SLO, name="premium", priority=1)
SPAN_S = 40.0
WARM_UP_S = 8.0
COOL_DOWN_S = 4.0
RATES_PER_S = (25.0, 30.0, 35.0)
"""Around what three such replicas can prefill: 2,000 tokens take 95 ms in a full step of 8,192, and
128 ms alone, for a step with prompts has a fixed time of 21 ms."""
DECODE_BOUND_RATES_PER_S = (28.0, 32.0, 36.0, 40.0, 44.0)
"""Around what one such replica can decode at 20 ms a token, with what stays on the other three."""
LIMITS = CoordinatorLimits(
    max_requests=100_000,
    max_queued_requests=1024,
    first_token_timeout_s=60.0,
    transfer_deadline_s=60.0,
    stall_timeout_s=60.0,
)
"""So that without admission nothing ends but by itself: its requests are late, not lost."""
_WINDOW_S = 1.0
_RAMP_UP_S = 6.0
"""Until those that count have taken the places of those that came before: longer than most live."""
_MAX_LAG_WINDOWS = 11
"""Windows: half of a run."""
_SEEDS = range(5)
_REJECTED = frozenset({Phase.SHED, Phase.EVICTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMix:
    """What requests are like: lognormal lengths, cut off."""

    mean_prompt_tokens: float = 2000.0
    mean_output_tokens: float = 200.0
    sigma: float = 0.7
    max_prompt_tokens: int = 8000
    """Longer ones could not have their first token in time on an idle fleet."""
    slo: Slo = SLO

    def draw_lengths(self, rng: random.Random) -> tuple[int, int]:
        """Of one request's prompt and answer."""
        prompt, output = (
            max(1, round(rng.lognormvariate(math.log(mean) - self.sigma**2 / 2, self.sigma)))
            for mean in (self.mean_prompt_tokens, self.mean_output_tokens)
        )
        return min(prompt, self.max_prompt_tokens), min(output, 1000)


CONVERSATION = RequestMix()
DECODE_BOUND = RequestMix(
    mean_prompt_tokens=500.0, mean_output_tokens=200.0, slo=replace(SLO, tpot_s=0.02)
)
"""Bound by decode on three replicas and one, with streams that live for about four seconds: a small
part of a run, so that it is not all beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLoad:
    """One tenant's part of the load."""

    tenant: str
    share: float
    slo_class: str | None = None


SINGLE_TENANT = (TenantLoad(tenant="default", share=1.0),)


def generate_load(
    rate_per_s: float,
    seed: int,
    *,
    mix: RequestMix = CONVERSATION,
    tenant_loads: Sequence[TenantLoad] = SINGLE_TENANT,
) -> Trace:
    """Poisson arrivals; the same seed makes the same requests at every rate."""
    rng = random.Random(f"overload/{seed}")  # noqa: S311 - a load, not a secret
    cumulative_shares = list(accumulate(other.share for other in tenant_loads))
    at_s, requests = 0.0, []
    while (at_s := at_s + rng.expovariate(rate_per_s)) < SPAN_S:
        prompt, output = mix.draw_lengths(rng)
        (tenant_load,) = rng.choices(tenant_loads, cum_weights=cumulative_shares)
        requests.append(
            TraceRequest(
                at_s, prompt, output, tenant=tenant_load.tenant, slo_class=tenant_load.slo_class
            )
        )
    return Trace(name="overload", requests=tuple(requests))


def run_fleet(
    trace: Trace,
    rule: AdmissionPolicy,
    *,
    tenants: Mapping[str, Tenant] | None = None,
    replicas: tuple[int, int] = (3, 2),
    slo: Slo = SLO,
) -> list[RequestRecord]:
    """Let the fleet serve a load; the records of those that count."""
    settings = engine_settings("H100-SXM", Dtype.FP8, max_batched_tokens=8192, cold_start_s=0.0)
    options = PredictedOptions(ttft_slo_s=slo.ttft_s, tpot_slo_s=slo.tpot_s)
    rules = ServiceRules(
        slos=SloClasses(classes={"default": slo, "premium": PREMIUM}),
        tenants=tenants or {},
        admission=AdmissionOptions(policy=rule),
    )
    pools = (
        PoolPlan(name="prefill", role=Role.PREFILL, replicas=replicas[0], settings=settings),
        PoolPlan(name="decode", role=Role.DECODE, replicas=replicas[1], settings=settings),
    )
    simulation = Simulation(
        Scenario(pools=pools, placer=lambda: PredictedPlacer(options), limits=LIMITS, rules=rules),
        trace,
    )
    records: list[RequestRecord] = []
    simulation.fleet.add_end_listener(records.append)
    simulation.run(trace.to_requests(declared_tokens=1024, classes=rules.slos.classes))
    return [record for record in records if WARM_UP_S <= record.arrived_at_s < SPAN_S - COOL_DOWN_S]


# ------------------------------------------------------------------ figures


def goodput(records: Sequence[RequestRecord]) -> float:
    """Requests per second that were served in time."""
    return sum(record.slo_result.is_good for record in records) / (SPAN_S - WARM_UP_S - COOL_DOWN_S)


def good_tokens(records: Sequence[RequestRecord]) -> float:
    """Tokens per second, in and out, of those."""
    tokens = sum(
        record.prompt_tokens + record.output_tokens
        for record in records
        if record.slo_result.is_good
    )
    return tokens / (SPAN_S - WARM_UP_S - COOL_DOWN_S)


def wasted_prefill_fraction(records: Sequence[RequestRecord]) -> float:
    """Of the prompt tokens that were computed, those of requests that got no good end."""
    computed = [
        (record.prompt_tokens, record.slo_result.is_good) for record in records if record.routes
    ]
    return sum(n for n, good in computed if not good) / max(1, sum(n for n, _ in computed))


def reject_p99_s(records: Sequence[RequestRecord]) -> float:
    """From arrival to refusal, of nearly all that were rejected; 0 when none was."""
    times_s = sorted(
        record.ended_at_s - record.arrived_at_s for record in records if record.outcome in _REJECTED
    )
    return times_s[int(0.99 * len(times_s))] if times_s else 0.0


def attainment(records: Sequence[RequestRecord]) -> float:
    """The share that was served in time."""
    return sum(record.slo_result.is_good for record in records) / max(1, len(records))


def oscillation_amplitude(spans_s: Sequence[tuple[float, float]]) -> float:
    """How much the number of requests in a phase swings: half its range over its mean.

    `spans_s` are when each was in that phase. The range is that from the 5th to the 95th percentile
    of means over windows of a second. Where few are in a phase at a time, chance alone swings: see
    `oscillation_regularity`.
    """
    means = sorted(_mean_count_by_window(spans_s))
    low, high = means[int(0.05 * len(means))], means[int(0.95 * len(means))]
    return (high - low) / 2 / max(1e-9, fmean(means))


def oscillation_regularity(runs: Sequence[Sequence[tuple[float, float]]]) -> float:
    """How regularly the number of requests in a phase swings, from 0 for chance to 1.

    An admission by the present load fills a pool and starves it in turn, and one period later
    all is as it was. So this is the greatest autocorrelation of means over windows of a second,
    once it has fallen to nothing: before that it only says that requests stay for a while. It is
    the mean over runs, for one alone has few windows.
    """
    series = [_mean_count_by_window(spans_s) for spans_s in runs]
    autocorrelations = [
        fmean(_autocorrelation(series_item, lag) for series_item in series)
        for lag in range(1, _MAX_LAG_WINDOWS + 1)
    ]
    first_zero_lag = next(
        (lag for lag, value in enumerate(autocorrelations) if value <= 0), len(autocorrelations)
    )
    return max(0.0, *autocorrelations[first_zero_lag:], 0.0)


def _mean_count_by_window(spans_s: Sequence[tuple[float, float]]) -> list[float]:
    """How many were in a phase, as means over windows."""
    means = []
    for number in range(int(WARM_UP_S + _RAMP_UP_S), int(SPAN_S - COOL_DOWN_S)):
        begin_s, end_s = number * _WINDOW_S, (number + 1) * _WINDOW_S
        means.append(sum(max(0.0, min(end_s, b) - max(begin_s, a)) for a, b in spans_s))
    return means


def _autocorrelation(values: Sequence[float], lag: int) -> float:
    mean = fmean(values)
    deviations = [value - mean for value in values]
    variance_sum = sum(deviation * deviation for deviation in deviations)
    return sum(a * b for a, b in zip(deviations, deviations[lag:], strict=False)) / max(
        1e-9, variance_sum
    )


def phase_spans(records: Sequence[RequestRecord]) -> dict[str, list[tuple[float, float]]]:
    """When requests were in each phase."""
    prefill = [
        (record.arrived_at_s + record.queue_wait_s, record.prefill_done_at_s)
        for record in records
        if record.prefill_done_at_s is not None
    ]
    decode = [
        (record.first_token_at_s, record.ended_at_s)
        for record in records
        if record.first_token_at_s is not None
    ]
    return {"prefill": prefill, "decode": decode}


# ------------------------------------------------------------------ parts


def find_plateau(
    seed: int, mix: RequestMix, rates_per_s: Sequence[float], replicas: tuple[int, int]
) -> tuple[float, float, float]:
    """The most that is served in time without admission: the rate offered, requests, tokens.

    Raises:
        ValueError: The best rate is the lowest or the highest of those that are tried.
    """
    candidates = []
    for rate_per_s in rates_per_s:
        trace = generate_load(rate_per_s, seed, mix=mix)
        records = run_fleet(trace, AdmissionPolicy.BOUNDED, replicas=replicas, slo=mix.slo)
        candidates.append((goodput(records), rate_per_s, good_tokens(records)))
    best, rate_per_s, tokens = max(candidates)
    check_plateau(rate_per_s, rates_per_s)
    return rate_per_s, best, tokens


def check_plateau(rate_per_s: float, rates_per_s: Sequence[float]) -> None:
    """Raise ValueError when the plateau may lie beyond the rates that were tried."""
    if not min(rates_per_s) < rate_per_s < max(rates_per_s):
        raise ValueError(
            f"overload: the best rate is {rate_per_s:g} per s, expected one between"
            f" {min(rates_per_s):g} and {max(rates_per_s):g}; try rates around it"
        )


def run_at_double_rate(
    seed: int, mix: RequestMix, rates_per_s: Sequence[float], replicas: tuple[int, int]
) -> dict[str, float]:
    """Twice the plateau's rate, with admission and without."""
    rate_per_s, best, tokens = find_plateau(seed, mix, rates_per_s, replicas)
    metrics = {"plateau_rate_per_s": rate_per_s, "plateau_goodput_per_s": best}
    trace = generate_load(2 * rate_per_s, seed, mix=mix)
    for name, rule in (("", AdmissionPolicy.PREDICTED), ("_off", AdmissionPolicy.BOUNDED)):
        records = run_fleet(trace, rule, replicas=replicas, slo=mix.slo)
        spans_by_phase = phase_spans(records)
        metrics |= {
            f"goodput_fraction{name}": goodput(records) / best,
            f"good_tokens_fraction{name}": good_tokens(records) / tokens,
            f"wasted_prefill_fraction{name}": wasted_prefill_fraction(records),
            f"reject_p99_s{name}": reject_p99_s(records),
            **{
                f"{phase}_swing{name}": oscillation_amplitude(spans)
                for phase, spans in spans_by_phase.items()
            },
        }
    return metrics


def regularity_by_phase(
    rate_per_s: float, mix: RequestMix, replicas: tuple[int, int]
) -> dict[str, float]:
    """Whether phases swing regularly under twice the load, with admission, over several runs."""
    runs = [
        phase_spans(
            run_fleet(
                generate_load(2 * rate_per_s, seed, mix=mix),
                AdmissionPolicy.PREDICTED,
                replicas=replicas,
                slo=mix.slo,
            )
        )
        for seed in _SEEDS
    ]
    return {
        f"{phase}_rhythm": oscillation_regularity([run[phase] for run in runs]) for phase in runs[0]
    }


def measure_premium(rate_per_s: float, seed: int) -> dict[str, float]:
    """A premium class of a sixth of the load, at twice the plateau."""
    tenant_loads = (
        TenantLoad(tenant="gold", share=1 / 6, slo_class="premium"),
        TenantLoad(tenant="free", share=5 / 6),
    )
    tenants = {"gold": Tenant(name="gold", slo="premium"), "free": Tenant(name="free")}
    trace = generate_load(2 * rate_per_s, seed, tenant_loads=tenant_loads)
    metrics = {}
    for name, rule in (("", AdmissionPolicy.PREDICTED), ("_off", AdmissionPolicy.BOUNDED)):
        records = run_fleet(trace, rule, tenants=tenants)
        for tenant in tenants:
            label = "premium" if tenant == "gold" else "free"
            tenant_records = [record for record in records if record.tenant == tenant]
            metrics[f"{label}_attainment{name}"] = attainment(tenant_records)
    return metrics


def measure_fairness(rate_per_s: float, seed: int) -> dict[str, float]:
    """Three tenants of weights 1, 2 and 4, each of which asks for as much: the share of each.

    Three times the plateau in all, so that even the largest share, 4/7, is less than what is asked.
    """
    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    tenant_loads = tuple(TenantLoad(tenant=name, share=1.0) for name in weights)
    tenants = {name: Tenant(name=name, weight=weight) for name, weight in weights.items()}
    records = run_fleet(
        generate_load(3 * rate_per_s, seed, tenant_loads=tenant_loads),
        AdmissionPolicy.PREDICTED,
        tenants=tenants,
    )
    gpu_s_by_tenant: Counter[str] = Counter()
    for record in records:
        gpu_s_by_tenant[record.tenant] += record.gpu_s  # type: ignore[assignment]  # a counter of seconds
    total, weight_sum = sum(gpu_s_by_tenant.values()), sum(weights.values())
    shares = {
        name: gpu_s_by_tenant[name] / total / (weights[name] / weight_sum) for name in weights
    }
    metrics = {f"share_of_weight_{name}": share for name, share in shares.items()}
    return metrics | {"fairness_error": max(abs(share - 1) for share in shares.values())}


def compute_metrics(seed: int = 0) -> dict[str, float]:
    """All figures of overload, simulated."""
    conversation_metrics = run_at_double_rate(seed, CONVERSATION, RATES_PER_S, (3, 2))
    rate_per_s = conversation_metrics["plateau_rate_per_s"]
    conversation_metrics |= regularity_by_phase(rate_per_s, CONVERSATION, (3, 2))
    decode_bound_metrics = run_at_double_rate(seed, DECODE_BOUND, DECODE_BOUND_RATES_PER_S, (3, 1))
    decode_bound_metrics |= regularity_by_phase(
        decode_bound_metrics["plateau_rate_per_s"], DECODE_BOUND, (3, 1)
    )
    return {
        "overload_goodput_fraction": conversation_metrics.pop("goodput_fraction"),
        "wasted_prefill_fraction": conversation_metrics.pop("wasted_prefill_fraction"),
        **measure_premium(rate_per_s, seed),
        **measure_fairness(rate_per_s, seed),
        **{f"overload_{name}": value for name, value in conversation_metrics.items()},
        **{f"overload_decode_bound_{name}": value for name, value in decode_bound_metrics.items()},
    }
