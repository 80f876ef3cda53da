"""Several coordinators with the same old views must not all choose the same replica.

Measured by what each replica is assigned of one burst, and in each tenth of a second of a steady
load.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest

from baton.config import DeploymentConfig
from baton.config.load import load_config
from baton.config.simulation.to_scenario import to_scenario
from baton.domain.commands import RequestRecord
from baton.domain.fleet import Role
from baton.domain.request import Request
from baton.domain.value import evolve
from baton.engine.sim import SimSettings
from baton.simulator.fleet.fleet import FleetOptions, VirtualFleet
from baton.simulator.fleet.replica import ReportingOptions
from baton.simulator.scenario import Scenario, SimulationResult, simulate
from baton.simulator.workloads.trace import Trace, TraceRequest
from benchmarks._arrivals import open_loop, poisson_times
from tests.simulator.fleets import JOINED_S, coordinator, fleet, requests

REPLICAS = 8
BURST = 40
ENGINE = SimSettings(max_len_tokens=4096, kv_blocks=8192)
STALE = ReportingOptions(report_interval_s=0.05, load_delay_s=0.05)
"""A snapshot is 50 ms old when it arrives, and up to 100 ms when the next one comes."""
FRESH = ReportingOptions(report_interval_s=0.001, load_delay_s=0.0)


def with_coordinators(
    count: int, reporting: ReportingOptions, seed: int, replicas: int
) -> VirtualFleet:
    return fleet(
        replicas={Role.MIXED: replicas},
        engine=ENGINE,
        options=FleetOptions(seed=seed, reporting=reporting),
        coordinators=[coordinator(100 * seed + number) for number in range(count)],
    )


def send_burst(made: VirtualFleet, burst: Iterable[Request]) -> None:
    """Half a millisecond apart, to one coordinator after the other."""
    begun_at_s = made.timeline.now_s
    for number, request in enumerate(burst):
        at_s = begun_at_s + number * 0.0005
        sent = evolve(request, arrived_at_s=at_s)
        made.timeline.call_at(at_s, partial(made.send, sent, number % len(made.ingresses)))


def assigned(records: Iterable[RequestRecord], sent: Iterable[Request]) -> Counter[str]:
    ids = {request.request_id for request in sent}
    return Counter(
        record.routes[0].decode_replica_id for record in records if record.request_id in ids
    )


@pytest.mark.parametrize("seed", range(2))
def test_of_a_burst_no_replica_gets_much_more_than_its_share(seed: int) -> None:
    made = with_coordinators(4, STALE, seed, REPLICAS)
    burst = requests(BURST, prompt_tokens=1000, max_tokens=50, seed=seed)
    send_burst(made, burst)
    made.run(until_ended=BURST, until_s=60.0)
    got = assigned(made.records, burst)
    assert len(got) == REPLICAS
    assert max(got.values()) <= 7  # 5 on average


@pytest.mark.parametrize("seed", range(2))
def test_a_replica_that_has_just_joined_is_not_run_over(seed: int) -> None:
    made = with_coordinators(4, STALE, seed, REPLICAS - 1)
    before = requests(BURST, prompt_tokens=1000, max_tokens=120, seed=seed)
    send_burst(made, before)
    made.run(until_s=JOINED_S + 0.3)
    made.add_replica("new", ENGINE, role=Role.MIXED, pool="mixed")
    made.run(until_s=JOINED_S + 0.5)
    burst = [
        evolve(request, request_id=f"b-{request.request_id}") for request in requests(BURST, seed=9)
    ]
    send_burst(made, burst)
    made.run(until_ended=2 * BURST, until_s=60.0)
    # With all 80 spread evenly it would have 10; each coordinator alone would give it no more.
    assert 5 <= assigned(made.records, burst)["new"] <= 16


def worst_windows(made: VirtualFleet, seed: int) -> float:
    """Under a steady load, the mean over all 100 ms of the most that any replica was assigned.

    As a multiple of what it would be with the same tokens spread evenly.
    """
    rng = random.Random(seed)
    sent = [
        evolve(request, prompt_token_ids=request.prompt_token_ids[: rng.randint(100, 1000)])
        for request in requests(600, prompt_tokens=1000, max_tokens=30, seed=seed)
    ]
    times_s = poisson_times(200.0, len(sent), rng, start_s=JOINED_S)
    count = len(made.ingresses)
    open_loop(made, sent, times_s, lambda request: int(request.request_id[1:]) % count)
    made.run(until_ended=len(sent), until_s=60.0)
    windows: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for record in made.records:
        window = windows[int(record.arrived_at_s / 0.1)]
        window[record.routes[0].decode_replica_id] += record.prompt_tokens
    ratios = [max(w.values()) / (sum(w.values()) / REPLICAS) for w in windows.values()]
    return sum(ratios) / len(ratios)


def test_four_coordinators_with_old_views_spread_work_like_one_with_fresh_views() -> None:
    fresh = worst_windows(with_coordinators(1, FRESH, 1, REPLICAS), 1)
    stale = worst_windows(with_coordinators(4, STALE, 1, REPLICAS), 1)
    assert stale <= 1.5 * fresh


# ---------- prompts that all begin alike are served no later than by a policy that looks at nothing
CONFIG = Path(__file__).parents[2] / "configs" / "sim.yaml"
BLOCK_TOKENS = 16
WARM_FRACTION = 0.4
"""Of a load: by then who needs the prefix has computed it once. In turn that takes as many requests
as there are replicas; here it takes until so much is forgone that a copy pays."""
WHOLE_MEAN = 1.2
"""At most, of a policy that looks at nothing: the mean of all requests, the cold ones too."""
MEAN, P90, P99 = 1.08, 1.2, 1.5
"""The same, of requests to warm caches. Where engines are idle most of the time, requests in turn
never meet, and of those that go where they cost least some do: the slowest few wait longer."""
FIXED_PREFILL = (
    '{"prefill_step":"16.5ms","prefill_rate":"65861/s","decode_step":"5.74ms","decode_kv":"54ms",'
    '"decode_kv_quadratic":"25.7ms","transfer_rate":"25GB/s","kv_blocks":4096}'
)
SLOW = '{"prefill_rate":"8k/s","decode_step":"20ms","transfer_rate":"25GB/s","kv_blocks":8192}'
FAST = '{"prefill_rate":"20k/s","decode_step":"8ms","transfer_rate":"25GB/s","kv_blocks":8192}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Prompts of one or several shared prefixes, each with a short end of its own."""

    rate_per_s: float = 25.0
    prefix_tokens: int = 2048
    own_tokens: int = 512
    output_tokens: int = 64
    prefixes: int = 1
    changes: bool = False
    """Half way through, all prefixes are others from then on."""
    requests: int = 800

    @property
    def duration_s(self) -> float:
        return self.requests / self.rate_per_s

    def trace(self, seed: int) -> Trace:
        rng = random.Random(seed)
        own_blocks = -(-self.own_tokens // BLOCK_TOKENS)
        prefix_blocks = self.prefix_tokens // BLOCK_TOKENS
        requests, at_s, fresh = [], rng.expovariate(self.rate_per_s), 1_000_000
        while at_s < self.duration_s:
            later = self.changes and at_s >= self.duration_s / 2
            which = rng.randrange(self.prefixes) + (self.prefixes if later else 0)
            shared = range(which * prefix_blocks, (which + 1) * prefix_blocks)
            ids = (*shared, *range(fresh, fresh + own_blocks))
            tokens = prefix_blocks * BLOCK_TOKENS + self.own_tokens
            requests.append(TraceRequest(at_s, tokens, self.output_tokens, ids))
            fresh += own_blocks
            at_s += rng.expovariate(self.rate_per_s)
        return Trace(name="hot", requests=tuple(requests), block_tokens=BLOCK_TOKENS)


SPLIT = {"prefill": 4, "decode": 4}


def configured(
    *, engine: str, replicas: Mapping[str, int] = SPLIT, policy: str = "predicted"
) -> DeploymentConfig:
    pools = ",".join(
        f'"{role}":{{"role":"{role}","replicas":{{"min":{count},"initial":{count},"max":{count}}}}}'
        for role, count in replicas.items()
    )
    disaggregate = "auto" if policy == "predicted" else "always"
    sets = (
        f"pools={{{pools}}}",
        f"model.engine.sim={engine}",
        "model.max_len=16384",
        f"router.policy={policy}",
        f"router.disaggregate={disaggregate}",
    )
    return load_config([CONFIG], sets=sets).config


def scenario_of(
    *, engine: str, replicas: Mapping[str, int] = SPLIT, policy: str = "predicted"
) -> Scenario:
    return to_scenario(configured(engine=engine, replicas=replicas, policy=policy)).scenario


SEEDS = range(3)
"""Of traces: the slowest few of a single one are a matter of luck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Times to first token, as means over traces."""

    whole_mean_s: float
    mean_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, run: SimulationResult) -> Waits:
        """All but the first once caches are warm."""
        assert all(outcome.ok for outcome in run.outcomes)
        all_s = [outcome.ttft_s for outcome in run.outcomes]
        warm_s = sorted(all_s[int(WARM_FRACTION * len(all_s)) :])
        p90_s, p99_s = (warm_s[int(share * len(warm_s))] for share in (0.9, 0.99))
        return cls(whole_mean_s=fmean(all_s), mean_s=fmean(warm_s), p90_s=p90_s, p99_s=p99_s)

    @classmethod
    def mean_of(
        cls, load: Load, engine: str, replicas: Mapping[str, int], policy: str = "predicted"
    ) -> Waits:
        made = scenario_of(engine=engine, replicas=replicas, policy=policy)
        waits = [cls.of(simulate(made, load.trace(seed))) for seed in SEEDS]
        return cls(
            whole_mean_s=fmean([wait.whole_mean_s for wait in waits]),
            mean_s=fmean([wait.mean_s for wait in waits]),
            p90_s=fmean([wait.p90_s for wait in waits]),
            p99_s=fmean([wait.p99_s for wait in waits]),
        )


def assert_no_later_than_round_robin(load: Load, engine: str, replicas: Mapping[str, int]) -> None:
    found = Waits.mean_of(load, engine, replicas)
    blind = Waits.mean_of(load, engine, replicas, "round-robin")
    assert found.whole_mean_s <= WHOLE_MEAN * blind.whole_mean_s
    assert found.mean_s <= MEAN * blind.mean_s
    assert found.p90_s <= P90 * blind.p90_s
    assert found.p99_s <= P99 * blind.p99_s


LOADS = {
    "as-reported": (Load(), SLOW),
    "fixed-prefill-cost": (Load(own_tokens=128), FIXED_PREFILL),
    "full-caches": (Load(prefix_tokens=1024, output_tokens=256), FIXED_PREFILL),
    "two-prefixes": (Load(prefixes=2), SLOW),
}
MORE_LOADS = {
    "seldom": (Load(rate_per_s=5.0), SLOW),
    "half-the-rate": (Load(rate_per_s=12.0), SLOW),
    "near-saturation": (Load(rate_per_s=60.0, requests=1600), FAST),
    "short-prefix": (Load(prefix_tokens=512), SLOW),
    "long-prefix": (Load(prefix_tokens=8192), SLOW),
    "short-end": (Load(own_tokens=64), FAST),
    "long-end": (Load(prefix_tokens=3000, own_tokens=900), FAST),
    "prefix-changes": (Load(changes=True), SLOW),
    "two-prefixes-change": (Load(prefixes=2, changes=True), FAST),
}


@pytest.mark.parametrize("name", LOADS)
def test_prompts_with_one_beginning_wait_no_longer_than_when_sent_in_turn(name: str) -> None:
    load, engine = LOADS[name]
    assert_no_later_than_round_robin(load, engine, SPLIT)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_LOADS)
def test_they_wait_no_longer_at_any_rate_and_length(name: str) -> None:
    load, engine = MORE_LOADS[name]
    assert_no_later_than_round_robin(load, engine, SPLIT)


FLEETS: Mapping[str, tuple[Mapping[str, int], float]] = {
    "1P+1D": ({"prefill": 1, "decode": 1}, 5.0),
    "2P+6D": ({"prefill": 2, "decode": 6}, 12.0),
    "6P+2D": ({"prefill": 6, "decode": 2}, 25.0),
    "8 mixed": ({"mixed": 8}, 25.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "rate_per_s", "prefix_tokens"),
    [
        pytest.param(*fleet, tokens, id=f"{name}, {tokens}")
        for name, fleet in FLEETS.items()
        for tokens in (512, 2048, 8192)
    ],
)
def test_they_wait_no_longer_on_fleets_of_any_shape(
    replicas: Mapping[str, int], rate_per_s: float, prefix_tokens: int
) -> None:
    load = Load(rate_per_s=rate_per_s, prefix_tokens=prefix_tokens)
    assert_no_later_than_round_robin(load, SLOW, replicas)


def test_a_simulated_coordinator_knows_as_little_of_its_engines_as_a_live_one() -> None:
    config = load_config([CONFIG], sets=(f"model.engine.sim={SLOW}",)).config
    assert to_scenario(config).scenario.priors == {}


def test_handoffs_hardly_depend_on_initial_knowledge_of_engines() -> None:
    made, trace = scenario_of(engine=SLOW), Load().trace(0)
    learned = simulate(made, trace)
    told = simulate(replace(made, priors=None), trace)
    share = [run.handoffs / len(run.outcomes) for run in (learned, told)]
    assert share[0] == pytest.approx(share[1], abs=0.1)
    assert min(share) > 0.75
