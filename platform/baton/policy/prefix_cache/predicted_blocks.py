"""Expected blocks of replicas, from routed requests: with expiry, and least recent out.

*Theory of operation.* A prediction is a chain of blocks, made when a request is routed. A block
belongs to the newest prediction that names it, and is forgotten with it. A prediction expires, or
is evicted as the oldest when its replica has more predicted blocks than fit into its cache. Within
a prediction the deepest blocks go first, so the rest of a chain starts where the chain started. A
prediction whose every block a newer one has taken over is over. These are removed when there are
twice as many as last time. A prompt that is sent fifty times a second would otherwise be kept
thousands of times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.domain.handoff import HitSource
from baton.policy.prefix_cache.block_masks import HolderMasks

_MAX_SUPERSEDED = 64
"""Predictions of one replica that may be kept although newer predictions have replaced them."""


@dataclass(slots=True, eq=False, kw_only=True)
class Prediction:
    """A chain that was sent to a replica, and its expected blocks there at that time."""

    bit: int
    at_s: float
    ttl_s: float
    blocks: list[int]
    """From the root on; blocks that were evicted are cut off at the end. Empty: it is over."""
    expected_blocks: int = 0
    expected_from: HitSource = HitSource.NONE
    """How it was known; NONE too where the replica could not know yet (see `PrefixIndex`)."""
    removals_before: int = 0
    """Of the replica, when the prediction was made."""
    is_confirmed: bool = False
    """The replica has reported how much of it was cached."""


@dataclass(slots=True, eq=False, kw_only=True)
class ReplicaPredictions:
    """One replica's."""

    capacity_blocks: int
    newest_by_block: dict[int, Prediction] = field(default_factory=dict)
    """By block: the newest prediction that names it."""
    oldest_first: deque[Prediction] = field(default_factory=deque)
    """Oldest first; those that are over may be among them."""
    cleanup_threshold: int = _MAX_SUPERSEDED
    """With more of them, those that newer predictions have replaced are dropped."""


class PredictedBlocks:
    """Which slots are expected to hold which blocks."""

    __slots__ = ("_by_ttl", "masks")

    def __init__(self) -> None:
        self.masks = HolderMasks()
        self._by_ttl: dict[float, deque[tuple[ReplicaPredictions, Prediction]]] = {}
        """By how long a prediction lasts, oldest first: there are two such times at most."""

    def add(self, predictions: ReplicaPredictions, prediction: Prediction) -> None:
        """Note a prediction; it is the newest of its replica."""
        del prediction.blocks[predictions.capacity_blocks :]
        if not prediction.blocks:
            return
        predictions.newest_by_block.update(dict.fromkeys(prediction.blocks, prediction))
        predictions.oldest_first.append(prediction)
        if len(predictions.oldest_first) > predictions.cleanup_threshold:
            _drop_superseded(predictions)
        self._by_ttl.setdefault(prediction.ttl_s, deque()).append((predictions, prediction))
        self.masks.add(prediction.bit, prediction.blocks)
        self._evict(predictions)

    def expire(self, now_s: float) -> None:
        """Forget the predictions whose time is up."""
        for queue in self._by_ttl.values():
            while queue and queue[0][1].at_s + queue[0][1].ttl_s <= now_s:
                predictions, prediction = queue.popleft()
                self._end(predictions, prediction)

    def discard(self, predictions: ReplicaPredictions, blocks: Iterable[int]) -> None:
        """Forget single blocks of one replica, wherever they are in their chains."""
        for block in blocks:
            prediction = predictions.newest_by_block.pop(block, None)
            if prediction is not None:
                self.masks.discard(prediction.bit, (block,))

    def discard_all(self, predictions: ReplicaPredictions) -> None:
        """Forget all that was predicted of one replica."""
        for prediction in tuple(predictions.oldest_first):
            self._end(predictions, prediction)
        predictions.oldest_first.clear()

    @staticmethod
    def clear(predictions: ReplicaPredictions) -> None:
        """Forget all of one replica at once: its slot was retired, so its bits will be swept."""
        predictions.newest_by_block.clear()
        predictions.oldest_first.clear()

    def check_integrity(self, by_slot: Sequence[tuple[int, ReplicaPredictions]]) -> None:
        """Masks and predictions agree, no replica has more than its capacity.

        Args:
            by_slot: the slots in use, and their predictions.

        Raises:
            AssertionError: it is not so.
        """
        expected: dict[int, int] = {}
        for bit, predictions in by_slot:
            assert len(predictions.newest_by_block) <= predictions.capacity_blocks, (
                "more predicted than fits"
            )
            assert all(prediction.bit == bit for prediction in predictions.oldest_first), (
                "a prediction outlived its slot"
            )
            for block, prediction in predictions.newest_by_block.items():
                assert block in prediction.blocks, "a prediction forgot its block"
                assert prediction in predictions.oldest_first, (
                    "a prediction cannot be evicted any more"
                )
                expected[block] = expected.get(block, 0) | bit
        live = sum(bit for bit, _ in by_slot)
        actual = {block: mask & live for block, mask in self.masks.masks() if mask & live}
        assert actual == expected, "masks and predictions differ"

    def _evict(self, predictions: ReplicaPredictions) -> None:
        excess = len(predictions.newest_by_block) - predictions.capacity_blocks
        while predictions.oldest_first and (excess > 0 or not predictions.oldest_first[0].blocks):
            oldest = predictions.oldest_first[0]
            evicted = []
            while excess > 0 and oldest.blocks:
                block = oldest.blocks.pop()
                if predictions.newest_by_block.get(block) is oldest:
                    del predictions.newest_by_block[block]
                    evicted.append(block)
                    excess -= 1
            self.masks.discard(oldest.bit, evicted)
            if not oldest.blocks:
                predictions.oldest_first.popleft()

    def _end(self, predictions: ReplicaPredictions, prediction: Prediction) -> None:
        newest = predictions.newest_by_block
        # A chain of blocks whose hashes collide may name a block twice.
        ended = [block for block in prediction.blocks if newest.get(block) is prediction]
        for block in ended:
            newest.pop(block, None)
        self.masks.discard(prediction.bit, ended)
        prediction.blocks.clear()
        while predictions.oldest_first and not predictions.oldest_first[0].blocks:
            predictions.oldest_first.popleft()


def _drop_superseded(predictions: ReplicaPredictions) -> None:
    """End the predictions that have no block left."""
    alive = set(predictions.newest_by_block.values())
    for prediction in predictions.oldest_first:
        if prediction not in alive:
            prediction.blocks.clear()
    predictions.oldest_first = deque(
        prediction for prediction in predictions.oldest_first if prediction.blocks
    )
    predictions.cleanup_threshold = 2 * len(predictions.oldest_first) + _MAX_SUPERSEDED
