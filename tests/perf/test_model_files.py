"""Published files of models, where they are there: baton's figures against sums over modules."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from baton.domain.errors import UnknownModel
from baton.perf.model.config_json import from_config
from baton.perf.model.known_models import find_shape
from benchmarks._fidelity_models import Row, config_files, lines, model_name, rows

pytestmark = [pytest.mark.data, pytest.mark.slow, pytest.mark.timeout(900)]
_TOLERANCE = 0.005
"""Norms, biases and convolutions, which a shape leaves out, are less."""
_REFUSED = {"nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": "NVFP4 without 'exclude_modules'"}


_UNKNOWN = ["nvidia/Llama-3_3-Nemotron-Super-49B-v1", "nvidia/Nemotron-H-56B-Base-8K"]


def folder() -> Path:
    """The folder of models is beside that of traces."""
    return Path(os.environ["BATON_TRACES"]).parent / "models"


@pytest.fixture(scope="module")
def found() -> list[Row]:
    return rows(folder())


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


def test_a_name_and_its_file_describe_the_same_model() -> None:
    """But for the longest length, of which variants differ."""
    unknown = []
    for file in config_files(folder()):
        name = model_name(file)
        config = json.loads(file.read_text(encoding="utf-8"))
        shape = replace(from_config(config, name=name), max_len_tokens=1)
        try:
            known = find_shape(name)
        except UnknownModel:
            unknown.append(name)
        else:
            assert replace(known, name=name, max_len_tokens=1) == shape
    assert sorted(unknown) == _UNKNOWN


def test_nearly_all_files_have_a_sum(found: list[Row]) -> None:
    without = [row.name for row in found if not row.sum_parameters]
    assert without == []
    assert sum(row.sum_weights_bytes is not None for row in found) >= 69
    assert sum(row.sum_kv_bytes is not None for row in found) >= 66
