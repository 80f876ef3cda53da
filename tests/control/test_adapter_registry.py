"""Adapters that are added while a deployment runs: which may be, and how they are called."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.control.fleet.adapter_registry import (
    AdapterRegistry,
    AdapterRejection,
    AdapterRules,
    LoadRequest,
    load_adapter,
    remove_drained,
    replica_adapters,
    requestable_adapters,
    unload_adapter,
    unserved_adapters,
)

RULES = AdapterRules(
    max=3,
    max_per_tenant=2,
    paths=("/adapters", "acme/"),
    reserved_names=frozenset({"tiny", "ada"}),
)
ONE = {"tiny": RULES}
TWO = {"tiny": RULES, "large": replace(RULES, reserved_names=frozenset({"large"}))}
OFF = {"tiny": replace(RULES, max=0)}


def order(name: str = "sql", source: str = "/adapters/sql", **more: object) -> LoadRequest:
    return LoadRequest(**{"name": name, "source": source, "tenant": "ops"} | more)  # type: ignore[arg-type]


def added(
    registry: AdapterRegistry, what: LoadRequest, rules: dict[str, AdapterRules] = ONE
) -> AdapterRegistry:
    found = load_adapter(registry, what, rules)
    assert isinstance(found, AdapterRegistry), found
    return found


def removed(registry: AdapterRegistry, name: str) -> AdapterRegistry:
    found = unload_adapter(registry, name, ONE)
    assert isinstance(found, AdapterRegistry), found
    return found


def test_an_adapter_is_offered_under_its_name_and_needed_under_a_key_of_its_own() -> None:
    registry = added(AdapterRegistry(), order())
    assert list(requestable_adapters(registry, "tiny", ONE)) == ["sql"]
    assert replica_adapters(registry, "tiny", ONE) == {"sql@1": "/adapters/sql"}


def test_one_that_is_unloaded_is_offered_no_more_and_needed_until_it_has_drained() -> None:
    registry = removed(added(AdapterRegistry(), order()), "sql")
    assert requestable_adapters(registry, "tiny", ONE) == {}
    assert replica_adapters(registry, "tiny", ONE) == {"sql@1": "/adapters/sql"}
    gone = remove_drained(registry, ["sql@1"])
    assert replica_adapters(gone, "tiny", ONE) == {}
    assert gone.version > registry.version
    assert remove_drained(gone, ["sql@1"]) is gone


def test_one_that_is_offered_is_never_taken_for_one_that_has_drained() -> None:
    registry = added(AdapterRegistry(), order())
    assert remove_drained(registry, ["sql@1"]) is registry


def test_loading_in_place_drains_the_one_before() -> None:
    registry = added(AdapterRegistry(), order())
    registry = added(registry, order(source="/adapters/new", in_place=True))
    assert requestable_adapters(registry, "tiny", ONE)["sql"].source == "/adapters/new"
    assert [adapter.key for adapter in registry.draining] == ["sql@1"]
    assert len(replica_adapters(registry, "tiny", ONE)) == 2


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
def test_an_unloadable_adapter_is_refused_with_the_reason(
    what: LoadRequest, status: int, why: str
) -> None:
    found = load_adapter(added(AdapterRegistry(), order("had", "acme/had")), what, ONE)
    assert isinstance(found, AdapterRejection)
    assert found.status == status
    assert why in found.reason


def test_with_several_models_the_one_that_is_meant_is_named() -> None:
    refused = load_adapter(AdapterRegistry(), order(), TWO)
    assert isinstance(refused, AdapterRejection)
    assert "base_model_name" in refused.reason
    registry = added(AdapterRegistry(), order(model="large"), TWO)
    assert requestable_adapters(registry, "tiny", TWO) == {}
    assert list(requestable_adapters(registry, "large", TWO)) == ["sql"]
    taken = load_adapter(registry, order("ada", model="large"), TWO)
    assert isinstance(taken, AdapterRejection)


def test_where_none_may_be_loaded_it_says_what_to_set() -> None:
    found = load_adapter(AdapterRegistry(), order(), OFF)
    assert isinstance(found, AdapterRejection)
    assert "models.tiny.runtime_adapters.max" in found.reason


def test_a_tenant_and_a_model_have_as_many_as_they_may() -> None:
    registry = added(added(AdapterRegistry(), order("a")), order("b"))
    refused = load_adapter(registry, order("c"), ONE)
    assert isinstance(refused, AdapterRejection)
    assert "max_per_tenant" in refused.reason
    registry = added(registry, order("c", tenant="other"))
    refused = load_adapter(registry, order("d", tenant="third"), ONE)
    assert isinstance(refused, AdapterRejection)
    assert "runtime_adapters.max " in refused.reason
    # One that drains has given up its place, and one that is replaced needs no other.
    added(removed(registry, "a"), order("d"))
    added(registry, order("c", in_place=True, tenant="other"))


def test_unknown_adapters_and_those_of_the_file_cannot_be_unloaded() -> None:
    for name, status in (("sql", 404), ("ada", 400)):
        found = unload_adapter(AdapterRegistry(), name, ONE)
        assert isinstance(found, AdapterRejection)
        assert found.status == status


def test_a_name_that_the_file_has_is_the_files_and_that_is_said() -> None:
    registry = added(AdapterRegistry(), order())
    later = {"tiny": replace(RULES, reserved_names=RULES.reserved_names | {"sql"})}
    assert requestable_adapters(registry, "tiny", later) == {}
    assert [
        (adapter.name, "file" in reason) for adapter, reason in unserved_adapters(registry, later)
    ] == [("sql", True)]
    assert list(unserved_adapters(registry, ONE)) == []


@pytest.mark.parametrize("later", [OFF, {"other": RULES}])
def test_an_adapter_that_its_model_no_longer_allows_is_kept_and_not_served(
    later: dict[str, AdapterRules],
) -> None:
    registry = added(AdapterRegistry(), order())
    assert requestable_adapters(registry, "tiny", later) == {}
    assert replica_adapters(registry, "tiny", later) == {}
    assert [adapter.name for adapter, _ in unserved_adapters(registry, later)] == ["sql"]


STEPS = st.lists(
    st.tuples(st.sampled_from(["load", "in place", "unload", "drained"]), st.sampled_from("abcde")),
    max_size=30,
)


@given(STEPS)
def test_keys_are_never_used_twice_and_quotas_hold(steps: list[tuple[str, str]]) -> None:
    registry, seen = AdapterRegistry(), set[str]()
    for what, name in steps:
        before = registry
        found: AdapterRegistry | AdapterRejection
        if what == "unload":
            found = unload_adapter(registry, name, ONE)
        elif what == "drained":
            found = remove_drained(
                registry, [adapter.key for adapter in registry.draining if adapter.name == name]
            )
        else:
            found = load_adapter(registry, order(name, in_place=what == "in place"), ONE)
        if isinstance(found, AdapterRejection):
            continue
        registry = found
        new = {adapter.key for adapter in registry.adapters} - {
            adapter.key for adapter in before.adapters
        }
        assert not new & seen
        seen |= new
        assert registry is before or registry.version == before.version + 1
        assert len(requestable_adapters(registry, "tiny", ONE)) <= 2
        names = [adapter.name for adapter in registry.adapters if not adapter.draining]
        assert len(names) == len(set(names))
