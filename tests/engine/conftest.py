"""What several tests of engines and frontends begin with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from baton.engine.gpus import use_cpu_without_gpus
from tests.fakes.tiny_model import tiny_model

use_cpu_without_gpus(os.environ)  # before the first test imports vLLM


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def tiny_tokenizer(model: Path) -> Any:  # noqa: ANN401 - transformers is not followed
    """The tokenizer of the tiny model, as transformers reads it: pieces of bytes."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)
