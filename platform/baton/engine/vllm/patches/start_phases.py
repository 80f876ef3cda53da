"""Records the phase of an engine's start in a file, for the replica that waits for it.

Theory of operation: vLLM has no call that tells how far a start is, but logs the beginning of each
phase. A handler of its logger writes the phase. Without these messages (another version, another
level of logs) the file stays as it is, and only the display is less exact.

Source: vLLM 0.32 and 0.33, v1/worker: gpu_model_runner.py, gpu_worker.py, cpu_model_runner.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

START_PHASE_VARIABLE: Final = "BATON_START_PHASE_FILE"
PHASES: Mapping[str, str] = MappingProxyType(
    {
        "Starting to load model": "loading weights",
        "Model loading took": "compiling and measuring memory",
        "Available KV cache memory": "warming up",
        "Warming up model for the compilation": "compiling and warming up",
    }
)
"""The phase that begins with a message, by the message's first words."""
_LOGGER: Final = logging.getLogger("vllm")


class _PhaseHandler(logging.Handler):
    """Writes the phase that a message begins."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.INFO)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        """Write the phase; a folder that is gone has no reader."""
        template = str(record.msg)
        for beginning, phase in PHASES.items():
            if template.startswith(beginning) and self._file.parent.is_dir():
                self._file.write_text(phase)


def record_phases() -> None:
    """Write phases of this process from now on, if its replica has asked for it on this node."""
    file = os.environ.get(START_PHASE_VARIABLE)
    if file is not None and Path(file).parent.is_dir():
        _LOGGER.addHandler(_PhaseHandler(Path(file)))
