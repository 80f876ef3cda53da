"""The KV memory of a counted engine: each run's number of blocks, and leases."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from baton.control.state.deadlines import Deadlines
from baton.domain.cache import CacheChange, CacheChangeKind, CacheUpdate, pack_hashes
from baton.domain.handoff import Leg, renewed_expiry_s
from baton.domain.hashed_prompt import HashedPrompt, TokenIds
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root
from baton.simulator.engine.blocks import expect
from baton.simulator.engine.commands import SimKvHandle
from baton.simulator.v1.runs import LegRun, LegRunState
from baton.simulator.v1.settings import V1Settings


class _Lease(NamedTuple):
    hashes: list[int]
    private: int


class V1Memory:
    """Blocks for runs, and for finished prefills until they are pulled.

    As in vLLM, prompt blocks enter the prefix cache when a step is about to compute them. Generated
    blocks enter it when the run frees its memory: no request can contain them before a client has
    them.
    """

    def __init__(self, settings: V1Settings, model: str) -> None:
        self.blocks = V1BlockPool(settings.kv_blocks)
        self._block_size_tokens = settings.block_size_tokens
        self._request_blocks = settings.request_blocks
        self._prefix_caching = settings.prefix_caching
        self._lease_s = settings.lease_s
        self._model = model
        self._chain_roots: dict[tuple[str | None, str | None], int] = {}
        self._leases: dict[str, _Lease] = {}
        self._expiries = Deadlines()

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks for a request with this number of tokens, its states included."""
        return -(-tokens // self._block_size_tokens) + self._request_blocks

    def prefix_digest(self, run: LegRun, tokens: int) -> bytes:
        """Digest of the full blocks of a run's first tokens, its salt and its adapter.

        Empty without prefix caching, where hashing would be the only cost.
        """
        if not self._prefix_caching:
            return b""
        self._extend_hashes(run, run.known_tokens // self._block_size_tokens)
        full_blocks = tokens // self._block_size_tokens
        return b"%d" % (run.hashes[full_blocks - 1] if full_blocks else self._chain_root(run.leg))

    def is_same_prompt(self, run: LegRun, kv_handle: SimKvHandle) -> bool:
        """Whether a KV handle is for the beginning of a run's prompt, as far as digests tell."""
        own_digest = self.prefix_digest(run, kv_handle.tokens)
        return (
            not own_digest or not kv_handle.prompt_digest or own_digest == kv_handle.prompt_digest
        )

    # ------------------------------------------------------------------ a run's blocks
    def lookup(self, run: LegRun) -> tuple[int, int]:
        """Leading cached blocks of a run, and how many of them are idle.

        The last token is always computed: sampling needs its logits.
        """
        if not self._prefix_caching:
            return 0, 0
        max_hit_blocks = (run.known_tokens - 1) // self._block_size_tokens
        self._extend_hashes(run, run.known_tokens // self._block_size_tokens)
        return self.blocks.count_cached(run.hashes, max_hit_blocks)

    def allocate(self, run: LegRun, cached: int, tokens: int) -> None:
        """Give a run its cached blocks and new blocks for the rest of its first `tokens` tokens."""
        if cached:
            self.blocks.touch(run.hashes[:cached])
        run.shared_blocks = cached
        run.computed_tokens = cached * self._block_size_tokens
        if run.cached_tokens < 0:  # not when it is placed again
            run.local_hit_tokens = run.computed_tokens
        self.extend(run, tokens)

    def try_extend(self, run: LegRun, tokens: int) -> bool:
        """Extend a run's blocks to `tokens` tokens; False, without a change, if room is missing."""
        if self.blocks_for(tokens) - run.blocks > self.blocks.available:
            return False
        self.extend(run, tokens)
        return True

    def extend(self, run: LegRun, tokens: int) -> None:
        """Extend a run's blocks to `tokens` tokens; the caller has checked the room."""
        new_blocks = self.blocks_for(tokens) - run.shared_blocks - run.private_blocks
        if new_blocks > 0:
            self.blocks.allocate(new_blocks)
            run.private_blocks += new_blocks

    def cache_full_blocks(self, run: LegRun, tokens: int) -> None:
        """Put a run's full blocks of its first `tokens` tokens into the prefix cache.

        Only hashed blocks: see the class.
        """
        full_blocks = min(tokens // self._block_size_tokens, len(run.hashes))
        if full_blocks > run.shared_blocks:
            self.blocks.cache_full_blocks(run.hashes[run.shared_blocks : full_blocks])
            run.private_blocks -= full_blocks - run.shared_blocks
            run.shared_blocks = full_blocks

    def free(self, run: LegRun) -> None:
        """Free a run's blocks; full blocks stay cached until they are evicted."""
        if (
            self._prefix_caching
            and run.computed_tokens >= (run.shared_blocks + 1) * self._block_size_tokens
        ):
            self._extend_hashes(run, run.computed_tokens // self._block_size_tokens)
            self.cache_full_blocks(run, run.computed_tokens)
        self.blocks.free(run.hashes[: run.shared_blocks], run.private_blocks)
        run.shared_blocks = run.private_blocks = run.computed_tokens = 0

    # ------------------------------------------------------------------ leases
    def lease(self, run: LegRun, now_s: float) -> None:
        """Turn a run's blocks into a lease, for the engine that pulls them."""
        leased_hashes = run.hashes[: run.shared_blocks]
        self._leases[run.leg_id] = _Lease(leased_hashes, run.private_blocks)
        self._expiries.arm(run.leg_id, now_s + self._lease_s)
        run.shared_blocks = run.private_blocks = run.computed_tokens = 0

    def renew(self, leg_id: str, now_s: float) -> None:
        """Extend a leg's lease, if it has not ended."""
        if leg_id in self._leases:
            self._expiries.postpone(leg_id, renewed_expiry_s(now_s, self._lease_s))

    def is_leased(self, leg_id: str) -> bool:
        """Whether this finished prefill leg's blocks are still leased."""
        return leg_id in self._leases

    def release(self, leg_id: str) -> None:
        """End a lease."""
        self._expiries.disarm(leg_id)
        lease = self._leases.pop(leg_id)
        self.blocks.free(lease.hashes, lease.private)

    def expire(self, now_s: float) -> int:
        """End the leases that are due; returns their number."""
        expired = tuple(self._expiries.pop_due(now_s))
        for leg_id in expired:
            self.release(leg_id)
        return len(expired)

    def next_expiry_s(self) -> float | None:
        """When to check for expired leases: maybe early, never late; None without leases."""
        return self._expiries.next_at_s()

    def check_integrity(self, runs: Iterable[LegRun]) -> None:
        """Assert that every block's users are the runs and leases that list it."""
        runs = tuple(runs)
        running_and_leased = self._leases.keys() & {run.leg_id for run in runs}
        expect(
            not running_and_leased, f"legs both run and are leased: {sorted(running_and_leased)}"
        )
        expect(len(self._expiries) == len(self._leases), "a lease without an end, or the reverse")
        chains = [run.hashes[: run.shared_blocks] for run in runs]
        chains += [lease.hashes for lease in self._leases.values()]
        expected_users = Counter(hash_ for hashes in chains for hash_ in hashes)
        users, idle = self.blocks.users(), self.blocks.idle_blocks()
        expect(users == expected_users, f"users are {users}, counted {dict(expected_users)}")
        expect(len(idle) + len(users) == self.blocks.cached_blocks, "a block is lost")
        private = sum(run.private_blocks for run in runs)
        private += sum(lease.private for lease in self._leases.values())
        empty, total = self.blocks.empty, self.blocks.total
        counts = (empty, private, len(users), self.blocks.available - empty)
        expect(len(idle) == counts[-1], f"{len(idle)} are idle, counted {counts[-1]}")
        expect(min(counts) >= 0, f"less than no blocks: {counts}")
        expect(sum(counts) == total, f"empty, private, shared, idle: {counts}, not {total} blocks")
        states_without_blocks = (LegRunState.PULL_QUEUED, LegRunState.WAITING, LegRunState.ENDED)
        expect(
            not any(run.blocks for run in runs if run.state in states_without_blocks),
            "it should have none",
        )

    def _extend_hashes(self, run: LegRun, blocks: int) -> None:
        """Hash a run's leading blocks: each over its tokens and the previous hash."""
        hashes = run.hashes
        if len(hashes) >= blocks:
            return
        previous = hashes[-1] if hashes else self._chain_root(run.leg)
        hashes.extend(
            _chain(run, previous, self._block_size_tokens, first_block=len(hashes), stop=blocks)
        )

    def _chain_root(self, leg: Leg) -> int:
        key = leg.adapter, leg.cache_salt
        root = self._chain_roots.get(key)
        if root is None:
            root = self._chain_roots[key] = chain_root(
                model=self._model,
                block_size_tokens=self._block_size_tokens,
                adapter=leg.adapter,
                salt=leg.cache_salt,
            )
        return root


def _chain(
    run: LegRun, previous: int, block_size_tokens: int, *, first_block: int, stop: int
) -> list[int]:
    prompt: TokenIds = run.prompt
    generated_tokens = stop * block_size_tokens - len(prompt)
    if isinstance(prompt, HashedPrompt):
        known_outline = prompt.extended(generated_tokens) if generated_tokens > 0 else prompt
        return known_outline.chain_hashes(previous, block_size_tokens, first_block=first_block)
    tokens = (*prompt, *(0,) * max(0, generated_tokens))  # all generated tokens are 0
    return chain_hashes(
        previous,
        tokens[first_block * block_size_tokens : stop * block_size_tokens],
        block_size_tokens,
    )


class V1BlockPool:
    """Blocks by count, the prefix cache by hashes, and unreported changes of it.

    Theory of operation: a block is in one of four states.

    - *empty*
    - *private*: used by one run and not in the prefix cache
    - *shared*: in the prefix cache and used by at least one run
    - *idle*: in the prefix cache and used by no run

    empty + private + shared + idle = total. Cached blocks are known by their chained hashes, the
    others only counted. As in vLLM's free queue, allocation takes empty blocks first, then evicts
    the idle block that was freed longest ago. Runs free their blocks tail first, and a block is
    shared only behind shared blocks. So the cached blocks of a chain are a prefix of it, and its
    shared blocks a prefix of those: bisection finds hits.

    The entry of a cached block is the number of its users. For an idle block it is minus the number
    of the `free` that made it idle. Each `free` queues its blocks as a whole; a block that has been
    used since has another entry and is skipped. Unlike in vLLM, equal blocks are merged at once:
    vLLM keeps the copy until its run ends.
    """

    __slots__ = (
        "_cached",
        "_changes",
        "_eviction_queue",
        "_idle",
        "_return_count",
        "_returned_blocks",
        "empty",
        "sequence",
        "total",
    )

    def __init__(self, total: int) -> None:
        self.total = total
        self.empty = total
        self.sequence = 0
        """The number of the last popped update."""
        self._cached: dict[int, int] = {}
        """Users of each cached block, or minus the number of its return."""
        self._idle = 0
        self._return_count = 0
        self._eviction_queue: deque[tuple[int, list[int]]] = deque()
        """Returns that may still have idle blocks: minus the number, and the blocks, next eviction
        last."""
        self._returned_blocks = 0
        """Blocks in those returns, idle or not."""
        self._changes: dict[int, bool] = {}
        """Blocks that became cached (True) or were evicted since the last update."""

    @property
    def available(self) -> int:
        """Number of blocks that `allocate` could take."""
        return self.empty + self._idle

    @property
    def used(self) -> int:
        """Private and shared blocks."""
        return self.total - self.empty - self._idle

    @property
    def cached_blocks(self) -> int:
        """Shared and idle blocks."""
        return len(self._cached)

    # ------------------------------------------------------------------ the prefix cache
    def count_cached(self, hashes: Sequence[int], limit: int) -> tuple[int, int]:
        """Leading cached blocks of a chain, at most `limit`, and how many of them are idle."""
        users_of = self._cached.get
        cached = _count_leading(limit, lambda index: hashes[index] in self._cached)
        shared = _count_leading(cached, lambda index: users_of(hashes[index], 0) > 0)
        return cached, cached - shared

    def touch(self, hashes: Sequence[int]) -> None:
        """Add a user to each of these cached blocks, which are the beginning of a chain."""
        cached = self._cached
        for hash_ in hashes:
            users = cached[hash_]
            if users > 0:
                cached[hash_] = users + 1
            else:
                cached[hash_] = 1
                self._idle -= 1

    def cache_full_blocks(self, hashes: Sequence[int]) -> None:
        """Put full private blocks, the next of their chain, into the prefix cache."""
        if not self._cached.keys().isdisjoint(hashes):
            copies = [hash_ for hash_ in hashes if hash_ in self._cached]
            hashes = [hash_ for hash_ in hashes if hash_ not in self._cached]
            self.touch(copies)
            self.empty += len(copies)
        self._cached.update(dict.fromkeys(hashes, 1))
        self._record_change(hashes, stored=True)

    # ------------------------------------------------------------------ in and out of use
    def allocate(self, blocks: int) -> None:
        """Make this number of blocks private; as many must be `available`."""
        evicted = blocks - self.empty
        if evicted <= 0:
            self.empty -= blocks
            return
        self.empty = 0
        self._evict(evicted)

    def free(self, hashes: Sequence[int], private: int) -> None:
        """End one run's use of a chain's shared blocks and of its private blocks."""
        self.empty += private
        if not hashes:
            return
        cached = self._cached
        first_unshared = _count_leading(len(hashes), lambda index: cached[hashes[index]] > 1)
        for hash_ in hashes[:first_unshared]:
            cached[hash_] -= 1
        unshared = list(hashes[first_unshared:])
        if unshared:
            self._return_count += 1
            cached.update(dict.fromkeys(unshared, -self._return_count))
            self._eviction_queue.append((-self._return_count, unshared))
            self._idle += len(unshared)
            self._returned_blocks += len(unshared)
            if self._returned_blocks > 2 * self.total:
                self._compact_eviction_queue()

    def _evict(self, blocks: int) -> None:
        cached, evicted = self._cached, []
        self._idle -= blocks
        while blocks:
            number, returned = self._eviction_queue[0]
            while blocks and returned:
                hash_ = returned.pop()
                self._returned_blocks -= 1
                if cached.get(hash_) == number:
                    del cached[hash_]
                    evicted.append(hash_)
                    blocks -= 1
            if not returned:
                self._eviction_queue.popleft()
        self._record_change(evicted, stored=False)

    def _compact_eviction_queue(self) -> None:
        """Keep only idle blocks in the queue: amortised O(1), since at least half of it goes."""
        entry_of = self._cached.get
        live_returns = (
            (number, [value for value in returned if entry_of(value) == number])
            for number, returned in self._eviction_queue
        )
        self._eviction_queue = deque(returned for returned in live_returns if returned[1])
        self._returned_blocks = self._idle

    # ------------------------------------------------------------------ reports
    @property
    def has_update(self) -> bool:
        """Whether `pop_update` would return an update."""
        return bool(self._changes)

    def pop_update(self) -> CacheUpdate | None:
        """Changes since the last call; None without any."""
        if not self._changes:
            return None
        removed = [value for value, stored in self._changes.items() if not stored]
        stored = [value for value, stored in self._changes.items() if stored]
        self._changes = {}
        self.sequence += 1
        changes = []
        if removed:
            changes.append(CacheChange(CacheChangeKind.REMOVED, pack_hashes(removed)))
        if stored:
            changes.append(CacheChange(CacheChangeKind.STORED, pack_hashes(stored)))
        return CacheUpdate(self.sequence, tuple(changes))

    def snapshot(self) -> CacheUpdate:
        """All cached blocks, parents before children."""
        cached_hashes = pack_hashes(self._cached)
        changes = (CacheChange(CacheChangeKind.STORED, cached_hashes),) if cached_hashes else ()
        return CacheUpdate(self.sequence, changes, is_snapshot=True)

    def users(self) -> dict[int, int]:
        """Number of runs that use each shared block."""
        return {value: users for value, users in self._cached.items() if users > 0}

    def idle_blocks(self) -> list[int]:
        """Idle blocks in the order of their eviction."""
        return [
            value
            for number, returned in self._eviction_queue
            for value in reversed(returned)
            if self._cached.get(value) == number
        ]

    def _record_change(self, hashes: Sequence[int], *, stored: bool) -> None:
        changes = self._changes
        if changes.keys().isdisjoint(hashes):
            changes.update(dict.fromkeys(hashes, stored))
            return
        for hash_ in hashes:  # a change and its reverse cancel
            if hash_ in changes:
                del changes[hash_]
            else:
                changes[hash_] = stored


def _count_leading(limit: int, predicate: Callable[[int], bool]) -> int:
    """The first index below `limit` at which `predicate` is false, by bisection."""
    low, high = 0, limit
    while low < high:
        middle = (low + high) // 2
        if predicate(middle):
            low = middle + 1
        else:
            high = middle
    return low
