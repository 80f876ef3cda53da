"""The KV memory of a counted engine: which run has how many blocks, and leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from baton.control.request.transfers import renewed_expiry_s
from baton.control.state.deadlines import Deadlines
from baton.domain.handoff import Leg
from baton.domain.hashed_prompt import HashedPrompt, TokenIds
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root
from baton.simulator.engine.blocks import expect
from baton.simulator.engine.commands import SimKvHandle
from baton.simulator.v1.blocks import V1BlockPool
from baton.simulator.v1.runs import LegRun, LegRunState
from baton.simulator.v1.settings import V1Settings


class _Lease(NamedTuple):
    hashes: list[int]
    private: int


class V1Memory:
    """Blocks for runs, and for finished prefills until somebody has pulled them.

    Prompt blocks enter the prefix cache as soon as a step is to compute them, as in vLLM; generated
    ones when the run leaves its memory, for nobody can ask for them before its client has them.
    """

    def __init__(self, settings: V1Settings, model: str) -> None:
        self.blocks = V1BlockPool(settings.kv_blocks)
        self._block_size_tokens = settings.block_size_tokens
        self._prefix_caching = settings.prefix_caching
        self._lease_s = settings.lease_s
        self._model = model
        self._chain_roots: dict[tuple[str | None, str | None], int] = {}
        self._leases: dict[str, _Lease] = {}
        self._expiries = Deadlines()

    def blocks_for(self, tokens: int) -> int:
        """How many blocks this many tokens need."""
        return -(-tokens // self._block_size_tokens)

    def prefix_digest(self, run: LegRun, tokens: int) -> bytes:
        """What stands for the full blocks of a run's first tokens, its salt and its adapter.

        Empty where no prefixes are cached: hashing them would be all their cost.
        """
        if not self._prefix_caching:
            return b""
        self._extend_hashes(run, run.known_tokens // self._block_size_tokens)
        full_blocks = tokens // self._block_size_tokens
        return b"%d" % (run.hashes[full_blocks - 1] if full_blocks else self._chain_root(run.leg))

    def is_same_prompt(self, run: LegRun, kv_handle: SimKvHandle) -> bool:
        """Whether a ticket is for the beginning of a run's prompt, as far as both sides can say."""
        own_digest = self.prefix_digest(run, kv_handle.tokens)
        return (
            not own_digest or not kv_handle.prompt_digest or own_digest == kv_handle.prompt_digest
        )

    # ------------------------------------------------------------------ a run's blocks
    def lookup(self, run: LegRun) -> tuple[int, int]:
        """How many leading blocks of a run are cached, and how many of those are idle.

        The last token is always computed: its logits are needed.
        """
        if not self._prefix_caching:
            return 0, 0
        max_hit_blocks = (run.known_tokens - 1) // self._block_size_tokens
        self._extend_hashes(run, run.known_tokens // self._block_size_tokens)
        return self.blocks.count_cached(run.hashes, max_hit_blocks)

    def allocate(self, run: LegRun, cached: int, tokens: int) -> None:
        """Give a run its cached blocks and new ones for the rest of its first `tokens` tokens."""
        if cached:
            self.blocks.touch(run.hashes[:cached])
        run.shared_blocks = cached
        run.computed_tokens = cached * self._block_size_tokens
        if run.cached_tokens < 0:  # not when it is placed again
            run.local_hit_tokens = run.computed_tokens
        self.extend(run, tokens)

    def try_extend(self, run: LegRun, tokens: int) -> bool:
        """Let a run have blocks for so many tokens; False, and nothing, without room."""
        if self.blocks_for(tokens) - run.blocks > self.blocks.available:
            return False
        self.extend(run, tokens)
        return True

    def extend(self, run: LegRun, tokens: int) -> None:
        """Let a run have blocks for so many tokens; there is room."""
        new_blocks = self.blocks_for(tokens) - run.shared_blocks - run.private_blocks
        if new_blocks > 0:
            self.blocks.allocate(new_blocks)
            run.private_blocks += new_blocks

    def cache_full_blocks(self, run: LegRun, tokens: int) -> None:
        """Put a run's full blocks of its first `tokens` tokens into the prefix cache.

        Only as far as they are hashed: see the class.
        """
        full_blocks = min(tokens // self._block_size_tokens, len(run.hashes))
        if full_blocks > run.shared_blocks:
            self.blocks.cache_full_blocks(run.hashes[run.shared_blocks : full_blocks])
            run.private_blocks -= full_blocks - run.shared_blocks
            run.shared_blocks = full_blocks

    def free(self, run: LegRun) -> None:
        """Take a run's blocks back; the full ones stay cached until someone needs the room."""
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
        """Keep a run's blocks for whoever pulls them."""
        leased_hashes = run.hashes[: run.shared_blocks]
        self._leases[run.leg_id] = _Lease(leased_hashes, run.private_blocks)
        self._expiries.arm(run.leg_id, now_s + self._lease_s)
        run.shared_blocks = run.private_blocks = run.computed_tokens = 0

    def renew(self, leg_id: str, now_s: float) -> None:
        """Keep a leg's blocks for longer, where they are still kept."""
        if leg_id in self._leases:
            self._expiries.postpone(leg_id, renewed_expiry_s(now_s, self._lease_s))

    def is_leased(self, leg_id: str) -> bool:
        """Whether this finished prefill leg's blocks are still kept."""
        return leg_id in self._leases

    def release(self, leg_id: str) -> None:
        """End a lease."""
        self._expiries.disarm(leg_id)
        lease = self._leases.pop(leg_id)
        self.blocks.free(lease.hashes, lease.private)

    def expire(self, now_s: float) -> int:
        """End the leases whose time is up and count them."""
        expired = tuple(self._expiries.pop_due(now_s))
        for leg_id in expired:
            self.release(leg_id)
        return len(expired)

    def next_expiry_s(self) -> float | None:
        """When to look for a lease that ends: perhaps early, never late; None without leases."""
        return self._expiries.next_at_s()

    def check_integrity(self, runs: Iterable[LegRun]) -> None:
        """Assert that every block is used by exactly those who think so."""
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
        """Hash a run's leading blocks: each over its tokens and the hash before it."""
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
