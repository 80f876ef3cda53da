"""Checks of classes, tenants, scaling, security and observability."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from baton.config.checks.check_context import CheckContext
from baton.config.derive.options import devices_per_replica
from baton.config.language.addresses import describe_invalid_host, is_host
from baton.config.language.scalars import did_you_mean
from baton.config.language.tree import Finding, Path
from baton.config.schema.deployment import SIDE_CHANNEL_PORTS, ServerConfig, SideChannel
from baton.config.schema.observability import ObservabilityConfig
from baton.config.schema.scaling import AutoscalerConfig
from baton.config.schema.security import TlsConfig
from baton.config.schema.service import SloConfig, TenantConfig
from baton.domain.names.addresses import is_any_address, is_loopback, same_host
from baton.domain.tenant import DEFAULT_TENANT
from baton.policy.admission.slo_classes import DEFAULT_CLASS

_TLS = ("security", "tls")
_FORBIDDEN_CHARACTERS = frozenset("\"'\\$#")
"""Characters with a special meaning in HAProxy's configuration."""
_METRICS = ("observability", "metrics")


def check_service(context: CheckContext) -> Iterator[Finding]:
    """Findings about classes and tenants."""
    slo = context.get(SloConfig, "slo")
    if slo is not None and DEFAULT_CLASS in slo.classes:
        message = f"there is one already, put what it says under slo.{DEFAULT_CLASS}"
        yield context.finding(("slo", "classes", DEFAULT_CLASS), message)
    for name in context.tenant_names:
        tenant = context.get(TenantConfig, "tenants", name)
        if tenant is not None:
            yield from _check_tenant(context, name, tenant, slo)


def _check_tenant(
    context: CheckContext, name: str, tenant: TenantConfig, slo: SloConfig | None
) -> Iterator[Finding]:
    path = ("tenants", name)
    if slo is not None:
        known_classes = (DEFAULT_CLASS, *slo.classes)
        if tenant.slo is not None:
            yield from _check_class(context, (*path, "slo"), tenant.slo, known_classes)
        for index, class_name in enumerate(tenant.classes or ()):
            yield from _check_class(
                context, (*path, "classes", str(index)), class_name, known_classes
            )
    if tenant.anonymous is not None and name != DEFAULT_TENANT:
        message = (
            f"has no effect here: callers without a key are tenant '{DEFAULT_TENANT}',"
            f" set tenants.{DEFAULT_TENANT}.anonymous"
        )
        yield context.finding((*path, "anonymous"), message)


def _check_class(
    context: CheckContext, path: Path, class_name: str, known_classes: tuple[str, ...]
) -> Iterator[Finding]:
    if class_name not in known_classes:
        suggestion = (
            did_you_mean(class_name, known_classes)
            or f", expected one of {', '.join(known_classes)}"
        )
        yield context.finding(path, f"no class {class_name!r}{suggestion}")


def check_scaling(context: CheckContext) -> Iterator[Finding]:
    """Findings about the autoscaler's bounds and those of the pools."""
    autoscaler, pools = context.get(AutoscalerConfig, "autoscaler"), context.pools()
    if autoscaler is None or len(pools) < len(context.pool_names):
        return
    if autoscaler.scale_to_zero and all(pool.replicas.min for pool in pools.values()):
        message = "no pool may have 0 replicas, expected replicas.min: 0 in one, or false"
        yield context.finding(("autoscaler", "scale_to_zero"), message)
    if autoscaler.gpu_budget is not None:
        initial_gpus = sum(
            pool.replicas.initial * devices_per_replica(pool) for pool in pools.values()
        )
        if autoscaler.gpu_budget < initial_gpus:
            message = f"got {autoscaler.gpu_budget:g}, expected at least {initial_gpus:g}"
            yield context.finding(
                ("autoscaler", "gpu_budget"), f"{message}, which the pools start with"
            )


def check_security(context: CheckContext) -> Iterator[Finding]:
    """Findings about certificates and keys: both or neither, with paths that HAProxy can read."""
    tls = context.get(TlsConfig, *_TLS)
    if tls is None:
        return
    if (tls.cert_file is None) is not (tls.key_file is None):
        given_key, missing_key = ("key_file", "cert_file") if tls.cert_file is None else (
            "cert_file",
            "key_file",
        )  # fmt: skip
        yield context.finding(
            (*_TLS, given_key), f"given without {missing_key}, expected both or neither"
        )
    if tls.client_ca_file is not None and tls.cert_file is None:
        message = "has no effect without cert_file: only over TLS do clients show certificates"
        yield context.finding((*_TLS, "client_ca_file"), message)
    for key in ("cert_file", "key_file", "client_ca_file"):
        path = getattr(tls, key)
        if path is not None and _FORBIDDEN_CHARACTERS & set(path):
            message = "has a quote, a backslash, '$' or '#' in it, expected a path without"
            yield context.finding((*_TLS, key), message)


def check_observability(context: CheckContext) -> Iterator[Finding]:
    """Findings about metrics and console (address, token) and the collector."""
    observability = context.get(ObservabilityConfig, "observability")
    if observability is None:
        return
    yield from _check_collector(context, observability.tracing.otlp)
    if not (observability.metrics.enabled or observability.console.enabled):
        return
    host = observability.metrics.host
    if not is_host(host):
        message = describe_invalid_host(host, "a host name or an IP address")
        yield context.finding((*_METRICS, "host"), message)
    elif not is_loopback(host) and observability.token_file is None:
        message = (
            f"got {host!r}, which others reach, without a token: set observability.token_file to a"
            " file with one, or host to 127.0.0.1"
        )
        yield context.finding((*_METRICS, "host"), message)
    yield from _check_port(context, host, observability.metrics.port)


def _check_collector(context: CheckContext, url: str | None) -> Iterator[Finding]:
    """The URL must be valid, and without credentials, because it is shown."""
    if url is None:
        return
    path = ("observability", "tracing", "otlp")
    try:
        parts = urlsplit(url)
        host, _port_part = parts.hostname or "", parts.port
    except ValueError:
        host = ""
    if not host or parts.scheme not in {"http", "https"}:
        yield context.finding(path, "expected a URL as http://collector:4318")
    elif parts.username is not None or parts.password is not None:
        message = (
            "a name or a password in it would be shown, expected it without: let a collector on"
        )
        yield context.finding(path, f"{message} the node hand traces on")


def _check_port(context: CheckContext, host: str, port: int) -> Iterator[Finding]:
    path = (*_METRICS, "port")
    server = context.get(ServerConfig, "server")
    if server is not None and port == server.port and _hosts_overlap(host, server.host):
        yield context.finding(
            path, f"got {port}, which is server.port, expected another, or 0 for any"
        )
    side_channel = context.get(SideChannel, "transfer", "side_channel")
    if side_channel is None:
        return
    base = side_channel.port_base
    engines = sum(pool.replicas.max * pool.parallel.workers for pool in context.pools().values())
    last_port = base + max(engines, SIDE_CHANNEL_PORTS) - 1
    if base <= port <= last_port:
        message = (
            f"got {port}, which is one of the side channel's ({base} to {last_port}),"
            " expected another"
        )
        yield context.finding(path, message)


def _hosts_overlap(host: str, other_host: str) -> bool:
    """Whether one process cannot use a port on both."""
    same = same_host(host, other_host) or (is_loopback(host) and is_loopback(other_host))
    return same or is_any_address(host) or is_any_address(other_host)
