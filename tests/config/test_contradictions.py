"""Keys that are valid each by itself, and work against each other."""

from __future__ import annotations

import pytest

from baton.config.checks.contradictions import contradictions
from baton.config.derive.options import coordinator_limits, scales_from_zero, split_by_model
from tests.config.conftest import Load

ZERO = """
version: 1
model: {source: tiny, max_len: 4096, engine: {kind: sim, sim: {}}}
pools:
  prefill: {role: prefill, replicas: {min: 0, initial: 1}}
  decode: {role: decode, replicas: {min: 0, initial: 1}}
"""
SCALES = "autoscaler: {scale_to_zero: true}\n"


def test_where_keys_agree_nothing_is_said(load: Load) -> None:
    assert not contradictions(load(ZERO).config)
    assert not contradictions(load(ZERO + SCALES).config)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (
            "autoscaler: {scale_to_zero: true, policy: static}",
            "autoscaler.scale_to_zero: no effect with autoscaler.policy: static",
        ),
        (
            "autoscaler: {scale_to_zero: true, dry_run: true}",
            "autoscaler.scale_to_zero: no effect with autoscaler.dry_run: true",
        ),
        (
            SCALES + "admission: {timeouts: {total: 60s}}",
            "admission.timeouts.total: got 60s, expected more than admission.cold_start_timeout",
        ),
        (
            SCALES + "admission: {cold_start_timeout: 10s, queue_timeout: 20s}",
            "admission.cold_start_timeout: got 10s, expected at least admission.queue_timeout",
        ),
        (
            SCALES + "admission: {cold_start_timeout: 3s}",
            "admission.cold_start_timeout: got 3s, expected at least two of autoscaler.interval",
        ),
    ],
)
def test_what_works_against_each_other_is_said(load: Load, text: str, key: str) -> None:
    (found,) = contradictions(load(ZERO + text).config)
    assert found.startswith(key)
    assert ";" in found, "it says what to do"


def test_requests_wait_for_a_cold_start_where_the_fleet_can_be_at_zero(load: Load) -> None:
    assert coordinator_limits(load(ZERO).config).cold_start_timeout_s is None
    assert coordinator_limits(load(ZERO + SCALES).config).cold_start_timeout_s == 300.0
    some = ZERO.replace("{min: 0, initial: 1}", "{min: 1, initial: 1}", 1)
    assert coordinator_limits(load(some + SCALES).config).cold_start_timeout_s is None
    assert (
        coordinator_limits(
            load(ZERO + SCALES[:-2] + ", dry_run: true}").config
        ).cold_start_timeout_s
        is None
    )


def test_of_several_models_only_those_can_be_at_zero_all_of_whose_pools_can(load: Load) -> None:
    config = load(
        """
version: 1
models:
  a: {source: tiny, max_len: 4096, engine: {kind: sim, sim: {}}}
  b: {source: tiny, max_len: 4096, engine: {kind: sim, sim: {}}}
pools:
  for-a: {model: a, role: mixed, replicas: {min: 0, initial: 1}}
  for-b: {model: b, role: mixed}
"""
        + SCALES
    ).config
    assert {name: scales_from_zero(part) for name, part in split_by_model(config).items()} == {
        "a": True,
        "b": False,
    }
