"""Whoever configures logging as it is imported leaves other people's handlers as they are."""

from __future__ import annotations

import logging
import logging.config
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest

from baton.engine.log_handlers import preserve_log_handlers

LOGGER = logging.getLogger("tests.kept_handlers")
VLLMS: dict[str, object] = {"version": 1, "disable_existing_loggers": False}


@pytest.fixture
def serves(tmp_path: Path) -> Iterator[MemoryHandler]:
    """A handler as Ray Serve has it: one that gathers lines for a file."""
    file = logging.FileHandler(tmp_path / "replica.log")
    handler = MemoryHandler(10, target=file)
    LOGGER.addHandler(handler)
    yield handler
    LOGGER.removeHandler(handler)
    handler.close()
    file.close()


def test_a_handler_goes_on_that_was_there_before(serves: MemoryHandler) -> None:
    with preserve_log_handlers():
        logging.config.dictConfig(VLLMS)
    assert isinstance(serves.target, logging.FileHandler), "Serve asks it for the name of its file"
    serves.handle(logging.makeLogRecord({"msg": "still here", "levelno": logging.WARNING}))
    serves.flush()
    assert "still here" in Path(serves.target.baseFilename).read_text()


def test_python_closes_it_otherwise(serves: MemoryHandler) -> None:
    with only(serves):
        logging.config.dictConfig(VLLMS)
    assert serves.target is None, "Python has changed: nothing need be kept any more"


def test_a_handler_that_was_made_meanwhile_is_known_as_well(tmp_path: Path) -> None:
    with only():
        with preserve_log_handlers():
            made = logging.FileHandler(tmp_path / "own.log")
        logging.config.dictConfig(VLLMS)
    assert made.stream is None, "it was not closed"


@contextmanager
def only(*handlers: logging.Handler) -> Iterator[None]:
    """Python's list of handlers holds these: those of other tests go on."""
    with preserve_log_handlers():
        listed: list[object] = logging._handlerList  # type: ignore[attr-defined]
        listed.extend(weakref.ref(handler) for handler in handlers)
        yield


SERVES = """
import logging, sys
from logging.handlers import MemoryHandler
from baton.config.schema.deployment import ModelConfig
from baton.engine.vllm.frontend.app import _server_args
from baton.engine.vllm.frontend.settings import FleetFacts, FrontendSettings
from baton.serving.replica.engines import model_path
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig

configure_component_logger(
    component_name="ingress",
    component_id="1",
    logging_config=LoggingConfig(logs_dir=sys.argv[1]),
    buffer_size=10,
    max_bytes=10**6,
    backup_count=1,
)
settings = FrontendSettings(model=model_path(ModelConfig(source="tiny")), served_name="tiny")
facts = FleetFacts(
    max_len_tokens=128,
    block_size_tokens=16,
    kv_blocks=8,
    max_running_requests=8,
    max_batched_tokens=128,
)
_server_args(settings, facts)
(kept,) = (one for one in logging.getLogger("ray.serve").handlers if isinstance(one, MemoryHandler))
print("FILE", kept.target.baseFilename)
"""


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.thorough
def test_serve_finds_the_log_of_a_replica_that_has_imported_vllm(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVES, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert "FILE " in done.stdout, done.stderr
    assert done.stdout.split("FILE ")[1].strip().endswith(".log")
