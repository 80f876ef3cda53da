"""Numbered changes of the blocks in a replica's prefix cache, as sent to coordinators.

A replica numbers its updates without holes. Update n says what changed between states n-1 and n; a
snapshot numbered n is state n as a whole. A reader at state n takes update n+1, ignores older
numbers, and requests a snapshot after a gap.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

BLOCK_HASH_BYTES = 8


class CacheTier(StrEnum):
    """Which memory of a replica holds a block."""

    GPU = "gpu"
    """Where attention reads it: the KV cache itself, on any device."""
    HOST = "host"
    """In the host's memory (or further away): it must be loaded before it is of use."""


class PrefixRequirement(StrEnum):
    """The blocks that one group of layers needs in order to reuse a prefix."""

    ALL = "all"
    """Every block: full attention."""
    TRAILING_BLOCKS = "trailing_blocks"
    """The last N blocks: a sliding window; one, for a state."""
    CHUNK = "chunk"
    """The blocks since the last multiple of N tokens: chunked local attention."""
    NONE = "none"
    """Scratch memory of one request, which is never shared."""


class CacheGroup(NamedTuple):
    """Layers of a model that keep blocks of their own, and give them up by a rule of their own."""

    requirement: PrefixRequirement
    block_size_tokens: int
    span: int = 0
    """LAST: blocks. CHUNK: tokens."""
    needs_next_block: bool = False
    """The block after the prefix must be held, too: a draft model computes it again."""


class CacheShape(NamedTuple):
    """How a prefix cache of more than plain full attention finds what it can reuse.

    A request goes on after a prefix only where each group holds the blocks that it needs. So a
    reusable prefix does not imply that its own prefixes are reusable.
    """

    groups: tuple[CacheGroup, ...]
    """By the engine's own numbers."""
    alignment_tokens: int
    """Reused prefixes are multiples of this."""

    @property
    def lookahead_tokens(self) -> int:
        """How far beyond a prefix blocks must be held for it to be reused."""
        return max(
            (group.block_size_tokens for group in self.groups if group.needs_next_block), default=0
        )


class CacheChangeKind(StrEnum):
    """A change of blocks."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"
    """Everything in that tier is gone; carries no hashes."""


class CacheChange(NamedTuple):
    """One thing that happened to some blocks of one tier."""

    kind: CacheChangeKind
    packed_hashes: bytes = b""
    """Block hashes, 8 bytes little-endian each: see `pack_hashes`."""
    tier: CacheTier = CacheTier.GPU


class CacheUpdate(NamedTuple):
    """A numbered step in the life of one replica's prefix cache."""

    sequence: int
    changes: tuple[CacheChange, ...]
    """In order: a block may be stored and removed in one update."""
    is_snapshot: bool = False
    """Forget all that was known of the replica first."""


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Block hashes as bytes; each is in [0, 2^63)."""
    packed = array("q", hashes)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_hashes(packed: bytes) -> Sequence[int]:
    """The block hashes that `pack_hashes` was given.

    Raises:
        ValueError: the length is no multiple of 8.
    """
    if len(packed) % BLOCK_HASH_BYTES:
        raise ValueError(
            f"block hashes: got {len(packed)} bytes, expected a multiple of {BLOCK_HASH_BYTES}"
        )
    hashes = array("q")
    hashes.frombytes(packed)
    if sys.byteorder == "big":
        hashes.byteswap()
    return hashes
