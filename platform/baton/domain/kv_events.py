"""KV events as plain values: blocks that an engine stored in its prefix cache or evicted.

Batches of one replica are numbered without holes by their publisher. A reader that sees `sequence`
jump by more than one has missed batches, and its view of that replica's cache may be wrong in
either direction.
"""

from __future__ import annotations

from dataclasses import dataclass

BlockHash = bytes
"""An engine's own name for a full block and all before it. Only equality means anything, and only
between replicas of one layout; an outside index may hash `token_ids` its own way instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """Full blocks of one sequence, in order, became reusable."""

    block_hashes: tuple[BlockHash, ...]
    parent_hash: BlockHash | None
    """The block before the first of these; None when they start a prompt."""
    token_ids: tuple[int, ...]
    """The tokens of all these blocks: `len(block_hashes) * block_size_tokens` ids."""
    block_size_tokens: int
    tier: str | None = None
    """Which memory holds them, in lower case ("gpu", "cpu"); None when the engine does not say."""
    adapter: str | None = None
    cache_salt: str | None = None
    has_hidden_content: bool = False
    """They depend on more than their token ids (images, prompt embeddings), so token ids alone
    cannot tell whether they would be reused."""
    group: int = 0
    """Which of the engine's groups of layers; their blocks have one name for one prefix."""

    def __post_init__(self) -> None:
        expected_tokens = len(self.block_hashes) * self.block_size_tokens
        if len(self.token_ids) != expected_tokens:
            raise ValueError(
                f"blocks stored: got {len(self.token_ids)} token ids for"
                f" {len(self.block_hashes)} blocks of {self.block_size_tokens}, expected"
                f" {expected_tokens}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    """Blocks were evicted and can no longer be reused."""

    block_hashes: tuple[BlockHash, ...]
    tier: str | None = None
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """The whole prefix cache was emptied."""


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventBatch:
    """Changes of one replica's prefix cache in one engine step."""

    replica_id: str
    sequence: int
    events: tuple[KvEvent, ...]
