"""Which LoRA adapters an engine has in its memory, as its legs come and go.

Theory of operation: an adapter is loaded for the first leg that needs it, and stays until another
adapter needs its place. Then the least recently used adapter goes, of those that no leg needs if
there are any. Engines forget by the same rule but do not say so; that is why this table exists. A
leg is reported at its start and at its end; its adapter, when it has been loaded.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from baton.domain.fleet import AdapterStatus

_MAX_REPORTED = 256
"""Names in a report; it is sent several times a second."""


class LoadedAdapters:
    """The book of one engine. Names that are None, of legs without an adapter, are ignored."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._loaded: OrderedDict[str, None] = OrderedDict()
        """The longest unused first."""
        self._leg_counts: Counter[str] = Counter()
        """By how many legs each is needed."""
        self._hits = 0
        self._loads = 0
        self._busy_s = 0.0

    def on_leg_started(self, name: str | None) -> None:
        """A leg came that needs an adapter."""
        if name is not None:
            self._hits += name in self._loaded or name in self._leg_counts
            self._leg_counts[name] += 1

    def on_leg_ended(self, name: str | None) -> None:
        """A leg that came is over."""
        if name is not None:
            self._leg_counts[name] -= 1
            if not self._leg_counts[name]:
                del self._leg_counts[name]

    def touch(self, name: str | None) -> bool:
        """Note that an adapter is used now; False when it must be loaded first."""
        if name is None:
            return True
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return True
        return False

    def on_loaded(self, name: str, duration_s: float) -> None:
        """An adapter was loaded; another may have gone for it."""
        self._loads += 1
        self._busy_s += duration_s
        if len(self._loaded) >= self._slots:
            idle = (
                adapter_name
                for adapter_name in self._loaded
                if adapter_name not in self._leg_counts
            )
            del self._loaded[next(idle, next(iter(self._loaded)))]
        self._loaded[name] = None

    def report(self) -> AdapterStatus:
        """The report to coordinators."""
        loading = (name for name in self._leg_counts if name not in self._loaded)
        names = (*self._loaded, *loading)[:_MAX_REPORTED]
        return AdapterStatus(
            loaded=names, hits=self._hits, loads=self._loads, loading_s=self._busy_s
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when it holds more than there is room for."""
        assert len(self._loaded) <= max(1, self._slots), f"{len(self._loaded)} adapters are loaded"
        assert all(count > 0 for count in self._leg_counts.values()), "an adapter has no legs"
