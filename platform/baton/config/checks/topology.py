"""Checks between keys: counts, ports and options.

Each check uses only sections without findings, so that no error is reported twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from baton.config.checks.check_context import CheckContext
from baton.config.checks.kv_compatibility import check_kv_compatibility
from baton.config.checks.service import (
    check_observability,
    check_scaling,
    check_security,
    check_service,
)
from baton.config.derive.api_arguments import (
    CORS_ARGUMENTS,
    MODEL_KEYS,
    MODEL_LOADING_ARGUMENTS,
    missing_companions,
    problem_with,
)
from baton.config.derive.options import shares_gpu, sim_settings
from baton.config.language.addresses import describe_invalid_host, ip_network, is_host, needs_zone
from baton.config.language.build import Builder
from baton.config.language.fields import fields_of
from baton.config.language.scalars import did_you_mean
from baton.config.language.tree import Finding, Path, Section
from baton.config.schema.adapters import AdapterSlots
from baton.config.schema.allow import AllowConfig
from baton.config.schema.cluster import ClusterConfig, ModelCache
from baton.config.schema.deployment import (
    SIDE_CHANNEL_PORTS,
    ApiServerKind,
    EngineConfig,
    EngineKind,
    IngressCounts,
    ListenerKind,
    Parallel,
    PoolConfig,
    ReplicaCounts,
    Route,
    ServerConfig,
    SideChannel,
    SimTimings,
    TransferConfig,
)
from baton.config.schema.observability import TracingConfig
from baton.config.schema.routing import Policy, RouterConfig
from baton.config.schema.service import AdmissionConfig, Timeouts
from baton.domain.fleet import Role
from baton.domain.names.addresses import (
    ip_address,
    is_any_address,
    is_ipv6,
    is_loopback,
    parse_address,
)
from baton.domain.names.model_sources import source_error
from baton.policy.placement.port import Disaggregate
from baton.simulator.engine.settings import SettingInvalid

_CONFIG_KEYS: Mapping[str, str] = {
    **MODEL_KEYS,
    "dtype": "engine.dtype",
    "block_size": "engine.block_size",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "kv_cache_memory_bytes": "engine.kv_cache",
    "enable_prefix_caching": "engine.prefix_caching",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "tensor_parallel_size": "parallel.tp of the pool",
    "pipeline_parallel_size": "parallel.pp of the pool",
    "enable_expert_parallel": "parallel.ep of the pool",
    "data_parallel_size": "parallel.dp of the pool (simulated only), or its replicas",
    "kv_transfer_config": "transfer",
    "kv_events_config": "router.index",
    "kv_offloading_size": "engine.offload.host_memory",
    "max_loras": "engine.adapters.max_batched",
    "max_cpu_loras": "engine.adapters.max_loaded",
    "max_lora_rank": "engine.adapters.max_rank",
}
"""vLLM engine arguments that have their own key, by argument."""
AUTO_ADDRESS = "auto"
"""Ray's word for the cluster of this machine."""
RESERVED_POOL_NAMES = frozenset({"ingress", "controller"})
"""Names of baton's own deployments and their nodes."""
_LAST_PORT = 65535
_OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
"""Source: Kubernetes' documentation, "Object Names and IDs", of DNS subdomains."""
_ALLOWED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Source: vLLM 0.32, config/lora.py, `MaxLoRARanks`."""
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/")
_API_SERVER_KEY = ("server", "api_server")
_LISTENER_KEY = ("server", "listener")
_SETTING_KEYS: Mapping[str, Path] = {
    "block_size_tokens": ("block_size",),
    "max_running_requests": ("max_num_seqs",),
    "max_batched_tokens": ("max_num_batched_tokens",),
    "max_batched_tokens_while_decoding": ("max_num_batched_tokens_while_decoding",),
    **{field.attribute: ("sim", key) for key, field in fields_of(SimTimings).items()},
}
"""Keys under `engine`, by an engine's setting."""
_SETTING_NAME = re.compile(r"\w+(?==)")
"""A setting in an expected value, such as `max_running_requests=256`."""


def check_config(
    root: Section, builder: Builder, *, for_simulation: bool = False
) -> Iterator[Finding]:
    """All errors between keys; `for_simulation` accepts what no deployment starts."""
    context = CheckContext(builder, *(_names(root, key) for key in ("models", "pools", "tenants")))
    yield from _check_pool_names(context)
    for name, pool in context.pools().items():
        yield from _check_replica_counts(context, name)
        yield from _check_pool(context, name, pool)
        if not for_simulation:
            yield from _check_ranks(context, name, pool.parallel)
    for owner in [("models", name) for name in context.model_names]:
        yield from _check_engine(context, owner)
    for name, model in context.models().items():
        if (message := source_error(model.source)) is not None:
            yield context.finding(("models", name, "source"), message)
    yield from _check_adapters(context)
    yield from _check_api(context)
    yield from _check_frontend(context)
    for owner in [("pools", name) for name in context.pool_names]:
        yield from _check_engine(context, owner)
    yield from _check_router(context)
    yield from check_kv_compatibility(context)
    yield from _check_decode_pools(context)
    yield from _check_addresses(context)
    yield from _check_ports(context)
    yield from _check_timeouts(context)
    yield from check_service(context)
    yield from check_scaling(context)
    yield from check_observability(context)
    yield from check_security(context)


def _names(root: Section, key: str) -> tuple[str, ...]:
    entry = root.entries.get(key)
    return tuple(entry.node.entries) if entry and isinstance(entry.node, Section) else ()


def _check_pool_names(context: CheckContext) -> Iterator[Finding]:
    for name in context.pool_names:
        if name in RESERVED_POOL_NAMES:
            message = f"one of baton's own deployments is called {name!r}, expected another name"
            yield context.finding(("pools", name), message)


def _check_replica_counts(context: CheckContext, pool: str) -> Iterator[Finding]:
    path = ("pools", pool, "replicas")
    counts = context.get(ReplicaCounts, *path)
    if counts is not None and not counts.min <= counts.initial <= counts.max:
        got = f"min {counts.min}, start {counts.initial}, max {counts.max}"
        yield context.finding(path, f"got {got}, expected min <= start <= max")


def _check_pool(context: CheckContext, name: str, pool: PoolConfig) -> Iterator[Finding]:
    path, workers = ("pools", name), pool.parallel.workers
    product = "tp x pp" if pool.parallel.dp == 1 else "tp x pp x dp"
    if pool.model not in context.model_names:
        suggestion = did_you_mean(pool.model, context.model_names)
        known_models = f", expected one of {', '.join(context.model_names)}"
        yield context.finding(
            (*path, "model"), f"no model {pool.model!r}{suggestion or known_models}"
        )
    if pool.engine.kind is EngineKind.SIM:
        if pool.resources.gpus:
            message = f"got {pool.resources.gpus:g}, expected 0: a simulated engine uses no GPU"
            yield context.finding((*path, "resources", "gpus"), message)
        if workers > 1:
            message = f"got {workers} workers, expected tp 1 and pp 1: a simulated engine has one"
            yield context.finding((*path, "parallel"), message)
    elif shares_gpu(pool):
        yield from _check_shared_gpu(context, path, pool)
    elif pool.resources.gpus not in {0, workers}:
        fraction_hint = ", or a part of one, as 0.5" if workers == 1 else ""
        message = (
            f"got {pool.resources.gpus:g}, expected {product} = {workers} (or 0: no"
            f" GPU{fraction_hint})"
        )
        yield context.finding((*path, "resources", "gpus"), message)
    elif not pool.resources.gpus:
        yield from _check_cpu_parallelism(context, path, pool.parallel)
    if pool.resources.accelerator is not None and not pool.resources.gpus:
        message = f"got {pool.resources.accelerator!r} without GPUs, expected gpus: {workers}"
        yield context.finding((*path, "resources", "accelerator"), message)
    if pool.placement.max_per_node is not None and workers > 1 and pool.resources.gpus:
        message = f"not possible with {workers} workers: Ray places their group, remove it"
        yield context.finding((*path, "placement", "max_per_node"), message)
    yield from _check_offload(context, path, pool)
    yield from _check_max_num_batched_tokens_while_decoding(context, path, pool.engine)


def _check_ranks(context: CheckContext, pool: str, parallel: Parallel) -> Iterator[Finding]:
    if parallel.dp > 1:
        message = (
            f"got {parallel.dp}, expected 1: no deployment starts data-parallel groups, only"
            " 'baton simulate' takes them; set replicas"
        )
        yield context.finding(("pools", pool, "parallel", "dp"), message)


def _check_shared_gpu(context: CheckContext, path: Path, pool: PoolConfig) -> Iterator[Finding]:
    """A replica on a part of a GPU may use at most the same part of its memory."""
    gpu_fraction, workers = pool.resources.gpus, pool.parallel.workers
    if workers > 1:
        message = (
            f"got {gpu_fraction:g}, expected {workers}: workers of a split engine share no GPU"
        )
        yield context.finding((*path, "resources", "gpus"), message)
    memory_fraction = pool.engine.gpu_memory_utilization
    if memory_fraction is not None and memory_fraction > gpu_fraction:
        message = (
            f"got {memory_fraction:g}, expected at most resources.gpus = {gpu_fraction:g}:"
            " others share this GPU"
        )
        yield context.finding((*path, "engine", "gpu_memory_utilization"), message)


def _check_cpu_parallelism(
    context: CheckContext, path: Path, parallel: Parallel
) -> Iterator[Finding]:
    """Limits of vLLM for CPUs. Source: tried with 0.32, which fails in its first batch."""
    reason = "vLLM does not split engines on CPUs so; set resources.gpus, or split by tp alone"
    if parallel.pp > 1:
        yield context.finding((*path, "parallel", "pp"), f"got {parallel.pp}, expected 1: {reason}")
    if parallel.ep and parallel.workers > 1:
        yield context.finding((*path, "parallel", "ep"), f"got true, expected false: {reason}")


def _check_max_num_batched_tokens_while_decoding(
    context: CheckContext, pool_path: Path, engine: EngineConfig
) -> Iterator[Finding]:
    """At least a token per stream, at most the tokens of any step.

    Simulated engines also have bounds by default: see `_check_sim`.
    """
    tokens = engine.max_num_batched_tokens_while_decoding
    if tokens is None or engine.kind is EngineKind.SIM:
        return
    path, max_tokens = (
        (*pool_path, "engine", "max_num_batched_tokens_while_decoding"),
        engine.max_num_batched_tokens,
    )
    if max_tokens is not None and tokens > max_tokens:
        yield context.finding(
            path, f"got {tokens}, expected at most max_num_batched_tokens, {max_tokens}"
        )
    if engine.max_num_seqs is not None and tokens < engine.max_num_seqs:
        message = (
            f"got {tokens}, expected at least max_num_seqs, {engine.max_num_seqs}: one a stream"
        )
        yield context.finding(path, message)


def _check_offload(context: CheckContext, pool_path: Path, pool: PoolConfig) -> Iterator[Finding]:
    """The host tier, which only some engines have."""
    path, offload = (*pool_path, "engine", "offload", "host_memory"), pool.engine.offload
    if offload.host_memory_bytes is None:
        return
    if not pool.engine.prefix_caching:
        yield context.finding(path, "has no effect without prefix_caching, remove it")
    if pool.engine.kind is EngineKind.VLLM and not pool.resources.gpus:
        message = "not possible without GPUs: vLLM offloads blocks from GPUs only, remove it"
        yield context.finding(path, message)
    if pool.engine.sim is not None and offload.host_memory_bytes < pool.engine.sim.kv_block_bytes:
        message = (
            f"less than one KV block, expected at least {pool.engine.sim.kv_block_bytes} bytes"
        )
        yield context.finding(path, message)


def _check_router(context: CheckContext) -> Iterator[Finding]:
    router = context.get(RouterConfig, "router")
    if router is None or router.disaggregate is not Disaggregate.AUTO:
        return
    if router.policy in set(Policy) - {Policy.PREDICTED}:
        message = (
            f"got 'auto', which policy {str(router.policy)!r} cannot decide about,"
            " expected 'always' or 'never', or policy 'predicted'"
        )
        yield context.finding(("router", "disaggregate"), message)


def _check_engine(context: CheckContext, owner: Path) -> Iterator[Finding]:
    path = (*owner, "engine")
    engine = context.get(EngineConfig, *path)
    if engine is None:
        return
    for argument in engine.extra:
        if argument in _CONFIG_KEYS:
            message = f"cannot be passed on, use '{_CONFIG_KEYS[argument]}'"
            yield context.finding((*path, "extra", argument), message)
    if engine.kind is EngineKind.VLLM:
        if engine.sim is not None:
            yield context.finding(
                (*path, "sim"), "given for kind 'vllm', expected kind: sim or no sim"
            )
        return
    vllm_only = {
        "extra": engine.extra,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "kv_cache": engine.kv_cache_bytes,
        "start_deadline": engine.start_deadline_s,
    }
    for key, value in vllm_only.items():
        if value:
            message = "has no effect on a simulated engine, remove it"
            yield context.finding((*path, key), message)
    yield from _check_sim(context, owner, engine)


def _check_decode_pools(context: CheckContext) -> Iterator[Finding]:
    pools = context.pools()
    if len(pools) < len(context.pool_names):
        return  # a pool with an error may decode
    for model in context.model_names:
        model_pools = {name: pool for name, pool in pools.items() if pool.model == model}
        decode_pools = [name for name, pool in model_pools.items() if pool.role is not Role.PREFILL]
        if not decode_pools:
            got = "only prefill pools" if model_pools else "no pool"
            message = (
                f"{got}, expected a pool of role 'decode' or 'mixed' (with or without prefill)"
            )
            yield context.finding(("models", model), message)
        elif not any(model_pools[name].replicas.initial for name in decode_pools):
            path = ("pools", decode_pools[0], "replicas", "initial")
            yield context.finding(
                path, f"got 0, expected at least 1: nothing else decodes {model!r}"
            )


def _check_addresses(context: CheckContext) -> Iterator[Finding]:
    counts = context.get(IngressCounts, "server", "replicas")
    if counts is not None and counts.min > counts.max:
        message = f"got min {counts.min}, max {counts.max}, expected min <= max"
        yield context.finding(("server", "replicas"), message)
    server = context.get(ServerConfig, "server")
    if server is not None and not is_host(server.host):
        message = describe_invalid_host(server.host, "a host name or an IP address")
        yield context.finding(("server", "host"), message)
    allow = context.get(AllowConfig, "server", "allow")
    for domain in (allow and allow.media_domains) or ():
        if not is_host(domain):
            message = describe_invalid_host(
                domain, "a host name or an IP address, without a scheme"
            )
            yield context.finding(("server", "allow", "media_domains"), message)
    side_channel = context.get(SideChannel, "transfer", "side_channel")
    if side_channel is not None and (problem := _invalid_bind(side_channel.bind)):
        yield context.finding(("transfer", "side_channel", "bind"), problem)
    cluster = context.get(ClusterConfig, "cluster")
    if cluster is not None and (problem := _invalid_node_address(cluster.node_address)):
        yield context.finding(("cluster", "node_address"), problem)
    yield from _check_model_cache(context)
    if cluster is not None and cluster.address is not None and cluster.address != AUTO_ADDRESS:
        try:
            parse_address(cluster.address)
        except ValueError as error:
            yield context.finding(("cluster", "address"), str(error))


def _check_model_cache(context: CheckContext) -> Iterator[Finding]:
    """One place, with a path that is equal on all nodes."""
    path = ("cluster", "model_cache")
    cache = context.get(ModelCache, *path)
    if cache is None:
        return
    locations = {"path": cache.path, "claim": cache.claim, "size": cache.size_bytes}
    given = [key for key, value in locations.items() if value is not None]
    if len(given) > 1:
        yield context.finding(path, f"got {' and '.join(given)}, expected one of them")
    if cache.path is not None and not cache.path.startswith(("/", "~/")):
        message = (
            f"got {cache.path!r}, expected a whole path, from / or ~/ on: nodes have no folder else"
        )
        yield context.finding((*path, "path"), message)
    for key, name in (("claim", cache.claim), ("storage_class", cache.storage_class)):
        if name is not None and not _OBJECT_NAME.fullmatch(name):
            message = (
                f"got {name!r}, expected a name of Kubernetes': lower-case letters, digits, '-',"
                " '.'"
            )
            yield context.finding((*path, key), message)
    if cache.storage_class is not None and cache.size_bytes is None:
        yield context.finding((*path, "storage_class"), "has no effect without size, remove it")


def _invalid_bind(bind: str) -> str | None:
    """The reason why side channels cannot listen there, or None."""
    network, address = ip_network(bind), ip_address(bind)
    if bind == "private" or (network is not None and not needs_zone(network.network_address)):
        return None
    if address is None or needs_zone(address) or is_any_address(bind) or address.is_multicast:
        expected = "'private', one IP address or a network as '10.1.0.0/16' or 'fd00:1::/64'"
        return f"{describe_invalid_host(bind, expected)}: the side channel has no guard"
    return None


def _invalid_node_address(node: str) -> str | None:
    """The reason why Ray cannot use this address for a node, or None."""
    address = ip_address(node)
    if address is None or needs_zone(address) or is_any_address(node):
        return describe_invalid_host(node, "one IP address of this machine")
    if is_loopback(node) and is_ipv6(node):
        return (
            f"got {node!r}, which Ray takes for 127.0.0.1: expected that for this machine alone, or"
            " an IPv6 address that other nodes reach"
        )
    return None


def _check_ports(context: CheckContext) -> Iterator[Finding]:
    side_channel, server = (
        context.get(SideChannel, "transfer", "side_channel"),
        context.get(ServerConfig, "server"),
    )
    if side_channel is None:
        return
    base = side_channel.port_base
    engines = sum(pool.replicas.max * pool.parallel.workers for pool in context.pools().values())
    path = ("transfer", "side_channel", "port_base")
    port_count = max(engines, SIDE_CHANNEL_PORTS)
    if base + port_count - 1 > _LAST_PORT:
        max_base = _LAST_PORT - port_count + 1
        expected = f"at most {max_base}" if max_base >= 1 else "fewer replicas or workers"
        message = (
            f"got {base} for {engines} engine workers and {port_count} ports in all,"
            f" expected {expected}"
        )
        yield context.finding(path, message)
    elif server is not None and base <= server.port < base + port_count:
        message = (
            f"got {server.port}, expected a port outside the side channel's range ({base} to"
            f" {base + port_count - 1})"
        )
        yield context.finding(("server", "port"), message)


def _check_timeouts(context: CheckContext) -> Iterator[Finding]:
    transfer = context.get(TransferConfig, "transfer")
    if transfer is not None and transfer.lease_s < transfer.deadline_s:
        message = (
            "shorter than transfer.deadline, expected at least as long: blocks must outlive a pull"
        )
        yield context.finding(("transfer", "lease"), message)
    timeouts = context.get(Timeouts, "admission", "timeouts")
    if timeouts is not None and timeouts.total_s < timeouts.first_token_s:
        message = "shorter than admission.timeouts.first_token, expected at least as long"
        yield context.finding(("admission", "timeouts", "total"), message)
    admission = context.get(AdmissionConfig, "admission")
    if admission is None or admission.max_prompt_tokens is None:
        return
    for name, model in context.models().items():
        if model.max_len_tokens is not None and admission.max_prompt_tokens >= model.max_len_tokens:
            message = f"got {admission.max_prompt_tokens}, expected less than max_len of {name!r}"
            yield context.finding(
                ("admission", "max_prompt_tokens"), f"{message}, {model.max_len_tokens}"
            )


def _check_runtime_adapters(context: CheckContext) -> Iterator[Finding]:
    for model_name, model in context.models().items():
        adapters, path = model.runtime_adapters, ("models", model_name, "runtime_adapters")
        if adapters.max and not adapters.paths:
            message = "got none, expected the folders in which adapters lie; '/' stands for any"
            yield context.finding((*path, "paths"), message)
        for index, adapter_path in enumerate(adapters.paths or ()):
            if not adapter_path.startswith("/") and not _OWNER.fullmatch(adapter_path):
                message = (
                    f"got {adapter_path!r}, expected an absolute path, or an owner on the"
                    " hub as 'acme/'"
                )
                yield context.finding((*path, "paths", str(index)), message)
        max_per_tenant = adapters.max_per_tenant
        if max_per_tenant is not None and max_per_tenant > adapters.max:
            message = f"got {max_per_tenant}, expected at most max, {adapters.max}"
            yield context.finding((*path, "max_per_tenant"), message)


def _check_adapters(context: CheckContext) -> Iterator[Finding]:
    """Errors between keys of adapters."""
    owner_of_name = {name: f"model {name!r}" for name in context.model_names}
    for model_name, model in context.models().items():
        for name in model.adapters:
            if name in owner_of_name:
                message = (
                    f"the name is taken by {owner_of_name[name]}, expected another: requests go"
                    " by it"
                )
                yield context.finding(("models", model_name, "adapters", name), message)
            owner_of_name.setdefault(name, f"an adapter of model {model_name!r}")
    yield from _check_runtime_adapters(context)
    owners = [("models", name) for name in context.model_names]
    owners += [("pools", name) for name in context.pool_names]
    for owner in owners:
        path = (*owner, "engine", "adapters")
        slots = context.get(AdapterSlots, *path)
        if slots is None:
            continue
        if slots.max_loaded < slots.max_batched:
            message = f"got {slots.max_loaded}, expected at least max_batched, {slots.max_batched}"
            yield context.finding((*path, "max_loaded"), message)
        if slots.max_rank not in _ALLOWED_RANKS:
            allowed_ranks = ", ".join(map(str, _ALLOWED_RANKS))
            yield context.finding(
                (*path, "max_rank"), f"got {slots.max_rank}, expected one of {allowed_ranks}"
            )


def _check_api(context: CheckContext) -> Iterator[Finding]:
    """Errors in arguments of API servers."""
    models = context.models()
    for name, model in models.items():
        for argument, value in model.api.items():
            if (message := problem_with(argument, value)) is not None:
                yield context.finding(("models", name, "api", argument), message)
        for argument in MODEL_LOADING_ARGUMENTS:
            extra = model.engine.extra
            if argument in extra and extra[argument] != model.api.get(argument, extra[argument]):
                message = f"differs from engine.extra.{argument}; set it once, both get it"
                yield context.finding(("models", name, "api", argument), message)
        for argument, message in missing_companions(model.api).items():
            yield context.finding(("models", name, "api", argument), message)
    for argument in CORS_ARGUMENTS:
        values = [model.api.get(argument) for model in models.values()]
        if any(value != values[0] for value in values[1:]):
            name = next(name for name, model in models.items() if argument in model.api)
            message = "is answered by one front for all models; give each of them the same"
            yield context.finding(("models", name, "api", argument), message)


def _check_frontend(context: CheckContext) -> Iterator[Finding]:
    """Settings that vLLM's Rust frontend does not support, or a gate without that frontend."""
    server = context.get(ServerConfig, "server")
    if server is None:
        return
    if server.api_server is not ApiServerKind.RUST:
        if server.listener is ListenerKind.INGRESS:
            message = "but only the Rust frontend has a gate"
            yield context.finding(
                _LISTENER_KEY,
                f"got 'ingress', {message}; expected server.api_server 'rust' or server.listener"
                " 'ray-serve'",
            )
        return
    if len(context.model_names) > 1:
        # The model of a request is in its body, which no component reads before the frontend.
        yield context.finding(
            _API_SERVER_KEY, "serves one model, remove the others or use 'python'"
        )
    for name, model in context.models().items():
        if model.runtime_adapters.max:
            message = "the Rust frontend takes no adapters while it serves, expected 0"
            adapters_path = ("models", name, "runtime_adapters", "max")
            yield context.finding(adapters_path, f"{message}; or use server.api_server 'python'")
    for key, message in _unsupported_by_rust(context, server).items():
        path = tuple(key.split("."))
        yield context.finding(path, f"{message}; or use server.api_server 'python'")
    tracing = context.get(TracingConfig, "observability", "tracing")
    if tracing is not None and tracing.otlp is not None:
        message = "traces do not come through the Rust frontend; or use server.api_server 'python'"
        yield context.finding(("observability", "tracing", "otlp"), message)


def _unsupported_by_rust(context: CheckContext, server: ServerConfig) -> dict[str, str]:
    # Imported only here, because every command checks the configuration.
    from baton.engine.vllm.frontend.rust_arguments import unsupported_settings

    admission = context.get(AdmissionConfig, "admission") or AdmissionConfig()
    # The default, all routes, means all routes of the frontend.
    is_restricted = set(server.routes) != set(Route)
    return unsupported_settings(
        routes=[str(route) for route in server.routes] if is_restricted else (),
        max_messages=admission.max_messages,
        media_domains=server.allow.media_domains,
        prompt_embeds=server.allow.prompt_embeds,
        extra={name for model in context.models().values() for name in model.api},
    )


def _check_sim(context: CheckContext, owner: Path, engine: EngineConfig) -> Iterator[Finding]:
    """The first error in the settings of simulated engines of a model or a pool."""
    pool = context.get(PoolConfig, *owner)
    name = owner[-1] if pool is None else pool.model
    model, transfer = context.models().get(name), context.get(TransferConfig, "transfer")
    if model is None or transfer is None:
        return
    if model.max_len_tokens is None:
        message = "missing, expected a number: a simulated engine cannot ask the model"
        yield context.finding(("models", name, "max_len"), message)
        return
    try:
        sim_settings(engine, model, transfer)
    except SettingInvalid as error:
        yield _setting_finding(context, owner, ("models", name), error)


def _setting_finding(
    context: CheckContext, owner: Path, model: Path, error: SettingInvalid
) -> Finding:
    """A finding at the setting's key; if that is implicit, at an explicit key of its bound."""

    def path(setting: str) -> Path:
        if setting == "max_len_tokens":
            return (*model, "max_len")
        return (*owner, "engine", *_SETTING_KEYS.get(setting, ("sim", setting)))

    setting_path, bound_paths = (
        path(error.name),
        [path(bound) for bound in _SETTING_NAME.findall(error.expected)],
    )
    expected = _SETTING_NAME.sub(lambda bound: path(bound[0])[-1], error.expected)
    reported_path = next(
        (
            bound_path
            for bound_path in (setting_path, *bound_paths)
            if context.is_explicit(*bound_path)
        ),
        setting_path,
    )
    got = (
        f"got {error.got}"
        if reported_path == setting_path
        else f"{setting_path[-1]} is {error.got} unless set"
    )
    return context.finding(reported_path, f"{got}, expected {expected}")
