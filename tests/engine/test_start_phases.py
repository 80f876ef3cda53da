"""The phase of an engine's start, as vLLM's log tells it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.engine.vllm.patches.start_phases import PHASES, START_PHASE_VARIABLE, record_phases

_WORKERS = ("gpu_model_runner.py", "gpu_worker.py", "cpu_model_runner.py")


@pytest.fixture
def vllm_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("vllm")
    handlers, level = list(logger.handlers), logger.level
    logger.setLevel(logging.INFO)
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_the_phase_is_written_when_vllm_logs_its_beginning(
    vllm_logger: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "phase"
    monkeypatch.setenv(START_PHASE_VARIABLE, str(file))
    record_phases()
    worker = logging.getLogger("vllm.v1.worker.gpu_worker")
    worker.info("Starting to load model %s...", "org/m")
    assert file.read_text() == "loading weights"
    worker.info("Using FlashAttention")
    assert file.read_text() == "loading weights"
    worker.info("Model loading took %s GiB memory and %.6f seconds", 1, 2.0)
    assert file.read_text() == "compiling and measuring memory"
    file.unlink()
    tmp_path.rmdir()  # its replica has started, or has ended
    worker.info("Available KV cache memory: %s GiB", 1)


def test_no_handler_is_added_without_a_reader(
    vllm_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = list(vllm_logger.handlers)
    monkeypatch.delenv(START_PHASE_VARIABLE, raising=False)
    record_phases()
    monkeypatch.setenv(START_PHASE_VARIABLE, str(tmp_path / "other-node" / "phase"))
    record_phases()
    assert vllm_logger.handlers == before


def test_vllm_logs_these_messages() -> None:
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "v1" / "worker"
    sources = "".join((folder / name).read_text() for name in _WORKERS)
    assert [message for message in PHASES if f'"{message}' not in sources] == []
