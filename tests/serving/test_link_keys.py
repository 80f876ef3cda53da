"""A deployment's link keys: made once, found by all, and shown by nobody."""

from __future__ import annotations

import threading

import pytest

from baton.domain.errors import EngineStartFailed
from baton.runtime.link.keys import FleetKeys
from baton.serving.link_keys import fleet_keys


class Kept:
    """A store as Ray's head has one."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        with self._lock:
            if key in self.kept and not overwrite:
                return False
            self.kept[key] = value
            return True

    def get(self, key: str) -> bytes | None:
        return self.kept.get(key)

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.kept if key.startswith(prefix)]

    def delete(self, key: str, *, by_prefix: bool = False) -> None:
        for found in self.keys(key) if by_prefix else [key]:
            del self.kept[found]


class Raced(Kept):
    """A store in which another process is a moment earlier."""

    def __init__(self, first: FleetKeys) -> None:
        super().__init__()
        self._first = first

    def put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        super().put(key, self._first.written(), overwrite=True)
        return super().put(key, value, overwrite=overwrite)


def test_whoever_asks_later_gets_what_the_first_one_made() -> None:
    store = Kept()
    made = fleet_keys(store)
    assert fleet_keys(store) == made
    assert fleet_keys(Kept()) != made


def test_of_two_who_make_them_at_once_both_use_the_first_ones() -> None:
    first = FleetKeys.make()
    assert fleet_keys(Raced(first)) == first


def test_a_deployment_that_begins_anew_has_new_ones() -> None:
    store = Kept()
    before = fleet_keys(store)
    store.delete("", by_prefix=True)  # as `forget_all` does
    assert fleet_keys(store) != before


def test_keys_that_cannot_be_read_are_refused_and_not_shown() -> None:
    store = Kept()
    fleet_keys(store)
    (name,) = store.kept
    store.kept[name] = b'["a-secret", "another"]'
    with pytest.raises(EngineStartFailed, match="link key") as caught:
        fleet_keys(store)
    assert "a-secret" not in f"{caught.value} {caught.value.args} {caught.value.__cause__}"
