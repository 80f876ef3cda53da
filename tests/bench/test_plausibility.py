"""Rows that no device could have computed are told from those that are only good."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.bench.accuracy.accuracy import busy_fractions, implausible_reason
from baton.bench.accuracy.measurements import MeasuredRow
from baton.perf.hardware.accelerators import Dtype

ROW = MeasuredRow(
    line=2,
    backend="vllm",
    version="0.12.0",
    model="nvidia/Llama-3.1-8B-Instruct-FP8",
    system="h200_sxm",
    weights=Dtype.FP8,
    experts=None,
    disaggregated=False,
    prompt_tokens=1000,
    output_tokens=100,
    tp=1,
    pp=1,
    concurrency=112,
    ttft_s=0.0719,
    tpot_s=0.01125,
)
"""94.5 requests a second of 1,099 tokens through 7 billion parameters: 1.45 PFLOP/s of 1.98, and
112 clients' keys and values are read besides."""


def test_a_row_that_implies_more_than_the_device_can_compute_is_told() -> None:
    share = busy_fractions(ROW)
    assert share.products == pytest.approx(94.5 * 1099 * 2 * 6.98e9 / (0.85 * 1.979e15), rel=0.02)
    assert share.kv_reads == pytest.approx(94.5 * 100 * 1050 * 65_536 / 4.8e12, rel=0.02)
    assert share.links == 0
    said = implausible_reason(ROW)
    assert said is not None
    assert "more than its devices can compute" in said
    assert f"{share.total:.0%}" in said


@pytest.mark.parametrize(
    "slower",
    [replace(ROW, tpot_s=0.0125), replace(ROW, ttft_s=0.4), replace(ROW, concurrency=80)],
)
def test_the_same_row_a_little_slower_can_be(slower: MeasuredRow) -> None:
    assert implausible_reason(slower) is None


def test_reading_the_weights_faster_than_memory_is_impossible() -> None:
    row = replace(ROW, model="meta-llama/Llama-3.1-70B", concurrency=1, prompt_tokens=8)
    assert busy_fractions(replace(row, tpot_s=0.015)).products == pytest.approx(
        68.5e9 / 0.015 / 4.8e12, rel=0.01
    )
    assert implausible_reason(replace(row, tpot_s=0.015)) is None
    assert implausible_reason(replace(row, tpot_s=0.014)) is not None


def test_devices_of_a_group_compute_together_and_send_each_number_once() -> None:
    alone, group = busy_fractions(ROW), busy_fractions(replace(ROW, tp=4))
    assert group.products == pytest.approx(alone.products / 4)
    assert group.kv_reads == pytest.approx(alone.kv_reads / 4)
    assert group.links == pytest.approx(94.5 * 1099 * 2 * 32 * 4096 * 2 / 450e9, rel=0.02)


def test_attention_grows_with_the_square_of_prompts() -> None:
    long = replace(ROW, prompt_tokens=8000, output_tokens=2, tpot_s=0.01, ttft_s=1.0)
    longer = replace(long, prompt_tokens=16_000)
    assert busy_fractions(longer).attention == pytest.approx(
        4 * busy_fractions(long).attention, rel=0.01
    )
    assert busy_fractions(long).attention == pytest.approx(
        112 / 1.01 * 4 * 32 * 4096 * 8000**2 / 2 / (0.8 * 1.979e15), rel=0.01
    )


def test_random_lengths_count_as_their_mean() -> None:
    fixed = replace(ROW, prompt_tokens=1025, output_tokens=1024, tpot_s=0.05, ttft_s=0.01)
    varied = replace(fixed, prompt_tokens=1024)
    # Little's law: shorter requests end sooner, so there are as many tokens a second.
    assert busy_fractions(varied).products == pytest.approx(
        busy_fractions(fixed).products, rel=0.01
    )
    assert busy_fractions(varied).kv_reads == pytest.approx(
        0.9 * busy_fractions(fixed).kv_reads, rel=0.01
    )
