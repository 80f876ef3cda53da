"""Environment variables that every Ray process needs, on every node, before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from baton.config.schema.deployment import DeploymentConfig, ListenerKind
from baton.serving.front.data_path import DataPath, FrontPorts, FrontSettings, serve_environment

RUN_DIR: Final = Path("/tmp/baton")  # noqa: S108 - of a container, or of the service alone
"""HAProxy's files and sockets; short, because a socket's path holds 107 bytes."""
FRONT_PORTS: Final = FrontPorts(
    stats=21000,
    metrics=21001,
    fallback_http=21002,
    fallback_grpc=21003,
    replica_http_min=21004,
    replica_http_max=21203,
)
"""The same on every node, because each has one front and its own addresses."""
_DUAL_STACK_ADDRESS: Final = "::0"
"""Replaces `::` for Ray Serve, which would use IPv4 alone.

Source: Ray 2.60, serve/_private/haproxy.py, `frontend_host`, which makes `*` of `::`.
"""
_HEAD_RECONNECT_TIMEOUT_S: Final = 600
"""How long a node waits for a restarted head, whose state is in Redis, before it ends."""


def uses_ingress_listener(config: DeploymentConfig) -> bool:
    """Whether clients connect to ingresses instead of Ray Serve's front."""
    return config.server.listener is ListenerKind.INGRESS


def serve_address(config: DeploymentConfig) -> tuple[str, int]:
    """Where Ray Serve's front listens: the clients' address, unless ingresses use it."""
    if uses_ingress_listener(config):
        return "127.0.0.1", FRONT_PORTS.fallback_http
    host = config.server.host
    return _DUAL_STACK_ADDRESS if host == "::" else host, config.server.port


def ray_variables(config: DeploymentConfig) -> dict[str, str]:
    """Variables by name, sorted."""
    front_settings = FrontSettings(
        data_path=DataPath.INGRESS_HAPROXY
        if uses_ingress_listener(config)
        else DataPath.SERVE_HAPROXY,
        run_dir=RUN_DIR,
        ports=FRONT_PORTS,
        max_stream_s=config.admission.timeouts.total_s,
        threads=4,
    )
    variables = serve_environment(front_settings) | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(_HEAD_RECONNECT_TIMEOUT_S),
        "VLLM_NO_USAGE_STATS": "1",
    }
    return dict(sorted(variables.items()))
