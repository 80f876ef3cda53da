"""The LoRA adapters that a replica may be asked for, by the names that legs give.

Theory of operation: adapters of the configuration file are fixed. `replace_added` replaces all
others at once. A leg may be faster than the news of its adapter, so `refresh` is called once before
a name is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from baton.domain.errors import AdapterFailed

_REFRESH_TIMEOUT_S = 2.0
_MAX_LISTED = 20


class KnownAdapters:
    """Where each adapter is kept."""

    def __init__(
        self,
        fixed: Mapping[str, str] | None = None,
        *,
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Keep the fixed adapters.

        Args:
            fixed: A folder or a hub id for each name.
            refresh: Calls `replace_added` where adapters changed, and may fail.
        """
        self._fixed = dict(fixed or {})
        self._added: dict[str, str] = {}
        self._refresh = refresh

    @property
    def fixed(self) -> Mapping[str, str]:
        """The adapters of the configuration."""
        return self._fixed

    def replace_added(self, added: Mapping[str, str]) -> None:
        """Replace all adapters but the fixed."""
        self._added = dict(added)

    async def source(self, name: str) -> str:
        """Where an adapter is kept.

        Raises:
            AdapterFailed: there is none of that name.
        """
        location = self._find(name)
        if location is None and self._refresh is not None:
            try:
                async with asyncio.timeout(_REFRESH_TIMEOUT_S):
                    await self._refresh()
            except (TimeoutError, OSError, RuntimeError) as error:
                detail = str(error) or "no answer"
                reason = f"not known, and whether it is new cannot be asked: {detail}"
                raise AdapterFailed(name, reason) from error
            location = self._find(name)
        if location is None:
            names = [*self._fixed, *self._added]
            known = ", ".join(names[:_MAX_LISTED]) or "none"
            raise AdapterFailed(name, f"this engine has no adapter of that name; it has {known}")
        return location

    def _find(self, name: str) -> str | None:
        return self._fixed.get(name) or self._added.get(name)
