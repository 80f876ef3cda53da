"""What the shell of `baton up` says of a hub and of proxies, for the processes of every node.

Theory of operation. The variables are kept as a note in the store of Ray's head when a deployment
is made. Each replica and each ingress takes them before it imports what reads them, so that a node
that joins later has them, too. They are in no runtime environment and no configuration: Ray's
dashboard and `serve status` would show a token there. Who may join the cluster may read the note,
and could as well run code as its processes. What the shell does not say stays as each node has it.
Folders of the shell's machine (`HF_HOME`) are nothing to others.

What baton's processes ask each other goes through no proxy: their clients do not look at these
variables. `NO_PROXY` gets the nodes' addresses for everything else that runs in these processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Final

from baton.domain.names.proxies import NO_PROXY, PROXIES, PROXY_VARIABLES
from baton.serving.store.config_store import load, save

NAMES: Final = (
    "HF_TOKEN",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "HF_HUB_DISABLE_XET",
    "HF_HUB_DOWNLOAD_TIMEOUT",
    "HF_HUB_ETAG_TIMEOUT",
    *PROXY_VARIABLES,
)
"""Source: huggingface_hub 2.4, constants.py."""
_NOTE: Final = "hub"
_OWN_NAMES: Final = ("localhost", "127.0.0.1", "::1")


def said(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that are to hold on every node."""
    return {name: environ[name] for name in NAMES if environ.get(name)}


def keep(environ: Mapping[str, str]) -> None:
    """Keep what this shell says for the deployment that is made; blocks for milliseconds."""
    save(_NOTE, json.dumps(said(environ)).encode())


def kept() -> dict[str, str]:
    """What the shell said by which the deployment was made; empty where nothing is known."""
    data = load(_NOTE)
    found: dict[str, str] = {} if data is None else json.loads(data)
    return found


def take(cache: str | None) -> None:
    """Have this process, which is a node's, go by what is kept; blocks for milliseconds.

    To be called before anything of a hub is imported: it reads its variables then.

    Args:
        cache: the folder for models of a hub, where the configuration says one.
    """
    from baton.serving.ray.context import node_address, node_addresses

    go_by(os.environ, kept(), (node_address(), *node_addresses()))
    if cache is not None:
        os.environ["HF_HOME"] = str(Path(cache).expanduser())
        os.environ.pop("HF_HUB_CACHE", None)  # it would count for more


def go_by(
    environ: MutableMapping[str, str], told: Mapping[str, str], own_addresses: Iterable[str]
) -> None:
    """Have a process ask hubs as it is told, and nodes at these addresses without a proxy."""
    environ.update(told)
    if not any(environ.get(name) or environ.get(name.lower()) for name in PROXIES):
        return
    before = f"{environ.get(NO_PROXY, '')},{environ.get(NO_PROXY.lower(), '')}".split(",")
    names = [*(name.strip() for name in before), *_OWN_NAMES, *own_addresses]
    # Some read the one, some the other.
    every = ",".join(dict.fromkeys(name for name in names if name))
    environ.update({NO_PROXY: every, NO_PROXY.lower(): every})
