"""Which LoRA adapters an engine has in its memory, as its legs come and go.

Theory of operation: an adapter is loaded for the first leg that needs it, and stays until another
one needs its place: then the one goes that was unused for longest, of those that no leg needs if
there are any. Engines forget by the same rule but do not say so; that is why somebody keeps book.
A leg is told of when it comes and when it is over; its adapter, when it has been loaded.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from baton.domain.fleet import AdapterLoad

_MOST_TOLD = 256
"""Names in a report; it is sent several times a second."""


class LoadedAdapters:
    """The book of one engine. Names that are None, of legs without an adapter, are ignored."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._loaded: OrderedDict[str, None] = OrderedDict()
        """The longest unused first."""
        self._needed: Counter[str] = Counter()
        """By how many legs each is needed."""
        self._hits = 0
        self._loads = 0
        self._busy_s = 0.0

    def leg_came(self, name: str | None) -> None:
        """A leg came that needs an adapter."""
        if name is not None:
            self._hits += name in self._loaded or name in self._needed
            self._needed[name] += 1

    def leg_over(self, name: str | None) -> None:
        """A leg that came is over."""
        if name is not None:
            self._needed[name] -= 1
            if not self._needed[name]:
                del self._needed[name]

    def use(self, name: str | None) -> bool:
        """Note that an adapter is used now; False when it must be loaded first."""
        if name is None:
            return True
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return True
        return False

    def loaded(self, name: str, took_s: float) -> None:
        """An adapter was loaded; another may have gone for it."""
        self._loads += 1
        self._busy_s += took_s
        if len(self._loaded) >= self._slots:
            idle = (one for one in self._loaded if one not in self._needed)
            del self._loaded[next(idle, next(iter(self._loaded)))]
        self._loaded[name] = None

    def told(self) -> AdapterLoad:
        """What others are told."""
        on_the_way = (name for name in self._needed if name not in self._loaded)
        names = (*self._loaded, *on_the_way)[:_MOST_TOLD]
        return AdapterLoad(names, self._hits, self._loads, self._busy_s)

    def check_integrity(self) -> None:
        """Raise AssertionError when it holds more than there is room for."""
        assert len(self._loaded) <= max(1, self._slots), f"{len(self._loaded)} adapters are loaded"
        assert all(count > 0 for count in self._needed.values()), "an adapter is needed by nobody"
