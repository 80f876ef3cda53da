"""Sizes of models by their files, beside sums over the modules that transformers builds.

A row for each `ORG--NAME_config.json` of `models/`: parameters, bytes of weights, of a token of KV
cache and of a request's states, each beside a sum that owes nothing to baton's code, or the reason
of a refusal.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.cli.model.models import read_model
from baton.domain.errors import UnknownModel
from baton.perf.model.memory import ModelSplit

_CONFIG = "_config.json"
_QUANTIZATION = "_hf_quant_config.json"
_PROGRAM = """
import json, sys, warnings
warnings.filterwarnings("ignore")
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
same = {
    "minimax_m3": "minimax_m3_vl_text", "kimi_k2": "deepseek_v3", "deepseek_ref": "deepseek_v4",
    "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe", "mimo": "qwen2",
}
for path in sys.argv[1:]:
    with open(path, encoding="utf-8") as file:
        whole = json.load(file)
    text = {**whole.get("text_config", whole)}
    for key in ("quantization_config", "auto_map"):
        text.pop(key, None)
    kind = text.pop("model_type", whole.get("model_type"))
    try:
        config = CONFIG_MAPPING[same.get(kind, kind)](**text)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (KeyError, ValueError) as error:
        sys.stdout.write(json.dumps({"path": path, "why": str(error)}) + "\\n")
        continue
    sizes = {id(weights): (name, weights.numel()) for name, weights in model.named_parameters()}
    projected = sum(
        getattr(module, "out_features", 0)
        for name, module in model.named_modules()
        if name.endswith(("_attn.k_proj", "_attn.v_proj", "mixer.k_proj", "mixer.v_proj"))
    )
    row = {"path": path, "sizes": list(sizes.values()), "projected": projected}
    sys.stdout.write(json.dumps(row) + "\\n")
"""
"""Models that transformers has under another name have the same matrices under both."""

_MODELS = "models"
_BLOCKS, _NVFP4, _MXFP4 = 1 + 4 / 128**2, 0.5 + 1 / 16, 0.5 + 1 / 32
_ATTENTION, _EXPERTS = r"self_attn\..*(proj|wq_b|wk)\b", r"mlp\.experts\."
_ALL = r"(proj|wq_b|wk)\b"
_LAYERS_3_UP = r"layers\.([3-9]|\d\d)\."
_MIXERS = r"layers\.(%s)\.mixer\.(in|out|q|k|v|o)_proj"
_NANO_WIDE = _MIXERS % "4|5|11|12|18|19|25|26|32|33|41|42"
_STORED: Mapping[str, Sequence[tuple[str, float]]] = {
    "Qwen/Qwen3-32B-FP8-Static-PerTensor": ((_ALL, 1),),
    "Qwen/*-FP8": ((_ALL, _BLOCKS),),
    "MiniMaxAI/MiniMax-M2*": ((_ALL, _BLOCKS),),
    "deepseek-ai/DeepSeek-V4*": (
        (_EXPERTS, _MXFP4),
        (r"(compressor|indexer\.(kv|gate|we))", 2),
        (_ALL, _BLOCKS),
    ),
    "nvidia/DeepSeek-V4*": (
        (_EXPERTS, _NVFP4),
        (r"(compressor|indexer\.(kv|gate|we))", 2),
        (_ALL, _BLOCKS),
    ),
    "sgl-project/DeepSeek-V4*": ((r"(compressor|indexer\.(kv|gate|we))", 2), (_ALL, _BLOCKS)),
    "deepseek-ai/*": ((_ALL, _BLOCKS),),
    "moonshotai/Kimi-K2.5": ((_EXPERTS, 0.5 + 2 / 32),),
    "moonshotai/*": ((_ALL, _BLOCKS),),
    "zai-org/*-FP8": ((_ALL, _BLOCKS),),
    "openai/*": ((r"mlp\.experts\.(gate_up|down)_proj$", _MXFP4),),
    "nvidia/DeepSeek-V3.1-NVFP4": ((r"self_attn\.o_proj|mlp\..*proj", _NVFP4),),
    "nvidia/GLM-5.3-NVFP4": (
        (_LAYERS_3_UP + r"mlp\.(experts|gate_proj|up_proj|down_proj)", _NVFP4),
    ),
    "nvidia/Kimi-K2.5-NVFP4": ((r"mlp\..*proj", _NVFP4),),
    "nvidia/Kimi-K2.6-NVFP4": ((_EXPERTS, _NVFP4),),
    "nvidia/Llama-3.1-70B-Instruct-FP8": ((_ALL, 1),),
    "nvidia/MiniMax-M2*": ((_EXPERTS, _NVFP4),),
    "nvidia/Gemma-4*": ((r"\.experts\.", _NVFP4),),
    "nvidia/*Nano*NVFP4": ((_NANO_WIDE, 2), (r"_proj", _NVFP4)),
    "nvidia/*Super*FP8": ((r"_proj|lm_head", 1),),
    "nvidia/*Ultra*FP8": ((r"_proj|lm_head", 1),),
    "nvidia/Qwen3.5*NVFP4": ((_EXPERTS, _NVFP4),),
    "nvidia/Qwen3.6*NVFP4": (
        (r"in_proj_[ab]\b", 2),
        (r"(linear_attn|self_attn)\..*proj", 1),
        (r"mlp\.|lm_head", _NVFP4),
    ),
}
"""Bytes of a parameter by names of transformers, as the lists of exceptions of each file say them;
16 bits for the rest. Read by a person, not by baton."""
_FP8_KV = ("nvidia/", "Qwen/Qwen3-32B-FP8-Static")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model: baton's figures and the sums; None where there is none."""

    name: str
    refusal: str | None = None
    parameters: float | None = None
    weights_bytes: float | None = None
    kv_bytes: float | None = None
    state_bytes: float = 0.0
    sum_parameters: float | None = None
    sum_weights_bytes: float | None = None
    sum_kv_bytes: float | None = None
    left_out: tuple[str, ...] = ()

    @property
    def errors(self) -> Mapping[str, float]:
        """Of each figure that has a sum, as a fraction of it."""
        pairs = {
            "parameters": (self.parameters, self.sum_parameters),
            "weights": (self.weights_bytes, self.sum_weights_bytes),
            "kv": (self.kv_bytes, self.sum_kv_bytes),
        }
        return {
            name: ours / theirs - 1
            for name, (ours, theirs) in pairs.items()
            if ours is not None and theirs
        }


def compute_metrics(data_dir: Path) -> dict[str, float]:
    """Counts and the worst errors against the sums, and a table printed.

    Raises:
        FileNotFoundError: the files are not there.
    """
    if not config_files(data_dir / _MODELS):
        raise FileNotFoundError(f"{data_dir / _MODELS}: no *{_CONFIG}")
    found = rows(data_dir / _MODELS)
    for line in lines(found):
        print(line)
    refused = sum(row.refusal is not None for row in found)
    metrics: dict[str, float] = {
        "models_answered": len(found) - refused,
        "models_refused": refused,
    }
    for figure in ("parameters", "weights", "kv"):
        errors = [abs(row.errors[figure]) for row in found if figure in row.errors]
        metrics |= {
            f"models_{figure}_with_a_sum": len(errors),
            f"models_{figure}_worst_error": round(max(errors, default=0.0), 6),
        }
    return metrics


def rows(folder: Path) -> list[Row]:
    """A row for each config of a folder."""
    files = config_files(folder)
    built = _built(files)
    return [_row(file, built.get(str(file), {})) for file in files]


def config_files(folder: Path) -> Sequence[Path]:
    """Those that are no quantization beside one."""
    files = folder.glob(f"*{_CONFIG}")
    return sorted(file for file in files if not file.name.endswith(_QUANTIZATION))


def model_name(file: Path) -> str:
    """The hub id by a file's name."""
    return file.name.removesuffix(_CONFIG).replace("--", "/")


def _built(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    done = subprocess.run(  # noqa: S603 - the program above
        [sys.executable, "-c", _PROGRAM, *map(str, files)],
        env=os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    found = (json.loads(line) for line in done.stdout.splitlines())
    return {row["path"]: row for row in found}


def _row(file: Path, built: Mapping[str, Any]) -> Row:
    name = model_name(file)
    sums = _sums(name, json.loads(file.read_text(encoding="utf-8")), built)
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder)
        (own / "config.json").write_bytes(file.read_bytes())
        beside = file.with_name(file.name.removesuffix(_CONFIG) + _QUANTIZATION)
        if beside.is_file():
            (own / "hf_quant_config.json").write_bytes(beside.read_bytes())
        try:
            stored = read_model(str(own))
        except UnknownModel as error:
            return Row(name=name, refusal=str(error).replace(folder, name), **sums)
    shape = stored.shape
    return Row(
        name=name,
        parameters=shape.parameters,
        weights_bytes=ModelSplit(shape=shape).stage_weights_bytes(0, stored.weights),
        kv_bytes=shape.kv_token_bytes(stored.kv),
        state_bytes=shape.state_bytes,
        left_out=shape.left_out,
        **sums,
    )


def _sums(name: str, config: Mapping[str, Any], built: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text_config", config)
    sizes = built.get("sizes")
    return {
        "sum_parameters": sum(size for _, size in sizes) if sizes else None,
        "sum_weights_bytes": _stored_bytes(name, sizes) if sizes else None,
        "sum_kv_bytes": _kv_bytes(name, text, built.get("projected")),
    }


def _stored_bytes(name: str, sizes: Sequence[tuple[str, int]]) -> float:
    rules = next((own for pattern, own in _STORED.items() if _globs(pattern, name)), ())
    return sum(
        size * next((own for expression, own in rules if re.search(expression, path)), 2.0)
        for path, size in sizes
    )


def _globs(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) is not None


def _kv_bytes(name: str, text: Mapping[str, Any], projected: int | None) -> float | None:
    """Of outputs of the projections to keys and values, or of the latent; FP8 where files say."""
    number_bytes = 1 if name.startswith(_FP8_KV) and _is_quantized(name) else 2
    layers = text.get("num_hidden_layers", 0)
    if "compress_ratios" in text:
        return None  # no module has what is kept
    if (rank := text.get("kv_lora_rank")) is not None:
        latent: int = layers * (rank + text["qk_rope_head_dim"])
        indexers = 0 if "index_head_dim" not in text else layers
        if text.get("index_topk_freq"):
            indexers = sum(
                max(layer - text["index_skip_topk_offset"] + 1, 0) % text["index_topk_freq"] == 0
                for layer in range(layers)
            )
        latent_bytes: int = latent * number_bytes
        if indexers and number_bytes == 1:  # 656 bytes in vLLM's format
            latent_bytes = layers * (rank + 4 * 4 + 2 * text["qk_rope_head_dim"])
        return latent_bytes + indexers * 132
    if not projected:
        return None
    shared: int = 0
    if text.get("attention_k_eq_v"):  # a layer without a window has one projection for both
        full = sum(type_ == "full_attention" for type_ in text["layer_types"])
        shared = full * text["num_global_key_value_heads"] * text["global_head_dim"]
    sparse = text.get("sparse_attention_config", {})
    keys: int = sum(sparse.get("sparse_attention_freq", ())) * sparse.get("sparse_index_dim", 0)
    return (projected + shared) * number_bytes + keys * 2


def _is_quantized(name: str) -> bool:
    return any(part in name for part in ("FP8", "NVFP4"))


def lines(found: Sequence[Row]) -> Iterator[str]:
    """A table: baton's figure, and the sum with the error."""
    for row in found:
        figures = [
            _figure(row.parameters, row.sum_parameters, 1e9, "B"),
            _figure(row.weights_bytes, row.sum_weights_bytes, 1e9, "GB"),
            _figure(row.kv_bytes, row.sum_kv_bytes, 1, "B/token"),
            f"{row.state_bytes / 1e6:.1f} MB/request" if row.state_bytes else "",
        ]
        notes = [f"without {part}" for part in row.left_out]
        notes += [f"REFUSED: {row.refusal}"] if row.refusal else []
        yield " | ".join((row.name, *figures, *notes))
    refused = sum(row.refusal is not None for row in found)
    yield f"{len(found)} models, {len(found) - refused} answered, {refused} refused"


def _figure(ours: float | None, theirs: float | None, unit: float, name: str) -> str:
    ours_text = "-" if ours is None else f"{ours / unit:,.2f}"
    theirs_text = "no sum" if not theirs else f"{theirs / unit:,.2f}"
    return f"{ours_text} ({theirs_text}) {name}"
