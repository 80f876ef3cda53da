"""What Ray's head keeps for a deployment, in memory."""

from __future__ import annotations

import threading


class HeadStore:
    """Bytes by key; a key that is not to be overwritten is written by whoever comes first."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        with self._lock:
            if key in self.values and not overwrite:
                return False
            self.values[key] = value
            return True

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.values if key.startswith(prefix)]

    def delete(self, key: str, *, by_prefix: bool = False) -> None:
        for name in self.keys(key) if by_prefix else [key]:
            self.values.pop(name, None)
