"""Whether the front has found the ingress.

Until HAProxy's own check of the ingress has passed, it sends requests through its *backup* server,
Ray Serve's proxy in Python. The endpoint is healthy then, but slow, and connections may be cut when
HAProxy is reloaded with the ingress in its list. So a deployment is not called up before.
"""

from __future__ import annotations

from pathlib import Path

import httpx

from baton.serving.cluster.cluster_state import ClusterState
from baton.serving.front.data_path import DataPath
from baton.serving.front.haproxy_admin import admin_sockets, direct_server_is_up, query_haproxy

_HTTP_TIMEOUT_S = 5.0


def local_client(url: str) -> httpx.Client:
    """A client for this machine's own endpoint, by which nothing secret may be sent.

    It does not look at certificates: they are for the name by which clients know the endpoint. Nor
    at the shell's proxies: they are for what is elsewhere.
    """
    return httpx.Client(
        base_url=url,
        timeout=_HTTP_TIMEOUT_S,
        verify=False,  # noqa: S501 - see above
        trust_env=False,
    )


def front_is_direct(state: ClusterState) -> bool:
    """Whether requests go straight to an ingress replica; the classic proxy has no other way."""
    if state.data_path is not DataPath.SERVE_HAPROXY:
        return True
    sockets = admin_sockets(Path(state.run_dir))
    return any(direct_server_is_up(query_haproxy(path, "show stat")) for path in sockets)
