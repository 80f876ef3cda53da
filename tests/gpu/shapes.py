"""Deployments on GPUs whose engines' configurations are tried on a faked CUDA platform.

Run as a program, it makes them and says of each pool, in one line of JSON, what vLLM made of it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

POOLS = ("prefill", "decode")
MODELS = Path(__file__).with_name("models.json")
"""What the configurations of models say that are built alike."""
Json = Mapping[str, Any]


class Split(NamedTuple):
    """How an engine is split over GPUs."""

    tp: int = 1
    pp: int = 1
    ep: bool = False


class Shape(NamedTuple):
    """A deployment; `engine` holds for both pools, `prefill` and `decode` for one."""

    model: str = "llama-8b"
    engine: Json = {}  # noqa: RUF012 - nobody writes it
    prefill: Json = {}  # noqa: RUF012
    decode: Json = {}  # noqa: RUF012
    split: Split = Split()
    decode_split: Split | None = None
    """As `split` unless said."""
    max_len: int = 16384
    accelerator: str = "H100"
    gpu_fraction: float | None = None
    """Of a GPU, that an engine with one worker takes; None: a whole one for each worker."""
    adapter: str | None = None

    def document(self, models: Path) -> dict[str, Any]:
        """The configuration file; a model in `extra` is named as `$MODELS/...`."""
        splits = {"prefill": self.split, "decode": self.decode_split or self.split}
        model: dict[str, Any] = {
            "source": str(models / self.model),
            "max_len": self.max_len,
            "engine": self.engine,
        }
        if self.adapter is not None:
            model["adapters"] = {"one": {"source": str(models / self.adapter)}}
        pools = {
            name: {
                "role": name,
                "replicas": {"min": 1},
                "resources": {
                    "cpus": 4,
                    "gpus": self.gpu_fraction or splits[name].tp * splits[name].pp,
                    "accelerator": self.accelerator,
                },
                "parallel": splits[name]._asdict(),
                "engine": getattr(self, name),
            }
            for name in POOLS
        }
        document = {"version": 1, "models": {"m": model}, "pools": pools}
        resolved: dict[str, Any] = json.loads(json.dumps(document).replace("$MODELS", str(models)))
        return resolved


def kv(dtype: str) -> Json:
    """Keys of an engine whose KV blocks are of this type."""
    return {"extra": {"kv_cache_dtype": dtype}}


def speculative(method: str, model: str | None = None, **options: object) -> Json:
    """Keys of an engine that drafts tokens."""
    speculative_config = {
        "method": method,
        **({"model": f"$MODELS/{model}"} if model else {}),
        **options,
    }
    return {"extra": {"speculative_config": speculative_config}}


_EAGLE = speculative("eagle3", "eagle3-llama-8b", num_speculative_tokens=3)
_DEEPSEEK = Shape("deepseek-v3", split=Split(8), max_len=32768, accelerator="H200")
SHAPES: Mapping[str, Shape] = {
    "nothing said": Shape(),
    "as in the example": Shape(
        engine={"dtype": "bfloat16", "block_size": 16, "gpu_memory_utilization": 0.9},
        prefill={"max_num_batched_tokens": 8192},
        decode={"max_num_seqs": 256},
    ),
    "405b, tp 8, pp 2": Shape("llama-405b", split=Split(8, 2), max_len=32768),
    "deepseek v3, ep, blocks of 64": _DEEPSEEK._replace(
        engine={"block_size": 64}, split=Split(8, ep=True)
    ),
    "deepseek v3, blocks of 16": _DEEPSEEK._replace(engine={"block_size": 16}),
    "deepseek v3, blocks of 128": _DEEPSEEK._replace(engine={"block_size": 128}),
    "deepseek v3, fp8 blocks": _DEEPSEEK._replace(engine={"block_size": 64, **kv("fp8")}),
    "deepseek v3, mtp": _DEEPSEEK._replace(
        engine=speculative("deepseek_mtp", num_speculative_tokens=1)
    ),
    "deepseek v3.2": _DEEPSEEK._replace(model="deepseek-v32"),
    "deepseek v3.2, fp8_ds_mla blocks": _DEEPSEEK._replace(
        model="deepseek-v32", engine=kv("fp8_ds_mla")
    ),
    "fp8 blocks": Shape(engine=kv("fp8")),
    "fp8_e5m2 blocks": Shape(engine=kv("fp8_e5m2")),
    "nvfp4 blocks": Shape(engine=kv("nvfp4")),
    "fp8_per_token_head blocks": Shape(engine=kv("fp8_per_token_head")),
    "int8_per_token_head blocks": Shape(engine=kv("int8_per_token_head")),
    "turboquant blocks": Shape(engine=kv("turboquant_k8v4")),
    "fp8 weights": Shape("llama-8b-fp8"),
    "awq weights": Shape("llama-8b-awq"),
    "weights made fp8 as they are read": Shape(engine={"extra": {"quantization": "fp8"}}),
    "eagle3 on both": Shape(engine=_EAGLE),
    "eagle3 on decode": Shape(decode=_EAGLE),
    "n-gram drafts": Shape(
        engine=speculative("ngram", num_speculative_tokens=3, prompt_lookup_max=4)
    ),
    "a model that drafts": Shape(
        engine=speculative("draft_model", "llama-1b", num_speculative_tokens=3)
    ),
    "an adapter": Shape(adapter="llama-1b"),
    "offload": Shape(engine={"offload": {"host_memory": "64GiB"}}),
    "offload, tp 4": Shape(
        "llama-70b", engine={"offload": {"host_memory": "64GiB"}}, split=Split(4)
    ),
    "a budget for steps that decode": Shape(
        engine={
            "max_num_batched_tokens": 8192,
            "max_num_batched_tokens_while_decoding": 512,
            "max_num_seqs": 256,
        }
    ),
    "tp 2 to 4": Shape("llama-70b", split=Split(2), decode_split=Split(4)),
    "tp 4 to 1": Shape(split=Split(4), decode_split=Split(1)),
    "tp 4 pp 2 to tp 8": Shape("llama-70b", split=Split(4, 2), decode_split=Split(8)),
    "gpt-oss": Shape("gpt-oss-120b", split=Split(2), max_len=32768),
    "gpt-oss, one pool of blocks": Shape(
        "gpt-oss-120b",
        engine={"extra": {"disable_hybrid_kv_cache_manager": True}},
        split=Split(2),
        max_len=32768,
    ),
    "gemma 3": Shape("gemma3-27b-text", split=Split(2), max_len=32768),
    "qwen3-next": Shape("qwen3-next-80b", split=Split(4), max_len=32768),
    "qwen3-next, offload": Shape(
        "qwen3-next-80b",
        engine={"offload": {"host_memory": "64GiB"}},
        split=Split(4),
        max_len=32768,
    ),
    "jamba": Shape("jamba-mini", split=Split(2), max_len=32768),
    "qwen3 moe, ep": Shape("qwen3-30b-a3b", split=Split(4, ep=True), max_len=32768),
    "qwen2.5-vl": Shape("qwen25-vl-7b"),
    "data parallel in extra": _DEEPSEEK._replace(
        engine={"extra": {"data_parallel_size": 8}}, split=Split(1)
    ),
    "executor mp in extra": Shape(
        "llama-70b", engine={"extra": {"distributed_executor_backend": "mp"}}, split=Split(4)
    ),
    "no async scheduling": Shape(engine={"extra": {"async_scheduling": False}}),
    "blocks of 8": Shape(engine={"block_size": 8}),
    "blocks of 32": Shape(engine={"block_size": 32}),
    "blocks of 128": Shape(engine={"block_size": 128}),
    "float32": Shape(engine={"dtype": "float32"}),
    "bytes for blocks": Shape(engine={"kv_cache": "20GiB"}),
    "halves of one gpu": Shape(gpu_fraction=0.5),
}


def write_models(folder: Path, tokenizer: Path) -> None:
    """A folder for each model, with its configuration and somebody's tokenizer."""
    for name, files in json.loads(MODELS.read_text()).items():
        (folder / name).mkdir(parents=True)
        for file, content in files.items():
            (folder / name / file).write_text(json.dumps(content))
        for file in [*tokenizer.glob("tokenizer*"), *tokenizer.glob("chat_template.jinja")]:
            (folder / name / file.name).write_bytes(file.read_bytes())


def vllm_configs(models: Path) -> Iterator[dict[str, object]]:
    """What vLLM makes of each pool of each shape, by baton's own way from file to engine."""
    for name, shape in SHAPES.items():
        for pool in POOLS:
            row: dict[str, object] = {"shape": name, "pool": pool}
            try:
                yield row | _vllm_config(shape.document(models), pool)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
                yield row | {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def _vllm_config(document: Mapping[str, object], pool: str) -> dict[str, object]:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.executor import Executor

    from baton.config.load import load_text
    from baton.engine.vllm.core import engine
    from baton.engine.vllm.core.facts import engine_config, kv_block_bytes, kv_layout
    from baton.engine.vllm.core.settings import engine_arguments, engine_environment
    from baton.serving.replica.engines import ReplicaSite, vllm_settings

    site = ReplicaSite(
        replica_id=f"{pool}-x",
        pool=pool,
        host="127.0.0.1",
        reserve_ports=lambda _host, base, _count: base,
    )
    settings = vllm_settings(load_text(json.dumps(document)), site)
    scratch = Path(tempfile.gettempdir())
    with engine.patched_environment(engine_environment(settings, scratch)):
        config = engine_config(engine_arguments(settings, "ipc://events"))
    connector = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    return {
        "device": config.device_config.device_type,
        "executor": Executor.get_class(config).__name__,
        "connector": f"{connector.__module__}.{connector.__name__}",
        "block_tokens": config.cache_config.block_size,
        "memory_share": config.cache_config.gpu_memory_utilization,
        "most_requests": config.scheduler_config.max_num_seqs,
        "step_tokens": config.scheduler_config.max_num_batched_tokens,
        "block_bytes": kv_block_bytes(config),
        "layout": kv_layout(settings, config),
    }


if __name__ == "__main__":
    for _line in vllm_configs(Path(sys.argv[1])):
        sys.stdout.write(json.dumps(_line) + "\n")
        sys.stdout.flush()
