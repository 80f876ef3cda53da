"""Adapters that are added while a deployment runs: which may be, and how they are called."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.control.fleet.adapter_registry import (
    AdapterRefusal,
    AdapterRules,
    LoadOrder,
    Registry,
    hindrances,
    loaded,
    needed,
    offered,
    unloaded,
    without,
)

RULES = AdapterRules(
    limit=3, limit_per_tenant=2, places=("/adapters", "acme/"), taken=frozenset({"tiny", "ada"})
)
ONE = {"tiny": RULES}
TWO = {"tiny": RULES, "large": replace(RULES, taken=frozenset({"large"}))}
OFF = {"tiny": replace(RULES, limit=0)}


def order(name: str = "sql", source: str = "/adapters/sql", **more: object) -> LoadOrder:
    return LoadOrder(**{"name": name, "source": source, "tenant": "ops"} | more)  # type: ignore[arg-type]


def added(registry: Registry, what: LoadOrder, rules: dict[str, AdapterRules] = ONE) -> Registry:
    found = loaded(registry, what, rules)
    assert isinstance(found, Registry), found
    return found


def removed(registry: Registry, name: str) -> Registry:
    found = unloaded(registry, name, ONE)
    assert isinstance(found, Registry), found
    return found


def test_an_adapter_is_offered_under_its_name_and_needed_under_a_key_of_its_own() -> None:
    registry = added(Registry(), order())
    assert list(offered(registry, "tiny", ONE)) == ["sql"]
    assert needed(registry, "tiny", ONE) == {"sql@1": "/adapters/sql"}


def test_one_that_is_unloaded_is_offered_no_more_and_needed_until_it_has_drained() -> None:
    registry = removed(added(Registry(), order()), "sql")
    assert offered(registry, "tiny", ONE) == {}
    assert needed(registry, "tiny", ONE) == {"sql@1": "/adapters/sql"}
    gone = without(registry, ["sql@1"])
    assert needed(gone, "tiny", ONE) == {}
    assert gone.version > registry.version
    assert without(gone, ["sql@1"]) is gone


def test_one_that_is_offered_is_never_taken_for_one_that_has_drained() -> None:
    registry = added(Registry(), order())
    assert without(registry, ["sql@1"]) is registry


def test_a_name_that_is_loaded_again_never_has_an_old_key() -> None:
    registry = added(Registry(), order())
    registry = without(removed(registry, "sql"), ["sql@1"])
    registry = added(registry, order(source="/adapters/other"))
    (key,) = needed(registry, "tiny", ONE)
    assert key != "sql@1"


def test_loading_in_place_drains_the_one_before() -> None:
    registry = added(Registry(), order())
    registry = added(registry, order(source="/adapters/new", in_place=True))
    assert offered(registry, "tiny", ONE)["sql"].source == "/adapters/new"
    assert [one.key for one in registry.draining] == ["sql@1"]
    assert len(needed(registry, "tiny", ONE)) == 2


@pytest.mark.parametrize(
    ("what", "status", "why"),
    [
        (order("tiny"), 400, "taken by the configuration file"),
        (order("ada"), 400, "taken by the configuration file"),
        (order(""), 400, "'lora_name'"),
        (order("a@1"), 400, "'lora_name'"),
        (order("x" * 129), 400, "'lora_name'"),
        (order(source=""), 400, "'lora_path'"),
        (order(source="adapters"), 400, "absolute path or a hub id"),
        (order(source="/adapters/\x00"), 400, "printable"),
        (order(source="/adapters/" + "x" * 2000), 400, "at most 1024"),
        (order(source="/etc/adapter"), 403, "runtime_adapters.paths"),
        (order(source="/adapters/../etc"), 403, "runtime_adapters.paths"),
        (order(source="/adapters"), 403, "runtime_adapters.paths"),
        (order(source="/adapters2/sql"), 403, "runtime_adapters.paths"),
        (order(source="evil/sql"), 403, "runtime_adapters.paths"),
        (order(source="acme/../sql"), 400, "hub id"),
        (order(model="other"), 404, "not served"),
        (order("had"), 400, "has already been loaded"),
    ],
)
def test_what_cannot_be_loaded_is_refused_and_says_why(
    what: LoadOrder, status: int, why: str
) -> None:
    found = loaded(added(Registry(), order("had", "acme/had")), what, ONE)
    assert isinstance(found, AdapterRefusal)
    assert found.status == status
    assert why in found.why


def test_with_several_models_the_one_that_is_meant_is_named() -> None:
    refused = loaded(Registry(), order(), TWO)
    assert isinstance(refused, AdapterRefusal)
    assert "base_model_name" in refused.why
    registry = added(Registry(), order(model="large"), TWO)
    assert offered(registry, "tiny", TWO) == {}
    assert list(offered(registry, "large", TWO)) == ["sql"]
    taken = loaded(registry, order("ada", model="large"), TWO)
    assert isinstance(taken, AdapterRefusal)


def test_where_none_may_be_loaded_it_says_what_to_set() -> None:
    found = loaded(Registry(), order(), OFF)
    assert isinstance(found, AdapterRefusal)
    assert "models.tiny.runtime_adapters.max" in found.why


def test_a_tenant_and_a_model_have_as_many_as_they_may() -> None:
    registry = added(added(Registry(), order("a")), order("b"))
    refused = loaded(registry, order("c"), ONE)
    assert isinstance(refused, AdapterRefusal)
    assert "max_per_tenant" in refused.why
    registry = added(registry, order("c", tenant="other"))
    refused = loaded(registry, order("d", tenant="third"), ONE)
    assert isinstance(refused, AdapterRefusal)
    assert "runtime_adapters.max " in refused.why
    # One that drains has given up its place, and one that is replaced needs no other.
    added(removed(registry, "a"), order("d"))
    added(registry, order("c", in_place=True, tenant="other"))


def test_what_is_not_there_cannot_be_unloaded_and_the_files_own_neither() -> None:
    for name, status in (("sql", 404), ("ada", 400)):
        found = unloaded(Registry(), name, ONE)
        assert isinstance(found, AdapterRefusal)
        assert found.status == status


def test_a_name_that_the_file_has_is_the_files_and_that_is_said() -> None:
    registry = added(Registry(), order())
    later = {"tiny": replace(RULES, taken=RULES.taken | {"sql"})}
    assert offered(registry, "tiny", later) == {}
    assert [(one.name, "file" in why) for one, why in hindrances(registry, later)] == [
        ("sql", True)
    ]
    assert list(hindrances(registry, ONE)) == []


@pytest.mark.parametrize("later", [OFF, {"other": RULES}])
def test_what_a_model_takes_no_more_is_kept_and_not_served(
    later: dict[str, AdapterRules],
) -> None:
    registry = added(Registry(), order())
    assert offered(registry, "tiny", later) == {}
    assert needed(registry, "tiny", later) == {}
    assert [one.name for one, _ in hindrances(registry, later)] == ["sql"]


STEPS = st.lists(
    st.tuples(st.sampled_from(["load", "in place", "unload", "drained"]), st.sampled_from("abcde")),
    max_size=30,
)


@given(STEPS)
def test_keys_are_never_used_twice_and_quotas_hold(steps: list[tuple[str, str]]) -> None:
    registry, seen = Registry(), set[str]()
    for what, name in steps:
        before = registry
        found: Registry | AdapterRefusal
        if what == "unload":
            found = unloaded(registry, name, ONE)
        elif what == "drained":
            found = without(registry, [one.key for one in registry.draining if one.name == name])
        else:
            found = loaded(registry, order(name, in_place=what == "in place"), ONE)
        if isinstance(found, AdapterRefusal):
            continue
        registry = found
        new = {one.key for one in registry.adapters} - {one.key for one in before.adapters}
        assert not new & seen
        seen |= new
        assert registry is before or registry.version == before.version + 1
        assert len(offered(registry, "tiny", ONE)) <= 2
        names = [one.name for one in registry.adapters if not one.draining]
        assert len(names) == len(set(names))
