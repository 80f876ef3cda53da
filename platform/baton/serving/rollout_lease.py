"""One rollout at a time: who rolls out holds a lease in the cluster's store, and renews it.

Theory of operation. The lease is one key that is written only where there is none, or where the one
that is there has run out, which is how the lease of a command that was killed ends. Renewing costs
a call to the store, so that it is done only now and then, however often it is asked for. The clock
is the wall's, for it is shared by machines: lease and renewal are far apart compared with what
clocks of one cluster differ by.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from baton.serving.live_config import HeadStore, Store, wall_s

_KEY = "lease/rollout"
_LEASE_S = 60.0
_RENEW_S = 5.0


class RolloutLease:
    """The right to replace what runs."""

    def __init__(
        self, who: str, store: Store | None = None, *, now_s: Callable[[], float] = wall_s
    ) -> None:
        self._who = who
        self._store = store or HeadStore()
        self._now_s = now_s
        self._renewed_at_s: float | None = None

    def take(self) -> str:
        """Hold it from now on; who holds it already, and empty when that is us now."""
        if self._put(overwrite=False):
            return ""
        told = json.loads(self._store.get(_KEY) or b"{}")
        if told.get("until_s", 0.0) > self._now_s():
            return str(told["who"])
        self._store.delete(_KEY)
        return "" if self._put(overwrite=False) else "somebody who was quicker"

    def renew(self) -> None:
        """Hold it for longer, where it is held."""
        if self._renewed_at_s is not None and self._now_s() - self._renewed_at_s >= _RENEW_S:
            self._put(overwrite=True)

    def drop(self) -> None:
        """Hold it no longer. Idempotent."""
        if self._renewed_at_s is not None:
            self._renewed_at_s = None
            self._store.delete(_KEY)

    def _put(self, *, overwrite: bool) -> bool:
        now_s = self._now_s()
        told = {"who": self._who, "until_s": now_s + _LEASE_S}
        if not self._store.put(_KEY, json.dumps(told).encode(), overwrite=overwrite):
            return False
        self._renewed_at_s = now_s
        return True
