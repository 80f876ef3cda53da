"""What must agree about what can be seen, and by whom."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from baton.config.checks.check_context import CheckContext
from baton.config.language.addresses import describe_invalid_host, is_host
from baton.config.language.tree import Finding
from baton.config.schema.deployment import SIDE_CHANNEL_PORTS, ServerConfig, SideChannel
from baton.config.schema.observability import ObservabilityConfig
from baton.domain.names.addresses import is_any_address, is_loopback, same_host

_METRICS = ("observability", "metrics")


def check_observability(context: CheckContext) -> Iterator[Finding]:
    """The endpoint of metrics and console: its address, and who may ask there; the collector."""
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
    """Where traces go: a URL that can be asked, and that everybody may see."""
    if url is None:
        return
    path = ("observability", "tracing", "otlp")
    try:
        parts = urlsplit(url)
        host, _port_part = parts.hostname or "", parts.port
    except ValueError:
        host = ""
    if not host or parts.scheme not in {"http", "https"}:
        yield context.finding(path, "wanted a URL as http://collector:4318")
    elif parts.username is not None or parts.password is not None:
        message = "a name or a password in it would be shown, wanted it without: let a collector on"
        yield context.finding(path, f"{message} the node hand traces on")


def _check_port(context: CheckContext, host: str, port: int) -> Iterator[Finding]:
    path = (*_METRICS, "port")
    server = context.get(ServerConfig, "server")
    if server is not None and port == server.port and _hosts_overlap(host, server.host):
        yield context.finding(
            path, f"got {port}, which is server.port, wanted another, or 0 for any"
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
            " wanted another"
        )
        yield context.finding(path, message)


def _hosts_overlap(host: str, other_host: str) -> bool:
    """Whether one port cannot be had on both."""
    same = same_host(host, other_host) or (is_loopback(host) and is_loopback(other_host))
    return same or is_any_address(host) or is_any_address(other_host)
