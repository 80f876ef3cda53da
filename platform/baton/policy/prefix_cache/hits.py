"""The result of a lookup in the prefix index: how much of one prompt each replica holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from baton.domain.handoff import HitSource


class Hit(NamedTuple):
    """How much of a prompt one replica holds."""

    blocks: int = 0
    """Leading full blocks, in any tier."""
    host_blocks: int = 0
    """Those among them that must be loaded from the host's memory first."""
    source: HitSource = HitSource.NONE
    age_s: float = 0.0
    """How long ago the source last vouched for it; 0 without a hit."""


NO_HIT = Hit()


class Hits(Protocol):
    """The answer to one lookup; valid until the index changes."""

    def of(self, replica_id: str) -> Hit:
        """The hit of one replica; `NO_HIT` when it holds nothing or is unknown."""
        ...

    def holders(self, limit: int) -> Sequence[str]:
        """Up to `limit` replicas that hold something, those that hold most first.

        When too many hold the same number of blocks, the index's own seeded choice decides among
        them, so that several coordinators do not all name the same replicas.
        """
        ...

    def depths(self) -> Sequence[int]:
        """The different numbers of leading blocks that replicas hold, the most first; none: 0."""
        ...


class _NoHits:
    def of(self, replica_id: str) -> Hit:
        return NO_HIT

    def holders(self, limit: int) -> Sequence[str]:
        return ()

    def depths(self) -> Sequence[int]:
        return ()


NO_HITS: Hits = _NoHits()
