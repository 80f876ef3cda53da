"""Treatment of every key in a simulation: modelled, irrelevant, or noted in reports.

Theory of operation. One table has a row for every key; a test covers the schema. A *modelled* key
reaches the scenario. An *irrelevant* key would not change the scenario, and its row has the reason.
Reports name every *noted* key whose value is not the default, as not simulated. Keys of a model's
engine are treated where its pools inherit them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from baton.config.derive.options import scales_from_zero
from baton.config.language.fields import Free, each
from baton.config.language.tree import Path, format_path, matches
from baton.config.schema.deployment import DeploymentConfig, EngineKind
from baton.perf.model.engine_arguments import IRRELEVANT_ARGUMENTS


class Treatment(StrEnum):
    """Treatments of a key."""

    MODELLED = "modelled"
    IRRELEVANT = "irrelevant"
    NOT_SIMULATED = "noted"


@dataclass(frozen=True, slots=True)
class KeyTreatment:
    """Treatment of the keys of a pattern."""

    pattern: str
    treatment: Treatment
    explanation: str = ""
    """Noted keys: a sentence about the missing effect. Irrelevant keys: the reason."""
    engine_kind: EngineKind | None = None
    """Only for pools with engines of this kind."""
    accepts_value: Callable[[object], bool] | None = None
    """Only for these values."""
    condition: Callable[[DeploymentConfig], bool] | None = None
    """Only in these configurations."""


_KV_TYPES = ("auto", "fp8", "int8", "int4", "nvfp4", "bfloat16", "float16", "float32")
"""Prefixes of KV types of known width."""


def known_kv_type(value: object) -> bool:
    """Whether the width of KV blocks of this type is known."""
    return str(value).startswith(_KV_TYPES)


_SIM, _VLLM = EngineKind.SIM, EngineKind.VLLM
_MODELLED, _NOT_SIMULATED, _IRRELEVANT = (
    Treatment.MODELLED,
    Treatment.NOT_SIMULATED,
    Treatment.IRRELEVANT,
)
_NO_TEXT = "a trace has tokens and no text"
_ALWAYS_PLACED = "every replica is taken to find its place"
_BEYOND_INGRESS = "requests begin and end in the simulated ingress"
_SINGLE_MODEL = "one model is simulated at a time"

_TREATMENTS: tuple[KeyTreatment, ...] = (
    KeyTreatment("version", _IRRELEVANT, "there is one format"),
    # ------------------------------------------------------------------ the model
    KeyTreatment("models.*.source", _MODELLED),
    KeyTreatment("models.*.revision", _IRRELEVANT, "revisions of a model have one shape"),
    KeyTreatment("models.*.max_len", _MODELLED),
    KeyTreatment("models.*.engine.**", _IRRELEVANT, "pools have it, where it is checked"),
    KeyTreatment(
        "models.*.adapters.**",
        _NOT_SIMULATED,
        "LoRA adapters are not simulated: every request is for the model itself",
    ),
    KeyTreatment(
        "models.*.runtime_adapters.*",
        _NOT_SIMULATED,
        "LoRA adapters are not simulated: every request is for the model itself",
    ),
    KeyTreatment("models.*.api.*", _IRRELEVANT, _NO_TEXT),
    # ------------------------------------------------------------------ pools
    KeyTreatment("pools.*.model", _IRRELEVANT, _SINGLE_MODEL),
    KeyTreatment("pools.*.role", _MODELLED),
    KeyTreatment("pools.*.replicas.*", _MODELLED),
    KeyTreatment("pools.*.resources.gpus", _MODELLED),
    KeyTreatment("pools.*.resources.accelerator", _MODELLED),
    KeyTreatment(
        "pools.*.resources.price_per_hour", _IRRELEVANT, "reports count devices, and no money"
    ),
    KeyTreatment("pools.*.resources.*", _IRRELEVANT, _ALWAYS_PLACED),
    KeyTreatment("pools.*.parallel.*", _IRRELEVANT, "a simulated engine has one worker", _SIM),
    KeyTreatment("pools.*.parallel.*", _MODELLED),
    KeyTreatment(
        "pools.*.placement.**",
        _NOT_SIMULATED,
        "Nodes are not simulated: wherever replicas are, KV blocks move over the network",
    ),
    KeyTreatment(
        "pools.*.env.*", _NOT_SIMULATED, "Environment variables of engines are not simulated"
    ),
    # ------------------------------------------------------------------ engines
    KeyTreatment("pools.*.engine.kind", _MODELLED),
    KeyTreatment("pools.*.engine.dtype", _MODELLED),
    KeyTreatment("pools.*.engine.block_size", _MODELLED),
    KeyTreatment("pools.*.engine.gpu_memory_utilization", _MODELLED, engine_kind=_VLLM),
    KeyTreatment("pools.*.engine.kv_cache", _MODELLED, engine_kind=_VLLM),
    KeyTreatment(
        "pools.*.engine.gpu_memory_utilization", _IRRELEVANT, "sim.kv_blocks says it", _SIM
    ),
    KeyTreatment("pools.*.engine.kv_cache", _IRRELEVANT, "sim.kv_blocks says it", _SIM),
    KeyTreatment("pools.*.engine.prefix_caching", _MODELLED),
    KeyTreatment(
        "pools.*.engine.offload.host_memory",
        _NOT_SIMULATED,
        "The tier in the host's memory is not simulated: evicted blocks are computed again",
    ),
    KeyTreatment("pools.*.engine.max_num_seqs", _MODELLED),
    KeyTreatment("pools.*.engine.max_num_batched_tokens", _MODELLED),
    KeyTreatment("pools.*.engine.max_num_batched_tokens_while_decoding", _MODELLED),
    KeyTreatment(
        "pools.*.engine.start_deadline",
        _NOT_SIMULATED,
        "Starts that fail are not simulated: every engine starts, after its cold start",
    ),
    KeyTreatment("pools.*.engine.adapters.*", _IRRELEVANT, "there are no adapters, which is noted"),
    KeyTreatment(
        "pools.*.engine.extra.*", _IRRELEVANT, "a simulated engine takes no arguments", _SIM
    ),
    KeyTreatment("pools.*.engine.extra.quantization", _MODELLED),
    KeyTreatment("pools.*.engine.extra.kv_cache_dtype", _MODELLED, accepts_value=known_kv_type),
    KeyTreatment(
        "pools.*.engine.extra.kv_cache_dtype",
        _NOT_SIMULATED,
        "This type of KV blocks is not simulated: they are taken to be as wide as activations",
    ),
    KeyTreatment(
        "pools.*.engine.extra.speculative_config",
        _NOT_SIMULATED,
        "Speculative decoding is not simulated: a step gives each stream one token",
    ),
    *(
        KeyTreatment(f"pools.*.engine.extra.{name}", _IRRELEVANT, reason)
        for name, reason in IRRELEVANT_ARGUMENTS.items()
    ),
    KeyTreatment(
        "pools.*.engine.extra.*", _NOT_SIMULATED, "Arguments passed on to vLLM are not simulated"
    ),
    KeyTreatment(
        "pools.*.engine.sim.share_bandwidth",
        _NOT_SIMULATED,
        "Transfers that do not share a network interface are not simulated: they do",
    ),
    KeyTreatment(
        "pools.*.engine.sim.host_rate", _IRRELEVANT, "there is no such tier, which is noted"
    ),
    KeyTreatment(
        "pools.*.engine.sim.adapter_load", _IRRELEVANT, "there are no adapters, which is noted"
    ),
    KeyTreatment(
        "pools.*.engine.sim.vocab_size", _IRRELEVANT, "which tokens these are changes nothing"
    ),
    KeyTreatment(
        "pools.*.engine.sim.eos_token_id", _IRRELEVANT, "which tokens these are changes nothing"
    ),
    KeyTreatment(
        "pools.*.engine.sim.eos_probability",
        _NOT_SIMULATED,
        "Answers that end by themselves are not simulated: they are as long as the trace says",
    ),
    KeyTreatment("pools.*.engine.sim.*", _MODELLED),
    # ------------------------------------------------------------------ rules
    KeyTreatment("slo.**", _MODELLED),
    KeyTreatment("router.**", _MODELLED),
    KeyTreatment("autoscaler.**", _MODELLED),
    KeyTreatment("tenants.*.keys_file", _IRRELEVANT, "a trace names the tenant of each request"),
    KeyTreatment("tenants.*.anonymous", _IRRELEVANT, "a trace names the tenant of each request"),
    KeyTreatment(
        "tenants.*.cache",
        _NOT_SIMULATED,
        "Prefix caches of single tenants are not simulated: all share what is cached",
    ),
    KeyTreatment("tenants.**", _MODELLED),
    KeyTreatment("admission.max_body", _IRRELEVANT, _NO_TEXT),
    KeyTreatment("admission.max_messages", _IRRELEVANT, _NO_TEXT),
    KeyTreatment("admission.max_n", _IRRELEVANT, "a request of a trace has one answer"),
    KeyTreatment(
        "admission.max_tokens",
        _NOT_SIMULATED,
        "Limits to what a request may ask for are not simulated: answers are as long as the trace"
        " says",
    ),
    KeyTreatment(
        "admission.default_max_tokens",
        _NOT_SIMULATED,
        "Limits to what a request may ask for are not simulated: answers are as long as the trace"
        " says",
    ),
    KeyTreatment(
        "recovery.heartbeat_timeout",
        _NOT_SIMULATED,
        "Unresponsive replicas are not simulated: a failed replica is known at once",
    ),
    KeyTreatment("admission.cold_start_timeout", _MODELLED, condition=scales_from_zero),
    KeyTreatment(
        "admission.cold_start_timeout", _IRRELEVANT, "a fleet that never rests is never woken"
    ),
    KeyTreatment("admission.**", _MODELLED),
    KeyTreatment("recovery.**", _MODELLED),
    # ------------------------------------------------------------------ transfers
    KeyTreatment("transfer.connector", _IRRELEVANT, "there is one"),
    KeyTreatment(
        "transfer.require_rdma",
        _NOT_SIMULATED,
        "Kinds of links are not simulated: every pair is used",
    ),
    KeyTreatment("transfer.deadline", _MODELLED),
    KeyTreatment(
        "transfer.on_failure",
        _NOT_SIMULATED,
        "Legs that fail with their transfer are not simulated: prompts are computed again",
    ),
    KeyTreatment("transfer.early_first_token", _MODELLED),
    KeyTreatment("transfer.lease", _MODELLED),
    KeyTreatment("transfer.max_concurrent_pulls", _MODELLED),
    KeyTreatment(
        "transfer.probe.*", _NOT_SIMULATED, "Links that fail by themselves are not simulated"
    ),
    KeyTreatment("transfer.side_channel.*", _IRRELEVANT, "no address is listened on"),
    KeyTreatment(
        "transfer.env.*", _NOT_SIMULATED, "Environment variables of engines are not simulated"
    ),
    # ------------------------------------------------------------------ around it
    KeyTreatment("server.replicas.min", _MODELLED),
    KeyTreatment("server.replicas.max", _IRRELEVANT, "a simulated ingress takes no time"),
    KeyTreatment(
        "server.api_server",
        _NOT_SIMULATED,
        "The time of API servers is not simulated, whichever stands in front",
    ),
    KeyTreatment(
        "server.listener",
        _NOT_SIMULATED,
        "The time of listeners is not simulated, whichever takes the connections",
    ),
    KeyTreatment("server.**", _IRRELEVANT, _BEYOND_INGRESS),
    KeyTreatment(
        "cluster.model_cache.*",
        _NOT_SIMULATED,
        "Downloads of weights are not simulated: a start takes its cold start",
    ),
    KeyTreatment("cluster.**", _IRRELEVANT, _ALWAYS_PLACED),
    KeyTreatment("observability.**", _IRRELEVANT, "watching takes no time that shows"),
    KeyTreatment(
        "security.tls.cert_file", _NOT_SIMULATED, "The time of encryption is not simulated"
    ),
    KeyTreatment("security.**", _IRRELEVANT, _BEYOND_INGRESS),
)
"""By path, first match; `*` is one name, `**` any number of names."""


def treatment_of(path: Path, config: DeploymentConfig, value: object) -> KeyTreatment:
    """The treatment of a key with this value in this configuration.

    Raises:
        LookupError: no row matches; a test covers every key of the schema.
    """
    pool = config.pools.get(path[1]) if path[0] == "pools" else None
    for row in _TREATMENTS:
        if row.engine_kind is not None and (
            pool is None or pool.engine.kind is not row.engine_kind
        ):
            continue
        if row.accepts_value is not None and not row.accepts_value(value):
            continue
        if row.condition is not None and not row.condition(config):
            continue
        if matches(path, row.pattern):
            return row
    raise LookupError(f"no row says whether {format_path(path)} is simulated")


def unsimulated_notes(config: DeploymentConfig) -> Iterator[str]:
    """A sentence for each kind of key that has no effect on the simulation."""
    keys_by_explanation: dict[str, list[str]] = {}
    for path, value in non_default_keys(config):
        row = treatment_of(path, config, value)
        if row.treatment is Treatment.NOT_SIMULATED:
            keys_by_explanation.setdefault(row.explanation, []).append(format_path(path))
    for explanation, keys in keys_by_explanation.items():
        yield f"{explanation} ({', '.join(keys)})."


def non_default_keys(config: DeploymentConfig) -> Iterator[tuple[Path, object]]:
    """Every key whose value is not its default, with the value."""
    for path, field, value in each(config):
        if isinstance(field.kind, Free) or field.required or value != field.default:
            yield path, value
