"""A deployment's link keys, in the store of Ray's head.

Replicas, ingresses and the controller start in any order. The first process makes the keys, and the
others read them. `clear_store` deletes them when a deployment begins. A reader of that store can
run code on every node anyway.
"""

from __future__ import annotations

from baton.domain.errors import EngineStartFailed
from baton.runtime.link.keys import FleetKeys
from baton.runtime.link.options import LinkOptions
from baton.serving.store.config_store import HeadStore, Store

_STORE_KEY = "link-keys"


def fleet_keys(store: Store | None = None) -> FleetKeys:
    """This deployment's keys; made if there are none. Blocks for milliseconds.

    Raises:
        EngineStartFailed: the stored keys are invalid, or keys cannot be stored.
    """
    store = store or HeadStore()
    stored = store.get(_STORE_KEY)
    if stored is None:
        new_keys = FleetKeys.generate()
        if store.put(_STORE_KEY, new_keys.to_bytes(), overwrite=False):
            return new_keys
        stored = store.get(_STORE_KEY)  # another process was first
    if stored is None:
        raise EngineStartFailed(
            "link keys were made and are not there", "start the deployment again"
        )
    try:
        return FleetKeys.from_bytes(stored)
    except ValueError as error:
        raise EngineStartFailed(str(error), "start the deployment again") from None


def link_options() -> LinkOptions:
    """Link options with this deployment's keys; see `fleet_keys` for errors."""
    return LinkOptions(keys=fleet_keys())
