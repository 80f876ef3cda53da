"""The KV memory of a simulated engine: owners of blocks, prefix cache, leases, host tier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from baton.control.state.deadlines import Deadlines
from baton.domain.handoff import Leg, renewed_expiry_s
from baton.domain.kv_events import BlockHash, BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from baton.simulator.engine.blocks import BlockPool, expect
from baton.simulator.engine.runs import LegRun
from baton.simulator.engine.settings import SimSettings
from baton.simulator.engine.tokens import digest, pack_tokens

_GPU = "gpu"
_HOST = "cpu"


class _BlockContent(NamedTuple):
    block_hash: BlockHash
    parent_hash: BlockHash | None
    token_ids: tuple[int, ...]
    adapter: str | None
    cache_salt: str | None


class KvMemory:
    """Blocks for runs, a prefix cache chained by block hashes, and leases of finished prefills.

    The chains start from layout, adapter and salt: no two models, block sizes, adapters or tenants
    share a hash. Evicted blocks go to the host tier, if it has room.
    """

    def __init__(self, settings: SimSettings, layout: str) -> None:
        self._block_size_tokens = settings.block_size_tokens
        self._lease_s = settings.lease_s
        self._layout = layout
        self._pool = BlockPool(settings.kv_blocks)
        self._host = HostTier(settings.host_blocks)
        self._leases: dict[str, tuple[int, ...]] = {}
        self._expiries = Deadlines()
        self._events: list[KvEvent] = []

    @property
    def used_fraction(self) -> float:
        """The fraction of blocks with an owner; cached blocks without one are available."""
        return self._pool.used_blocks / self._pool.total_blocks

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks for this number of tokens."""
        return -(-tokens // self._block_size_tokens)

    def root_hash(self, leg: Leg) -> BlockHash:
        """Start of the chains of one adapter and salt."""
        adapter = b"" if leg.adapter is None else b"\1" + leg.adapter.encode()
        return digest(self._layout.encode() + adapter + salt_bytes(leg.cache_salt))

    # ------------------------------------------------------------------ a run's blocks
    def try_allocate(self, run: LegRun) -> bool:
        """Give a run all blocks that its tokens need; False, without a change, if room is missing.

        Cached leading blocks are reused and count as computed; blocks that follow in the host tier
        are to be loaded. The last token is always computed: sampling needs its logits.
        """
        self._extend_hashes(run)
        max_hit_blocks = (len(run.tokens) - 1) // self._block_size_tokens
        cached_blocks = self._pool.match(run.hashes[:max_hit_blocks])
        blocks = self._pool.try_allocate(
            cached_blocks, self.blocks_for(len(run.tokens)) - len(cached_blocks)
        )
        if blocks is None:
            return False
        run.blocks = blocks
        run.cached_blocks = len(cached_blocks)
        run.computed_tokens = len(cached_blocks) * self._block_size_tokens
        if run.cached_tokens is None:  # not when it is placed again
            run.local_hit_tokens = run.computed_tokens
        run.host_blocks = self._host.match(run.hashes[len(cached_blocks) : max_hit_blocks])
        return True

    def touch_host_blocks(self, run: LegRun) -> None:
        """Note that a run's blocks in the host tier are being loaded."""
        first = run.cached_blocks
        self._host.touch(run.hashes[first : first + run.host_blocks])

    def on_host_blocks_loaded(self, run: LegRun) -> None:
        """Count a run's loaded blocks as computed."""
        run.computed_tokens = (run.cached_blocks + run.host_blocks) * self._block_size_tokens
        run.host_blocks = 0
        self.cache_full_blocks(run)

    def try_extend(self, run: LegRun) -> bool:
        """Give a run a block for its newest token if it needs one; False without room."""
        if self.blocks_for(len(run.tokens)) == len(run.blocks):
            return True
        block = self._pool.try_allocate((), 1)
        if block is None:
            return False
        run.blocks.extend(block)
        return True

    def free(self, run: LegRun) -> None:
        """Free a run's blocks; full blocks stay cached until they are evicted."""
        self._pool.free(run.blocks)
        run.blocks = []
        run.cached_blocks = run.host_blocks = 0

    def cache_full_blocks(self, run: LegRun) -> None:
        """Put the blocks that a run has fully computed into the prefix cache."""
        full_blocks = run.computed_tokens // self._block_size_tokens
        if full_blocks == run.cached_blocks:
            return
        self._extend_hashes(run)
        first_new: int | None = None
        for index in range(run.cached_blocks, full_blocks):
            own_block = run.blocks[index]
            run.blocks[index] = self._pool.cache_full_block(own_block, run.hashes[index])
            if run.blocks[index] == own_block:
                first_new = index if first_new is None else first_new
            elif first_new is not None:
                raise AssertionError(f"block {index} was cached and the block before it was not")
        if first_new is not None:
            self._record_stored(run, first_new, full_blocks)
        run.cached_blocks = full_blocks

    # ------------------------------------------------------------------ leases
    def lease(self, run: LegRun, now_s: float) -> None:
        """Turn a run's blocks into a lease, for the engine that pulls them."""
        self._leases[run.leg.leg_id] = tuple(run.blocks)
        self._expiries.arm(run.leg.leg_id, now_s + self._lease_s)
        run.blocks = []

    def renew(self, leg_id: str, now_s: float) -> None:
        """Extend a leg's lease, if it has not ended."""
        if leg_id in self._leases:
            until_s = renewed_expiry_s(now_s, self._lease_s)
            self._expiries.postpone(leg_id, until_s)

    def is_leased(self, leg_id: str) -> bool:
        """Whether this finished prefill leg's blocks are still leased."""
        return leg_id in self._leases

    def release(self, leg_id: str) -> None:
        """End a lease."""
        self._expiries.disarm(leg_id)
        self._pool.free(self._leases.pop(leg_id))

    def expire(self, now_s: float) -> int:
        """End the leases that are due; returns their number."""
        expired = tuple(self._expiries.pop_due(now_s))
        for leg_id in expired:
            self.release(leg_id)
        return len(expired)

    @property
    def next_expiry_s(self) -> float | None:
        """When to check for expired leases: maybe early, never late; None without leases."""
        return self._expiries.next_at_s()

    # ------------------------------------------------------------------ reports
    def record_evictions(self) -> None:
        """Turn the evictions so far into events; must precede newer stored blocks."""
        if evicted := self._pool.pop_evicted():
            self._events.extend(self._host.store_evicted(evicted))
            self._events.append(BlocksRemoved(block_hashes=evicted, tier=_GPU))

    def reset_cache(self) -> bool:
        """Empty both tiers of the prefix cache; False, without a change, while a block is used."""
        self.record_evictions()
        if not self._pool.reset_cache():
            return False
        self._host.clear()
        self._events.append(BlocksCleared())
        return True

    def pop_events(self) -> tuple[KvEvent, ...]:
        """Changes of the prefix cache since the last call."""
        self.record_evictions()
        events, self._events = tuple(self._events), []
        return events

    def check_integrity(self, runs: Iterable[LegRun]) -> None:
        """Assert that every block's owners are the runs and leases that list it."""
        runs = tuple(runs)
        running_and_leased = self._leases.keys() & {run.leg.leg_id for run in runs}
        expect(
            not running_and_leased, f"legs both run and are leased: {sorted(running_and_leased)}"
        )
        expect(len(self._expiries) == len(self._leases), "a lease without an end, or the reverse")
        self._pool.check_integrity([*(run.blocks for run in runs), *self._leases.values()])

    def _extend_hashes(self, run: LegRun) -> None:
        """Hash the blocks that have become full: each over its tokens and the previous hash."""
        size = self._block_size_tokens
        previous = run.hashes[-1] if run.hashes else self.root_hash(run.leg)
        for start in range(len(run.hashes) * size, len(run.tokens) - size + 1, size):
            previous = digest(previous + pack_tokens(run.tokens[start : start + size]))
            run.hashes.append(previous)

    def _record_stored(self, run: LegRun, first: int, end: int) -> None:
        self.record_evictions()
        size = self._block_size_tokens
        stored = BlocksStored(
            block_hashes=tuple(run.hashes[first:end]),
            parent_hash=run.hashes[first - 1] if first else None,
            token_ids=tuple(run.tokens[first * size : end * size]),
            block_size_tokens=size,
            tier=_GPU,
            adapter=run.leg.adapter,
            cache_salt=run.leg.cache_salt,
        )
        self._host.record_gpu_blocks(stored)
        self._events.append(stored)


def salt_bytes(cache_salt: str | None) -> bytes:
    """A salt as bytes; no salt and an empty salt differ."""
    return b"" if cache_salt is None else b"\0" + cache_salt.encode("utf-8", "surrogatepass")


class HostTier:
    """Evicted blocks, least recently used first; holds nothing when it has no room at all.

    Theory of operation: evicted blocks of the KV cache come here. Without room, the block that was
    stored or used longest ago is dropped. A loaded block stays here too. Prompts are stored and
    used tail first, so a prompt's tail is dropped before its head.
    """

    def __init__(self, total_blocks: int) -> None:
        self._total_blocks = total_blocks
        self._gpu_blocks: dict[BlockHash, _BlockContent] = {}
        self._host_blocks: OrderedDict[BlockHash, _BlockContent] = OrderedDict()

    def record_gpu_blocks(self, stored: BlocksStored) -> None:
        """Note the content of blocks that were stored in the KV cache."""
        if not self._total_blocks:
            return
        size, parent_hash = stored.block_size_tokens, stored.parent_hash
        for index, block_hash in enumerate(stored.block_hashes):
            tokens = stored.token_ids[index * size : (index + 1) * size]
            content = _BlockContent(
                block_hash=block_hash,
                parent_hash=parent_hash,
                token_ids=tokens,
                adapter=stored.adapter,
                cache_salt=stored.cache_salt,
            )
            self._gpu_blocks[block_hash] = content
            parent_hash = block_hash

    def store_evicted(self, evicted: Sequence[BlockHash]) -> Iterator[KvEvent]:
        """Store evicted blocks, tails first; yields the changes of this tier."""
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
            yield BlocksRemoved(block_hashes=dropped, tier=_HOST)

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks of these are here."""
        for index, block_hash in enumerate(hashes):
            if block_hash not in self._host_blocks:
                return index
        return len(hashes)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Mark these blocks, in prompt order, as most recently used."""
        for block_hash in reversed(hashes):
            self._host_blocks.move_to_end(block_hash)

    def clear(self) -> None:
        """Drop all blocks."""
        self._gpu_blocks.clear()
        self._host_blocks.clear()

    def block_hashes(self) -> frozenset[BlockHash]:
        """All blocks that are here."""
        return frozenset(self._host_blocks)


def _stored_events(contents: Iterable[_BlockContent]) -> Iterator[BlocksStored]:
    """One event for each chain of consecutive blocks."""
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
        tier=_HOST,
        adapter=chain[0].adapter,
        cache_salt=chain[0].cache_salt,
    )
