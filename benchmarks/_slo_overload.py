"""Twice as much as a fleet can carry: what is served in time, wasted, refused, and to whom it goes.

*Theory of operation.* A fleet of five replicas, three that prefill and two that decode, serves
made-up conversations in virtual time (everything here is simulated). First the plateau is found:
the most requests per second that are served in time without admission, over a few rates. Then twice
that rate is offered, with admission and without: with the plain bounded queue everybody goes to an
engine, and what is late was computed for nothing. The same with a load whose bottleneck is decode,
where a door that goes by the present load swings; with a premium class of a sixth of the load; and
with three tenants of weights 1, 2 and 4 that ask for as much each.

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
from baton.policy.admission.decision import AdmissionOptions, AdmissionRule
from baton.policy.admission.slo_classes import SloBook
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.simulator.fleet.plans import PoolPlan, Scenario
from baton.simulator.scenario import Stage
from baton.simulator.workloads.trace import Trace, TraceRequest
from benchmarks._slo_fleets import engine

SLO = Slo(ttft_s=1.0, tpot_s=0.05)
PREMIUM = replace(SLO, name="premium", priority=1)
SPAN_S = 40.0
WARM_UP_S = 8.0
COOL_DOWN_S = 4.0
RATES_PER_S = (25.0, 30.0, 35.0)
"""Around what three such replicas can prefill: 2,000 tokens take about 75 ms."""
FAST_RATES_PER_S = (32.0, 40.0, 44.0, 48.0, 52.0)
"""Around what one such replica can decode at 20 ms a token, with what stays on the other three."""
LIMITS = CoordinatorLimits(
    max_requests=100_000,
    max_queued=1024,
    first_token_s=60.0,
    transfer_s=60.0,
    stall_s=60.0,
)
"""So that without admission nothing ends but by itself: its requests are late, not lost."""
_WINDOW_S = 1.0
_FILL_S = 6.0
"""Until those that count have taken the places of those that came before: longer than most live."""
_LAGS = 11
"""Windows: half of a run."""
_SEEDS = range(5)
_REFUSED = frozenset({Phase.SHED, Phase.EVICTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What requests are like: lognormal lengths, cut off."""

    mean_prompt_tokens: float = 2000.0
    mean_output_tokens: float = 200.0
    spread: float = 0.7
    most_prompt_tokens: int = 8000
    """Longer ones could not have their first token in time on an idle fleet."""
    slo: Slo = SLO

    def lengths(self, rng: random.Random) -> tuple[int, int]:
        """Of one request's prompt and answer."""
        prompt, output = (
            max(1, round(rng.lognormvariate(math.log(mean) - self.spread**2 / 2, self.spread)))
            for mean in (self.mean_prompt_tokens, self.mean_output_tokens)
        )
        return min(prompt, self.most_prompt_tokens), min(output, 1000)


CONVERSATION = Mix()
FAST_STREAMS = Mix(
    mean_prompt_tokens=500.0, mean_output_tokens=200.0, slo=replace(SLO, tpot_s=0.02)
)
"""Bound by decode on three replicas and one, with streams that live for about four seconds: a small
part of a run, so that it is not all beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks:
    """One tenant's part of the load."""

    tenant: str
    share: float
    slo_class: str | None = None


EVERYBODY = (Asks(tenant="default", share=1.0),)


def load(
    rate_per_s: float, seed: int, *, mix: Mix = CONVERSATION, by: Sequence[Asks] = EVERYBODY
) -> Trace:
    """Poisson arrivals; the same seed makes the same requests at every rate."""
    rng = random.Random(f"overload/{seed}")  # noqa: S311 - a load, not a secret
    shares = list(accumulate(one.share for one in by))
    at_s, requests = 0.0, []
    while (at_s := at_s + rng.expovariate(rate_per_s)) < SPAN_S:
        prompt, output = mix.lengths(rng)
        (who,) = rng.choices(by, cum_weights=shares)
        requests.append(
            TraceRequest(at_s, prompt, output, tenant=who.tenant, slo_class=who.slo_class)
        )
    return Trace(name="overload", requests=tuple(requests))


def served(
    trace: Trace,
    rule: AdmissionRule,
    *,
    tenants: Mapping[str, Tenant] | None = None,
    replicas: tuple[int, int] = (3, 2),
    slo: Slo = SLO,
) -> list[RequestRecord]:
    """Let the fleet serve a load; the records of those that count."""
    settings = engine("H100-SXM", Dtype.FP8, budget=8192, cold_start_s=0.0)
    options = PredictedOptions(ttft_slo_s=slo.ttft_s, tpot_slo_s=slo.tpot_s)
    rules = ServiceRules(
        slos=SloBook(classes={"default": slo, "premium": PREMIUM}),
        tenants=tenants or {},
        admission=AdmissionOptions(rule=rule),
    )
    pools = (
        PoolPlan(name="prefill", role=Role.PREFILL, replicas=replicas[0], settings=settings),
        PoolPlan(name="decode", role=Role.DECODE, replicas=replicas[1], settings=settings),
    )
    stage = Stage(
        Scenario(pools=pools, placer=lambda: PredictedPlacer(options), limits=LIMITS, rules=rules),
        trace,
    )
    records: list[RequestRecord] = []
    stage.fleet.watch(records.append)
    stage.run(trace.asked(declared_tokens=1024, classes=rules.slos.classes))
    return [one for one in records if WARM_UP_S <= one.arrived_at_s < SPAN_S - COOL_DOWN_S]


# ------------------------------------------------------------------ figures


def goodput(records: Sequence[RequestRecord]) -> float:
    """Requests per second that were served in time."""
    return sum(one.judgement.good for one in records) / (SPAN_S - WARM_UP_S - COOL_DOWN_S)


def good_tokens(records: Sequence[RequestRecord]) -> float:
    """Tokens per second, in and out, of those."""
    tokens = sum(one.prompt_tokens + one.output_tokens for one in records if one.judgement.good)
    return tokens / (SPAN_S - WARM_UP_S - COOL_DOWN_S)


def wasted(records: Sequence[RequestRecord]) -> float:
    """Of the prompt tokens that were computed, those of requests that got no good end."""
    computed = [(one.prompt_tokens, one.judgement.good) for one in records if one.routes]
    return sum(n for n, good in computed if not good) / max(1, sum(n for n, _ in computed))


def reject_p99_s(records: Sequence[RequestRecord]) -> float:
    """From arrival to refusal, of nearly all that were refused; 0 when nobody was."""
    times_s = sorted(
        one.ended_at_s - one.arrived_at_s for one in records if one.outcome in _REFUSED
    )
    return times_s[int(0.99 * len(times_s))] if times_s else 0.0


def attainment(records: Sequence[RequestRecord]) -> float:
    """The share that was served in time."""
    return sum(one.judgement.good for one in records) / max(1, len(records))


def swing(spans_s: Sequence[tuple[float, float]]) -> float:
    """How much the number of requests in a phase swings: half its range over its mean.

    `spans_s` are when each was in that phase. The range is that from the 5th to the 95th percentile
    of means over windows of a second. Where few are in a phase at a time, chance alone swings: see
    `rhythm`.
    """
    means = sorted(_in_windows(spans_s))
    low, high = means[int(0.05 * len(means))], means[int(0.95 * len(means))]
    return (high - low) / 2 / max(1e-9, fmean(means))


def rhythm(runs: Sequence[Sequence[tuple[float, float]]]) -> float:
    """How regularly the number of requests in a phase swings, from 0 for chance to 1.

    A door that goes by what it sees now fills a pool and starves it in turn, and one period later
    all is as it was. So this is the greatest autocorrelation of means over windows of a second,
    once it has fallen to nothing: before that it only says that requests stay for a while. It is
    the mean over runs, for one alone has few windows.
    """
    series = [_in_windows(spans_s) for spans_s in runs]
    alike = [fmean(_autocorrelation(one, lag) for one in series) for lag in range(1, _LAGS + 1)]
    forgotten = next((lag for lag, value in enumerate(alike) if value <= 0), len(alike))
    return max(0.0, *alike[forgotten:], 0.0)


def _in_windows(spans_s: Sequence[tuple[float, float]]) -> list[float]:
    """How many were in a phase, as means over windows."""
    means = []
    for number in range(int(WARM_UP_S + _FILL_S), int(SPAN_S - COOL_DOWN_S)):
        begin_s, end_s = number * _WINDOW_S, (number + 1) * _WINDOW_S
        means.append(sum(max(0.0, min(end_s, b) - max(begin_s, a)) for a, b in spans_s))
    return means


def _autocorrelation(values: Sequence[float], lag: int) -> float:
    centre = fmean(values)
    apart = [value - centre for value in values]
    power = sum(one * one for one in apart)
    return sum(a * b for a, b in zip(apart, apart[lag:], strict=False)) / max(1e-9, power)


def phases(records: Sequence[RequestRecord]) -> dict[str, list[tuple[float, float]]]:
    """When requests were in each phase."""
    prefill = [
        (one.arrived_at_s + one.held_s, one.prefill_done_at_s)
        for one in records
        if one.prefill_done_at_s is not None
    ]
    decode = [
        (one.first_token_at_s, one.ended_at_s)
        for one in records
        if one.first_token_at_s is not None
    ]
    return {"prefill": prefill, "decode": decode}


# ------------------------------------------------------------------ parts


def plateau(
    seed: int, mix: Mix, rates_per_s: Sequence[float], replicas: tuple[int, int]
) -> tuple[float, float, float]:
    """The most that is served in time without admission: the rate offered, requests, tokens."""
    found = []
    for rate_per_s in rates_per_s:
        trace = load(rate_per_s, seed, mix=mix)
        records = served(trace, AdmissionRule.BOUNDED, replicas=replicas, slo=mix.slo)
        found.append((goodput(records), rate_per_s, good_tokens(records)))
    best, rate_per_s, tokens = max(found)
    return rate_per_s, best, tokens


def doubled(
    seed: int, mix: Mix, rates_per_s: Sequence[float], replicas: tuple[int, int]
) -> dict[str, float]:
    """Twice the plateau's rate, with admission and without."""
    rate_per_s, best, tokens = plateau(seed, mix, rates_per_s, replicas)
    figures = {"plateau_rate_per_s": rate_per_s, "plateau_goodput_per_s": best}
    trace = load(2 * rate_per_s, seed, mix=mix)
    for name, rule in (("", AdmissionRule.PREDICTED), ("_off", AdmissionRule.BOUNDED)):
        records = served(trace, rule, replicas=replicas, slo=mix.slo)
        in_phases = phases(records)
        figures |= {
            f"goodput_fraction{name}": goodput(records) / best,
            f"good_tokens_fraction{name}": good_tokens(records) / tokens,
            f"wasted_prefill_fraction{name}": wasted(records),
            f"reject_p99_s{name}": reject_p99_s(records),
            **{f"{phase}_swing{name}": swing(spans) for phase, spans in in_phases.items()},
        }
    return figures


def rhythms(rate_per_s: float, mix: Mix, replicas: tuple[int, int]) -> dict[str, float]:
    """Whether phases swing regularly under twice the load, with admission, over several runs."""
    runs = [
        phases(
            served(
                load(2 * rate_per_s, seed, mix=mix),
                AdmissionRule.PREDICTED,
                replicas=replicas,
                slo=mix.slo,
            )
        )
        for seed in _SEEDS
    ]
    return {f"{phase}_rhythm": rhythm([run[phase] for run in runs]) for phase in runs[0]}


def premium(rate_per_s: float, seed: int) -> dict[str, float]:
    """A premium class of a sixth of the load, at twice the plateau."""
    by = (
        Asks(tenant="gold", share=1 / 6, slo_class="premium"),
        Asks(tenant="free", share=5 / 6),
    )
    tenants = {"gold": Tenant(name="gold", slo="premium"), "free": Tenant(name="free")}
    trace = load(2 * rate_per_s, seed, by=by)
    figures = {}
    for name, rule in (("", AdmissionRule.PREDICTED), ("_off", AdmissionRule.BOUNDED)):
        records = served(trace, rule, tenants=tenants)
        for tenant in tenants:
            whose = "premium" if tenant == "gold" else "free"
            own = [one for one in records if one.tenant == tenant]
            figures[f"{whose}_attainment{name}"] = attainment(own)
    return figures


def fairness(rate_per_s: float, seed: int) -> dict[str, float]:
    """Three tenants of weights 1, 2 and 4, each of which asks for as much: who got how much.

    Three times the plateau in all, so that even the largest share, 4/7, is less than what is asked.
    """
    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    by = tuple(Asks(tenant=name, share=1.0) for name in weights)
    tenants = {name: Tenant(name=name, weight=weight) for name, weight in weights.items()}
    records = served(load(3 * rate_per_s, seed, by=by), AdmissionRule.PREDICTED, tenants=tenants)
    got: Counter[str] = Counter()
    for one in records:
        got[one.tenant] += one.gpu_s  # type: ignore[assignment]  # a counter of seconds
    total, weight_sum = sum(got.values()), sum(weights.values())
    shares = {name: got[name] / total / (weights[name] / weight_sum) for name in weights}
    figures = {f"share_of_weight_{name}": share for name, share in shares.items()}
    return figures | {"fairness_error": max(abs(share - 1) for share in shares.values())}


def overload(seed: int = 0) -> dict[str, float]:
    """All figures of overload, simulated."""
    talk = doubled(seed, CONVERSATION, RATES_PER_S, (3, 2))
    rate_per_s = talk["plateau_rate_per_s"]
    talk |= rhythms(rate_per_s, CONVERSATION, (3, 2))
    fast = doubled(seed, FAST_STREAMS, FAST_RATES_PER_S, (3, 1))
    fast |= rhythms(fast["plateau_rate_per_s"], FAST_STREAMS, (3, 1))
    return {
        "overload_goodput_fraction": talk.pop("goodput_fraction"),
        "wasted_prefill_fraction": talk.pop("wasted_prefill_fraction"),
        **premium(rate_per_s, seed),
        **fairness(rate_per_s, seed),
        **{f"overload_{name}": value for name, value in talk.items()},
        **{f"overload_decode_bound_{name}": value for name, value in fast.items()},
    }
