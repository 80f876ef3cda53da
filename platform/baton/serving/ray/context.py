"""The context of a Ray Serve replica."""

from __future__ import annotations

from pathlib import Path

HEAD_NODE_RESOURCE = "node:__internal_head__"
"""Ray's own resource of the node that has the control store."""


def replica_name() -> str:
    """This replica's id, unique among all replicas of the app, now and later."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def app_name() -> str:
    """The name of the Serve application that this replica belongs to."""
    from ray import serve

    return str(serve.get_replica_context().app_name)


def node_address() -> str:
    """The address under which the cluster knows this node."""
    import ray

    return str(ray.util.get_node_ip_address())


def node_addresses() -> tuple[str, ...]:
    """The addresses of all live nodes of the cluster."""
    import ray

    return tuple(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"])


def get_gcs_address() -> str:
    """`host:port` of the connected cluster's control store."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def logs_folder() -> Path:
    """The folder of logs on the connected node (private in Ray 2.60)."""
    from ray._private import worker

    node = worker._global_node  # noqa: SLF001 - there is no public way
    assert node is not None, "asked by a process that is connected to no cluster"
    return Path(node.get_logs_dir_path())


def session_name() -> str:
    """The name of the connected cluster's session; no two clusters have the same, ever."""
    import ray

    return str(ray.get_runtime_context().get_session_name())
