"""The processes of a vLLM engine: their birth in the right environment, and their certain end."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from baton.domain.errors import EngineStartFailed
from baton.domain.names.addresses import format_address
from baton.domain.names.model_sources import is_path
from baton.engine.vllm.core.settings import VllmEngineSettings
from baton.runtime.process.sockets import create_bound_socket

KILL_WAIT_S = 5.0
"""How long the kernel may take to bury a killed process."""

CPU_BLOCK_TOKENS = 32
"""Source: vLLM 0.32 refuses others ("No common block size for 16 (CPU_ATTN: [MultipleOf(32)])")."""

_ENVIRONMENT_LOCK = threading.Lock()
"""`os.environ` belongs to the whole process, so two engines may not be started into it at once."""


@contextmanager
def patched_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes started inside, then put back what was there.

    vLLM has no argument for some of what an engine needs (side-channel port, start method): it
    reads the environment while the engine is constructed, and its processes inherit it.
    """
    with _ENVIRONMENT_LOCK:
        previous = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in previous.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def child_pids() -> set[int]:
    """Ids of the processes that this one started through multiprocessing."""
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


def process_tree(pids: set[int]) -> list[psutil.Process]:
    """The processes `pids` and all they started, as far as they still live."""
    processes: list[psutil.Process] = []
    for pid in pids:
        try:
            parent = psutil.Process(pid)
            processes += [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return processes


def kill_tree(processes: list[psutil.Process], *, grace_s: float) -> list[int]:
    """Wait for processes to end, kill those that do not; blocks. Returns who had to be killed."""
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=KILL_WAIT_S)
    return [process.pid for process in alive]


def check_startable(settings: VllmEngineSettings, *, on_cpu: bool) -> None:
    """Look for the reasons to fail that can be seen beforehand.

    Raises:
        EngineStartFailed: with what is wrong and what to do.
    """
    _check_model(settings.model_source)
    if settings.nixl is not None:
        _check_port(settings.nixl.host, settings.nixl.port)
    if on_cpu:
        _check_block_size(settings)
    if on_cpu and settings.kv_cache_bytes is not None:
        # On a GPU its own memory counts; vLLM looks at that.
        _check_memory(settings)


def _check_model(source: str) -> None:
    folder = Path(source).expanduser()
    if is_path(source) and not folder.is_dir():
        raise EngineStartFailed(
            f"model folder {source!r} does not exist", "give an existing folder or a hub id"
        )
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise EngineStartFailed(
            f"model folder {source!r} has no config.json",
            "give the folder that the model was saved into",
        )


def _check_port(host: str, port: int) -> None:
    try:
        # As ZMQ does: a port whose last connections only linger is free.
        with create_bound_socket(host, port):
            pass
    except OSError as error:
        raise EngineStartFailed(
            f"NIXL side channel cannot listen on {format_address(host, port)}: {error.strerror}",
            "end the process that holds the port, or choose another host or port_base",
        ) from error


def _check_block_size(settings: VllmEngineSettings) -> None:
    block_size_tokens = settings.block_size_tokens
    if block_size_tokens is not None and block_size_tokens % CPU_BLOCK_TOKENS:
        raise EngineStartFailed(
            f"block size of {block_size_tokens} tokens: vLLM's attention on a CPU takes"
            " multiples of"
            f" {CPU_BLOCK_TOKENS}",
            f"choose block_size {CPU_BLOCK_TOKENS}, 64 or 128",
        )


def _check_memory(settings: VllmEngineSettings) -> None:
    required_bytes = (
        (settings.kv_cache_bytes or 0) * settings.tensor_parallel * settings.pipeline_parallel
    )
    available_bytes = psutil.virtual_memory().available
    if required_bytes > available_bytes:
        raise EngineStartFailed(
            f"not enough memory for the KV cache: {required_bytes:,} bytes needed,"
            f" {available_bytes:,} available",
            "lower kv_cache or end other processes",
        )
