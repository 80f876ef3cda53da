"""What is claimed of the model's fidelity, on the measurements that were published."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import _fidelity_silicon, _fidelity_vllm_log
from benchmarks.fidelity import find_data_folder

pytestmark = pytest.mark.data


def data() -> Path:
    folder = find_data_folder(None, os.environ)
    if folder is None:
        pytest.skip("BATON_TRACES names no folder beside which measurements lie")
    return folder


def test_a_real_engines_log_is_met_by_the_roofline_and_more_closely_by_profiles() -> None:
    found = _fidelity_vllm_log.compute_metrics(data())
    assert found["vllm_log_requests"] == 300
    assert abs(found["vllm_log_tpot_mean_error"]) < 0.10
    assert abs(found["vllm_log_ttft_mean_error"]) < 0.20
    assert abs(found["vllm_log_profile_tpot_mean_error"]) < 0.02
    assert abs(found["vllm_log_profile_ttft_mean_error"]) < 0.05


@pytest.mark.slow
def test_vllm_on_h200_is_predicted_from_h100() -> None:
    found = _fidelity_silicon.compute_metrics(data())
    assert found["h200_rows"] == 94
    assert found["h200_vllm_published_rows"] == 30
    assert found["h200_vllm_tpot_mape_plausible"] < 0.08
    assert found["h200_vllm_ttft_mape_plausible"] < 0.20
    assert found["h200_vllm_published_tpot_mape"] < 0.08
    assert found["h200_vllm_published_ttft_mape"] < 0.20
    assert found["h200_published_tpot_mape"] < 0.08
    assert found["h200_published_ttft_mape"] < 0.20
    assert found["h200_ttft_mape"] < 0.20
    assert found["h200_rows_plausible"] == 90
    assert found["h200_rows_unspoiled"] == 83
    assert found["h200_tpot_mape_unspoiled"] < 0.08
