"""What pools of one model must have in common, so that one's engines can use the other's KV blocks.

An engine that is asked for blocks compares a hash of what makes them with that of the engine that
asks, and the number and sizes of their layers. Where these differ every handoff between two such
pools fails. `FACTORS` are the keys of a configuration that make them differ. Source: vLLM 0.32 and
0.33, kv_connector/v1/nixl: `compute_nixl_compatibility_hash` (metadata.py) and
`_validate_remote_agent_handshake` (base_worker.py).

What follows from the model is equal in all of its pools, and versions are in all of a deployment.
Where a key is left out and what it then stands for depends on model and device, it is taken to
differ from any value: `dtype`, `block_size` and the attention backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from baton.config.checks.check_context import Seen
from baton.config.language.tree import Finding, Path
from baton.config.schema.deployment import EngineConfig, PoolConfig, TransferConfig

_AUTO = "auto"
_NO_DRAFTS = "no drafts with KV blocks of their own"
_HIDDEN_STATES = ("eagle", "eagle3", "dflash", "dspark")
"""Methods that draft from the model's hidden states, beside those called mtp."""
_WITHOUT_BLOCKS = frozenset({"ngram", "[ngram]", "ngram_gpu", "suffix", "custom_class"})
_BY_NAME = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""What in a draft model's name makes vLLM take it for which method, in this order."""


class Factor(NamedTuple):
    """One thing that engines must share."""

    key: Path
    """Of a pool."""
    value: Callable[[PoolConfig], object]
    """What it comes to, so that keys which mean the same are equal."""


def check_exchange(seen: Seen) -> Iterator[Finding]:
    """Replicas of one model hand KV blocks to each other, so their blocks must be alike."""
    first: dict[str, tuple[str, PoolConfig]] = {}
    transfer = seen.get(TransferConfig, "transfer")
    shared = {} if transfer is None else transfer.env
    for name, said in seen.pools().items():
        pool = replace(said, env={**shared, **said.env})
        other_name, other = first.setdefault(pool.model, (name, pool))
        for factor in FACTORS:
            mine, theirs = factor.value(pool), factor.value(other)
            if mine != theirs:
                what = f"got {_shown(mine)}, wanted {_shown(theirs)} as in pool '{other_name}'"
                path = ("pools", name, *factor.key)
                yield seen.wrong(path, f"{what}: they exchange KV blocks")


def _shown(value: object) -> str:
    return "null" if value is None else str(value)


def _engine(key: str, value: Callable[[EngineConfig], object]) -> Factor:
    return Factor(("engine", *key.split(".")), lambda pool: value(pool.engine))


def _extra(name: str, default: object = None) -> Factor:
    """One of vLLM's own arguments; null is its default."""

    def value(engine: EngineConfig) -> object:
        said = engine.extra.get(name)
        return default if said is None or said == {} else said

    return _engine(f"extra.{name}", value)


def _variable(name: str, default: str | None = None) -> Factor:
    return Factor(("env", name), lambda pool: pool.env.get(name, default))


def _attention(engine: EngineConfig) -> object:
    """The attention backend that is asked for, in either of two ways."""
    config = engine.extra.get("attention_config")
    said = engine.extra.get("attention_backend")
    if said is None and isinstance(config, Mapping):
        said = config.get("backend")
    return said.upper() if isinstance(said, str) and said.lower() != _AUTO else _AUTO


def _attention_by_kind(engine: EngineConfig) -> object:
    config = engine.extra.get("attention_config")
    kinds = config.get("backend_per_kind") if isinstance(config, Mapping) else None
    if not isinstance(kinds, Mapping):
        return {}
    return {kind: str(backend).upper() for kind, backend in kinds.items()}


def _drafts(engine: EngineConfig) -> str:
    """By what an engine drafts tokens, where that adds KV blocks to the model's.

    A draft model's layers have blocks like the model's own. Where it works from the model's hidden
    states, what it is counts too. Source: `_get_speculative_compatibility_factors` (metadata.py);
    how vLLM finds the method: `SpeculativeConfig.__post_init__`.
    """
    said = engine.extra.get("speculative_config")
    if not isinstance(said, Mapping):
        return _NO_DRAFTS
    method, model = said.get("method"), said.get("model")
    kind = str(method or (model if model in _WITHOUT_BLOCKS else "draft_model"))
    if kind in _WITHOUT_BLOCKS:
        return _NO_DRAFTS
    if kind.endswith("mtp"):
        kind = "mtp"
    if kind not in _HIDDEN_STATES:
        name = str(model or "").lower()
        kind = next((one for part, one in _BY_NAME.items() if part in name), kind)
    if kind not in {*_HIDDEN_STATES, "mtp", "draft_model"}:
        return _NO_DRAFTS
    told = {"model": model}
    if kind != "draft_model":
        blocks = said.get("kv_cache_dtype")
        told |= {name: said.get(name) for name in ("revision", "code_revision")}
        told["parallel_drafting"] = said.get("parallel_drafting") or None
        told["kv_cache_dtype"] = None if blocks == _blocks(engine) else blocks
    said_of_it = (f", {name} {value}" for name, value in told.items() if value is not None)
    return f"{kind} drafts" + "".join(said_of_it)


def _blocks(engine: EngineConfig) -> object:
    return engine.extra.get("kv_cache_dtype") or _AUTO


FACTORS: tuple[Factor, ...] = (
    _engine("kind", lambda engine: engine.kind),
    _engine("dtype", lambda engine: engine.dtype),
    _engine("block_size", lambda engine: engine.block_size_tokens),
    _engine("sim.kv_block_size", lambda engine: engine.sim and engine.sim.kv_block_bytes),
    _engine("extra.kv_cache_dtype", _blocks),
    _extra("kv_cache_dtype_skip_layers", []),
    _extra("mamba_cache_dtype", _AUTO),
    _extra("mamba_ssm_cache_dtype", _AUTO),
    _extra("disable_hybrid_kv_cache_manager", default=False),
    _engine("extra.attention_backend", _attention),
    _engine("extra.attention_config", _attention_by_kind),
    _engine("extra.speculative_config", _drafts),
    _extra("hf_overrides"),
    _extra("hf_config_path"),
    _extra("config_format", _AUTO),
    _variable("VLLM_KV_CACHE_LAYOUT"),
    _variable("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "1"),
)
