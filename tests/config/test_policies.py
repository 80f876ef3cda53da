"""From `router.policy` to a placer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from baton.config import DeploymentConfig, load_config
from baton.config.derive.policies import build_placer, load_chooser, router_rng
from baton.config.schema import scaling as schema_scaling
from baton.config.schema.routing import MOVED_POLICIES, Policy
from baton.domain.errors import ConfigInvalid
from baton.domain.fleet import Role
from baton.domain.handoff import LegKind, PlacementDecision
from baton.policy.placement.chooser import Candidate
from baton.policy.placement.port import PlacementQuery
from baton.policy.placement.predicted import NAME
from baton.policy.placement.simple import POLICIES
from tests.fakes.timings import placement_context, replica_view

HERE = __name__
QUERY = PlacementQuery(prompt_tokens=100)
LEAST = ["version=1", "model={source: tiny}", "pools.main.role=mixed"]


def config(**router: str) -> DeploymentConfig:
    sets = [f"router.{key}={value}" for key, value in router.items()]
    return load_config([], sets=[*LEAST, *sets]).config


def choose_last(
    query: PlacementQuery, kind: LegKind, candidates: Sequence[Candidate], rng: Random
) -> int:
    """A user's own."""
    del query, kind, rng
    return len(candidates) - 1


class ChoosesFirst:
    """A user's own with a state."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(
        self, query: PlacementQuery, kind: LegKind, candidates: Sequence[Candidate], rng: Random
    ) -> int:
        del query, kind, candidates, rng
        self.asked += 1
        return 0


class WantsArguments:
    def __init__(self, something: int) -> None:
        self.something = something


async def chooses_late(
    query: PlacementQuery, kind: LegKind, candidates: Sequence[Candidate], rng: Random
) -> int:
    del query, kind, candidates, rng
    return 0


def takes_too_little(query: PlacementQuery) -> int:
    del query
    return 0


NOT_CALLABLE = 7


def decided(of: DeploymentConfig) -> PlacementDecision:
    views = [replica_view(replica_id) for replica_id in "abc"]
    placed = build_placer(of, router_rng(of, "c")).place(QUERY, placement_context(*views))
    assert isinstance(placed, PlacementDecision)
    return placed


def test_the_names_in_a_configuration_are_those_of_the_policies() -> None:
    assert {str(known) for known in Policy} == {NAME, *POLICIES}


@pytest.mark.parametrize("policy", [str(known) for known in Policy])
def test_every_policy_can_be_had_by_its_name_and_says_it_in_its_decisions(policy: str) -> None:
    assert decided(config(policy=policy)).policy == policy


@pytest.mark.parametrize("place", MOVED_POLICIES.values())
def test_a_policy_from_outside_the_package_is_found_and_asked(place: str) -> None:
    assert decided(config(policy=place)).policy == place


@pytest.mark.parametrize(
    ("key", "name", "place"),
    [
        *(("router.policy", name, place) for name, place in MOVED_POLICIES.items()),
        *(
            ("autoscaler.policy", name, place)
            for name, place in schema_scaling.MOVED_POLICIES.items()
        ),
    ],
)
def test_a_name_of_a_policy_that_was_built_in_once_says_where_it_is_now(
    key: str, name: str, place: str
) -> None:
    with pytest.raises(ConfigInvalid, match=f"got '{name}', expected .* any more: write '{place}'"):
        load_config([], sets=[*LEAST, f"{key}={name}"])


def test_a_function_of_the_users_own_is_found_and_asked() -> None:
    placed = decided(config(policy=f"{HERE}:choose_last"))
    assert (placed.route.decode_replica_id, placed.policy) == ("c", f"{HERE}:choose_last")


def test_a_class_of_the_users_own_is_made_first() -> None:
    assert decided(config(policy=f"{HERE}:ChoosesFirst")).route.decode_replica_id == "a"
    assert load_chooser(f"{HERE}:ChoosesFirst") is not load_chooser(f"{HERE}:ChoosesFirst")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (
            "no.such.module:choose",
            "ModuleNotFoundError: No module named 'no', expected a module that",
        ),
        (f"{HERE}:choose_lost", "AttributeError: module"),
        (f"{HERE}:WantsArguments", "TypeError: WantsArguments.__init__"),
        (f"{HERE}:NOT_CALLABLE", "got int 'NOT_CALLABLE', expected a function of (query, kind, "),
        (f"{HERE}:takes_too_little", "got function 'takes_too_little', expected a function of"),
        (f"{HERE}:chooses_late", "got function 'chooses_late', expected a function of"),
    ],
)
def test_code_that_cannot_be_used_is_said_before_the_first_request(path: str, why: str) -> None:
    of = config(policy=path)
    with pytest.raises(ConfigInvalid) as error:
        build_placer(of, Random(1))
    (finding,) = error.value.problems
    assert finding.startswith(f"router.policy: cannot use {path!r}: {why}")


def test_a_module_that_breaks_on_import_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_policy.py").write_text("raise RuntimeError('on purpose')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigInvalid, match="RuntimeError: on purpose"):
        load_chooser("broken_policy:choose")


def test_coordinators_draw_differently_from_one_seed_and_each_always_the_same() -> None:
    seed_0, seed_1 = config(), config(seed="1")
    draws = [
        router_rng(seed_0, "a").random(),
        router_rng(seed_0, "b").random(),
        router_rng(seed_1, "a").random(),
    ]
    assert len(set(draws)) == 3
    assert router_rng(seed_0, "a").random() == draws[0]


def test_the_preference_of_the_configuration_reaches_the_policy() -> None:
    views = [replica_view("p", Role.PREFILL), replica_view("d", Role.DECODE)]
    for policy in ("predicted", "random", f"{HERE}:choose_last"):
        of = config(policy=policy, disaggregate="never")
        placed = build_placer(of, Random(1)).place(QUERY, placement_context(*views))
        assert isinstance(placed, PlacementDecision)
        assert placed.route.reason == "disaggregation_off"
