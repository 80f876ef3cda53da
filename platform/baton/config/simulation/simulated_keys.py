"""What a simulation makes of every key: it is modelled, it does not matter, or a report says so.

Theory of operation. One table has a row for every key of a configuration; a test asks for every key
of the schema. What is *modelled* reaches the scenario. What is *irrelevant* would change nothing in
it, and its row says why. Anything else is *noted*: where such a key has another value than its
default, every report says that this is not simulated, and names the key. Keys of a model's engine
are judged where its pools have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from baton.config.derive.options import wakes
from baton.config.language.fields import Free, each
from baton.config.language.tree import Path, format_path, matches
from baton.config.schema.deployment import DeploymentConfig, EngineKind
from baton.perf.model.engine_arguments import IRRELEVANT_ARGUMENTS


class Treatment(StrEnum):
    """What becomes of a key."""

    MODELLED = "modelled"
    IRRELEVANT = "irrelevant"
    NOTED = "noted"


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of the keys that a pattern names."""

    pattern: str
    treatment: Treatment
    words: str = ""
    """Of a noted key what is not simulated, as a sentence; of an irrelevant one why."""
    kind: EngineKind | None = None
    """Only where a pool's engines are of this kind."""
    values: Callable[[object], bool] | None = None
    """Only for these values."""
    where: Callable[[DeploymentConfig], bool] | None = None
    """Only in such configurations."""


_SHOWN_KEYS = 4
_QUANTIZATIONS = ("fp8", "awq", "gptq")
"""Which schemes of vLLM say how wide weights are; a scheme's name holds one of these."""
_KV_TYPES = ("auto", "fp8", "int8", "int4", "nvfp4", "bfloat16", "float16", "float32")
"""What the types of KV blocks begin with whose width is known."""


def known_quantization(value: object) -> bool:
    """Whether it is known how wide weights are that are quantized so."""
    return value is None or any(one in str(value).lower() for one in _QUANTIZATIONS)


def known_kv_type(value: object) -> bool:
    """Whether it is known how wide KV blocks of this type are."""
    return str(value).startswith(_KV_TYPES)


_SIM, _VLLM = EngineKind.SIM, EngineKind.VLLM
_MODELLED, _NOTED, _IRRELEVANT = Treatment.MODELLED, Treatment.NOTED, Treatment.IRRELEVANT
_TOKENS = "a trace has tokens and no text"
_ROOM = "every replica is taken to find its place"
_OUTSIDE = "requests begin and end in the simulated ingress"
_ONE = "one model is simulated at a time"

_ROWS: tuple[Row, ...] = (
    Row("version", _IRRELEVANT, "there is one format"),
    # ------------------------------------------------------------------ the model
    Row("models.*.source", _MODELLED),
    Row("models.*.revision", _IRRELEVANT, "revisions of a model have one shape"),
    Row("models.*.max_len", _MODELLED),
    Row("models.*.engine.**", _IRRELEVANT, "pools have it, where it is judged"),
    Row(
        "models.*.adapters.**",
        _NOTED,
        "LoRA adapters are not simulated: every request is for the model itself",
    ),
    Row(
        "models.*.runtime_adapters.*",
        _NOTED,
        "LoRA adapters are not simulated: every request is for the model itself",
    ),
    Row("models.*.api.*", _IRRELEVANT, _TOKENS),
    # ------------------------------------------------------------------ pools
    Row("pools.*.model", _IRRELEVANT, _ONE),
    Row("pools.*.role", _MODELLED),
    Row("pools.*.replicas.*", _MODELLED),
    Row("pools.*.resources.gpus", _MODELLED),
    Row("pools.*.resources.accelerator", _MODELLED),
    Row("pools.*.resources.price_per_hour", _IRRELEVANT, "reports count devices, and no money"),
    Row("pools.*.resources.*", _IRRELEVANT, _ROOM),
    Row(
        "pools.*.parallel.ep",
        _NOTED,
        "Expert parallelism is not simulated: experts are taken to be split as other layers are",
    ),
    Row("pools.*.parallel.*", _MODELLED),
    Row(
        "pools.*.placement.**",
        _NOTED,
        "Nodes are not simulated: wherever replicas are, KV blocks move over the network",
    ),
    Row("pools.*.env.*", _NOTED, "Environment variables of engines are not simulated"),
    # ------------------------------------------------------------------ engines
    Row("pools.*.engine.kind", _MODELLED),
    Row("pools.*.engine.dtype", _MODELLED),
    Row("pools.*.engine.block_size", _MODELLED),
    Row("pools.*.engine.gpu_memory_utilization", _MODELLED, kind=_VLLM),
    Row("pools.*.engine.kv_cache", _MODELLED, kind=_VLLM),
    Row("pools.*.engine.gpu_memory_utilization", _IRRELEVANT, "sim.kv_blocks says it", _SIM),
    Row("pools.*.engine.kv_cache", _IRRELEVANT, "sim.kv_blocks says it", _SIM),
    Row("pools.*.engine.prefix_caching", _MODELLED),
    Row(
        "pools.*.engine.offload.host_memory",
        _NOTED,
        "The tier in the host's memory is not simulated: evicted blocks are computed again",
    ),
    Row("pools.*.engine.max_num_seqs", _MODELLED),
    Row("pools.*.engine.max_num_batched_tokens", _MODELLED),
    Row("pools.*.engine.decode_step_tokens", _MODELLED),
    Row("pools.*.engine.start_deadline", _IRRELEVANT, "every simulated engine starts"),
    Row("pools.*.engine.adapters.*", _IRRELEVANT, "there are no adapters, which is noted"),
    Row("pools.*.engine.extra.*", _IRRELEVANT, "a simulated engine takes no arguments", _SIM),
    Row("pools.*.engine.extra.quantization", _MODELLED, values=known_quantization),
    Row(
        "pools.*.engine.extra.quantization",
        _NOTED,
        "This quantization is not simulated: weights are taken as they are stored",
    ),
    Row("pools.*.engine.extra.kv_cache_dtype", _MODELLED, values=known_kv_type),
    Row(
        "pools.*.engine.extra.kv_cache_dtype",
        _NOTED,
        "This type of KV blocks is not simulated: they are taken to be as wide as activations",
    ),
    Row(
        "pools.*.engine.extra.speculative_config",
        _NOTED,
        "Speculative decoding is not simulated: a step gives each stream one token",
    ),
    *(
        Row(f"pools.*.engine.extra.{name}", _IRRELEVANT, why)
        for name, why in IRRELEVANT_ARGUMENTS.items()
    ),
    Row("pools.*.engine.extra.*", _NOTED, "Arguments passed on to vLLM are not simulated"),
    Row(
        "pools.*.engine.sim.share_bandwidth",
        _NOTED,
        "Transfers that do not share a network interface are not simulated: they do",
    ),
    Row("pools.*.engine.sim.host_rate", _IRRELEVANT, "there is no such tier, which is noted"),
    Row("pools.*.engine.sim.adapter_load", _IRRELEVANT, "there are no adapters, which is noted"),
    Row("pools.*.engine.sim.vocab_size", _IRRELEVANT, "which tokens these are changes nothing"),
    Row("pools.*.engine.sim.eos_token_id", _IRRELEVANT, "which tokens these are changes nothing"),
    Row(
        "pools.*.engine.sim.eos_probability",
        _NOTED,
        "Answers that end by themselves are not simulated: they are as long as the trace says",
    ),
    Row("pools.*.engine.sim.*", _MODELLED),
    # ------------------------------------------------------------------ rules
    Row("slo.**", _MODELLED),
    Row("router.**", _MODELLED),
    Row("autoscaler.**", _MODELLED),
    Row("tenants.*.keys_file", _IRRELEVANT, "a trace says who asks"),
    Row("tenants.*.anonymous", _IRRELEVANT, "a trace says who asks"),
    Row(
        "tenants.*.cache",
        _NOTED,
        "Prefix caches of single tenants are not simulated: all share what is cached",
    ),
    Row("tenants.**", _MODELLED),
    Row("admission.max_body", _IRRELEVANT, _TOKENS),
    Row("admission.max_messages", _IRRELEVANT, _TOKENS),
    Row("admission.max_n", _IRRELEVANT, "a request of a trace has one answer"),
    Row(
        "admission.max_tokens",
        _NOTED,
        "Limits to what a request may ask for are not simulated: answers are as long as the trace"
        " says",
    ),
    Row(
        "admission.default_max_tokens",
        _NOTED,
        "Limits to what a request may ask for are not simulated: answers are as long as the trace"
        " says",
    ),
    Row(
        "admission.recovery.silence",
        _NOTED,
        "Replicas that fall silent are not simulated: of one that dies it is known at once",
    ),
    Row("admission.max_cold_start_wait", _MODELLED, where=wakes),
    Row("admission.max_cold_start_wait", _IRRELEVANT, "a fleet that never rests is never woken"),
    Row("admission.**", _MODELLED),
    # ------------------------------------------------------------------ transfers
    Row("transfer.connector", _IRRELEVANT, "there is one"),
    Row("transfer.require_rdma", _NOTED, "Kinds of links are not simulated: every pair is used"),
    Row("transfer.deadline", _MODELLED),
    Row(
        "transfer.on_failure",
        _NOTED,
        "Legs that fail with their transfer are not simulated: prompts are computed again",
    ),
    Row("transfer.early_first_token", _MODELLED),
    Row("transfer.lease", _MODELLED),
    Row("transfer.max_concurrent_pulls", _MODELLED),
    Row("transfer.probe.*", _IRRELEVANT, "no link fails by itself"),
    Row("transfer.side_channel.*", _IRRELEVANT, "no address is listened on"),
    Row("transfer.env.*", _NOTED, "Environment variables of engines are not simulated"),
    # ------------------------------------------------------------------ around it
    Row("server.replicas.min", _MODELLED),
    Row("server.replicas.max", _IRRELEVANT, "a simulated ingress takes no time"),
    Row(
        "server.frontend",
        _NOTED,
        "The time of API servers is not simulated, whichever stands in front",
    ),
    Row("server.**", _IRRELEVANT, _OUTSIDE),
    Row("cluster.**", _IRRELEVANT, _ROOM),
    Row("observability.**", _IRRELEVANT, "watching takes no time that shows"),
    Row("security.**", _IRRELEVANT, _OUTSIDE),
)
"""By path, first match; `*` is one name, `**` any number of them."""


def row_of(path: Path, config: DeploymentConfig, value: object) -> Row:
    """What a simulation of this configuration makes of a key with this value.

    Raises:
        LookupError: nobody has said; a test asks for every key of the schema.
    """
    pool = config.pools.get(path[1]) if path[0] == "pools" else None
    for row in _ROWS:
        if row.kind is not None and (pool is None or pool.engine.kind is not row.kind):
            continue
        if row.values is not None and not row.values(value):
            continue
        if row.where is not None and not row.where(config):
            continue
        if matches(path, row.pattern):
            return row
    raise LookupError(f"nobody has said whether {format_path(path)} is simulated")


def not_simulated(config: DeploymentConfig) -> Iterator[str]:
    """A sentence for whatever has another value than its default and is not simulated."""
    found: dict[str, list[str]] = {}
    for path, value in said(config):
        row = row_of(path, config, value)
        if row.treatment is Treatment.NOTED:
            found.setdefault(row.words, []).append(format_path(path))
    for words, keys in found.items():
        more = len(keys) - _SHOWN_KEYS
        shown = ", ".join(keys[:_SHOWN_KEYS]) + (f" and {more} more" if more > 0 else "")
        yield f"{words} ({shown})."


def said(config: DeploymentConfig) -> Iterator[tuple[Path, object]]:
    """Every key that has another value than its default, with that value."""
    for path, field, value in each(config):
        if isinstance(field.kind, Free) or field.required or value != field.default:
            yield path, value
