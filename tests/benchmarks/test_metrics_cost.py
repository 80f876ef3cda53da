"""What metrics cost: the figures, and requests of many tenants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks._data_plane import read_config
from benchmarks.metrics_cost import CLASSES, SCENARIO, TENANTS, Tenants, figures, tenants

MEASURED = {
    "cpu_s": {"with": [10.2, 10.4], "without": [10.0, 10.0]},
    "scrape_cpu_s": 0.02,
}
SAID = {"steps": 3000, "steps_cpu_s": 0.03, "requests": 300, "requests_cpu_s": 0.015}


def told(**changes: object) -> Any:  # noqa: ANN401 - figures by name
    return figures(MEASURED | changes, SAID, windows=1)


def test_the_cost_is_what_the_one_with_metrics_took_more() -> None:
    found = told()
    assert found["metrics_cpu_fraction"] == pytest.approx(0.03)
    assert found["pairs"] == pytest.approx({"min": 0.02, "median": 0.03, "max": 0.04})
    assert found["pairs_standard_error"] == pytest.approx(0.01)


def test_what_was_measured_inside_is_hooks_and_scrapes_without_the_warm_up() -> None:
    hooks_s, scrapes_s = 0.045 * 2 / 3, 2 * 0.02
    assert told()["direct_cpu_fraction"] == pytest.approx(
        (hooks_s + scrapes_s) / (20.6 - hooks_s - scrapes_s)
    )
    assert told()["us_per_step"] == pytest.approx(10.0)
    assert told()["us_per_request"] == pytest.approx(50.0)


def test_every_tenant_asks_in_every_class_with_its_own_key(tmp_path: Path) -> None:
    keys, sets = tenants(tmp_path)
    config = read_config(SCENARIO, sets)
    assert len(config.tenants) == len(set(keys)) == TENANTS
    client = Tenants("http://127.0.0.1:1", keys)
    heads = [client._request(b"{}") for _ in range(TENANTS * len(CLASSES))]
    assert len(set(heads)) == len(heads)
    assert heads[0].startswith(b"POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer ")
    assert heads[0].endswith(b"\r\n\r\n{}")
