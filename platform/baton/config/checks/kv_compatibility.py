"""Keys that pools of one model must share, so that their engines can exchange KV blocks.

An engine compares a hash of its KV settings, and the number and sizes of its layers, with those of
the engine that requests blocks. When they differ, every handoff between the two pools fails.
`FACTORS` are the keys that change them.

Facts of the model are equal in all its pools, and versions in the whole deployment. Defaults of
`dtype`, `block_size` and the attention backend depend on model and device. So a missing key is
taken to differ from any value.

Source: vLLM 0.32 and 0.33, kv_connector/v1/nixl: `compute_nixl_compatibility_hash` (metadata.py)
and `_validate_remote_agent_handshake` (base_worker.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from baton.config.checks.check_context import CheckContext
from baton.config.language.tree import Finding, Path
from baton.config.schema.deployment import EngineConfig, PoolConfig, TransferConfig

_AUTO = "auto"
_NO_DRAFTS = "no drafts with KV blocks of their own"
_HIDDEN_STATE_METHODS = ("eagle", "eagle3", "dflash", "dspark")
"""Methods that draft from the model's hidden states, in addition to mtp methods."""
_METHODS_WITHOUT_KV = frozenset({"ngram", "[ngram]", "ngram_gpu", "suffix", "custom_class"})
_METHOD_BY_NAME_PART = {
    "eagle-": "eagle",
    "eagle3": "eagle3",
    "dflash": "dflash",
    "dspark": "dspark",
}
"""Parts of a draft model's name by which vLLM selects a method, in this order."""


class Factor(NamedTuple):
    """One setting that engines must share."""

    key: Path
    """Of a pool."""
    value: Callable[[PoolConfig], object]
    """Its normalized value, so that equivalent keys compare equal."""


def check_kv_compatibility(context: CheckContext) -> Iterator[Finding]:
    """Findings where KV blocks of a pool differ from those of its model's first pool."""
    reference_pools: dict[str, tuple[str, PoolConfig]] = {}
    transfer = context.get(TransferConfig, "transfer")
    transfer_env = {} if transfer is None else transfer.env
    for name, pool_config in context.pools().items():
        pool = replace(pool_config, env={**transfer_env, **pool_config.env})
        reference_name, reference = reference_pools.setdefault(pool.model, (name, pool))
        for factor in FACTORS:
            own_value, reference_value = factor.value(pool), factor.value(reference)
            if own_value != reference_value:
                message = (
                    f"got {_format_value(own_value)}, expected"
                    f" {_format_value(reference_value)} as in pool '{reference_name}'"
                )
                path = ("pools", name, *factor.key)
                yield context.finding(path, f"{message}: they exchange KV blocks")


def _format_value(value: object) -> str:
    return "null" if value is None else str(value)


def _engine_factor(key: str, value: Callable[[EngineConfig], object]) -> Factor:
    return Factor(("engine", *key.split(".")), lambda pool: value(pool.engine))


def _extra_factor(name: str, default: object = None) -> Factor:
    """An argument of vLLM; null is its default."""

    def value(engine: EngineConfig) -> object:
        argument = engine.extra.get(name)
        return default if argument is None or argument == {} else argument

    return _engine_factor(f"extra.{name}", value)


def _env_factor(name: str, default: str | None = None) -> Factor:
    return Factor(("env", name), lambda pool: pool.env.get(name, default))


def _attention_backend(engine: EngineConfig) -> object:
    """The requested attention backend, from either of its two arguments."""
    config = engine.extra.get("attention_config")
    backend = engine.extra.get("attention_backend")
    if backend is None and isinstance(config, Mapping):
        backend = config.get("backend")
    return backend.upper() if isinstance(backend, str) and backend.lower() != _AUTO else _AUTO


def _attention_backends_by_kind(engine: EngineConfig) -> object:
    config = engine.extra.get("attention_config")
    kinds = config.get("backend_per_kind") if isinstance(config, Mapping) else None
    if not isinstance(kinds, Mapping):
        return {}
    return {kind: str(backend).upper() for kind, backend in kinds.items()}


def _draft_method(engine: EngineConfig) -> str:
    """The drafting method, where it adds KV blocks to the model's.

    A draft model's layers have blocks like the model's own. A method that uses the model's hidden
    states must also match in its other settings. Source: `_get_speculative_compatibility_factors`
    (metadata.py); vLLM's choice of the method: `SpeculativeConfig.__post_init__`.
    """
    speculative_config = engine.extra.get("speculative_config")
    if not isinstance(speculative_config, Mapping):
        return _NO_DRAFTS
    method, model = speculative_config.get("method"), speculative_config.get("model")
    kind = str(method or (model if model in _METHODS_WITHOUT_KV else "draft_model"))
    if kind in _METHODS_WITHOUT_KV:
        return _NO_DRAFTS
    if kind.endswith("mtp"):
        kind = "mtp"
    if kind not in _HIDDEN_STATE_METHODS:
        name = str(model or "").lower()
        kind = next((other for part, other in _METHOD_BY_NAME_PART.items() if part in name), kind)
    if kind not in {*_HIDDEN_STATE_METHODS, "mtp", "draft_model"}:
        return _NO_DRAFTS
    draft_facts = {"model": model}
    if kind != "draft_model":
        draft_kv_dtype = speculative_config.get("kv_cache_dtype")
        draft_facts |= {
            name: speculative_config.get(name) for name in ("revision", "code_revision")
        }
        draft_facts["parallel_drafting"] = speculative_config.get("parallel_drafting") or None
        draft_facts["kv_cache_dtype"] = (
            None if draft_kv_dtype == _kv_cache_dtype(engine) else draft_kv_dtype
        )
    suffixes = (f", {name} {value}" for name, value in draft_facts.items() if value is not None)
    return f"{kind} drafts" + "".join(suffixes)


def _kv_cache_dtype(engine: EngineConfig) -> object:
    return engine.extra.get("kv_cache_dtype") or _AUTO


FACTORS: tuple[Factor, ...] = (
    _engine_factor("kind", lambda engine: engine.kind),
    _engine_factor("dtype", lambda engine: engine.dtype),
    _engine_factor("block_size", lambda engine: engine.block_size_tokens),
    _engine_factor("sim.kv_block_size", lambda engine: engine.sim and engine.sim.kv_block_bytes),
    _engine_factor("extra.kv_cache_dtype", _kv_cache_dtype),
    _extra_factor("kv_cache_dtype_skip_layers", []),
    _extra_factor("mamba_cache_dtype", _AUTO),
    _extra_factor("mamba_ssm_cache_dtype", _AUTO),
    _extra_factor("disable_hybrid_kv_cache_manager", default=False),
    _engine_factor("extra.attention_backend", _attention_backend),
    _engine_factor("extra.attention_config", _attention_backends_by_kind),
    _engine_factor("extra.speculative_config", _draft_method),
    _extra_factor("hf_overrides"),
    _extra_factor("hf_config_path"),
    _extra_factor("config_format", _AUTO),
    _env_factor("VLLM_KV_CACHE_LAYOUT"),
    _env_factor("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "1"),
)
