"""Published files of models, where they are there: baton's figures against sums over modules."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.perf.model_files import Row, lines, rows

pytestmark = [pytest.mark.data, pytest.mark.slow, pytest.mark.timeout(900)]
_TOLERANCE = 0.005
"""Norms, biases and convolutions, which a shape leaves out, are less."""
_REFUSED = {"nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": "NVFP4 without 'exclude_modules'"}


@pytest.fixture(scope="module")
def found() -> list[Row]:
    """The folder of models is beside that of traces."""
    return rows(Path(os.environ["BATON_TRACES"]).parent / "models")


def test_each_file_is_answered_as_its_modules_say_or_refused_with_the_reason(
    found: list[Row],
) -> None:
    assert len(found) >= 70, list(lines(found))
    wrong = {
        row.name: (name, error)
        for row in found
        for name, error in row.errors.items()
        if abs(error) > _TOLERANCE
    }
    assert wrong == {}, list(lines(found))
    refused = {row.name: row.refusal or "" for row in found if row.refusal}
    assert refused.keys() == _REFUSED.keys()
    assert all(reason in refused[name] for name, reason in _REFUSED.items())


def test_nearly_all_files_have_a_sum(found: list[Row]) -> None:
    without = [row.name for row in found if not row.sum_parameters]
    assert without == []
    assert sum(row.sum_weights_bytes is not None for row in found) >= 69
    assert sum(row.sum_kv_bytes is not None for row in found) >= 66
