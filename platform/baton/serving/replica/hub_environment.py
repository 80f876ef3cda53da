"""What the shell of `baton up` says of a hub and of proxies, for the processes of every node.

Theory of operation. The variables are kept as a note in the store of Ray's head when a deployment
is made. Each replica and each ingress takes them before it imports what reads them, so that a node
that joins later has them, too. They are in no runtime environment and no configuration: Ray's
dashboard and `serve status` would show a token there. Who may join the cluster may read the note,
and could as well run code as its processes. What the shell does not say stays as each node has it.
Folders of the shell's machine (`HF_HOME`) are nothing to others.

What baton's processes ask each other goes through no proxy: their clients do not look at these
variables. `NO_PROXY_VARIABLE` gets the nodes' addresses for everything else that runs in these
processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Final

from baton.domain.names.proxies import NO_PROXY_VARIABLE, PROXY_URL_VARIABLES, PROXY_VARIABLES
from baton.serving.store.config_store import load, save

HUB_VARIABLES: Final = (
    "HF_TOKEN",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "HF_HUB_DISABLE_XET",
    "HF_HUB_DOWNLOAD_TIMEOUT",
    "HF_HUB_ETAG_TIMEOUT",
    *PROXY_VARIABLES,
)
"""Source: huggingface_hub 2.4, constants.py."""
_STORE_KEY: Final = "hub"
_LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")


def select_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that are to hold on every node."""
    return {name: environ[name] for name in HUB_VARIABLES if environ.get(name)}


def store_variables(environ: Mapping[str, str]) -> None:
    """Keep what this shell says for the deployment that is made; blocks for milliseconds."""
    save(_STORE_KEY, json.dumps(select_variables(environ)).encode())


def load_variables() -> dict[str, str]:
    """What the shell said by which the deployment was made; empty where nothing is known."""
    data = load(_STORE_KEY)
    variables: dict[str, str] = {} if data is None else json.loads(data)
    return variables


def apply_stored(cache_folder: str | None) -> None:
    """Have this process, which is a node's, go by what is kept; blocks for milliseconds.

    To be called before anything of a hub is imported: it reads its variables then.

    Args:
        cache_folder: the folder for models of a hub, where the configuration says one.
    """
    from baton.serving.ray.context import node_address, node_addresses

    apply_variables(os.environ, load_variables(), (node_address(), *node_addresses()))
    if cache_folder is not None:
        os.environ["HF_HOME"] = str(Path(cache_folder).expanduser())
        os.environ.pop("HF_HUB_CACHE", None)  # it would count for more


def apply_variables(
    environ: MutableMapping[str, str], variables: Mapping[str, str], own_addresses: Iterable[str]
) -> None:
    """Have a process ask hubs as it is told, and nodes at these addresses without a proxy."""
    environ.update(variables)
    if not any(environ.get(name) or environ.get(name.lower()) for name in PROXY_URL_VARIABLES):
        return
    no_proxy_names = (
        f"{environ.get(NO_PROXY_VARIABLE, '')},{environ.get(NO_PROXY_VARIABLE.lower(), '')}".split(
            ","
        )
    )
    names = [*(name.strip() for name in no_proxy_names), *_LOOPBACK_NAMES, *own_addresses]
    # Some read the one, some the other.
    no_proxy = ",".join(dict.fromkeys(name for name in names if name))
    environ.update({NO_PROXY_VARIABLE: no_proxy, NO_PROXY_VARIABLE.lower(): no_proxy})
