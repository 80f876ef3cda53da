"""The cache feed of an engine whose layers keep their blocks by different rules.

*Theory of operation.* Full attention needs every block of a prefix, a sliding window its last few,
a state (Mamba, linear attention) the block at its end. vLLM reuses the longest prefix of which
every group of layers holds its blocks. A reusable prefix says nothing of shorter prefixes, so the
feed reports each reusable prefix (`CacheShape`) by the hash of its last block. Where a draft model
computes the block behind the prefix again, that block must be held. Then the prefix goes by the
hash of that block, and is shorter than it by `lookahead_tokens`.

Blocks form a tree: one node for each stretch of `block_size_tokens` and all before it. A node
counts how often each group holds it, and how far back the group's blocks reach without a hole.
Events mark nodes; `pop_update` settles these and their descendants, from the root downwards.

Unknown blocks count as not held: blocks without reported tokens, blocks in host memory, and after
missing batches all blocks. Full attention proves a block by computing another behind it. Names are
the same in all groups. An event with holes has no positions; its blocks count once another group
has placed them. Bounds: twice the nodes that fit into the KV cache, then the oldest leaves are
forgotten, and as many names without a node.
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
    PrefixRequirement,
    pack_hashes,
)
from baton.domain.kv_events import (
    BlockHash,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEventBatch,
)
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root

_CAPACITY_FACTOR: Final = 2
_FORGET_DIVISOR: Final = 8


class HybridCacheFeed:
    """One engine's prefix cache, as far as it is known; used like a `CacheFeed`."""

    def __init__(
        self, *, model: str, block_size_tokens: int, capacity_blocks: int, shape: CacheShape
    ) -> None:
        self.counters = FeedCounters()
        self.sequence = 0
        """The number of the last update that was taken."""
        self._model = model
        self._block_size_tokens = block_size_tokens
        self._rules = [_GroupRule(group, block_size_tokens) for group in shape.groups]
        self._alignment_blocks = shape.alignment_tokens // block_size_tokens
        self._peek_blocks = shape.lookahead_tokens // block_size_tokens
        widest = max(rule.width for rule in self._rules)
        self._max_nodes = _CAPACITY_FACTOR * capacity_blocks * widest
        self._nodes: dict[int, _Node] = {}
        """By hash, parents first."""
        self._node_by_name: dict[BlockHash, _Node] = {}
        self._orphan_counts: dict[BlockHash, list[int]] = {}
        """How often each group holds blocks of which it is not known where they are."""
        self._dirty_nodes: dict[_Node, None] = {}
        self._removed_hashes: list[int] = []
        """Hashes that readers know and that have no node any more."""
        self._cleared = False
        self._next_batch: int | None = None

    # ------------------------------------------------------------------ what the engine says

    def apply(self, batch: KvEventBatch) -> None:
        """Take in one batch; a batch that is not newer than the last is ignored."""
        expected = self._next_batch
        if expected is not None and batch.sequence < expected:
            self.counters.late_batches += 1
            return
        self.counters.batches += 1
        if expected is not None and batch.sequence > expected:
            self.counters.gaps += 1
            self.mark_unverified()
        self._next_batch = batch.sequence + 1
        for event in batch.events:
            match event:
                case BlocksStored():
                    if self._is_tracked(event):
                        self._on_stored(event)
                case BlocksRemoved():
                    if self._is_tracked(event):
                        self._on_removed(event)
                case BlocksCleared():
                    self._clear()
                case _:
                    assert_never(event)

    def mark_unverified(self) -> None:
        """Events are missing: of no block is it known that it is still held."""
        for node in self._nodes.values():
            node.unverified = [a or b for a, b in zip(node.held, node.unverified, strict=True)]
            node.held = [0] * len(self._rules)
            node.reach = [0] * len(self._rules)
            self._cleared = self._cleared or node.is_published
            node.is_published = False
        self._orphan_counts.clear()
        self._dirty_nodes.clear()
        if self._removed_hashes:
            self._cleared, self._removed_hashes = True, []

    # ------------------------------------------------------------------ cache events

    @property
    def pending_blocks(self) -> int:
        """Blocks that something may have happened to since the last `pop_update`."""
        return len(self._dirty_nodes) + len(self._removed_hashes)

    def pop_update(self) -> CacheUpdate | None:
        """The changes since this was last called; None, and no new number, without changes."""
        stored, removed = self._update_reusable()
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

        Call `pop_update` first.
        """
        published = (block for block, node in self._nodes.items() if node.is_published)
        hashes = pack_hashes(list(islice(published, max_blocks)))
        changes = (CacheChange(CacheChangeKind.STORED, hashes),) if hashes else ()
        return CacheUpdate(self.sequence, changes, is_snapshot=True)

    # ------------------------------------------------------------------ events

    def _is_tracked(self, event: BlocksStored | BlocksRemoved) -> bool:
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
        if event.has_hidden_content:
            self.counters.opaque += blocks
            return
        size = self._block_size_tokens
        if event.block_size_tokens and event.block_size_tokens % size == 0:
            self._add_nodes(event, event.block_size_tokens // size)
        for name in event.block_hashes:
            node = self._node_by_name.get(name)
            if node is None:
                self._count_orphan(event, name)
            else:
                node.held[event.group] += 1
                self._mark_dirty(node)
        self._enforce_bound()

    def _add_nodes(self, event: BlocksStored, width: int) -> None:
        """Make nodes of the blocks with reported tokens, where their parent is known."""
        parent = None
        if event.parent_hash is not None:
            parent = self._node_by_name.get(event.parent_hash)
            if parent is None:
                return
            self._verify_ancestors(parent, event.group)
        previous = self._chain_root(event) if parent is None else parent.block
        for position, block in enumerate(
            chain_hashes(previous, event.token_ids, self._block_size_tokens), start=1
        ):
            node = self._nodes.get(block)
            if node is None:
                node = self._nodes[block] = _Node(block, parent, len(self._rules))
            if position % width == 0:
                self._assign_name(node, event.block_hashes[position // width - 1])
            parent = node

    def _chain_root(self, event: BlocksStored) -> int:
        return chain_root(
            model=self._model,
            block_size_tokens=self._block_size_tokens,
            adapter=event.adapter,
            salt=event.cache_salt,
        )

    def _assign_name(self, node: _Node, name: BlockHash) -> None:
        previous_node = self._node_by_name.setdefault(name, node)
        if previous_node is not node:  # no sound engine does this: the old block is gone
            self._node_by_name[name] = node
            previous_node.names.discard(name)
            previous_node.held = [0] * len(self._rules)
            self._mark_dirty(previous_node)
        node.names.add(name)
        orphan_counts = self._orphan_counts.pop(name, None)
        if orphan_counts is not None:
            node.held = [a + b for a, b in zip(node.held, orphan_counts, strict=True)]
            self._mark_dirty(node)

    def _count_orphan(self, event: BlocksStored, name: BlockHash) -> None:
        if name not in self._orphan_counts and len(self._orphan_counts) >= self._max_nodes:
            del self._orphan_counts[next(iter(self._orphan_counts))]
            self.counters.forgotten += 1
        self._orphan_counts.setdefault(name, [0] * len(self._rules))[event.group] += 1
        if event.block_size_tokens % self._block_size_tokens:
            self.counters.other_size += 1
        else:
            self.counters.orphans += 1

    def _verify_ancestors(self, node: _Node, group: int) -> None:
        """The engine computed a block of full attention behind it: it holds all before it."""
        if self._rules[group].needs is not PrefixRequirement.ALL:
            return
        ancestor: _Node | None = node
        while ancestor is not None and ancestor.unverified[group]:
            ancestor.held[group], ancestor.unverified[group] = max(1, ancestor.held[group]), 0
            self._mark_dirty(ancestor)
            ancestor = ancestor.parent

    def _on_removed(self, event: BlocksRemoved) -> None:
        self.counters.removed += len(event.block_hashes)
        group = event.group
        for name in event.block_hashes:
            node = self._node_by_name.get(name)
            held = self._orphan_counts.get(name) if node is None else node.held
            if held is None:
                self.counters.unknown_removed += 1
                continue
            held[group] = max(0, held[group] - 1)
            if node is not None:
                node.unverified[group] = 0
                self._mark_dirty(node)
            elif not any(held):
                del self._orphan_counts[name]

    def _clear(self) -> None:
        had_published = any(node.is_published for node in self._nodes.values())
        self._cleared = self._cleared or had_published or bool(self._removed_hashes)
        for collection in (
            self._nodes,
            self._node_by_name,
            self._orphan_counts,
            self._dirty_nodes,
            self._removed_hashes,
        ):
            collection.clear()

    # ------------------------------------------------------------------ what is reusable

    def _mark_dirty(self, node: _Node) -> None:
        self._dirty_nodes[node] = None

    def _update_reusable(self) -> tuple[list[int], list[int]]:
        """Prefixes that are reusable now and were not, and the other way round."""
        stored: list[int] = []
        removed = self._removed_hashes
        self._removed_hashes = []
        heap = [(node.depth, node.block) for node in self._dirty_nodes]
        heapify(heap)
        visited = set()
        empty = []
        while heap:
            key = heappop(heap)
            if key in visited:
                continue
            visited.add(key)
            node = self._nodes[key[1]]
            reach = self._reach(node)
            if reach != node.reach or node in self._dirty_nodes:
                levels = max(1, self._peek_blocks)
                for descendant in node.descendants(levels):
                    heappush(heap, (descendant.depth, descendant.block))
            node.reach = reach
            reusable = self._is_reusable(node)
            if reusable != node.is_published:
                (stored if reusable else removed).append(node.block)
                node.is_published = reusable
            if node.is_empty:
                empty.append(node)
        self._dirty_nodes.clear()
        for node in reversed(empty):
            self._prune(node)
        return stored, removed

    def _reach(self, node: _Node) -> list[int]:
        parent_reach = None if node.parent is None else node.parent.reach
        return [
            rule.reach(
                node.depth, node.held[group], None if parent_reach is None else parent_reach[group]
            )
            for group, rule in enumerate(self._rules)
        ]

    def _is_reusable(self, node: _Node) -> bool:
        """Whether the prefix that goes by this node is."""
        depth = node.depth - self._peek_blocks
        if depth <= 0 or depth % self._alignment_blocks:
            return False
        path = [node, *islice(node.ancestors(), self._peek_blocks)]
        end = path[self._peek_blocks]
        for group, rule in enumerate(self._rules):
            # Where drafts peek, the group's own next block; the path begins with the last of all.
            group_end = path[self._peek_blocks - rule.width] if rule.peeks else end
            if not rule.is_met(group_end.depth, group_end.reach[group], group_end.held[group]):
                return False
        return True

    # ------------------------------------------------------------------ bounds

    def _prune(self, node: _Node) -> None:
        """Forget a node that nothing is known of, and its parents that were only its parents."""
        candidate: _Node | None = node
        while candidate is not None and candidate.is_empty and candidate.block in self._nodes:
            self._remove_node(candidate)
            candidate = candidate.parent

    def _remove_node(self, node: _Node) -> None:
        if node.is_published:
            self._removed_hashes.append(node.block)
        for name in node.names:
            del self._node_by_name[name]
        self._dirty_nodes.pop(node, None)
        del self._nodes[node.block]
        if node.parent is not None:
            del node.parent.children[node.block]

    def _enforce_bound(self) -> None:
        excess = len(self._nodes) - self._max_nodes
        if excess <= 0:
            return
        remaining = max(excess, self._max_nodes // _FORGET_DIVISOR)
        while remaining > 0:
            leaves = [node for node in self._nodes.values() if not node.children]
            for node in leaves[:remaining]:
                self._remove_node(node)
            remaining -= len(leaves)
        self.counters.forgotten += max(excess, self._max_nodes // _FORGET_DIVISOR)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books disagree or are over their bounds."""
        assert len(self._nodes) <= self._max_nodes, f"{len(self._nodes)} nodes are too many"
        assert len(self._orphan_counts) <= self._max_nodes, "too many names without a node"
        names = {name for node in self._nodes.values() for name in node.names}
        assert names == self._node_by_name.keys(), "names and nodes differ"
        assert not names & self._orphan_counts.keys(), "a block is both with and without a node"
        for node in self._nodes.values():
            assert self._nodes[node.block] is node, "a node is kept under another's hash"
            assert node.parent is None or self._nodes.get(node.parent.block) is node.parent
            assert min(*node.held, *node.unverified, 0) == 0, "held less than never"
        if not self._dirty_nodes:
            published = {node.block for node in self._nodes.values() if node.is_published}
            reusable = {node.block for node in self._nodes.values() if self._is_reusable(node)}
            assert published == reusable, "published and reusable blocks differ"


class _GroupRule:
    """How one group's blocks reach back from a block, and whether that is enough."""

    def __init__(self, group: CacheGroup, block_size_tokens: int) -> None:
        self.needs = group.requirement
        self.peeks = group.needs_next_block
        self.width = max(1, group.block_size_tokens // block_size_tokens)
        """Nodes in a block."""
        if self.needs is PrefixRequirement.NONE:
            self.width = 1
        self._chunk_blocks = max(1, group.span // block_size_tokens)
        self._required_blocks = group.span + group.needs_next_block

    def reach(self, depth: int, held: int, parent_reach: int | None) -> int:
        """How far a group's blocks reach back from here, `parent_reach` being its parent's.

        Before a prompt's first block all that is needed is there. Inside of a wide block, what was
        true at its start.
        """
        max_reach = self._required_blocks if self.needs is PrefixRequirement.TRAILING_BLOCKS else 1
        if self.needs is PrefixRequirement.CHUNK and depth % self._chunk_blocks == 0:
            return 1
        start = max_reach if parent_reach is None else parent_reach
        if depth % self.width:
            return start
        return min(max_reach, start + 1) if held and self._can_extend(start) else 0

    def _can_extend(self, start: int) -> bool:
        return self.needs is PrefixRequirement.TRAILING_BLOCKS or start > 0

    def is_met(self, depth: int, reach: int, held: int) -> bool:
        """Whether the group has what it needs for a prefix that ends here."""
        match self.needs:
            case PrefixRequirement.ALL | PrefixRequirement.CHUNK:
                # Inside of a wide block it is the block's filled part that must be held.
                return reach > 0 and (depth % self.width == 0 or held > 0)
            case PrefixRequirement.TRAILING_BLOCKS:
                return held > 0 and (self._required_blocks == 1 or reach >= self._required_blocks)
            case PrefixRequirement.NONE:
                return True
            case _:
                assert_never(self.needs)


class _Node:
    """A stretch of tokens and all before it."""

    __slots__ = (
        "block",
        "children",
        "depth",
        "held",
        "is_published",
        "names",
        "parent",
        "reach",
        "unverified",
    )

    def __init__(self, block: int, parent: _Node | None, groups: int) -> None:
        self.block = block
        self.parent = parent
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.children: dict[int, _Node] = {}
        self.names: set[BlockHash] = set()
        self.held = [0] * groups
        self.unverified = [0] * groups
        self.reach = [0] * groups
        self.is_published = False
        if parent is not None:
            parent.children[block] = self

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known of it, and nothing hangs on it."""
        return not (self.children or any(self.held) or any(self.unverified))

    def ancestors(self) -> Iterator[_Node]:
        """Its parent, and so on."""
        ancestor = self.parent
        while ancestor is not None:
            yield ancestor
            ancestor = ancestor.parent

    def descendants(self, levels: int) -> Iterable[_Node]:
        """The nodes that hang on it, `levels` levels down."""
        level = list(self.children.values())
        for _ in range(levels):
            yield from level
            level = [child for node in level for child in node.children.values()]
