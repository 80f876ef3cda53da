"""What the benchmark of an ingress makes of what it sees, and how its data plane is named."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from benchmarks._data_plane import pool_of, read_config
from benchmarks._ingress_metrics import (
    CLASSES,
    SCENARIO,
    TENANTS,
    Measured,
    Tenants,
    figures,
    tenants,
)
from benchmarks.ingress import _peak_during, summarize_runs

MEASURED = Measured(with_s=[10.2, 10.4], without_s=[10.0, 10.0], scrape_s=0.02)
SAID = {"steps": 3000, "steps_cpu_s": 0.03, "requests": 300, "requests_cpu_s": 0.015}


def test_one_run_is_quoted_as_it_is_and_several_by_median_and_spread() -> None:
    assert summarize_runs([{"us_per_token": 7.0}]) == {"us_per_token": 7.0}
    runs = [{"us_per_token": value} for value in (9.0, 5.0, 6.0)]
    assert summarize_runs(runs) == {"us_per_token": [6.0, 5.0, 9.0]}


def test_the_highest_is_read_before_and_while_something_is_done() -> None:
    reads = count(1)
    falling = iter((7, 3, 5))
    assert _peak_during(lambda: next(falling, 1), lambda: None) == 7
    assert _peak_during(lambda: next(reads), lambda: None) >= 1


def test_replicas_are_named_after_their_pools() -> None:
    assert pool_of("mixed-12") == "mixed"
    assert pool_of("long-prompts-0") == "long-prompts"


# ------------------------------------------------------------------ metrics


def test_the_cost_is_what_the_one_with_metrics_took_more() -> None:
    found = figures(MEASURED, SAID)
    assert found["metrics_cpu_fraction"] == pytest.approx(0.03)
    pairs = [found[f"pairs_{what}"] for what in ("min", "median", "max")]
    assert pairs == pytest.approx([0.02, 0.03, 0.04])
    assert found["pairs_standard_error"] == pytest.approx(0.01)


def test_inside_measurements_are_hooks_and_scrapes_without_the_warm_up() -> None:
    hooks_s, scrapes_s = 0.045 * 2 / 3, 2 * 0.02
    found = figures(MEASURED, SAID)
    assert found["direct_cpu_fraction"] == pytest.approx(
        (hooks_s + scrapes_s) / (20.6 - hooks_s - scrapes_s)
    )
    assert found["us_per_step"] == pytest.approx(10.0)
    assert found["us_per_request"] == pytest.approx(50.0)


def test_every_tenant_asks_in_every_class_with_its_own_key(tmp_path: Path) -> None:
    keys, sets = tenants(tmp_path)
    config = read_config(SCENARIO, sets)
    assert len(config.tenants) == len(set(keys)) == TENANTS
    client = Tenants("http://127.0.0.1:1", keys)
    heads = [client._http_request(b"{}") for _ in range(TENANTS * len(CLASSES))]
    assert len(set(heads)) == len(heads)
    assert heads[0].startswith(b"POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer ")
    assert heads[0].endswith(b"\r\n\r\n{}")
