"""Patches of private names: they prove themselves, are turned off, or refuse."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from baton.domain.errors import EngineStartFailed
from baton.runtime import patch_guards as guards
from baton.runtime.patch import (
    MissingAttribute,
    Patch,
    Target,
    coupling_report,
    replace_attributes,
    wrap_attribute,
)
from baton.runtime.process.log_events import FIELDS

TARGET = Target(package="vendor", names=("vendor.private",), tested=("1.2", "1.3"))


def made(*, reason: str | None = None, is_required: bool = False) -> Patch:
    return Patch(
        name="a patch",
        target=TARGET,
        guard=lambda: reason,
        apply=replace_attributes,
        fallback="it is slower",
        is_required=is_required,
    )


def test_a_patch_that_fits_is_applied() -> None:
    owner = SimpleNamespace(method=1)
    assert made().install(owner, method=2)
    assert owner.method == 2


def test_a_patch_that_does_not_fit_is_turned_off_with_one_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner = SimpleNamespace(method=1)
    with caplog.at_level(logging.WARNING):
        assert not made(reason="no method").install(owner, method=2)
    assert owner.method == 1
    (record,) = caplog.records
    assert record.getMessage() == "patch_turned_off"
    assert vars(record)[FIELDS] == {
        "patch": "a patch",
        "reason": "no method",
        "expected": "vendor 1.2 or 1.3",
        "fallback": "it is slower",
    }


def test_a_required_patch_that_does_not_fit_refuses() -> None:
    with pytest.raises(EngineStartFailed) as refused:
        made(reason="no method", is_required=True).install(SimpleNamespace(method=1), method=2)
    assert str(refused.value) == (
        "a patch: got no method, expected the private names of vendor 1.2 or 1.3;"
        " install vendor 1.2 or 1.3; it is slower"
    )


def test_an_object_without_the_attribute_is_left_as_it_is() -> None:
    owner = SimpleNamespace(method=1)
    assert not made().install(owner, method=2, another=3)
    assert vars(owner) == {"method": 1}
    with pytest.raises(EngineStartFailed, match="SimpleNamespace without another"):
        made(is_required=True).install(owner, another=3)


@pytest.mark.parametrize("error", [ImportError("gone"), AttributeError("gone"), TypeError("gone")])
def test_a_guard_that_fails_says_why(error: Exception) -> None:
    def guard() -> str | None:
        raise error

    patch = Patch(name="a patch", target=TARGET, guard=guard, fallback="it is slower")
    assert patch.find_incompatibility() == f"{type(error).__name__}: gone"
    assert not patch.fits()
    (row,) = coupling_report([patch])
    assert row["problem"] == patch.find_incompatibility()
    assert not row["is_required"]


def test_only_a_function_that_is_there_is_wrapped() -> None:
    owner = SimpleNamespace(method=lambda: 1)
    wrap_attribute(owner, "method", lambda method: lambda: method() + 1)
    assert owner.method() == 2
    with pytest.raises(MissingAttribute):
        wrap_attribute(owner, "another", lambda method: method)


HERE = "json.encoder:JSONEncoder"


@pytest.mark.parametrize(
    ("guard", "problem"),
    [
        (guards.has(f"{HERE}.encode", "json:dumps"), None),
        (guards.takes(f"{HERE}.encode", "o"), None),
        (guards.takes(f"{HERE}.encode", "text"), "JSONEncoder.encode without parameters text"),
        (guards.takes_only(f"{HERE}.encode", "self", "o", "more"), None),
        (guards.takes_only(f"{HERE}.encode", "self"), "JSONEncoder.encode with parameters o"),
        (guards.takes_exactly(f"{HERE}.encode", "self", "o"), None),
        (guards.takes_exactly(f"{HERE}.encode", "o"), "JSONEncoder.encode takes self, o"),
        (guards.uses(f"{HERE}.encode", "iterencode"), None),
        (guards.uses(f"{HERE}.encode", "ensure"), "JSONEncoder.encode does not use ensure"),
        (guards.has_fields("baton.runtime.patch:Target", "names"), None),
        (guards.has_fields("baton.runtime.patch:Target", "text"), "Target without fields text"),
        (guards.contains_text("json.encoder", "class JSONEncoder"), None),
        (guards.contains_text("json.encoder", "not here"), "json.encoder without 'not here'"),
        (guards.all_of(guards.has("json:dumps"), guards.uses(f"{HERE}.encode", "x")), ...),
    ],
)
def test_a_guard_says_what_is_not_as_it_was(guard: guards.Guard, problem: object) -> None:
    found = guard()
    assert found == problem or (problem is ... and found is not None)


@pytest.mark.parametrize("place", ["no.such.module:name", "json:no_such_name"])
def test_a_place_that_is_gone_is_an_error(place: str) -> None:
    with pytest.raises((ImportError, AttributeError)):
        guards.resolve(place)
