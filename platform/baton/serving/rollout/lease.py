"""One rollout at a time: who rolls out holds a lease in the cluster's store, and renews it.

Theory of operation. The lease is one key that is written only where there is none, or where the one
that is there has run out, which is how the lease of a command that was killed ends. Renewing costs
two calls to the store, so that it is done only now and then, however often it is asked for. The
clock is the wall's, for it is shared by machines: lease and renewal are far apart compared with
what clocks of one cluster differ by.

A command that only slept for longer than its lease finds another's when it wakes, or none: it does
not renew or drop that, for each lease carries a token of its own, and has to end. The store cannot
compare and write in one step. So of two who take or renew in the same millisecond each may believe
that it is theirs, and one of them finds the other's when it renews next.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from baton.domain.errors import ApplyRefused
from baton.serving.store.config_store import HeadStore, Store, wall_s

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
        self._token = secrets.token_hex(8)
        """Whose it is: process ids are the same in many containers, and are given again."""
        self._renewed_at_s: float | None = None

    def take(self) -> str:
        """Hold it from now on; who holds it already, and empty when that is us now."""
        if self._put(overwrite=False):
            return ""
        told = self._read()
        if told.get("until_s", 0.0) > self._now_s():
            return str(told["who"])
        self._store.delete(_KEY)
        # Read again: somebody else who saw the same old lease may have deleted ours for it.
        if self._put(overwrite=False) and self._is_ours(self._read()):
            return ""
        self._renewed_at_s = None
        return "somebody who was quicker"

    def renew(self) -> None:
        """Hold it for longer, where it is held.

        Raises:
            ApplyRefused: it ran out, and somebody else has taken it since.
        """
        if self._renewed_at_s is None or self._now_s() - self._renewed_at_s < _RENEW_S:
            return
        told = self._read()
        if not self._is_ours(told):
            raise ApplyRefused(
                f"this command was not heard of for {self._now_s() - self._renewed_at_s:.0f} s, and"
                f" {told.get('who', 'somebody else')} has begun to change what runs",
                "what it has ordered so far stands; when the other is done, look at 'baton status'"
                " and 'baton history', then begin again",
            )
        self._put(overwrite=True)

    def drop(self) -> None:
        """Hold it no longer. Idempotent; another's is left alone."""
        if self._renewed_at_s is not None:
            self._renewed_at_s = None
            if self._is_ours(self._read()):
                self._store.delete(_KEY)

    def _read(self) -> dict[str, Any]:
        return dict(json.loads(self._store.get(_KEY) or b"{}"))

    def _is_ours(self, told: Mapping[str, Any]) -> bool:
        return bool(told.get("token") == self._token)

    def _put(self, *, overwrite: bool) -> bool:
        now_s = self._now_s()
        told = {"who": self._who, "until_s": now_s + _LEASE_S, "token": self._token}
        if not self._store.put(_KEY, json.dumps(told).encode(), overwrite=overwrite):
            return False
        self._renewed_at_s = now_s
        return True
