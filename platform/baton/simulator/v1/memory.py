"""The KV memory of a counted engine: which run has how many blocks, and leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from baton.control.request.leases import renewed_until_s
from baton.control.state.deadlines import Deadlines
from baton.domain.handoff import Leg
from baton.domain.hashed_prompt import Outline, TokenIds
from baton.policy.prefix_cache.block_hash import chain, chain_root
from baton.simulator.engine.blocks import expect
from baton.simulator.engine.commands import SimTicket
from baton.simulator.v1.blocks import CountedBlocks
from baton.simulator.v1.runs import Run, RunState
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
        self.blocks = CountedBlocks(settings.kv_blocks)
        self._size = settings.block_size_tokens
        self._caching = settings.prefix_caching
        self._lease_s = settings.lease_s
        self._model = model
        self._roots: dict[tuple[str | None, str | None], int] = {}
        self._leases: dict[str, _Lease] = {}
        self._expiries = Deadlines()

    def blocks_for(self, tokens: int) -> int:
        """How many blocks this many tokens need."""
        return -(-tokens // self._size)

    def last_hash(self, run: Run, tokens: int) -> bytes:
        """What stands for the full blocks of a run's first tokens, its salt and its adapter.

        Empty where no prefixes are cached: hashing them would be all their cost.
        """
        if not self._caching:
            return b""
        self._hash(run, run.tokens // self._size)
        full = tokens // self._size
        return b"%d" % (run.hashes[full - 1] if full else self._root(run.leg))

    def same_prompt(self, run: Run, ticket: SimTicket) -> bool:
        """Whether a ticket is for the beginning of a run's prompt, as far as both sides can say."""
        own = self.last_hash(run, ticket.tokens)
        return not own or not ticket.prompt_digest or own == ticket.prompt_digest

    # ------------------------------------------------------------------ a run's blocks
    def lookup(self, run: Run) -> tuple[int, int]:
        """How many leading blocks of a run are cached, and how many of those are idle.

        The last token is always computed: its logits are needed.
        """
        if not self._caching:
            return 0, 0
        usable = (run.tokens - 1) // self._size
        self._hash(run, run.tokens // self._size)
        return self.blocks.cached(run.hashes, usable)

    def place(self, run: Run, cached: int, tokens: int) -> None:
        """Give a run its cached blocks and new ones for the rest of its first `tokens` tokens."""
        if cached:
            self.blocks.share(run.hashes[:cached])
        run.held = cached
        run.computed = cached * self._size
        if run.cached_tokens < 0:  # not when it is placed again
            run.own_tokens = run.computed
        self.extend(run, tokens)

    def grow(self, run: Run, tokens: int) -> bool:
        """Let a run have blocks for so many tokens; False, and nothing, without room."""
        if self.blocks_for(tokens) - run.blocks > self.blocks.available:
            return False
        self.extend(run, tokens)
        return True

    def extend(self, run: Run, tokens: int) -> None:
        """Let a run have blocks for so many tokens; there is room."""
        more = self.blocks_for(tokens) - run.held - run.private
        if more > 0:
            self.blocks.take(more)
            run.private += more

    def publish(self, run: Run, tokens: int) -> None:
        """Put a run's full blocks of its first `tokens` tokens into the prefix cache.

        Only as far as they are hashed: see the class.
        """
        full = min(tokens // self._size, len(run.hashes))
        if full > run.held:
            self.blocks.publish(run.hashes[run.held : full])
            run.private -= full - run.held
            run.held = full

    def drop(self, run: Run) -> None:
        """Take a run's blocks back; the full ones stay cached until someone needs the room."""
        if self._caching and run.computed >= (run.held + 1) * self._size:
            self._hash(run, run.computed // self._size)
            self.publish(run, run.computed)
        self.blocks.give_back(run.hashes[: run.held], run.private)
        run.held = run.private = run.computed = 0

    # ------------------------------------------------------------------ leases
    def lease(self, run: Run, now_s: float) -> None:
        """Keep a run's blocks for whoever pulls them."""
        kept = run.hashes[: run.held]
        self._leases[run.leg_id] = _Lease(kept, run.private)
        self._expiries.arm(run.leg_id, now_s + self._lease_s)
        run.held = run.private = run.computed = 0

    def renew(self, leg_id: str, now_s: float) -> None:
        """Keep a leg's blocks for longer, where they are still kept."""
        if leg_id in self._leases:
            self._expiries.postpone(leg_id, renewed_until_s(now_s, self._lease_s))

    def is_leased(self, leg_id: str) -> bool:
        """Whether this finished prefill leg's blocks are still kept."""
        return leg_id in self._leases

    def release(self, leg_id: str) -> None:
        """End a lease."""
        self._expiries.disarm(leg_id)
        lease = self._leases.pop(leg_id)
        self.blocks.give_back(lease.hashes, lease.private)

    def expire(self, now_s: float) -> int:
        """End the leases whose time is up and count them."""
        expired = tuple(self._expiries.take_due(now_s))
        for leg_id in expired:
            self.release(leg_id)
        return len(expired)

    def next_expiry_s(self) -> float | None:
        """When to look for a lease that ends: perhaps early, never late; None without leases."""
        return self._expiries.next_at_s()

    def check_integrity(self, runs: Iterable[Run]) -> None:
        """Assert that every block is used by exactly those who think so."""
        runs = tuple(runs)
        known = self._leases.keys() & {run.leg_id for run in runs}
        expect(not known, f"legs both run and are leased: {sorted(known)}")
        expect(len(self._expiries) == len(self._leases), "a lease without an end, or the reverse")
        chains = [run.hashes[: run.held] for run in runs]
        chains += [lease.hashes for lease in self._leases.values()]
        counted = Counter(one for hashes in chains for one in hashes)
        users, idle = self.blocks.users(), self.blocks.idle()
        expect(users == counted, f"users are {users}, counted {dict(counted)}")
        expect(len(idle) + len(users) == self.blocks.cached_blocks, "a block is lost")
        private = sum(run.private for run in runs)
        private += sum(lease.private for lease in self._leases.values())
        empty, total = self.blocks.empty, self.blocks.total
        found = (empty, private, len(users), self.blocks.available - empty)
        expect(len(idle) == found[-1], f"{len(idle)} are idle, counted {found[-1]}")
        expect(min(found) >= 0, f"less than no blocks: {found}")
        expect(sum(found) == total, f"empty, private, shared, idle: {found}, not {total} blocks")
        without = (RunState.HELD, RunState.WAITING, RunState.ENDED)
        expect(not any(run.blocks for run in runs if run.state in without), "it should have none")

    def _hash(self, run: Run, blocks: int) -> None:
        """Hash a run's leading blocks: each over its tokens and the hash before it."""
        hashes = run.hashes
        if len(hashes) >= blocks:
            return
        previous = hashes[-1] if hashes else self._root(run.leg)
        hashes.extend(_chain(run, previous, self._size, first_block=len(hashes), stop=blocks))

    def _root(self, leg: Leg) -> int:
        key = leg.adapter, leg.cache_salt
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = chain_root(
                model=self._model,
                block_size_tokens=self._size,
                adapter=leg.adapter,
                salt=leg.cache_salt,
            )
        return root


def _chain(run: Run, previous: int, size: int, *, first_block: int, stop: int) -> list[int]:
    prompt: TokenIds = run.prompt
    beyond = stop * size - len(prompt)
    if isinstance(prompt, Outline):
        known = prompt.extended(beyond) if beyond > 0 else prompt
        return known.chain(previous, size, first_block=first_block)
    tokens = (*prompt, *(0,) * max(0, beyond))  # all generated tokens are 0
    return chain(previous, tokens[first_block * size : stop * size], size)
