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

from baton.domain.errors import ApplyRejected
from baton.serving.store.config_store import HeadStore, Store, unix_time_s

_KEY = "lease/rollout"
_LEASE_S = 60.0
_RENEW_S = 5.0


class RolloutLease:
    """The right to replace what runs."""

    def __init__(
        self, holder: str, store: Store | None = None, *, now_s: Callable[[], float] = unix_time_s
    ) -> None:
        self._holder = holder
        self._store = store or HeadStore()
        self._now_s = now_s
        self._token = secrets.token_hex(8)
        """Whose it is: process ids are the same in many containers, and are given again."""
        self._renewed_at_s: float | None = None

    def acquire(self) -> str:
        """Hold it from now on; who holds it already, and empty when that is us now."""
        if self._write(overwrite=False):
            return ""
        stored = self._read()
        if stored.get("until_s", 0.0) > self._now_s():
            return str(stored["who"])
        self._store.delete(_KEY)
        # Read again: somebody else who saw the same old lease may have deleted ours for it.
        if self._write(overwrite=False) and self._is_own(self._read()):
            return ""
        self._renewed_at_s = None
        return "somebody who was quicker"

    def renew(self) -> None:
        """Hold it for longer, where it is held.

        Raises:
            ApplyRejected: it ran out, and somebody else has taken it since.
        """
        if self._renewed_at_s is None or self._now_s() - self._renewed_at_s < _RENEW_S:
            return
        stored = self._read()
        if not self._is_own(stored):
            raise ApplyRejected(
                f"this command was not heard of for {self._now_s() - self._renewed_at_s:.0f} s, and"
                f" {stored.get('who', 'another command')} has begun to change what runs",
                "its changes so far stay; when the other is done, look at 'baton status'"
                " and 'baton history', then begin again",
            )
        self._write(overwrite=True)

    def release(self) -> None:
        """Hold it no longer. Idempotent; another's is left alone."""
        if self._renewed_at_s is not None:
            self._renewed_at_s = None
            if self._is_own(self._read()):
                self._store.delete(_KEY)

    def _read(self) -> dict[str, Any]:
        return dict(json.loads(self._store.get(_KEY) or b"{}"))

    def _is_own(self, stored: Mapping[str, Any]) -> bool:
        return bool(stored.get("token") == self._token)

    def _write(self, *, overwrite: bool) -> bool:
        now_s = self._now_s()
        entry = {"who": self._holder, "until_s": now_s + _LEASE_S, "token": self._token}
        if not self._store.put(_KEY, json.dumps(entry).encode(), overwrite=overwrite):
            return False
        self._renewed_at_s = now_s
        return True
