"""What operators are told of scaling, and what a person reads of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cli.explain.explain_scale import report_lines
from baton.config import load_config
from baton.control.autoscaling.autoscaler import Override
from baton.control.autoscaling.observer import Observer
from baton.domain.demand import CoordinatorReport, DemandTotals, Tally
from baton.domain.errors import ConfigInvalid
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.policy.scaling.actions import (
    AutoscalerTick,
    FlipReplicas,
    ScalingDecision,
    StartReplicas,
)
from baton.policy.scaling.desired import ScalingReason
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.runtime.ports import Clock
from baton.serving.controller.serve_fleet import (
    ClusterControllerStore,
    decode_overrides,
    encode_overrides,
)
from baton.serving.ray.serve_control import DeploymentState
from baton.serving.scaling.plan import ScalingPlan, observer_options, scaling_plan
from baton.serving.scaling.reports import (
    class_rows,
    demand_row,
    override_rows,
    pool_rows,
    tick_rows,
)
from tests.serving.scaled_fleet import Clock as OwnClock


def decision(pool: str = "decode", have: int = 2, want: int = 2) -> ScalingDecision:
    return ScalingDecision(
        pool=pool,
        current_replicas=have,
        target_replicas=want,
        desired_replicas=want,
        reason=ScalingReason.FORECAST,
        detail="decode needs 2.1 now",
        inputs={"output_tokens_per_s": 1234.5, "horizon_s": float("inf")},
    )


def tick(at_s: float = 90.0, *decisions: ScalingDecision, held: str = "") -> AutoscalerTick:
    actions = tuple(
        StartReplicas(pool=other.pool, replicas=other.target_replicas - other.current_replicas)
        for other in decisions
        if other.target_replicas > other.current_replicas
    )
    return AutoscalerTick(
        at_s=at_s, policy="slo", decisions=decisions, actions=actions, paused_reason=held
    )


def lines(*ticks: AutoscalerTick) -> list[str]:
    rows = tick_rows(ticks, 100.0)
    return list(report_lines(json.loads(json.dumps({"autoscaler": "slo", "ticks": rows}))))


def report(at_s: float, judged: int, good: int, name: str = "i") -> CoordinatorReport:
    counts = {"evaluated": judged, "good": good, "ttft_met": 8 * judged // 10, "tpot_met": judged}
    row = Tally("default", "acme", "m", "decode", **counts)
    return CoordinatorReport(
        coordinator_id=name, at_s=at_s, demand=DemandTotals(requests=judged), tallies=(row,)
    )


# ----------------------------------------------------------------------- what is reported


def test_a_tick_is_told_by_its_age_with_everything_it_was_decided_from() -> None:
    (row,) = tick_rows([tick(90.0, decision(want=4))], 100.0)
    assert (row["age_s"], row["policy"], row["actions"]) == (10.0, "slo", ["start 2 of decode"])
    assert row["pools"] == [
        {
            "pool": "decode",
            "have": 2,
            "desired": 4,
            "asked": 4,
            "reason": "forecast",
            "detail": "decode needs 2.1 now",
            "clipped_by": "",
            "flips": {},
            "inputs": {"output_tokens_per_s": 1234.5, "horizon_s": None},
        }
    ]


def test_a_flip_is_told_with_its_role() -> None:
    flip = FlipReplicas(pool="prefill", replicas=1, role=Role.DECODE)
    (row,) = tick_rows([AutoscalerTick(at_s=0.0, policy="slo", actions=(flip,))], 1.0)
    assert row["actions"] == ["flip 1 of prefill to decode"]


def test_a_class_fares_as_all_ingresses_together_saw_it() -> None:
    observer = Observer(slos={"default": Slo(ttft_s=1.0)})
    for at_s in (0.0, 10.0):
        judged = int(at_s)
        reports = [report(at_s, 10 * judged, 9 * judged), report(at_s, 0, 0, "idle")]
        observer.observe(reports, {}, at_s)
    (row,) = class_rows({"default": Slo(ttft_s=1.0)}, observer, 10.0)
    assert (row["attainment"], row["requests_per_s"], row["goodput_per_s"]) == (0.9, 10.0, 9.0)
    assert (row["ttft_s"], row["tpot_s"], row["target"]) == (1.0, None, 0.99)
    assert (row["ttft_attainment"], row["tpot_attainment"]) == (0.8, 1.0)


def test_a_class_without_requests_attains_nothing_and_misses_nothing() -> None:
    (row,) = class_rows({"batch": Slo(name="batch")}, Observer(), 10.0)
    assert (row["attainment"], row["window_attainment"], row["requests_per_s"]) == (None, None, 0.0)


def test_a_pool_is_told_as_serve_and_ingresses_see_it() -> None:
    pool = PoolObservation(
        name="decode", role=Role.DECODE, prefill=1, decode=2, starting=1, draining=1
    )
    states = {"decode": DeploymentState(name="decode", target=4, running=3, message="no GPU")}
    seen = Observation(at_s=0.0, window_s=1.0, pools={"decode": pool})
    (row,) = pool_rows(seen, states)
    assert [row[name] for name in ("desired", "ready", "starting", "draining")] == [4, 3, 1, 1]
    assert (row["prefill"], row["decode"], row["trouble"]) == (1, 2, "no GPU")


def test_a_pool_of_which_nothing_was_seen_is_told_as_serve_has_it() -> None:
    state = DeploymentState(name="decode", target=2, running=1, starting=1)
    assert pool_rows(None, {"decode": state}) == [
        {"pool": "decode", "desired": 2, "ready": 1, "starting": 1, "draining": 0}
    ]
    assert demand_row(None) is None


def test_an_override_is_reported_with_its_remaining_time() -> None:
    rows = override_rows(
        {"b": Override(replicas=1), "a": Override(replicas=3, until_s=130.0)}, 100.0
    )
    assert rows == [
        {"pool": "a", "replicas": 3, "remaining_s": 30.0},
        {"pool": "b", "replicas": 1, "remaining_s": None},
    ]


# ----------------------------------------------------------------------- what a person reads


def test_ticks_that_decide_the_same_are_read_once() -> None:
    told = lines(*(tick(at_s, decision()) for at_s in (80.0, 85.0, 90.0)))
    assert told[2] == "20 s to 10 s ago, 3 ticks, policy slo: no change"
    assert len([line for line in told if "policy slo" in line]) == 1


def test_a_tick_that_does_something_is_read_apart_with_its_reason_and_inputs() -> None:
    told = lines(tick(80.0, decision()), tick(90.0, decision(want=4)))
    assert told[-5:] == [
        "10 s ago, policy slo: start 2 of decode",
        "  pool    have  desired  reason    bounds  flips",
        "  decode  2     4        forecast  -       -",
        "  decode: decode needs 2.1 now",
        "    output_tokens_per_s 1234, horizon_s -",
    ]


def test_a_paused_tick_has_a_reason() -> None:
    assert lines(tick(held="ingress: no answer"))[2].endswith("paused, because ingress: no answer")


def test_a_loop_that_has_not_ticked_says_so() -> None:
    assert lines() == ["autoscaler: slo", "no tick yet"]


# -------------------------------------------------------------------- the plan


SIM = Path(__file__).parents[2] / "configs" / "sim.yaml"


def plan(*sets: str) -> ScalingPlan:
    return scaling_plan(load_config([SIM], env={}, sets=sets).config)


@pytest.mark.parametrize(
    ("sets", "automatic", "text"),
    [
        ((), False, "none is configured, pools follow overrides only"),
        (("autoscaler.policy=static",), False, "static, pools follow overrides only"),
        (("autoscaler.policy=slo",), True, "slo"),
        (("autoscaler.policy=slo", "autoscaler.dry_run=true"), True, "slo, dry run"),
    ],
)
def test_only_a_configured_autoscaler_that_is_not_static_scales(
    sets: tuple[str, ...], *, automatic: bool, text: str
) -> None:
    found = plan(*sets)
    assert (found.is_automatic, found.description) == (automatic, text)


def test_a_pool_without_scaling_has_its_size_as_desire() -> None:
    pool = PoolObservation(name="decode", role=Role.DECODE, decode=5, starting=1)
    seen = Observation(at_s=0.0, window_s=1.0, pools={"decode": pool})
    assert plan().policy().desired(seen)["decode"].replicas == 6


def test_a_policy_of_the_users_own_that_is_not_there_is_said() -> None:
    with pytest.raises(ConfigInvalid, match="no_such_module"):
        plan("autoscaler.policy=no_such_module:make").policy()


def test_a_pool_is_seen_as_serve_has_it_in_the_role_that_it_is_configured_for() -> None:
    sets = ("pools.prefill.parallel.tp=2", "pools.prefill.resources.gpus=2")
    config = load_config([SIM.with_name("gpu-example.yaml")], env={}, sets=sets).config
    state = DeploymentState(name="prefill", target=3, running=2, starting=1, stopping=1)
    seen = scaling_plan(config).pool_state(state)
    assert (seen.role, seen.gpus_per_replica) == (Role.PREFILL, 2.0)
    assert (seen.running, seen.starting, seen.draining) == (2, 1, 1)


@pytest.mark.parametrize(("interval", "window_s"), [("2s", 30.0), ("10s", 150.0), ("100ms", 5.0)])
def test_shorter_intervals_take_rates_over_less_time(interval: str, window_s: float) -> None:
    options = observer_options(plan("autoscaler.policy=slo", f"autoscaler.interval={interval}"))
    assert options.window_s == pytest.approx(window_s)


# -------------------------------------------------------------------- overrides of operators


_OVERRIDE = st.builds(
    Override,
    replicas=st.integers(min_value=0, max_value=100),
    until_s=st.none() | st.floats(min_value=0, max_value=1e6),
)


@given(
    overrides=st.dictionaries(st.text(max_size=5), _OVERRIDE, max_size=3),
    now_s=st.floats(min_value=0, max_value=1e6),
    other_s=st.floats(min_value=0, max_value=1e6),
)
def test_an_override_ends_at_the_same_moment_by_another_clock(
    overrides: dict[str, Override], now_s: float, other_s: float
) -> None:
    wall_s = 1.7e9
    kept = encode_overrides(overrides, now_s=now_s, wall_s=wall_s)
    read = decode_overrides(kept, now_s=other_s, wall_s=wall_s + 10.0)
    assert read.keys() == overrides.keys()
    for pool, override in overrides.items():
        assert read[pool].replicas == override.replicas
        if override.until_s is None:
            assert read[pool].until_s is None
        else:
            remaining_s = (read[pool].until_s or 0.0) - other_s
            assert remaining_s == pytest.approx(override.until_s - now_s - 10.0, abs=1e-3)


def test_nothing_kept_is_nothing_said() -> None:
    assert decode_overrides(None, now_s=1.0, wall_s=2.0) == {}


@pytest.mark.parametrize("data", [b"", b"[]", b'{"a": 1}', b'{"a": {"replicas": null}}', b"\xff"])
def test_unreadable_notes_are_reported(data: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        decode_overrides(data, now_s=1.0, wall_s=2.0)


class Notes:
    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def load(self, name: str) -> bytes | None:
        return self.kept.get(name)

    def save(self, name: str, data: bytes) -> None:
        self.kept[name] = data


def memory(notes: Notes, owner: str, clock: Clock | None = None) -> ClusterControllerStore:
    return ClusterControllerStore(
        notes, owner=owner, clock=clock or OwnClock(), wall_now_s=lambda: 1e9
    )


async def test_the_newest_controller_is_the_one_that_acts() -> None:
    notes = Notes()
    first, second = memory(notes, "first"), memory(notes, "second")
    await first.claim()
    assert await first.is_owner()
    await second.claim()
    assert await second.is_owner()
    assert not await first.is_owner()


async def test_a_claim_says_whether_another_controller_acted_before() -> None:
    notes = Notes()
    first, second = memory(notes, "first"), memory(notes, "second")
    assert [await first.claim(), await first.claim(), await second.claim()] == [False, False, True]


async def test_a_store_that_has_forgotten_everything_is_claimed_again() -> None:
    notes = Notes()
    first = memory(notes, "first")
    await first.claim()
    notes.kept.clear()
    assert await first.is_owner()
    assert not await memory(notes, "second").is_owner()


async def test_notes_of_one_controller_are_read_by_the_next() -> None:
    notes, later = Notes(), OwnClock()
    later.at_s = 7.0
    await memory(notes, "first").save({"decode": Override(replicas=3, until_s=160.0)})
    read = await memory(notes, "second", later).load()
    assert read == {"decode": Override(replicas=3, until_s=67.0)}


async def test_overrides_that_cannot_be_read_are_lost_and_pools_scaled_all_the_same() -> None:
    notes = Notes()
    await memory(notes, "first").save({"decode": Override(replicas=3)})
    notes.kept = dict.fromkeys(notes.kept, b"garbage")
    assert await memory(notes, "second").load() == {}
