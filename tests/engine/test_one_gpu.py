"""What one GPU does with a prefill and a decode engine on it, against what is predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.domain.errors import BatonError
from baton.perf.hardware.catalogue import find_accelerator
from tests.engine.one_gpu import Setup, measure, on_cpu, on_gpu

pytestmark = [
    pytest.mark.real,
    pytest.mark.thorough,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "one_gpu.json"


def device_here() -> str:
    """The GPU of this machine, as the catalogue has it; skips where there is none."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU, or a build of torch for CPUs")
    named = torch.cuda.get_device_name()
    for word in reversed(named.replace("-", " ").split()):
        try:
            return find_accelerator(word).name
        except BatonError:
            continue
    pytest.skip(f"no data sheet of {named}: nothing could be predicted of it")


def is_whole(found: dict[str, Any], site: Setup) -> None:
    """Everything was handed over, measured and counted."""
    assert [row["handed_off"] for row in found["ttft"]] == [5] * len(site.prompts_tokens)
    assert all(row["ttft_p50_s"] >= row["prefill_p50_s"] > 0 for row in found["ttft"])
    assert all(row["tpot_p50_s"] > 0 for row in found["tpot"])
    assert found["transfer"]["pulls"] == 5
    assert found["transfer"]["bytes_per_s"] > 0
    assert len(found["role_flip_s"]) == 5


async def test_two_engines_on_the_cpu_are_measured_like_two_on_a_gpu(tmp_path: Path) -> None:
    """So that it is known to work before a GPU is there."""
    site = on_cpu(tmp_path)
    found = await measure(site)
    is_whole(found, site)
    print(json.dumps(found))  # noqa: T201 - figures, for who asks for them


async def test_an_8b_model_on_one_gpu_is_as_fast_as_predicted(tmp_path: Path) -> None:
    """Writes what it measured, whatever comes of it."""
    site = on_gpu(tmp_path, device_here())
    found = await measure(site)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    is_whole(found, site)
    assert "cuda" in str(found["transfer"]["transport"])  # type: ignore[index]
    for row in found["ttft"]:  # type: ignore[attr-defined]
        if row["prompt_tokens"] >= 2048:
            assert row["prefill_p50_s"] == pytest.approx(row["predicted_prefill_s"], rel=0.25)
    for row in found["tpot"]:  # type: ignore[attr-defined]
        assert row["tpot_p50_s"] == pytest.approx(row["predicted_step_s"], rel=0.25)
