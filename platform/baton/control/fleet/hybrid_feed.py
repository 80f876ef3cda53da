"""The cache feed of an engine whose layers keep their blocks by different rules.

*Theory of operation.* Full attention needs every block of a prefix, a sliding window its last few,
a state (Mamba, linear attention) just the one at its end. vLLM reuses the longest prefix of which
every group of layers holds what it needs. So a reusable prefix says nothing of shorter ones, and
the feed tells of exactly those prefixes that are reusable (`CacheShape`), by the hash of their last
block. Where a group peeks, a draft model computes the block behind the prefix again, and it must be
held; then the prefix goes by the hash of that block, and is shorter than it by `peek_tokens`.

Blocks form a tree, one node for each stretch of `block_size_tokens` and all before it. A node knows
how often each group holds it, and from its parent, how far back the group's blocks reach without a
hole. Events mark nodes; `take` settles these and what hangs on them, from the root downwards.

What is not known counts as not held: blocks whose tokens the engine did not tell, blocks in the
host's memory, and after missing batches all blocks, until the engine shows that it holds them. Full
attention shows it by computing a block behind them.

Names of blocks are the same in all groups. An event that leaves holes names blocks but not where
they are; they count as soon as another group has told that. Bounds: twice the nodes that fit into
the KV cache, beyond that the oldest leaves are forgotten; and as many names without a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final, assert_never

from baton.control.fleet.cache_feed import FeedCounters
from baton.domain.cache import (
    CacheChange,
    CacheChangeKind,
    CacheGroup,
    CacheShape,
    CacheTier,
    CacheUpdate,
    GroupNeeds,
    pack_hashes,
)
from baton.domain.kv_events import (
    BlockHash,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEventBatch,
)
from baton.policy.prefix_cache.block_hash import chain, chain_root

_CAPACITIES: Final = 2
_FORGOTTEN_SHARE: Final = 8


class HybridFeed:
    """One engine's prefix cache, as far as it is known; used like a `CacheFeed`."""

    def __init__(
        self, *, model: str, block_size_tokens: int, capacity_blocks: int, shape: CacheShape
    ) -> None:
        self.counters = FeedCounters()
        self.sequence = 0
        """The number of the last update that was taken."""
        self._model = model
        self._block_size_tokens = block_size_tokens
        self._rules = [_Rule(group, block_size_tokens) for group in shape.groups]
        self._aligned = shape.alignment_tokens // block_size_tokens
        self._peek = shape.peek_tokens // block_size_tokens
        widest = max(rule.width for rule in self._rules)
        self._max_nodes = _CAPACITIES * capacity_blocks * widest
        self._nodes: dict[int, _Node] = {}
        """By hash, parents first."""
        self._named: dict[BlockHash, _Node] = {}
        self._nameless: dict[BlockHash, list[int]] = {}
        """How often each group holds blocks of which it is not known where they are."""
        self._marked: dict[_Node, None] = {}
        self._gone: list[int] = []
        """Hashes that readers know and that have no node any more."""
        self._cleared = False
        self._next_batch: int | None = None

    # ------------------------------------------------------------------ what the engine says

    def apply(self, batch: KvEventBatch) -> None:
        """Take in one batch; one that is not newer than the last is ignored."""
        wanted = self._next_batch
        if wanted is not None and batch.sequence < wanted:
            self.counters.late_batches += 1
            return
        self.counters.batches += 1
        if wanted is not None and batch.sequence > wanted:
            self.counters.gaps += 1
            self.doubt()
        self._next_batch = batch.sequence + 1
        for event in batch.events:
            match event:
                case BlocksStored():
                    if self._is_ours(event):
                        self._on_stored(event)
                case BlocksRemoved():
                    if self._is_ours(event):
                        self._on_removed(event)
                case BlocksCleared():
                    self._clear()
                case _:
                    assert_never(event)

    def doubt(self) -> None:
        """Events are missing: of no block is it known that it is still held."""
        for node in self._nodes.values():
            node.doubted = [a or b for a, b in zip(node.held, node.doubted, strict=True)]
            node.held = [0] * len(self._rules)
            node.reach = [0] * len(self._rules)
            self._cleared = self._cleared or node.told
            node.told = False
        self._nameless.clear()
        self._marked.clear()
        if self._gone:
            self._cleared, self._gone = True, []

    # ------------------------------------------------------------------ what is told

    @property
    def pending_blocks(self) -> int:
        """Blocks that something may have happened to since the last `take`."""
        return len(self._marked) + len(self._gone)

    def take(self) -> CacheUpdate | None:
        """What changed since this was last called; None, and no new number, when nothing did."""
        stored, removed = self._settle()
        changes = []
        if self._cleared:
            changes.append(CacheChange(CacheChangeKind.CLEARED))
        if removed:
            changes.append(CacheChange(CacheChangeKind.REMOVED, pack_hashes(removed)))
        if stored:
            changes.append(CacheChange(CacheChangeKind.STORED, pack_hashes(stored)))
        self._cleared = False
        if not changes:
            return None
        self.sequence += 1
        return CacheUpdate(self.sequence, tuple(changes))

    def snapshot(self, max_blocks: int | None = None) -> CacheUpdate:
        """All prefixes that are reusable, parents before children; cut off after `max_blocks`.

        Call `take` first.
        """
        told = (block for block, node in self._nodes.items() if node.told)
        hashes = pack_hashes(list(islice(told, max_blocks)))
        changes = (CacheChange(CacheChangeKind.STORED, hashes),) if hashes else ()
        return CacheUpdate(self.sequence, changes, snapshot=True)

    # ------------------------------------------------------------------ events

    def _is_ours(self, event: BlocksStored | BlocksRemoved) -> bool:
        if event.tier not in {None, CacheTier.GPU}:
            self.counters.other_tiers += len(event.block_hashes)
        elif event.group >= len(self._rules):
            self.counters.other_groups += len(event.block_hashes)
        else:
            return True
        return False

    def _on_stored(self, event: BlocksStored) -> None:
        blocks = len(event.block_hashes)
        self.counters.stored += blocks
        if event.opaque:
            self.counters.opaque += blocks
            return
        size = self._block_size_tokens
        if event.block_size_tokens and event.block_size_tokens % size == 0:
            self._place(event, event.block_size_tokens // size)
        for name in event.block_hashes:
            node = self._named.get(name)
            if node is None:
                self._hold_nameless(event, name)
            else:
                node.held[event.group] += 1
                self._mark(node)
        self._bound()

    def _place(self, event: BlocksStored, width: int) -> None:
        """Make nodes of the blocks that are told with their tokens, where their parent is known."""
        parent = None
        if event.parent_hash is not None:
            parent = self._named.get(event.parent_hash)
            if parent is None:
                return
            self._trust(parent, event.group)
        previous = self._root(event) if parent is None else parent.block
        for place, block in enumerate(
            chain(previous, event.token_ids, self._block_size_tokens), start=1
        ):
            node = self._nodes.get(block)
            if node is None:
                node = self._nodes[block] = _Node(block, parent, len(self._rules))
            if place % width == 0:
                self._name(node, event.block_hashes[place // width - 1])
            parent = node

    def _root(self, event: BlocksStored) -> int:
        return chain_root(
            model=self._model,
            block_size_tokens=self._block_size_tokens,
            adapter=event.adapter,
            salt=event.cache_salt,
        )

    def _name(self, node: _Node, name: BlockHash) -> None:
        before = self._named.setdefault(name, node)
        if before is not node:  # no sound engine does this: what the name stood for is gone
            self._named[name] = node
            before.names.discard(name)
            before.held = [0] * len(self._rules)
            self._mark(before)
        node.names.add(name)
        nameless = self._nameless.pop(name, None)
        if nameless is not None:
            node.held = [a + b for a, b in zip(node.held, nameless, strict=True)]
            self._mark(node)

    def _hold_nameless(self, event: BlocksStored, name: BlockHash) -> None:
        if name not in self._nameless and len(self._nameless) >= self._max_nodes:
            del self._nameless[next(iter(self._nameless))]
            self.counters.forgotten += 1
        self._nameless.setdefault(name, [0] * len(self._rules))[event.group] += 1
        if event.block_size_tokens % self._block_size_tokens:
            self.counters.other_size += 1
        else:
            self.counters.orphans += 1

    def _trust(self, node: _Node, group: int) -> None:
        """The engine computed a block of full attention behind this one: it holds all before it."""
        if self._rules[group].needs is not GroupNeeds.ALL:
            return
        link: _Node | None = node
        while link is not None and link.doubted[group]:
            link.held[group], link.doubted[group] = max(1, link.held[group]), 0
            self._mark(link)
            link = link.parent

    def _on_removed(self, event: BlocksRemoved) -> None:
        self.counters.removed += len(event.block_hashes)
        group = event.group
        for name in event.block_hashes:
            node = self._named.get(name)
            held = self._nameless.get(name) if node is None else node.held
            if held is None:
                self.counters.unknown_removed += 1
                continue
            held[group] = max(0, held[group] - 1)
            if node is not None:
                node.doubted[group] = 0
                self._mark(node)
            elif not any(held):
                del self._nameless[name]

    def _clear(self) -> None:
        told = any(node.told for node in self._nodes.values())
        self._cleared = self._cleared or told or bool(self._gone)
        for held in (self._nodes, self._named, self._nameless, self._marked, self._gone):
            held.clear()

    # ------------------------------------------------------------------ what is reusable

    def _mark(self, node: _Node) -> None:
        self._marked[node] = None

    def _settle(self) -> tuple[list[int], list[int]]:
        """Prefixes that are reusable now and were not, and the other way round."""
        stored: list[int] = []
        removed = self._gone
        self._gone = []
        waiting = [(node.depth, node.block) for node in self._marked]
        heapify(waiting)
        seen = set()
        empty = []
        while waiting:
            place = heappop(waiting)
            if place in seen:
                continue
            seen.add(place)
            node = self._nodes[place[1]]
            fresh = self._reach(node)
            if fresh != node.reach or node in self._marked:
                levels = max(1, self._peek)
                for below in node.below(levels):
                    heappush(waiting, (below.depth, below.block))
            node.reach = fresh
            reusable = self._is_reusable(node)
            if reusable != node.told:
                (stored if reusable else removed).append(node.block)
                node.told = reusable
            if node.is_empty:
                empty.append(node)
        self._marked.clear()
        for node in reversed(empty):
            self._prune(node)
        return stored, removed

    def _reach(self, node: _Node) -> list[int]:
        before = None if node.parent is None else node.parent.reach
        return [
            rule.reach(node.depth, node.held[group], None if before is None else before[group])
            for group, rule in enumerate(self._rules)
        ]

    def _is_reusable(self, node: _Node) -> bool:
        """Whether the prefix that goes by this node is."""
        depth = node.depth - self._peek
        if depth <= 0 or depth % self._aligned:
            return False
        path = [node, *islice(node.ancestors(), self._peek)]
        end = path[self._peek]
        for group, rule in enumerate(self._rules):
            # Where drafts peek, the group's own next block; the path begins with the last of all.
            at = path[self._peek - rule.width] if rule.peeks else end
            if not rule.is_met(at.depth, at.reach[group], at.held[group]):
                return False
        return True

    # ------------------------------------------------------------------ bounds

    def _prune(self, node: _Node) -> None:
        """Forget a node that nothing is known of, and its parents that were only its parents."""
        link: _Node | None = node
        while link is not None and link.is_empty and link.block in self._nodes:
            self._forget(link)
            link = link.parent

    def _forget(self, node: _Node) -> None:
        if node.told:
            self._gone.append(node.block)
        for name in node.names:
            del self._named[name]
        self._marked.pop(node, None)
        del self._nodes[node.block]
        if node.parent is not None:
            del node.parent.children[node.block]

    def _bound(self) -> None:
        excess = len(self._nodes) - self._max_nodes
        if excess <= 0:
            return
        left = max(excess, self._max_nodes // _FORGOTTEN_SHARE)
        while left > 0:
            leaves = [node for node in self._nodes.values() if not node.children]
            for node in leaves[:left]:
                self._forget(node)
            left -= len(leaves)
        self.counters.forgotten += max(excess, self._max_nodes // _FORGOTTEN_SHARE)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books disagree or are over their bounds."""
        assert len(self._nodes) <= self._max_nodes, f"{len(self._nodes)} nodes are too many"
        assert len(self._nameless) <= self._max_nodes, "too many names without a node"
        names = {name for node in self._nodes.values() for name in node.names}
        assert names == self._named.keys(), "names and nodes differ"
        assert not names & self._nameless.keys(), "a block is both with and without a node"
        for node in self._nodes.values():
            assert self._nodes[node.block] is node, "a node is kept under another's hash"
            assert node.parent is None or self._nodes.get(node.parent.block) is node.parent
            assert min(*node.held, *node.doubted, 0) == 0, "held less than never"
        if not self._marked:
            told = {node.block for node in self._nodes.values() if node.told}
            true = {node.block for node in self._nodes.values() if self._is_reusable(node)}
            assert told == true, "what was told is not what is reusable"


class _Rule:
    """How one group's blocks reach back from a block, and whether that is enough."""

    def __init__(self, group: CacheGroup, block_size_tokens: int) -> None:
        self.needs = group.needs
        self.peeks = group.peeks
        self.width = max(1, group.block_size_tokens // block_size_tokens)
        """Nodes in a block."""
        if self.needs is GroupNeeds.NOTHING:
            self.width = 1
        self._chunk = max(1, group.span // block_size_tokens)
        self._blocks = group.span + group.peeks

    def reach(self, depth: int, held: int, before: int | None) -> int:
        """How far a group's blocks reach back from here, `before` being its parent's.

        Before a prompt's first block all that is needed is there. Inside of a wide block, what was
        true at its start.
        """
        full = self._blocks if self.needs is GroupNeeds.LAST else 1
        if self.needs is GroupNeeds.CHUNK and depth % self._chunk == 0:
            return 1
        start = full if before is None else before
        if depth % self.width:
            return start
        return min(full, start + 1) if held and self._goes_on(start) else 0

    def _goes_on(self, start: int) -> bool:
        return self.needs is GroupNeeds.LAST or start > 0

    def is_met(self, depth: int, reach: int, held: int) -> bool:
        """Whether the group has what it needs for a prefix that ends here."""
        match self.needs:
            case GroupNeeds.ALL | GroupNeeds.CHUNK:
                # Inside of a wide block it is the block's filled part that must be held.
                return reach > 0 and (depth % self.width == 0 or held > 0)
            case GroupNeeds.LAST:
                return held > 0 and (self._blocks == 1 or reach >= self._blocks)
            case GroupNeeds.NOTHING:
                return True
            case _:
                assert_never(self.needs)


class _Node:
    """A stretch of tokens and all before it."""

    __slots__ = (
        "block",
        "children",
        "depth",
        "doubted",
        "held",
        "names",
        "parent",
        "reach",
        "told",
    )

    def __init__(self, block: int, parent: _Node | None, groups: int) -> None:
        self.block = block
        self.parent = parent
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.children: dict[int, _Node] = {}
        self.names: set[BlockHash] = set()
        self.held = [0] * groups
        self.doubted = [0] * groups
        self.reach = [0] * groups
        self.told = False
        if parent is not None:
            parent.children[block] = self

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known of it, and nothing hangs on it."""
        return not (self.children or any(self.held) or any(self.doubted))

    def ancestors(self) -> Iterator[_Node]:
        """Its parent, and so on."""
        link = self.parent
        while link is not None:
            yield link
            link = link.parent

    def below(self, levels: int) -> Iterable[_Node]:
        """The nodes that hang on it, so many levels down."""
        level = list(self.children.values())
        for _ in range(levels):
            yield from level
            level = [child for node in level for child in node.children.values()]
