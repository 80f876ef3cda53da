"""Every key that a configuration may hold: types, bounds and defaults.

Keys are the attributes' names without their unit: `deadline_s` is written `deadline: 2s`. What is
planned but has no effect yet is named in `NOT_YET` and refused.
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
    """What runs inside a replica."""

    VLLM = "vllm"
    SIM = "sim"


class Dtype(StrEnum):
    """The type of weights and activations; `auto` takes the model's own."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class PlacementStrategy(StrEnum):
    """How the workers of one replica are laid over nodes (Ray's placement group strategies)."""

    PACK = "pack"
    SPREAD = "spread"
    STRICT_PACK = "strict_pack"
    STRICT_SPREAD = "strict_spread"


class Connector(StrEnum):
    """What moves KV blocks."""

    NIXL = "nixl"


class OnFailure(StrEnum):
    """What decode does when a prompt's KV blocks cannot be fetched."""

    RECOMPUTE = "recompute"
    """Prefill the prompt itself."""
    FAIL = "fail"
    """Give the leg up; the request is placed again."""


class ApiServerKind(StrEnum):
    """Which API server stands in front."""

    PYTHON = "python"
    RUST = "rust"


class ListenerKind(StrEnum):
    """Whose HAProxy listens where clients come."""

    RAY_SERVE = "ray-serve"
    """Ray Serve's, before all ingresses."""
    INGRESS = "ingress"
    """Each ingress' own, which is the gate before vLLM's Rust frontend."""


class Route(StrEnum):
    """A group of HTTP routes that may be opened."""

    CHAT = "chat"
    """OpenAI's chat completions."""
    COMPLETIONS = "completions"
    """OpenAI's completions of a text."""
    MODELS = "models"
    """Which models are served."""
    RESPONSES = "responses"
    """OpenAI's responses, without a memory of earlier ones."""
    MESSAGES = "messages"
    """Anthropic's messages, and how many tokens one has."""
    TOKENIZE = "tokenize"
    """Text to token ids, and back."""
    HEALTH = "health"
    """200 where a request could be served, else 503. Asks for no key."""
    METRICS = "metrics"
    """An ingress' own metrics of vLLM's API server."""
    ADAPTERS = "adapters"
    """LoRA adapters are loaded and unloaded, by keys that may administer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimTimings:
    """How fast and how large a simulated engine is; what it shares with real ones is set there."""

    prefill_tokens_per_s: Annotated[float, Key("prefill_rate")] = _SIM.prefill_tokens_per_s
    """Prompt tokens that one engine computes in a second."""
    prefill_step_s: float = _SIM.prefill_step_s
    """What a step that prefills anything costs besides."""
    prefill_quadratic_s: float = _SIM.prefill_quadratic_s
    """Times the square of the prompt tokens that a step computes."""
    decode_step_s: float = _SIM.decode_step_s
    """Time of a step that decodes for anyone, whoever it is for."""
    decode_request_s: float = _SIM.decode_request_s
    """What each decoding request adds to a step."""
    decode_kv_s: float = _SIM.decode_kv_s
    """Times the fraction of the KV blocks in use, added to a step that decodes."""
    decode_kv_quadratic_s: float = _SIM.decode_kv_quadratic_s
    """Times the square of that fraction, taken off again."""
    step_overhead_s: float = _SIM.step_overhead_s
    """What every step costs, whatever it computes."""
    transfer_bytes_per_s: Annotated[float, Key("transfer_rate")] = _SIM.transfer_bytes_per_s
    """Of KV blocks, over one network interface."""
    transfer_setup_s: float = _SIM.transfer_setup_s
    """What every transfer costs, however little it moves."""
    share_bandwidth: bool = _SIM.share_bandwidth
    """Transfers at the same time share the network interfaces that they have in common."""
    host_bytes_per_s: Annotated[float, Key("host_rate")] = _SIM.host_bytes_per_s
    """At which offloaded blocks come back."""
    adapter_load_s: float = _SIM.adapter_load_s
    """To load an adapter; nothing is computed meanwhile."""
    speed: Annotated[float, NotNegative] = _SIM.speed
    """Divides the duration of every step, load and transfer."""
    kv_blocks: Annotated[int, Positive] = _SIM.kv_blocks
    """KV blocks that one engine has room for."""
    kv_block_bytes: Annotated[int, Key("kv_block_size"), Positive] = _SIM.kv_block_bytes
    """What one of them takes on the way to another engine."""
    max_waiting_requests: Annotated[int, Positive] = _SIM.max_waiting_requests
    """Requests that wait inside one engine; further ones fail."""
    vocab_size: Annotated[int, Positive] = _SIM.vocab_size
    """Token ids that are made up are below it."""
    eos_probability: Annotated[float, Bounds(low=0, high=1)] = _SIM.eos_probability
    """That an answer ends with the next token; 0: at its limit only."""
    eos_token_id: Annotated[int, NotNegative] = _SIM.eos_token_id
    """The token that ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Where KV blocks go that the KV cache has no room for."""

    host_memory_bytes: Annotated[int | None, Positive] = None
    """The host's memory for the blocks of one engine, all its workers together; null for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Engine options; a pool's override its model's, key by key. Null leaves it to the engine."""

    kind: EngineKind = EngineKind.VLLM
    dtype: Dtype = Dtype.AUTO
    block_size_tokens: Annotated[int | None, Key("block_size"), Positive] = None
    """Tokens of one KV block. On a CPU, vLLM takes multiples of 32."""
    gpu_memory_utilization: Annotated[float | None, Bounds(low=0.01, high=1)] = None
    """The share of each GPU that the engine may fill: weights, activations and KV blocks."""
    kv_cache_bytes: Annotated[int | None, Positive] = None
    """Memory for KV blocks of one worker, instead of a share of the GPU's or the machine's."""
    prefix_caching: bool = True
    """Keep the KV blocks of prompts, so that the next one that begins alike computes less."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    max_num_seqs: Annotated[int | None, Positive] = None
    """Requests that one engine runs at a time."""
    max_num_batched_tokens: Annotated[int | None, Positive] = None
    """Tokens of one step: the larger, the sooner prompts are done and the longer streams wait."""
    max_num_batched_tokens_while_decoding: Annotated[int | None, Positive] = None
    """Tokens of a step that any stream waits for, where that should be fewer: prompts that are
    computed beside streams come in smaller pieces, and in large ones where nobody decodes. For
    pools whose replicas may play both roles."""
    adapters: AdapterSlots = field(default_factory=AdapterSlots)
    start_deadline_s: Annotated[float | None, Positive] = None
    """Until it must be ready; null: ten minutes, and as long as its weights take at 40 MB/s."""
    extra: Annotated[Mapping[str, object], ArgumentName] = field(default_factory=dict)
    """Raw vLLM engine arguments that have no key of their own here."""
    sim: SimTimings | None = None
    """Given exactly when the kind is `sim`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model that is served; its name is its key."""

    source: str
    """A hub id (also as `hf://org/model`), a folder, a place in `s3://`, `gs://` or `az://`, or
    `tiny`: a small random model that is made on this machine."""
    revision: str | None = None
    """A branch, tag or commit of the hub's; null takes the newest."""
    max_len_tokens: Annotated[int | None, Key("max_len"), Bounds(low=2)] = None
    """Prompt and output together; null takes what the model says."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    adapters: Annotated[Mapping[str, AdapterConfig], ModelName] = field(default_factory=dict)
    """LoRA adapters over it, under the names that requests give as their `model`."""
    runtime_adapters: RuntimeAdapters = field(default_factory=RuntimeAdapters)
    api: Annotated[Mapping[str, object], ArgumentName] = field(default_factory=dict)
    """Raw arguments of vLLM's API server, such as `tool_call_parser`, with underscores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounts:
    """How many replicas; `initial` is `min` and `max` is `initial` unless said."""

    min: Annotated[int, NotNegative] = 1
    """Not even the autoscaler goes below it."""
    initial: Annotated[int, NotNegative] = 1
    """With which a deployment starts; as many as `min` unless said."""
    max: Annotated[int, Bounds(low=1, high=10_000)] = 1
    """Not even the autoscaler goes above; as many as `initial` unless said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one replica takes from the cluster, all its workers together."""

    cpus: Annotated[float, NotNegative] = 1.0
    """CPU cores, as Ray counts them."""
    gpus: Annotated[float, NotNegative] = 0.0
    """GPUs of one replica: one for each of its workers, so `tp` times `pp`, or none; one worker
    may also take a part of a GPU, as 0.5, and shares it with others."""
    accelerator: str | None = None
    """Ray's accelerator type, e.g. H100."""
    price_per_hour: Annotated[float | None, NotNegative] = None
    """$ for one GPU, or one worker without GPUs; null takes the accelerator's usual one."""
    memory_bytes: Annotated[int | None, Positive] = None
    """Of the host's memory, as Ray counts it; null: none is set aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How one engine is split over workers."""

    tp: Annotated[int, Workers] = 1
    """Tensor parallelism: workers that share each layer."""
    pp: Annotated[int, Workers] = 1
    """Pipeline parallelism: groups of workers with some layers each."""
    ep: bool = False
    """Whole experts on each worker, instead of a slice of all of them (mixture of experts only)."""

    @property
    def workers(self) -> int:
        """Engine workers of one replica."""
        return self.tp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a pool's replicas, and the workers of each, go."""

    strategy: PlacementStrategy = PlacementStrategy.PACK
    """Of the workers of one replica; replicas of a pool are spread over nodes by Ray Serve."""
    max_per_node: Annotated[int | None, Positive] = None
    """Replicas of this pool on one node, of those with a single worker; null for no limit."""
    labels: Annotated[Mapping[str, str], LabelName] = field(default_factory=dict)
    """What the labels of every node that it runs on must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Replicas of one role and one shape; its name is its key."""

    model: str
    """The name of its model; may be left out where there is one only."""
    role: Role
    """What its replicas are meant to run. A hint: where one role is missing, the other does
    both."""
    replicas: ReplicaCounts = field(default_factory=ReplicaCounts)
    resources: Resources = field(default_factory=Resources)
    parallel: Parallel = field(default_factory=Parallel)
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The model's options with this pool's on top: nothing else needs to be looked up."""
    placement: Placement = field(default_factory=Placement)
    env: Annotated[Mapping[str, str | SecretRef], VariableName] = field(default_factory=dict)
    """Environment variables of this pool's engine processes, on top of `transfer.env`."""


SIDE_CHANNEL_PORTS = 1_000
"""From `port_base` on: many, for each rests an hour after its engine. Ray Serve's are at 21000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideChannel:
    """Where engines meet before they move KV blocks."""

    bind: str = "private"
    """An IP address; a network as `10.1.0.0/16`: each node's own address in it; or `private`: the
    address under which the node is known to the cluster."""
    port_base: Annotated[int, Port] = 20000
    """The first of 1,000 ports. Each engine worker of a node has one, and a restarted one another.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeConfig:
    """How pairs of replicas are watched that hand KV blocks over."""

    interval_s: Annotated[float, Bounds(low=0.1, high=3_600)] = _PROBE.interval_s
    """Between two looks at one pair."""
    deadline_s: Annotated[float, Timeout] = _PROBE.deadline_s
    """For each step of a probe; a pair that does not answer in it is not used until it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How KV blocks move."""

    connector: Connector = Connector.NIXL
    require_rdma: bool = False
    """Do not use a pair of replicas whose blocks go through the kernel's network stack."""
    deadline_s: Annotated[float, Timeout] = _LIMITS.transfer_deadline_s
    """For the blocks of one handoff, and twice what they are predicted to take if that is longer;
    besides what the rest of a prompt is predicted to take where only its prefix is fetched. Then
    `on_failure`."""
    on_failure: OnFailure = OnFailure.RECOMPUTE
    early_first_token: bool = _LIMITS.early_first_token
    """Give a client the token that ends its prefill at once, and go on after it where it is
    decoded: the first token comes sooner, by the transfer and a step, and the second when it
    would have come anyway."""
    lease_s: Annotated[float, Bounds(low=1, high=86_400)] = _LIMITS.lease_s
    """How long a prefill replica keeps a finished prompt's blocks for a pull."""
    max_concurrent_pulls: Annotated[int | None, Positive] = 8
    """Into one replica; further ones wait their turn. Null for no limit."""
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    side_channel: SideChannel = field(default_factory=SideChannel)
    env: Annotated[Mapping[str, str | SecretRef], VariableName] = field(default_factory=dict)
    """Environment variables of engine processes, e.g. UCX_TLS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressCounts:
    """How many ingress replicas."""

    min: Annotated[int, Positive] = 1
    """With which a deployment starts."""
    max: Annotated[int, Positive] = 1
    """More come while those that there are have little processor time left. As many as `min`
    unless said."""


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
    """The address that clients reach. Others than this machine: keys and TLS first."""
    port: Annotated[int, Port] = 8000
    """The port that clients reach."""
    api_server: ApiServerKind = ApiServerKind.PYTHON
    """Which of vLLM's API servers stands in front; `rust` is faster and does less: see
    [frontends](../frontends.md)."""
    listener: ListenerKind = ListenerKind.RAY_SERVE
    """Whose HAProxy listens there: Ray Serve's, or with `api_server: rust` that of each ingress
    (`ingress`), which spares a hop: see [frontends](../frontends.md#ingress-listener)."""
    replicas: IngressCounts = field(default_factory=IngressCounts)
    routes: tuple[Route, ...] = tuple(Route)
    """Which groups of routes are open; any other path is 404. See [the API](api.md)."""
    allow: AllowConfig = field(default_factory=AllowConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentConfig:
    """Everything that `baton up` needs to know."""

    version: Annotated[int, Bounds(low=1, high=1)]
    """Of the format of this file."""
    models: Annotated[Mapping[str, ModelConfig], ModelName]
    pools: Annotated[Mapping[str, PoolConfig], PoolName]
    slo: SloConfig = field(default_factory=SloConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    autoscaler: AutoscalerConfig | None = None
    """Null: pools keep the replicas that they start with."""
    tenants: Annotated[Mapping[str, TenantConfig], TenantName] = field(default_factory=dict)
    """Who is told apart; nobody is when it is empty."""
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)

    @property
    def model_name(self) -> str:
        """The name of the only model; of several, all names: to be shown, not looked up."""
        return ", ".join(self.models)
