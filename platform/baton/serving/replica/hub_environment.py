"""Hub and proxy variables of the shell of `baton up`, for the processes of every node.

Theory of operation. `baton up` keeps the variables in the store of Ray's head. Each replica and
ingress applies them before it imports a hub's client, so nodes that join later have them, too. They
are in no runtime environment, because Ray's dashboard and `serve status` would show the token.
Every node that joins may read them. A variable that the shell lacks stays as each node has it.
Folders of the shell's machine (`HF_HOME`) are not copied.

Clients between baton's processes ignore proxies. `NO_PROXY_VARIABLE` gets the nodes' addresses for
the other code in these processes.
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
    """The variables of an environment to apply on every node."""
    return {name: environ[name] for name in HUB_VARIABLES if environ.get(name)}


def store_variables(environ: Mapping[str, str]) -> None:
    """Store this shell's variables for the new deployment; blocks for milliseconds."""
    save(_STORE_KEY, json.dumps(select_variables(environ)).encode())


def load_variables() -> dict[str, str]:
    """The stored variables; empty without any."""
    data = load(_STORE_KEY)
    variables: dict[str, str] = {} if data is None else json.loads(data)
    return variables


def apply_stored(cache_folder: str | None) -> None:
    """Apply the stored variables to this process; blocks for milliseconds.

    Call it before importing a hub's client, which reads its variables then. `cache_folder` is the
    configured folder for hub models.
    """
    from baton.serving.ray.context import node_address, node_addresses

    apply_variables(os.environ, load_variables(), (node_address(), *node_addresses()))
    if cache_folder is not None:
        os.environ["HF_HOME"] = str(Path(cache_folder).expanduser())
        os.environ.pop("HF_HUB_CACHE", None)  # it would take precedence


def apply_variables(
    environ: MutableMapping[str, str], variables: Mapping[str, str], own_addresses: Iterable[str]
) -> None:
    """Apply the variables, and exclude these addresses from proxies."""
    environ.update(variables)
    if not any(environ.get(name) or environ.get(name.lower()) for name in PROXY_URL_VARIABLES):
        return
    # Programs read either spelling.
    spellings = (NO_PROXY_VARIABLE, NO_PROXY_VARIABLE.lower())
    configured = ",".join(environ.get(spelling, "") for spelling in spellings).split(",")
    names = [*(name.strip() for name in configured), *_LOOPBACK_NAMES, *own_addresses]
    no_proxy = ",".join(dict.fromkeys(name for name in names if name))
    environ.update(dict.fromkeys(spellings, no_proxy))
