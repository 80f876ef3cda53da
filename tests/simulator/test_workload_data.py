"""Recorded traces, where they are there: what is read is what their documentation says."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from baton.simulator.workloads import scaling
from baton.simulator.workloads.formats import read_trace
from baton.simulator.workloads.presets import synthetic
from baton.simulator.workloads.statistics import describe
from baton.simulator.workloads.trace import Trace

pytestmark = pytest.mark.data


def recorded(path: str) -> Trace:
    with (Path(os.environ["BATON_TRACES"]) / path).open(encoding="utf-8") as lines:
        return read_trace(path, lines)


CONV = "azure/AzureLLMInferenceTrace_conv.csv"
CODE = "azure/AzureLLMInferenceTrace_code.csv"
MOONCAKE = "mooncake/conversation_trace.jsonl"


@pytest.mark.parametrize(
    ("path", "requests", "rate", "prompt", "output", "reused"),
    [
        (CONV, 19366, 5.53, (1155, 1020, 4142, 14050), (211, 129, 601, 1000), 0),
        (CODE, 8819, 2.57, (2048, 1469, 7436, 7437), (28, 13, 251, 1899), 0),
        (MOONCAKE, 12031, 3.40, (12035, 6909, 85400, 126195), (343, 350, 1119, 2000), 0.374),
        (
            "sharegpt/sharegpt-qwen3-32b-300-sps10.blocks16.jsonl",
            300,
            10.3,
            (862, 728, 2768, 4570),
            (665, 638, 1001, 1224),
            0.079,
        ),
    ],
)
def test_a_recorded_trace_is_as_its_documentation_says(  # noqa: PLR0917 - a row of a table
    path: str,
    requests: int,
    rate: float,
    prompt: tuple[float, ...],
    output: tuple[float, ...],
    reused: float,
) -> None:
    found = describe(recorded(path))
    assert found.requests == requests
    assert found.rate_per_s == pytest.approx(rate, abs=0.05)
    for lengths, wanted in ((found.prompt_tokens, prompt), (found.output_tokens, output)):
        got = (lengths.mean, lengths.p50, lengths.p99, lengths.maximum)
        assert got == pytest.approx(wanted, abs=0.7)
    assert found.reused_tokens_fraction == pytest.approx(reused, abs=0.0006)


def test_bursts_are_as_documented() -> None:
    code, conv = describe(recorded(CODE)), describe(recorded(CONV))
    assert (code.gap_cv, conv.gap_cv) == pytest.approx((13.2, 1.09), rel=0.01)
    assert (code.peak_to_mean, conv.peak_to_mean) == pytest.approx((12.8, 1.78), rel=0.01)


def test_spread_ticks_leave_no_bursts_that_never_were() -> None:
    found = describe(recorded(MOONCAKE))
    assert found.gap_cv == pytest.approx(1.0, abs=0.05)
    assert found.mean_reused_fraction == pytest.approx(0.409, abs=0.001)


@pytest.mark.parametrize(
    ("name", "path"), [("conv", CONV), ("code", CODE), ("long-context", MOONCAKE)]
)
def test_a_named_workload_has_the_mean_lengths_of_its_model(name: str, path: str) -> None:
    found, wanted = (
        describe(synthetic(name, rate_per_s=5, duration_s=2000)),
        describe(recorded(path)),
    )
    assert found.prompt_tokens.mean == pytest.approx(wanted.prompt_tokens.mean, rel=0.05)
    assert found.output_tokens.mean == pytest.approx(wanted.output_tokens.mean, rel=0.06)


def test_twice_mooncake_has_twice_the_rate_and_the_reuse_of_one() -> None:
    trace = recorded(MOONCAKE)
    double = describe(scaling.at_rate(trace, 2 * trace.rate_per_s, random.Random(1)))
    assert double.rate_per_s == pytest.approx(2 * trace.rate_per_s, rel=0.01)
    assert double.reused_tokens_fraction == pytest.approx(0.374, abs=0.01)
