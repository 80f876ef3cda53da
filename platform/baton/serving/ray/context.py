"""What a Ray Serve replica knows of itself."""

from __future__ import annotations

from pathlib import Path


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
    """The addresses of all nodes that the cluster has at present."""
    import ray

    return tuple(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"])


def get_gcs_address() -> str:
    """`host:port` of the control store of the cluster that this process is connected to."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def logs_folder() -> Path:
    """Where the node that this process is connected to keeps its logs (private in Ray 2.60)."""
    from ray._private import worker

    node = worker._global_node  # noqa: SLF001 - there is no public way
    assert node is not None, "asked by a process that is connected to no cluster"
    return Path(node.get_logs_dir_path())


def session_name() -> str:
    """What the cluster that this process is connected to is called; no two ever have one name."""
    import ray

    return str(ray.get_runtime_context().get_session_name())
