"""Keys of the nodes of a deployment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from baton.config.language.bounds import Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCache:
    """Where models of a hub are stored, so that replicas share one download."""

    path: str | None = None
    """A folder on every node that baton's user may write; pods mount it from their node. Null: the
    folder of `HF_HOME`, else `~/.cache/huggingface`; in pods a folder that ends with the pod."""
    claim: str | None = None
    """For pods: an existing PersistentVolumeClaim that several nodes can write."""
    size_bytes: Annotated[int | None, Positive] = None
    """For pods: size of a PersistentVolumeClaim that the manifests create."""
    storage_class: str | None = None
    """Of that claim; null: the cluster's default. It must support `ReadWriteMany`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The nodes of a deployment."""

    node_address: str = "127.0.0.1"
    """Address at which other nodes reach the node of `baton up`; a loopback address: there are no
    others."""
    address: str | None = None
    """`host:port` of a running Ray cluster to deploy to, or `auto`: the cluster of this machine.
    Null: `RAY_ADDRESS`, else Ray is started on this machine."""
    allow_open: bool = False
    """Deploy also to a Ray cluster without token authentication: every client that reaches it can
    run code on every node."""
    model_cache: ModelCache = field(default_factory=ModelCache)
    allow_untested_versions: bool = False
    """Start also with versions of Ray, vLLM, torch and NIXL that baton was not tested with."""
