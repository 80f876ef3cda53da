"""Step times from published tables: the published numbers come out, and what lies between them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.value import evolve
from baton.perf.step_timing import StepBatch, attention_pairs
from baton.perf.steps.tables import (
    LAYER_MODULE_COUNTS,
    MODEL_MODULE_COUNTS,
    AttentionGrid,
    AttentionMeasurement,
    InterpolatedTiming,
    InterpolationCurve,
    LayerProfile,
    PolynomialTiming,
)

OPT_13B = PolynomialTiming(
    prefill=(18.10, 0.1019, 7.12e-6),
    small_batch=(19.93, 6.27e-4, 0.0385),
    large_batch=(7.17, 5.80e-4, 0.158),
)
"""DistServe's coefficients for OPT-13B on one A100."""


def prefill(*tokens: int) -> StepBatch:
    return StepBatch(
        prefill_tokens=sum(tokens),
        prefill_requests=len(tokens),
        prefill_pairs=sum(attention_pairs(token, 0) for token in tokens),
        finished_prefills=len(tokens),
    )


def decode(requests: int, context: int) -> StepBatch:
    return StepBatch(decode_requests=requests, decode_context_tokens=requests * context)


def test_distserves_times_come_out() -> None:
    """18.1 + 0.1019 x 2048 + 7.12e-6 x 2048 squared = 256.7 ms; 31.4 ms for 32 decodes of 512."""
    outside_ms = 1 + 2 + 1e-4 * 2048
    assert OPT_13B.step_s(prefill(2048)) * 1e3 == pytest.approx(256.65 + outside_ms, abs=0.1)
    outside_ms = 1 + 2 + 1e-4 * 32 * 512
    assert OPT_13B.step_s(decode(32, 512)) * 1e3 == pytest.approx(31.43 + outside_ms, abs=0.1)


def test_squares_are_of_each_prompt_and_not_of_their_sum() -> None:
    apart_s = OPT_13B.step_s(prefill(1000, 1000))
    assert OPT_13B.step_s(prefill(2000)) - apart_s == pytest.approx(7.12e-9 * 2_000_000)


def test_large_batches_have_coefficients_of_their_own() -> None:
    at_94, at_95 = (OPT_13B.step_s(decode(count, 0)) * 1e3 for count in (94, 95))
    assert at_94 == pytest.approx(19.93 + 0.0385 * 94 + 3)
    assert at_95 == pytest.approx(7.17 + 0.158 * 95 + 3)


def test_each_stage_takes_its_share_and_a_millisecond() -> None:
    two = PolynomialTiming(
        prefill=OPT_13B.prefill,
        small_batch=OPT_13B.small_batch,
        large_batch=OPT_13B.large_batch,
        pipeline_stages=2,
    )
    # Per stage: half and 1 ms; through both: all and 2 x (2 x 1 ms), as the published simulator
    # adds a millisecond for each stage to every stage.
    assert two.step_s(decode(8, 100)) - OPT_13B.step_s(decode(8, 100)) == pytest.approx(3e-3)


def test_decodes_beside_a_prompt_share_its_constant() -> None:
    together = evolve(prefill(500), decode_requests=8, decode_context_tokens=800)
    added_ms = (OPT_13B.step_s(together) - OPT_13B.step_s(prefill(500))) * 1e3
    assert added_ms == pytest.approx(6.27e-4 * 800 + 0.0385 * 8 + 1e-4 * 800)


POINTS = st.dictionaries(st.integers(0, 1000), st.floats(0, 1e3), min_size=1, max_size=8)


@given(POINTS, st.floats(-100, 1100))
def test_a_curve_is_linear_between_its_points(points: dict[int, float], x: float) -> None:
    curve, xs = InterpolationCurve(points.items()), sorted(points)
    for known in xs:
        assert curve.at(known) == pytest.approx(points[known], abs=1e-9)
    inside = [(a, b) for a, b in pairwise(xs) if a <= x <= b]
    for a, b in inside[:1]:
        mixed = points[a] + (points[b] - points[a]) * (x - a) / (b - a)
        assert curve.at(x) == pytest.approx(mixed, abs=1e-9)
    assert curve.at(x) >= min(points.values())


def test_a_curve_goes_on_as_it_ended() -> None:
    assert InterpolationCurve([(0, 1), (10, 2), (20, 4)]).at(30) == pytest.approx(6)
    assert InterpolationCurve([(5, 7)]).at(100) == 7
    with pytest.raises(ValueError, match="without points"):
        InterpolationCurve([])


def test_splitwise_counts_tokens_and_mixing_costs_a_tenth() -> None:
    timing = InterpolatedTiming(
        prompt=InterpolationCurve([(512, 0.05), (1024, 0.1)]),
        token=InterpolationCurve([(1, 0.03), (64, 0.06)]),
    )
    assert timing.step_s(prefill(512, 256)) == pytest.approx(0.075)
    assert timing.step_s(decode(64, 9999)) == pytest.approx(0.06)
    mixed = evolve(prefill(760), decode_requests=8, decode_context_tokens=1)
    assert timing.step_s(mixed) == pytest.approx(1.1 * 0.075)


def seconds(chunk: float, context: float, decodes: float, decode_context: float) -> float:
    """Linear in each coordinate, so that interpolation is exact."""
    return 1e-5 + 1e-8 * chunk + 1e-11 * chunk * context + 1e-9 * decodes * decode_context


GRID = AttentionGrid(
    AttentionMeasurement(chunk, context, decodes, behind, seconds(chunk, context, decodes, behind))
    for chunk in (0, 64, 2048)
    for context in ((0, 512, 4096) if chunk else (0,))
    for decodes in (0, 1, 128)
    for behind in ((16, 16384) if decodes else (0,))
)


@given(st.integers(64, 5000), st.integers(0, 9000), st.integers(1, 300), st.integers(16, 30_000))
def test_a_grid_is_exact_for_functions_linear_in_each_axis(
    chunk: int, context: int, decodes: int, behind: int
) -> None:
    expected = seconds(chunk, context, decodes, behind)
    assert GRID.at(chunk, context, decodes, behind) == pytest.approx(expected)


def test_a_grid_may_have_holes() -> None:
    assert GRID.at(0, 0, 64.5, 8200) == pytest.approx(seconds(0, 0, 64.5, 8200))
    with pytest.raises(ValueError, match="without rows"):
        AttentionGrid([])


PROFILE = LayerProfile(
    layers=10,
    dense={
        part: InterpolationCurve([(1, 1e-6), (1001, 2e-6)])
        for part in (*LAYER_MODULE_COUNTS, *MODEL_MODULE_COUNTS)
    },
    attention=GRID,
    per_sequence={
        "lm_head": InterpolationCurve([(1, 5e-4), (2, 6e-4)]),
        "sampler": InterpolationCurve([(1, 1e-5)]),
    },
    step_overhead_s=1e-3,
)


def test_a_profile_adds_up_the_parts_of_all_layers() -> None:
    # Seven parts, the norm twice: 8 in each of 10 layers, 2 outside of them.
    dense_s = (10 * 8 + 2) * 1.5e-6
    attention_s = 10 * seconds(500.0, 0, 1, 0) + 10 * 1e-9 * 2000
    batch = evolve(prefill(500), decode_requests=1, decode_context_tokens=2000)
    expected = 1e-3 + dense_s + attention_s + 6e-4 + 1e-5
    assert PROFILE.step_s(batch) == pytest.approx(expected, rel=1e-6)


def test_several_chunks_take_less_than_one_of_all_and_more_than_one_of_them() -> None:
    one, two, whole = (
        PROFILE.attention_s(batch) for batch in (prefill(300), prefill(300, 300), prefill(600))
    )
    assert one < two <= whole + 1e-5


def test_a_later_chunk_is_looked_up_by_the_context_before_it() -> None:
    batch = StepBatch(
        prefill_tokens=256,
        prefill_requests=1,
        prefill_pairs=attention_pairs(256, 1024),
        prefill_context_tokens=1024,
    )
    assert PROFILE.attention_s(batch) == pytest.approx(seconds(256, 1024, 0, 0))


def test_a_profile_needs_all_parts() -> None:
    with pytest.raises(ValueError, match="no rows for qkv_proj"):
        LayerProfile(
            layers=1,
            dense={
                part: InterpolationCurve([(1, 1)])
                for part in (*LAYER_MODULE_COUNTS, *MODEL_MODULE_COUNTS)
                if part[0] != "q"
            },
            attention=GRID,
            per_sequence={},
        )
