"""The keys that say what the machines of a deployment are to each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The nodes below a deployment."""

    node_address: str = "127.0.0.1"
    """The address at which other nodes reach the one where `baton up` runs; loopback: there are
    none."""
    address: str | None = None
    """`host:port` of a Ray cluster that runs already, to deploy there, or `auto`: the one that this
    machine is a node of. Null takes `RAY_ADDRESS`, and without that starts Ray on this machine."""
    allow_open: bool = False
    """Deploy also to a Ray cluster that asks nobody for a token: whoever reaches it runs code on
    every node."""
    allow_untested_versions: bool = False
    """Start also with versions of Ray, vLLM, torch and NIXL that baton was not tested with."""
