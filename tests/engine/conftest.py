"""What several tests of engines and frontends begin with."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest

from baton.engine.gpus import compute_on_cpus
from baton.engine.tiny_model import write_tiny_model

compute_on_cpus(os.environ)  # before the first test imports vLLM


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401 - transformers is not followed
    """The tokenizer of the tiny model, as transformers reads it: pieces of bytes."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tiny")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_tiny_model(folder)
    return AutoTokenizer.from_pretrained(folder)
