"""Where a deployment's link keys are kept: in the store of Ray's head, and nowhere else.

Replicas, ingresses and the controller start in any order, and each may be the first; the first one
makes the keys, and all others find them. They live as long as the deployment: `forget_all`, with
which a deployment begins, forgets them too. Whoever may read that store may run code on every node.
"""

from __future__ import annotations

from baton.domain.errors import EngineStartFailed
from baton.runtime.link.keys import FleetKeys
from baton.runtime.link.options import LinkOptions
from baton.serving.store.config_store import HeadStore, Store

_STORE_KEY = "link-keys"


def fleet_keys(store: Store | None = None) -> FleetKeys:
    """This deployment's keys, made now if nobody has yet. Blocks for milliseconds.

    Raises:
        EngineStartFailed: what is kept are no keys, or nothing can be kept.
    """
    store = store or HeadStore()
    stored = store.get(_STORE_KEY)
    if stored is None:
        new_keys = FleetKeys.generate()
        if store.put(_STORE_KEY, new_keys.to_bytes(), overwrite=False):
            return new_keys
        stored = store.get(_STORE_KEY)  # somebody else was first
    if stored is None:
        raise EngineStartFailed(
            "link keys were made and are not there", "start the deployment again"
        )
    try:
        return FleetKeys.from_bytes(stored)
    except ValueError as error:
        raise EngineStartFailed(str(error), "start the deployment again") from None


def link_options() -> LinkOptions:
    """How the links of this deployment are tuned and guarded. Blocks for milliseconds.

    Raises:
        EngineStartFailed: the keys cannot be had.
    """
    return LinkOptions(keys=fleet_keys())
