"""What must agree about what can be seen, and by whom."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from baton.config.checks.check_context import Seen
from baton.config.language.addresses import host_wanted, is_host
from baton.config.language.tree import Finding
from baton.config.schema.deployment import SIDE_CHANNEL_PORTS, ServerConfig, SideChannel
from baton.config.schema.observability import ObservabilityConfig
from baton.domain.names.addresses import is_any, is_loopback, same_host

_METRICS = ("observability", "metrics")


def check_observability(seen: Seen) -> Iterator[Finding]:
    """The endpoint of metrics and console: its address, and who may ask there; the collector."""
    wanted = seen.get(ObservabilityConfig, "observability")
    if wanted is None:
        return
    yield from _collector(seen, wanted.tracing.otlp)
    if not (wanted.metrics.enabled or wanted.console.enabled):
        return
    host = wanted.metrics.host
    if not is_host(host):
        what = host_wanted(host, "a host name or an IP address")
        yield seen.wrong((*_METRICS, "host"), what)
    elif not is_loopback(host) and wanted.token_file is None:
        what = (
            f"got {host!r}, which others reach, without a token: set observability.token_file to a"
            " file with one, or host to 127.0.0.1"
        )
        yield seen.wrong((*_METRICS, "host"), what)
    yield from _port(seen, host, wanted.metrics.port)


def _collector(seen: Seen, url: str | None) -> Iterator[Finding]:
    """Where traces go: a URL that can be asked, and that everybody may see."""
    if url is None:
        return
    path = ("observability", "tracing", "otlp")
    try:
        parts = urlsplit(url)
        host, _port_number = parts.hostname or "", parts.port
    except ValueError:
        host = ""
    if not host or parts.scheme not in {"http", "https"}:
        yield seen.wrong(path, "wanted a URL as http://collector:4318")
    elif parts.username is not None or parts.password is not None:
        what = "a name or a password in it would be shown, wanted it without: let a collector on"
        yield seen.wrong(path, f"{what} the node hand traces on")


def _port(seen: Seen, host: str, port: int) -> Iterator[Finding]:
    path = (*_METRICS, "port")
    server = seen.get(ServerConfig, "server")
    if server is not None and port == server.port and _overlap(host, server.host):
        yield seen.wrong(path, f"got {port}, which is server.port, wanted another, or 0 for any")
    side_channel = seen.get(SideChannel, "transfer", "side_channel")
    if side_channel is None:
        return
    base = side_channel.port_base
    engines = sum(pool.replicas.max * pool.parallel.workers for pool in seen.pools().values())
    last = base + max(engines, SIDE_CHANNEL_PORTS) - 1
    if base <= port <= last:
        what = f"got {port}, which is one of the side channel's ({base} to {last}), wanted another"
        yield seen.wrong(path, what)


def _overlap(one: str, other: str) -> bool:
    """Whether one port cannot be had on both."""
    same = same_host(one, other) or (is_loopback(one) and is_loopback(other))
    return same or is_any(one) or is_any(other)
