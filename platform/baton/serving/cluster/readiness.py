"""Whether HAProxy has found the ingress.

Until HAProxy's own check of the ingress has passed, it sends requests to its *backup* server, Ray
Serve's Python proxy. The endpoint is healthy then, but slow, and a reload of HAProxy may cut
connections. So a deployment is not reported as up before.
"""

from __future__ import annotations

from pathlib import Path

import httpx

from baton.serving.cluster.cluster_state import ClusterState
from baton.serving.front.data_path import DataPath
from baton.serving.front.haproxy_admin import admin_sockets, direct_server_is_up, query_haproxy

_HTTP_TIMEOUT_S = 5.0


def local_client(url: str) -> httpx.Client:
    """A client for this machine's endpoint; send no secret with it.

    It does not verify certificates, which are for the public name, and ignores the shell's proxies.
    """
    return httpx.Client(
        base_url=url,
        timeout=_HTTP_TIMEOUT_S,
        verify=False,  # noqa: S501 - see above
        trust_env=False,
    )


def front_is_direct(state: ClusterState) -> bool:
    """Whether requests go straight to an ingress replica; Serve's Python proxy has no other way."""
    if state.data_path is not DataPath.SERVE_HAPROXY:
        return True
    sockets = admin_sockets(Path(state.run_dir))
    return any(direct_server_is_up(query_haproxy(path, "show stat")) for path in sockets)
