"""The adapters that a replica may be asked for."""

from __future__ import annotations

import pytest

from baton.domain.errors import AdapterFailed
from baton.runtime.known_adapters import KnownAdapters


async def test_adapters_of_the_file_stay_and_others_come_and_go() -> None:
    known = KnownAdapters({"ada": "/a"})
    known.replace_added({"sql@1": "/s"})
    assert [await known.source(name) for name in ("ada", "sql@1")] == ["/a", "/s"]
    known.replace_added({})
    assert await known.source("ada") == "/a"
    with pytest.raises(AdapterFailed, match="no adapter of that name; it has ada"):
        await known.source("sql@1")


async def test_a_leg_that_is_faster_than_the_word_of_its_adapter_finds_it() -> None:
    looked = 0

    async def look() -> None:
        nonlocal looked
        looked += 1
        known.replace_added({"sql@1": "/s"})

    known = KnownAdapters(refresh=look)
    assert await known.source("sql@1") == "/s"
    assert await known.source("sql@1") == "/s"
    assert looked == 1


async def test_where_nobody_can_be_asked_the_leg_fails_and_says_so() -> None:
    async def look() -> None:
        raise ConnectionError("the store is away")

    with pytest.raises(AdapterFailed, match="the store is away"):
        await KnownAdapters(refresh=look).source("sql@1")
