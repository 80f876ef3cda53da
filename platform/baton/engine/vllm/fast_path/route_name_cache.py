"""What a path is called in vLLM's metrics is looked up once.

The layer that counts responses asks for each request which of the app's routes its path is of, and
tries them all, a mount of every extension among them: 0.15 ms of a processor. A path stays what it
is, so the answers are kept; only so many, for clients choose paths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.engine.vllm.patches import table

_MAX_ENTRIES = 1024
_KEY_FIELDS = ("app", "type", "method", "path", "root_path")


def install_route_name_cache() -> None:
    """Have the layer remember them from now on, in this process. Idempotent."""
    table.ROUTE_NAMES.install(_cached)


def _cached(look_up: Callable[..., Any]) -> Callable[..., Any]:
    return look_up if isinstance(look_up, _RouteNameCache) else _RouteNameCache(look_up)


class _RouteNameCache:
    """A function's answers by what they depend on, the oldest of too many forgotten."""

    def __init__(self, look_up: Any) -> None:  # noqa: ANN401 - its package is not followed
        self._look_up = look_up
        self._names: dict[tuple[object, ...], str | None] = {}

    def __call__(self, request: Any, should_include_root_path: bool) -> str | None:  # noqa: ANN401, FBT001 - as it is called
        key = (should_include_root_path, *map(request.scope.get, _KEY_FIELDS))
        if key in self._names:
            return self._names[key]
        name: str | None = self._look_up(request, should_include_root_path)
        if len(self._names) >= _MAX_ENTRIES:
            del self._names[next(iter(self._names))]
        self._names[key] = name
        return name
