"""The keys that say what the machines of a deployment are to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from baton.config.language.bounds import Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCache:
    """Where models of a hub are kept, so that they come once and not with every replica."""

    path: str | None = None
    """A folder on every node, which baton's user may write; pods have it from the machine below
    them. Null: the folder of `HF_HOME`, else `~/.cache/huggingface`; in pods a place that ends with
    the pod."""
    claim: str | None = None
    """For pods: a PersistentVolumeClaim that is there, and can be written from several nodes."""
    size_bytes: Annotated[int | None, Positive] = None
    """For pods: the room of a PersistentVolumeClaim that manifests bring along."""
    storage_class: str | None = None
    """Of that claim; null takes the cluster's usual one. It must allow `ReadWriteMany`."""


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
    model_cache: ModelCache = field(default_factory=ModelCache)
    allow_untested_versions: bool = False
    """Start also with versions of Ray, vLLM, torch and NIXL that baton was not tested with."""
