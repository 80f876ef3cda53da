"""The host's memory behind a KV cache: what the cache evicts is kept there for as long as it fits.

Theory of operation: a block that the KV cache evicts comes here; when there is no room, the one
that was kept or used longest ago goes for good. A block that is loaded back stays here too, until
it goes. Prompts are kept and used tail first, so a prompt's tail always goes before its head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from baton.domain.kv_events import BlockHash, BlocksRemoved, BlocksStored, KvEvent

GPU = "gpu"
HOST = "cpu"


class _BlockContent(NamedTuple):
    """What is known of one full block."""

    block_hash: BlockHash
    parent_hash: BlockHash | None
    token_ids: tuple[int, ...]
    adapter: str | None
    cache_salt: str | None


class HostTier:
    """Evicted blocks, the least recently used first; holds nothing when it has no room at all."""

    def __init__(self, total_blocks: int) -> None:
        self._total_blocks = total_blocks
        self._gpu_blocks: dict[BlockHash, _BlockContent] = {}
        self._host_blocks: OrderedDict[BlockHash, _BlockContent] = OrderedDict()

    def record_gpu_blocks(self, stored: BlocksStored) -> None:
        """Note what blocks hold that have come into the KV cache."""
        if not self._total_blocks:
            return
        size, parent_hash = stored.block_size_tokens, stored.parent_hash
        for index, block_hash in enumerate(stored.block_hashes):
            tokens = stored.token_ids[index * size : (index + 1) * size]
            content = _BlockContent(
                block_hash, parent_hash, tokens, stored.adapter, stored.cache_salt
            )
            self._gpu_blocks[block_hash] = content
            parent_hash = block_hash

    def store_evicted(self, evicted: Sequence[BlockHash]) -> Iterator[KvEvent]:
        """Keep what the KV cache has evicted, tails first; yields what has changed here."""
        if not self._total_blocks:
            return
        contents = [self._gpu_blocks.pop(block_hash) for block_hash in evicted]
        new_contents = [
            content for content in contents if content.block_hash not in self._host_blocks
        ]
        for content in contents:
            self._host_blocks[content.block_hash] = content
            self._host_blocks.move_to_end(content.block_hash)
        yield from _stored_events(new_contents[::-1])
        excess_blocks = max(0, len(self._host_blocks) - self._total_blocks)
        if dropped := tuple(self._host_blocks.popitem(last=False)[0] for _ in range(excess_blocks)):
            yield BlocksRemoved(block_hashes=dropped, tier=HOST)

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading ones of these blocks are here."""
        for index, block_hash in enumerate(hashes):
            if block_hash not in self._host_blocks:
                return index
        return len(hashes)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Note that these blocks, in prompt order, are loaded."""
        for block_hash in reversed(hashes):
            self._host_blocks.move_to_end(block_hash)

    def clear(self) -> None:
        """Forget everything."""
        self._gpu_blocks.clear()
        self._host_blocks.clear()

    def block_hashes(self) -> frozenset[BlockHash]:
        """Everything that is here."""
        return frozenset(self._host_blocks)


def _stored_events(contents: Iterable[_BlockContent]) -> Iterator[BlocksStored]:
    """One event for each run of blocks that follow each other."""
    chain: list[_BlockContent] = []
    for content in contents:
        if chain and content.parent_hash != chain[-1].block_hash:
            yield _stored_event(chain)
            chain = []
        chain.append(content)
    if chain:
        yield _stored_event(chain)


def _stored_event(chain: Sequence[_BlockContent]) -> BlocksStored:
    return BlocksStored(
        block_hashes=tuple(content.block_hash for content in chain),
        parent_hash=chain[0].parent_hash,
        token_ids=tuple(token for content in chain for token in content.token_ids),
        block_size_tokens=len(chain[0].token_ids),
        tier=HOST,
        adapter=chain[0].adapter,
        cache_salt=chain[0].cache_salt,
    )
