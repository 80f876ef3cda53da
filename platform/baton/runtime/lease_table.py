"""The tickets a replica has handed out: what keeps it from stopping although nothing runs on it."""

from __future__ import annotations

from collections.abc import Iterable

from baton.domain.handoff import KvHandle, LegOutput


class OutstandingLeases:
    """Tickets whose blocks may still be kept, as far as this side can know.

    The pulling side, not this one, is told when blocks have moved. But an engine of which no block
    is in use keeps none for anybody, once its load has caught up with the last ticket:
    `load_lag_s`.
    """

    def __init__(self, *, lease_s: float, load_lag_s: float) -> None:
        self._lease_s = lease_s
        self._load_lag_s = load_lag_s
        self._expires_at_s: dict[bytes, float] = {}
        self._last_lease_at_s = 0.0

    def __len__(self) -> int:
        return len(self._expires_at_s)

    def record(self, outputs: Iterable[LegOutput], now_s: float) -> None:
        """Take in the tickets of one engine step."""
        for output in outputs:
            if output.kv_handle is not None:
                self._last_lease_at_s = now_s
                self.remove(output.kv_handle)  # so that the oldest stay in front
                self._expires_at_s[output.kv_handle.params] = now_s + self._lease_s

    def remove(self, kv_handle: KvHandle) -> None:
        """A ticket was released."""
        self._expires_at_s.pop(kv_handle.params, None)

    def expire(self, now_s: float, *, engine_is_empty: bool) -> None:
        """Forget those whose time is up, or all when the engine can hold no blocks for them."""
        for params, expires_at_s in tuple(self._expires_at_s.items()):
            if expires_at_s > now_s:
                break
            del self._expires_at_s[params]
        if engine_is_empty and now_s - self._last_lease_at_s > self._load_lag_s:
            self._expires_at_s.clear()
