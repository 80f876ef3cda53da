"""What is shown while processes start, and what ends a start."""

from __future__ import annotations

import pytest

from baton.domain.errors import EngineStartFailed
from baton.serving.replica.start_reports import StartReporter, StartWatch
from tests.fakes.head_store import HeadStore


class _Broken(HeadStore):
    def put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        raise RuntimeError("the head is away")


def test_what_a_process_does_is_shown_every_few_seconds_until_it_is_done() -> None:
    store, shown = HeadStore(), list[str]()
    reporter, watch = StartReporter("decode", "10.0.0.7", store), StartWatch(shown.append, store)
    for second in range(12):
        reporter.progress(f"downloading m: {second}.0 of 16.1 GB")
        watch.poll(float(second))
    assert shown == [
        f"downloading m: {second}.0 of 16.1 GB, on node 10.0.0.7" for second in (0, 4, 8)
    ]
    reporter.done()
    watch.poll(20.0)
    assert len(shown) == 3
    assert store.values == {}


def test_replicas_of_a_node_that_wait_for_one_model_have_one_line() -> None:
    store, shown = HeadStore(), list[str]()
    for pool in ("prefill", "decode"):
        StartReporter(pool, "n", store).progress("downloading m: 1.0 of 2.0 GB")
    StartReporter("decode", "o", store).progress("downloading m: 1.0 of 2.0 GB")
    StartWatch(shown.append, store).poll(0.0)
    assert shown == [f"downloading m: 1.0 of 2.0 GB, on node {node}" for node in ("n", "o")]


def test_a_process_that_was_killed_is_not_shown_for_ever() -> None:
    store, shown = HeadStore(), list[str]()
    StartReporter("decode", "n", store).progress("downloading m: 1.0 of 2.0 GB")
    watch = StartWatch(shown.append, store)
    for second in range(100):
        watch.poll(float(second))
    assert len(shown) == 5


def test_what_can_only_fail_again_ends_the_start() -> None:
    store, shown = HeadStore(), list[str]()
    reporter = StartReporter("decode", "10.0.0.7", store)
    reporter.failed(EngineStartFailed("model m is gated", "accept its licence"))
    with pytest.raises(EngineStartFailed) as failed:
        StartWatch(shown.append, store).poll(0.0)
    assert failed.value.why == "model m is gated, on node 10.0.0.7"
    assert failed.value.remedy == "accept its licence"


def test_a_store_that_is_away_stops_no_start() -> None:
    reporter = StartReporter("decode", "n", _Broken())
    reporter.progress("downloading m: 1.0 of 2.0 GB")
    reporter.failed(EngineStartFailed("why", "remedy"))
    reporter.done()
