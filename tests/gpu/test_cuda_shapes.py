"""Shapes of deployments on GPUs: what vLLM's validation takes, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import pytest

from baton.engine.tiny_model import write_tiny_model
from tests.gpu.fake_gpus import ROOT, fake_environment, needs_cuda_build
from tests.gpu.shapes import POOLS, SHAPES, write_models

pytestmark = [needs_cuda_build, pytest.mark.timeout(600)]
CONNECTOR = "baton.engine.vllm.patches.connector.NixlConnector"
REFUSED = {
    "eagle3 on decode": "speculative_config: got eagle3 drafts",
    "data parallel in extra": "models.m.engine.extra.data_parallel_size: cannot be passed on",
}
LLAMA_8B_BLOCK = 16 * 32 * 2 * 8 * 128 * 2
"""Bytes of 16 tokens: layers, keys and values, heads, their width, bytes of bfloat16."""
DEEPSEEK_BLOCK = 16 * 61 * (512 + 64) * 2
"""Bytes of 16 tokens: layers, the latent with its rotary part, bytes of bfloat16."""
BYTES = {
    "nothing said": LLAMA_8B_BLOCK,
    "as in the example": LLAMA_8B_BLOCK,
    "tp 4 to 1": LLAMA_8B_BLOCK,
    "awq weights": LLAMA_8B_BLOCK,
    "fp8 weights": LLAMA_8B_BLOCK,
    "fp8 blocks": LLAMA_8B_BLOCK // 2,
    "float32": LLAMA_8B_BLOCK * 2,
    "blocks of 8": LLAMA_8B_BLOCK // 2,
    "blocks of 128": LLAMA_8B_BLOCK * 8,
    "405b, tp 8, pp 2": 16 * 126 * 2 * 8 * 128 * 2,
    "gpt-oss": 16 * 36 * 2 * 8 * 64 * 2,
    "deepseek v3, blocks of 16": DEEPSEEK_BLOCK,
    "deepseek v3, ep, blocks of 64": DEEPSEEK_BLOCK * 4,
    "deepseek v3, fp8 blocks": DEEPSEEK_BLOCK * 2,
}
"""Of a block of the whole model, over all workers."""
Told = Mapping[tuple[str, str], Mapping[str, Any]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What became of each pool of each shape, by a process of its own that sees eight GPUs."""
    folder = tmp_path_factory.mktemp("faked")
    (folder / "tiny").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_tiny_model(folder / "tiny")
    write_models(folder / "models", folder / "tiny")
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.shapes", str(folder / "models")],
        cwd=ROOT,
        env=fake_environment(folder, gpus=8),
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"shape"')]
    return {(line["shape"], line["pool"]): line for line in lines}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in REFUSED])
def test_vllm_takes_what_baton_hands_to_it(told: Told, name: str, pool: str) -> None:
    made = told[name, pool]
    assert "error" not in made, made
    assert made["device"] == "cuda"
    offloads = "offload" in name
    assert (made["connector"] == CONNECTOR) is not offloads, made
    shape = SHAPES[name]
    split = (shape.decode_split or shape.split) if pool == "decode" else shape.split
    executor = "UniProcExecutor" if split.tp * split.pp == 1 else "RayExecutorV2"
    assert made["executor"] == ("MultiprocExecutor" if "executor mp" in name else executor)
    if name in BYTES:
        assert made["block_bytes"] == BYTES[name]


def test_engines_have_the_defaults_of_vllm_serve_on_this_gpu(told: Told) -> None:
    made = told["nothing said", "decode"]
    assert (made["most_requests"], made["step_tokens"]) == (1024, 8192)
    chosen = told["as in the example", "decode"]
    assert (chosen["most_requests"], chosen["memory_share"]) == (256, 0.9)


def test_engines_on_one_gpu_leave_each_other_room(told: Told) -> None:
    shares = [told["halves of one gpu", pool]["memory_share"] for pool in POOLS]
    assert shares == [0.45, 0.45]


@pytest.mark.parametrize("name", sorted(set(SHAPES) - set(REFUSED)))
def test_both_pools_say_the_same_of_their_blocks(told: Told, name: str) -> None:
    """Pools are split differently and batch differently; blocks are what they hand over."""
    prefill, decode = (told[name, pool] for pool in POOLS)
    assert prefill["layout"] == decode["layout"]
    assert prefill["block_tokens"] == decode["block_tokens"]


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", REFUSED)
def test_an_impossible_shape_is_refused_with_batons_own_error(
    told: Told, name: str, pool: str
) -> None:
    error = told[name, pool]["error"]
    assert error.startswith("ConfigInvalid")
    assert REFUSED[name] in error
