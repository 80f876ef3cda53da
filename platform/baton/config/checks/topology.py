"""What no single key shows: counts, ports and options that must agree with each other.

Each check looks only at sections without findings of their own, so that nothing is said twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from baton.config.checks.adapters import check_adapters
from baton.config.checks.api import check_api
from baton.config.checks.check_context import Seen
from baton.config.checks.frontend import check_frontend
from baton.config.checks.kv_compatibility import check_exchange
from baton.config.checks.observability import check_observability
from baton.config.checks.security import check_security
from baton.config.checks.service import check_scaling, check_service
from baton.config.checks.sim import check_sim
from baton.config.derive.api_arguments import MODEL_KEYS
from baton.config.derive.gpu_fractions import shares_gpu
from baton.config.language.addresses import host_wanted, ip_network, is_host, needs_zone
from baton.config.language.build import Builder
from baton.config.language.scalars import did_you_mean
from baton.config.language.tree import Finding, Path, Section
from baton.config.schema.allow import AllowConfig
from baton.config.schema.cluster import ClusterConfig, ModelCache
from baton.config.schema.deployment import (
    SIDE_CHANNEL_PORTS,
    EngineConfig,
    EngineKind,
    IngressCounts,
    Parallel,
    PoolConfig,
    ReplicaCounts,
    ServerConfig,
    SideChannel,
    TransferConfig,
)
from baton.config.schema.routing import Policy, RouterConfig
from baton.config.schema.service import AdmissionConfig, Timeouts
from baton.domain.fleet import Role
from baton.domain.names.addresses import ip_address, is_any, is_ipv6, is_loopback, parse_address
from baton.domain.names.model_sources import trouble
from baton.policy.placement.port import Disaggregate

_OWN_KEYS: Mapping[str, str] = {
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
    "data_parallel_size": "replicas of the pool",
    "kv_transfer_config": "transfer",
    "kv_events_config": "router.index",
    "kv_offloading_size": "engine.offload.host_memory",
    "max_loras": "engine.adapters.max_batched",
    "max_cpu_loras": "engine.adapters.max_loaded",
    "max_lora_rank": "engine.adapters.max_rank",
}
"""vLLM engine arguments that have a key of their own, and which."""

AUTO = "auto"
"""Ray's word for the cluster that this machine is a node of."""

OWN_NAMES = frozenset({"ingress", "controller"})
"""What baton's own deployments and their nodes are called."""

_LAST_PORT = 65535
_OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
"""Source: Kubernetes' documentation, "Object Names and IDs", of DNS subdomains."""


def check(root: Section, builder: Builder) -> Iterator[Finding]:
    """Everything that is wrong between keys."""
    seen = Seen(builder, *(_names(root, key) for key in ("models", "pools", "tenants")))
    yield from _pool_names(seen)
    for name, pool in seen.pools().items():
        yield from _counts(seen, name)
        yield from _pool(seen, name, pool)
    for owner in [("models", name) for name in seen.model_names]:
        yield from _engine(seen, owner)
    for name, model in seen.models().items():
        if (what := trouble(model.source)) is not None:
            yield seen.wrong(("models", name, "source"), what)
    yield from check_adapters(seen)
    yield from check_api(seen)
    yield from check_frontend(seen)
    for owner in [("pools", name) for name in seen.pool_names]:
        yield from _engine(seen, owner)
    yield from _router(seen)
    yield from check_exchange(seen)
    yield from _serving(seen)
    yield from _endpoint(seen)
    yield from _ports(seen)
    yield from _waits(seen)
    yield from check_service(seen)
    yield from check_scaling(seen)
    yield from check_observability(seen)
    yield from check_security(seen)


def _names(root: Section, key: str) -> tuple[str, ...]:
    entry = root.entries.get(key)
    return tuple(entry.node.entries) if entry and isinstance(entry.node, Section) else ()


def _pool_names(seen: Seen) -> Iterator[Finding]:
    for name in seen.pool_names:
        if name in OWN_NAMES:
            what = f"one of baton's own deployments is called {name!r}, wanted another name"
            yield seen.wrong(("pools", name), what)


def _counts(seen: Seen, pool: str) -> Iterator[Finding]:
    path = ("pools", pool, "replicas")
    counts = seen.get(ReplicaCounts, *path)
    if counts is not None and not counts.min <= counts.start <= counts.max:
        got = f"min {counts.min}, start {counts.start}, max {counts.max}"
        yield seen.wrong(path, f"got {got}, wanted min <= start <= max")


def _pool(seen: Seen, name: str, pool: PoolConfig) -> Iterator[Finding]:
    path, workers = ("pools", name), pool.parallel.workers
    if pool.model not in seen.model_names:
        near = did_you_mean(pool.model, seen.model_names)
        known = f", wanted one of {', '.join(seen.model_names)}"
        yield seen.wrong((*path, "model"), f"no model {pool.model!r}{near or known}")
    if pool.engine.kind is EngineKind.SIM:
        if pool.resources.gpus:
            what = f"got {pool.resources.gpus:g}, wanted 0: a simulated engine uses no GPU"
            yield seen.wrong((*path, "resources", "gpus"), what)
        if workers > 1:
            what = f"got {workers} workers, wanted tp 1 and pp 1: a simulated engine has one"
            yield seen.wrong((*path, "parallel"), what)
    elif shares_gpu(pool):
        yield from _shared_gpu(seen, path, pool)
    elif pool.resources.gpus not in {0, workers}:
        alone = ", or a part of one, as 0.5" if workers == 1 else ""
        what = f"got {pool.resources.gpus:g}, wanted tp x pp = {workers} (or 0: no GPU{alone})"
        yield seen.wrong((*path, "resources", "gpus"), what)
    elif not pool.resources.gpus:
        yield from _split_on_cpus(seen, path, pool.parallel)
    if pool.resources.accelerator is not None and not pool.resources.gpus:
        what = f"got {pool.resources.accelerator!r} without GPUs, wanted gpus: {workers}"
        yield seen.wrong((*path, "resources", "accelerator"), what)
    if pool.placement.max_per_node is not None and workers > 1 and pool.resources.gpus:
        what = f"not possible with {workers} workers: Ray places their group, remove it"
        yield seen.wrong((*path, "placement", "max_per_node"), what)
    yield from _offload(seen, path, pool)
    yield from _budgets(seen, path, pool.engine)


def _shared_gpu(seen: Seen, path: Path, pool: PoolConfig) -> Iterator[Finding]:
    """A replica that takes a part of a GPU, and of its memory no larger part than that."""
    part, workers = pool.resources.gpus, pool.parallel.workers
    if workers > 1:
        what = f"got {part:g}, wanted {workers}: workers of a split engine share no GPU"
        yield seen.wrong((*path, "resources", "gpus"), what)
    share = pool.engine.gpu_memory_utilization
    if share is not None and share > part:
        what = f"got {share:g}, wanted at most resources.gpus = {part:g}: others share this GPU"
        yield seen.wrong((*path, "engine", "gpu_memory_utilization"), what)


def _split_on_cpus(seen: Seen, path: Path, parallel: Parallel) -> Iterator[Finding]:
    """What vLLM for CPUs cannot do. Source: tried with 0.32, where it fails in its first batch."""
    why = "vLLM does not split engines on CPUs so; set resources.gpus, or split by tp alone"
    if parallel.pp > 1:
        yield seen.wrong((*path, "parallel", "pp"), f"got {parallel.pp}, wanted 1: {why}")
    if parallel.ep and parallel.workers > 1:
        yield seen.wrong((*path, "parallel", "ep"), f"got true, wanted false: {why}")


def _budgets(seen: Seen, pool_path: Path, engine: EngineConfig) -> Iterator[Finding]:
    """Tokens of a step that streams wait for: one for each of them, no more than of any step.

    Simulated engines have bounds where none are set, too: see `check_sim`.
    """
    tokens = engine.decode_step_tokens
    if tokens is None or engine.kind is EngineKind.SIM:
        return
    path, most = (*pool_path, "engine", "decode_step_tokens"), engine.max_num_batched_tokens
    if most is not None and tokens > most:
        yield seen.wrong(path, f"got {tokens}, wanted at most max_num_batched_tokens, {most}")
    if engine.max_num_seqs is not None and tokens < engine.max_num_seqs:
        what = f"got {tokens}, wanted at least max_num_seqs, {engine.max_num_seqs}: one a stream"
        yield seen.wrong(path, what)


def _offload(seen: Seen, pool_path: Path, pool: PoolConfig) -> Iterator[Finding]:
    """The tier in the host's memory, which only some engines have."""
    path, wanted = (*pool_path, "engine", "offload", "host_memory"), pool.engine.offload
    if wanted.host_memory_bytes is None:
        return
    if not pool.engine.prefix_caching:
        yield seen.wrong(path, "has no effect without prefix_caching, remove it")
    if pool.engine.kind is EngineKind.VLLM and not pool.resources.gpus:
        what = "not possible without GPUs: vLLM offloads blocks from GPUs only, remove it"
        yield seen.wrong(path, what)
    if pool.engine.sim is not None and wanted.host_memory_bytes < pool.engine.sim.kv_block_bytes:
        what = f"less than one KV block, wanted at least {pool.engine.sim.kv_block_bytes} bytes"
        yield seen.wrong(path, what)


def _router(seen: Seen) -> Iterator[Finding]:
    router = seen.get(RouterConfig, "router")
    if router is None or router.disaggregate is not Disaggregate.AUTO:
        return
    if router.policy in set(Policy) - {Policy.PREDICTED}:
        what = (
            f"got 'auto', which policy {str(router.policy)!r} cannot decide about,"
            " wanted 'always' or 'never', or policy 'predicted'"
        )
        yield seen.wrong(("router", "disaggregate"), what)


def _engine(seen: Seen, owner: Path) -> Iterator[Finding]:
    path = (*owner, "engine")
    engine = seen.get(EngineConfig, *path)
    if engine is None:
        return
    for argument in engine.extra:
        if argument in _OWN_KEYS:
            what = f"cannot be passed on, use '{_OWN_KEYS[argument]}'"
            yield seen.wrong((*path, "extra", argument), what)
    if engine.kind is EngineKind.VLLM:
        if engine.sim is not None:
            yield seen.wrong((*path, "sim"), "given for kind 'vllm', wanted kind: sim or no sim")
        return
    real_only = {
        "extra": engine.extra,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "kv_cache": engine.kv_cache_bytes,
        "start_deadline": engine.start_deadline_s,
    }
    for key, value in real_only.items():
        if value:
            what = "has no effect on a simulated engine, remove it"
            yield seen.wrong((*path, key), what)
    yield from check_sim(seen, owner, engine)


def _serving(seen: Seen) -> Iterator[Finding]:
    pools = seen.pools()
    if len(pools) < len(seen.pool_names):
        return  # a pool that could not be read may be the one that serves
    for model in seen.model_names:
        mine = {name: pool for name, pool in pools.items() if pool.model == model}
        serving = [name for name, pool in mine.items() if pool.role is not Role.PREFILL]
        if not serving:
            got = "only prefill pools" if mine else "no pool"
            what = f"{got}, wanted a pool of role 'decode' or 'mixed' (with or without prefill)"
            yield seen.wrong(("models", model), what)
        elif not any(mine[name].replicas.start for name in serving):
            path = ("pools", serving[0], "replicas", "start")
            yield seen.wrong(path, f"got 0, wanted at least 1: nothing else decodes {model!r}")


def _endpoint(seen: Seen) -> Iterator[Finding]:
    counts = seen.get(IngressCounts, "server", "replicas")
    if counts is not None and counts.min > counts.max:
        what = f"got min {counts.min}, max {counts.max}, wanted min <= max"
        yield seen.wrong(("server", "replicas"), what)
    server = seen.get(ServerConfig, "server")
    if server is not None and not is_host(server.host):
        what = host_wanted(server.host, "a host name or an IP address")
        yield seen.wrong(("server", "host"), what)
    allow = seen.get(AllowConfig, "server", "allow")
    for domain in (allow and allow.media_domains) or ():
        if not is_host(domain):
            what = host_wanted(domain, "a host name or an IP address, without a scheme")
            yield seen.wrong(("server", "allow", "media_domains"), what)
    side_channel = seen.get(SideChannel, "transfer", "side_channel")
    if side_channel is not None and (trouble := _bind_trouble(side_channel.bind)):
        yield seen.wrong(("transfer", "side_channel", "bind"), trouble)
    cluster = seen.get(ClusterConfig, "cluster")
    if cluster is not None and (trouble := _node_trouble(cluster.node_address)):
        yield seen.wrong(("cluster", "node_address"), trouble)
    yield from _model_cache(seen)
    if cluster is not None and cluster.address is not None and cluster.address != AUTO:
        try:
            parse_address(cluster.address)
        except ValueError as error:
            yield seen.wrong(("cluster", "address"), str(error))


def _model_cache(seen: Seen) -> Iterator[Finding]:
    """One place, which is the same whoever looks for it."""
    path = ("cluster", "model_cache")
    cache = seen.get(ModelCache, *path)
    if cache is None:
        return
    said = {"path": cache.path, "claim": cache.claim, "size": cache.size_bytes}
    given = [key for key, value in said.items() if value is not None]
    if len(given) > 1:
        yield seen.wrong(path, f"got {' and '.join(given)}, wanted one of them")
    if cache.path is not None and not cache.path.startswith(("/", "~/")):
        what = (
            f"got {cache.path!r}, wanted a whole path, from / or ~/ on: nodes have no folder else"
        )
        yield seen.wrong((*path, "path"), what)
    for key, name in (("claim", cache.claim), ("storage_class", cache.storage_class)):
        if name is not None and not _OBJECT_NAME.fullmatch(name):
            what = (
                f"got {name!r}, wanted a name of Kubernetes': lower-case letters, digits, '-', '.'"
            )
            yield seen.wrong((*path, key), what)
    if cache.storage_class is not None and cache.size_bytes is None:
        yield seen.wrong((*path, "storage_class"), "has no effect without size, remove it")


def _bind_trouble(bind: str) -> str | None:
    """Why side channels cannot listen there; None where they can."""
    network, address = ip_network(bind), ip_address(bind)
    if bind == "private" or (network is not None and not needs_zone(network.network_address)):
        return None
    if address is None or needs_zone(address) or is_any(bind) or address.is_multicast:
        wanted = "'private', one IP address or a network as '10.1.0.0/16' or 'fd00:1::/64'"
        return f"{host_wanted(bind, wanted)}: the side channel has no guard"
    return None


def _node_trouble(node: str) -> str | None:
    """Why Ray cannot know a node by that address; None where it can."""
    address = ip_address(node)
    if address is None or needs_zone(address) or is_any(node):
        return host_wanted(node, "one IP address of this machine")
    if is_loopback(node) and is_ipv6(node):
        return (
            f"got {node!r}, which Ray takes for 127.0.0.1: wanted that for this machine alone, or"
            " an IPv6 address that other nodes reach"
        )
    return None


def _ports(seen: Seen) -> Iterator[Finding]:
    side_channel, server = (
        seen.get(SideChannel, "transfer", "side_channel"),
        seen.get(ServerConfig, "server"),
    )
    if side_channel is None:
        return
    base = side_channel.port_base
    engines = sum(pool.replicas.max * pool.parallel.workers for pool in seen.pools().values())
    path = ("transfer", "side_channel", "port_base")
    ports = max(engines, SIDE_CHANNEL_PORTS)
    if base + ports - 1 > _LAST_PORT:
        most = _LAST_PORT - ports + 1
        wanted = f"at most {most}" if most >= 1 else "fewer replicas or workers"
        what = f"got {base} for {engines} engine workers and {ports} ports in all, wanted {wanted}"
        yield seen.wrong(path, what)
    elif server is not None and base <= server.port < base + ports:
        what = (
            f"got {server.port}, which is one of the side channel's ({base} to {base + ports - 1})"
        )
        yield seen.wrong(("server", "port"), f"{what}, wanted another")


def _waits(seen: Seen) -> Iterator[Finding]:
    transfer = seen.get(TransferConfig, "transfer")
    if transfer is not None and transfer.lease_s < transfer.deadline_s:
        what = "shorter than transfer.deadline, wanted at least as long: blocks must outlive a pull"
        yield seen.wrong(("transfer", "lease"), what)
    timeouts = seen.get(Timeouts, "admission", "timeouts")
    if timeouts is not None and timeouts.total_s < timeouts.first_token_s:
        what = "shorter than admission.timeouts.first_token, wanted at least as long"
        yield seen.wrong(("admission", "timeouts", "total"), what)
    admission = seen.get(AdmissionConfig, "admission")
    if admission is None or admission.max_prompt_tokens is None:
        return
    for name, model in seen.models().items():
        if model.max_len_tokens is not None and admission.max_prompt_tokens >= model.max_len_tokens:
            what = f"got {admission.max_prompt_tokens}, wanted less than max_len of {name!r}"
            yield seen.wrong(("admission", "max_prompt_tokens"), f"{what}, {model.max_len_tokens}")
