"""What is said of vLLM's defaults, against the vLLM that is installed."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

from baton.perf.hardware.catalogue import CATALOGUE
from baton.perf.model.engine_defaults import (
    BLOCK_SIZE_TOKENS,
    GPU_MEMORY_UTILIZATION,
    BatchDefaults,
    cpu_batch_defaults,
    gpu_batch_defaults,
)

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    from vllm.config import CacheConfig
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext


def vllms(monkeypatch: pytest.MonkeyPatch, **platform: object) -> BatchDefaults:
    """By vLLM, on a device that says this of itself."""
    here = SimpleNamespace(
        is_tpu=lambda: False,
        is_cpu=lambda: False,
        is_device_capability=lambda _capability: False,
        **platform,
    )
    monkeypatch.setattr(arg_utils, "current_platform", here)
    tokens, requests = arg_utils.EngineArgs.get_batch_defaults(1)
    context = UsageContext.OPENAI_API_SERVER
    return BatchDefaults(requests[context], tokens[context])


@pytest.mark.parametrize("name", CATALOGUE)
def test_batches_are_as_large_as_vllm_makes_them_on_that_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CATALOGUE[name]
    found = vllms(
        monkeypatch,
        get_device_total_memory=lambda: device.memory_bytes,
        get_device_name=lambda: device.name,
    )
    assert gpu_batch_defaults(device) == found


@pytest.mark.parametrize("workers", [1, 4])
def test_batches_are_as_large_as_vllm_makes_them_on_cpus(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"is_cpu": lambda: True}
    monkeypatch.setattr(
        arg_utils, "current_platform", SimpleNamespace(is_tpu=lambda: False, **here)
    )
    tokens, requests = arg_utils.EngineArgs.get_batch_defaults(workers)
    context = UsageContext.OPENAI_API_SERVER
    assert cpu_batch_defaults(workers) == (requests[context], tokens[context])


def test_the_share_of_memory_and_the_size_of_blocks_are_vllms() -> None:
    assert CacheConfig().gpu_memory_utilization == GPU_MEMORY_UTILIZATION
    assert CacheConfig.DEFAULT_BLOCK_SIZE == BLOCK_SIZE_TOKENS
