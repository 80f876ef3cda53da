"""Every key of a configuration: types, bounds and defaults.

Keys are attribute names without their unit: `deadline_s` is written `deadline: 2s`. `NOT_YET` lists
planned keys, which are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, ClassVar

from baton.config.language.bounds import (
    ArgumentName,
    LabelName,
    ModelName,
    NotNegative,
    PoolName,
    Port,
    Positive,
    TenantName,
    Timeout,
    VariableName,
    Workers,
)
from baton.config.language.fields import Key, SecretRef
from baton.config.language.scalars import Bounds
from baton.config.schema.adapters import AdapterConfig, AdapterSlots, RuntimeAdapters
from baton.config.schema.allow import AllowConfig
from baton.config.schema.cluster import ClusterConfig
from baton.config.schema.observability import ObservabilityConfig
from baton.config.schema.recovery import RecoveryConfig
from baton.config.schema.routing import RouterConfig
from baton.config.schema.scaling import AutoscalerConfig
from baton.config.schema.security import SecurityConfig
from baton.config.schema.service import AdmissionConfig, SloConfig, TenantConfig
from baton.control.probing.prober import ProbeOptions
from baton.control.state.limits import CoordinatorLimits
from baton.domain.fleet import Role
from baton.simulator.engine.settings import SimSettings

_LIMITS = CoordinatorLimits()
_PROBE = ProbeOptions()
_SIM = SimSettings()


class EngineKind(StrEnum):
    """The engine of a replica."""

    VLLM = "vllm"
    SIM = "sim"


class Dtype(StrEnum):
    """The type of weights and activations; `auto` takes the model's own."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class PlacementStrategy(StrEnum):
    """Distribution of one replica's workers over nodes (Ray's placement group strategies)."""

    PACK = "pack"
    SPREAD = "spread"
    STRICT_PACK = "strict_pack"
    STRICT_SPREAD = "strict_spread"


class Connector(StrEnum):
    """Transport of KV blocks."""

    NIXL = "nixl"


class OnFailure(StrEnum):
    """Action of a decode replica that cannot fetch a prompt's KV blocks."""

    RECOMPUTE = "recompute"
    """Prefill the prompt itself."""
    FAIL = "fail"
    """Fail the leg; the request is placed again."""


class ApiServerKind(StrEnum):
    """The API server of ingresses."""

    PYTHON = "python"
    RUST = "rust"


class ListenerKind(StrEnum):
    """The HAProxy that listens for clients."""

    RAY_SERVE = "ray-serve"
    """Ray Serve's, in front of all ingresses."""
    INGRESS = "ingress"
    """Each ingress' own, which is the gate before vLLM's Rust frontend."""


class Route(StrEnum):
    """A group of HTTP routes."""

    CHAT = "chat"
    """OpenAI's chat completions."""
    COMPLETIONS = "completions"
    """OpenAI's completions of a text."""
    MODELS = "models"
    """The served models."""
    RESPONSES = "responses"
    """OpenAI's responses, without a memory of earlier responses."""
    MESSAGES = "messages"
    """Anthropic's messages, and their token counts."""
    TOKENIZE = "tokenize"
    """Text to token ids, and back."""
    HEALTH = "health"
    """200 if a request could be served, else 503. Needs no key."""
    METRICS = "metrics"
    """An ingress' own metrics of vLLM's API server."""
    ADAPTERS = "adapters"
    """Loads and unloads LoRA adapters, with administrator keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimTimings:
    """Speed and size of a simulated engine. Options of real engines have their own keys."""

    prefill_tokens_per_s: Annotated[float, Key("prefill_rate")] = _SIM.prefill_tokens_per_s
    """Prompt tokens per second of one engine."""
    prefill_step_s: float = _SIM.prefill_step_s
    """Fixed time of a step with prefill."""
    prefill_quadratic_s: float = _SIM.prefill_quadratic_s
    """Times the square of the prompt tokens of a step."""
    decode_step_s: float = _SIM.decode_step_s
    """Fixed time of a step with decodes."""
    decode_request_s: float = _SIM.decode_request_s
    """Time that each decoding request adds to a step."""
    decode_kv_s: float = _SIM.decode_kv_s
    """Times the fraction of KV blocks in use, added to a step with decodes."""
    decode_kv_quadratic_s: float = _SIM.decode_kv_quadratic_s
    """Times the square of that fraction, subtracted again."""
    step_overhead_s: float = _SIM.step_overhead_s
    """Fixed time of every step."""
    transfer_bytes_per_s: Annotated[float, Key("transfer_rate")] = _SIM.transfer_bytes_per_s
    """Bandwidth of one network interface for KV blocks."""
    transfer_setup_s: float = _SIM.transfer_setup_s
    """Fixed time of every transfer."""
    share_bandwidth: bool = _SIM.share_bandwidth
    """Whether concurrent transfers share the network interfaces that they have in common."""
    host_bytes_per_s: Annotated[float, Key("host_rate")] = _SIM.host_bytes_per_s
    """Rate at which offloaded blocks are loaded."""
    adapter_load_s: float = _SIM.adapter_load_s
    """Time to load an adapter; the engine computes nothing meanwhile."""
    speed: Annotated[float, NotNegative] = _SIM.speed
    """Divides the duration of every step, load and transfer."""
    kv_blocks: Annotated[int, Positive] = _SIM.kv_blocks
    """KV blocks of one engine."""
    kv_block_bytes: Annotated[int, Key("kv_block_size"), Positive] = _SIM.kv_block_bytes
    """Bytes of one KV block in a transfer."""
    max_waiting_requests: Annotated[int, Positive] = _SIM.max_waiting_requests
    """Requests that wait inside one engine; more requests fail."""
    vocab_size: Annotated[int, Positive] = _SIM.vocab_size
    """Upper bound of generated token ids."""
    eos_probability: Annotated[float, Bounds(low=0, high=1)] = _SIM.eos_probability
    """Probability that an answer ends with the next token; 0: only at its limit."""
    eos_token_id: Annotated[int, NotNegative] = _SIM.eos_token_id
    """The token that ends an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Offloading of KV blocks that do not fit the KV cache."""

    host_memory_bytes: Annotated[int | None, Positive] = None
    """Host memory for the blocks of one engine, all its workers together; null: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Engine options; null: the engine's default. A pool's options override its model's by key."""

    kind: EngineKind = EngineKind.VLLM
    dtype: Dtype = Dtype.AUTO
    block_size_tokens: Annotated[int | None, Key("block_size"), Positive] = None
    """Tokens of one KV block. On a CPU, vLLM takes multiples of 32."""
    gpu_memory_utilization: Annotated[float | None, Bounds(low=0.01, high=1)] = None
    """Share of each GPU that the engine may fill: weights, activations and KV blocks."""
    kv_cache_bytes: Annotated[int | None, Positive] = None
    """Memory for KV blocks of one worker, instead of a share of the GPU's or the machine's."""
    prefix_caching: bool = True
    """Keep the KV blocks of prompts, so that prompts with the same prefix compute less."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    max_num_seqs: Annotated[int | None, Positive] = None
    """Requests that one engine runs at a time."""
    max_num_batched_tokens: Annotated[int | None, Positive] = None
    """Tokens of one step. More tokens finish prompts sooner and delay streams longer."""
    max_num_batched_tokens_while_decoding: Annotated[int | None, Positive] = None
    """A smaller number of tokens for steps with decodes: prompts beside streams are computed in
    smaller chunks, and in large chunks otherwise. For pools whose replicas may have both roles."""
    adapters: AdapterSlots = field(default_factory=AdapterSlots)
    start_deadline_s: Annotated[float | None, Positive] = None
    """Time until the engine must be ready; null: ten minutes, and the time to load its weights at
    40 MB/s."""
    extra: Annotated[Mapping[str, object], ArgumentName] = field(default_factory=dict)
    """Raw vLLM engine arguments that have no key of their own here."""
    sim: SimTimings | None = None
    """Only with `kind: sim`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A served model; its name is its key."""

    MAIN_KEY: ClassVar[str] = "source"

    source: str
    """A hub id (also as `hf://org/model`), a folder, a place in `s3://`, `gs://` or `az://`, or
    `tiny`: a small random model that is made on this machine."""
    revision: str | None = None
    """A branch, tag or commit of the hub; null: the newest."""
    max_len_tokens: Annotated[int | None, Key("max_len"), Bounds(low=2)] = None
    """Tokens of prompt and output together; null: the model's own limit."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    adapters: Annotated[Mapping[str, AdapterConfig], ModelName] = field(default_factory=dict)
    """LoRA adapters of the model, under the names that requests give as their `model`."""
    runtime_adapters: RuntimeAdapters = field(default_factory=RuntimeAdapters)
    api: Annotated[Mapping[str, object], ArgumentName] = field(default_factory=dict)
    """Raw arguments of vLLM's API server, such as `tool_call_parser`, with underscores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounts:
    """Numbers of replicas. `initial` defaults to `min`, and `max` to `initial`."""

    MAIN_KEY: ClassVar[str] = "initial"

    min: Annotated[int, NotNegative] = 1
    """The autoscaler does not go below it."""
    initial: Annotated[int, NotNegative] = 1
    """Replicas at the start of a deployment; the default is `min`."""
    max: Annotated[int, Bounds(low=1, high=10_000)] = 1
    """The autoscaler does not go above it; the default is `initial`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of one replica in the cluster, for all its workers together."""

    cpus: Annotated[float, NotNegative] = 1.0
    """CPU cores, as Ray counts them."""
    gpus: Annotated[float, NotNegative] = 0.0
    """GPUs of one replica: `tp` times `pp` times `dp`, one per worker, or 0. A single worker may
    also take a part of a GPU, as 0.5, and share it with others."""
    accelerator: str | None = None
    """Ray's accelerator type, e.g. H100."""
    price_per_hour: Annotated[float | None, NotNegative] = None
    """$ for one GPU, or one worker without GPUs; null: the accelerator's usual price."""
    memory_bytes: Annotated[int | None, Positive] = None
    """Host memory, as Ray counts it; null: none is reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Split of one engine over workers."""

    MAIN_KEY: ClassVar[str] = "tp"

    tp: Annotated[int, Workers] = 1
    """Tensor parallelism: workers that share each layer."""
    pp: Annotated[int, Workers] = 1
    """Pipeline parallelism: groups of workers with some layers each."""
    dp: Annotated[int, Workers] = 1
    """Data parallelism: ranks with requests of their own, which share experts and step together.
    Only `baton simulate` takes more than 1."""
    ep: bool = False
    """Whole experts on each worker, instead of a slice of all of them (mixture of experts only)."""

    @property
    def workers(self) -> int:
        """Engine workers of one replica."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Nodes of a pool's replicas and of their workers."""

    strategy: PlacementStrategy = PlacementStrategy.PACK
    """For the workers of one replica; Ray Serve spreads the replicas of a pool over nodes."""
    max_per_node: Annotated[int | None, Positive] = None
    """Replicas of this pool on one node, for replicas with a single worker; null: no limit."""
    labels: Annotated[Mapping[str, str], LabelName] = field(default_factory=dict)
    """Required labels of the nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Replicas of one role and one shape; its name is its key."""

    model: str
    """Name of its model; optional with only one model."""
    role: Role
    """Intended work of its replicas. A hint: without pools of one role, the other role does both.
    """
    replicas: ReplicaCounts = field(default_factory=ReplicaCounts)
    resources: Resources = field(default_factory=Resources)
    parallel: Parallel = field(default_factory=Parallel)
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Engine options of the model, overridden by those of the pool."""
    placement: Placement = field(default_factory=Placement)
    env: Annotated[Mapping[str, str | SecretRef], VariableName] = field(default_factory=dict)
    """Environment variables of this pool's engine processes, in addition to `transfer.env`."""


SIDE_CHANNEL_PORTS = 1_000
"""From `port_base` on. A port stays unused for an hour after its engine, so there are many. Ray
Serve's ports start at 21000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideChannel:
    """Address at which engines coordinate transfers of KV blocks."""

    bind: str = "private"
    """An IP address; a network as `10.1.0.0/16`: each node's own address in it; or `private`: the
    address by which the cluster knows the node."""
    port_base: Annotated[int, Port] = 20000
    """The first of 1,000 ports. Each engine worker of a node has its own; a restarted worker gets
    another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeConfig:
    """Probes of replica pairs that exchange KV blocks."""

    interval_s: Annotated[float, Bounds(low=0.1, high=3_600)] = _PROBE.interval_s
    """Between two probes of a pair."""
    deadline_s: Annotated[float, Timeout] = _PROBE.deadline_s
    """For each step of a probe; a pair that misses it is not used until it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Transfers of KV blocks."""

    connector: Connector = Connector.NIXL
    require_rdma: bool = False
    """Do not use a pair of replicas whose blocks pass through the kernel's network stack."""
    deadline_s: Annotated[float, Timeout] = _LIMITS.transfer_deadline_s
    """For the blocks of one handoff, or twice their predicted time if that is longer. When only a
    prefix is fetched, the predicted time for the rest of the prompt is added. After it,
    `on_failure` applies."""
    on_failure: OnFailure = OnFailure.RECOMPUTE
    early_first_token: bool = _LIMITS.early_first_token
    """Send the token that ends prefill to the client at once, and continue with the decode replica.
    The first token comes sooner, by the transfer and a step; the second comes at the same time as
    without it."""
    lease_s: Annotated[float, Bounds(low=1, high=86_400)] = _LIMITS.lease_s
    """Time that a prefill replica keeps a finished prompt's blocks for a pull."""
    max_concurrent_pulls: Annotated[int | None, Positive] = _LIMITS.max_pulls
    """Into one replica; more pulls wait. Null: no limit."""
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    side_channel: SideChannel = field(default_factory=SideChannel)
    env: Annotated[Mapping[str, str | SecretRef], VariableName] = field(default_factory=dict)
    """Environment variables of engine processes, e.g. UCX_TLS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressCounts:
    """Numbers of ingress replicas."""

    min: Annotated[int, Positive] = 1
    """Ingresses at the start of a deployment."""
    max: Annotated[int, Positive] = 1
    """More ingresses start when the running ingresses have little processor time left. The default
    is `min`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The public endpoint."""

    NOT_YET: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "tls": "here; it is security.tls, move it there",
            "extra": "here; arguments of vLLM's API server are the model's, use models.*.api",
        }
    )

    host: str = "127.0.0.1"
    """The address for clients. For addresses other than loopback, set up keys and TLS first."""
    port: Annotated[int, Port] = 8000
    """The port for clients."""
    api_server: ApiServerKind = ApiServerKind.PYTHON
    """vLLM's API server; `rust` is faster and supports less: see [frontends](../frontends.md)."""
    listener: ListenerKind = ListenerKind.RAY_SERVE
    """The HAProxy that listens for clients: Ray Serve's, or with `api_server: rust` that of each
    ingress (`ingress`), which saves a hop: see [frontends](../frontends.md#ingress-listener)."""
    replicas: IngressCounts = field(default_factory=IngressCounts)
    routes: tuple[Route, ...] = tuple(Route)
    """Open groups of routes; any other path is 404. See [the API](api.md)."""
    allow: AllowConfig = field(default_factory=AllowConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentConfig:
    """Configuration of a deployment."""

    version: Annotated[int, Bounds(low=1, high=1)]
    """Version of the file format."""
    models: Annotated[Mapping[str, ModelConfig], ModelName]
    pools: Annotated[Mapping[str, PoolConfig], PoolName]
    slo: SloConfig = field(default_factory=SloConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    autoscaler: AutoscalerConfig | None = None
    """Null: pools keep their initial replicas."""
    tenants: Annotated[Mapping[str, TenantConfig], TenantName] = field(default_factory=dict)
    """Tenants by name; empty: all callers are one tenant."""
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)

    @property
    def model_name(self) -> str:
        """The name of the only model; of several, all names, only for display."""
        return ", ".join(self.models)
