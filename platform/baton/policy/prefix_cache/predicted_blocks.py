"""What replicas are expected to hold because we sent it there: with expiry, and least recent out.

*Theory of operation.* A prediction is a chain of blocks, noted when a request is routed. A block
belongs to the newest prediction that names it, and is forgotten with it: when it expires, or when
its replica has more predicted blocks than fit into its cache and it is the oldest. A newer
prediction takes over the blocks that both begin with, and within one prediction the deepest blocks
go first; so whatever is left of a chain always starts where the chain started. A prediction of
which newer ones have taken over every block is over, or else a prompt that is sent fifty times a
second would be kept thousands of times until the first of them expires. These are looked for when
there are twice as many as last time, so that the look costs next to nothing for each prediction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.domain.handoff import HitSource
from baton.policy.prefix_cache.block_masks import HolderMasks

_SUPERSEDED = 64
"""Predictions of one replica that may be kept although newer ones have replaced them."""


@dataclass(slots=True, eq=False, kw_only=True)
class Prediction:
    """A chain that was sent to a replica, and what the replica was believed to hold of it."""

    bit: int
    at_s: float
    lasts_s: float
    blocks: list[int]
    """From the root on; blocks that were evicted are cut off at the end. Empty: it is over."""
    promised_blocks: int = 0
    promised_by: HitSource = HitSource.NONE
    """How it was known; NONE too where the replica could not know yet (see `PrefixIndex`)."""
    removals: int = 0
    """Of the replica, when the prediction was made."""
    answered: bool = False
    """The replica has said how much of it was cached."""


@dataclass(slots=True, eq=False, kw_only=True)
class Predictions:
    """One replica's."""

    capacity_blocks: int
    newest: dict[int, Prediction] = field(default_factory=dict)
    """By block: the newest prediction that names it."""
    order: deque[Prediction] = field(default_factory=deque)
    """Oldest first; those that are over may be among them."""
    look_at: int = _SUPERSEDED
    """When there are more of them, those that newer ones have replaced are dropped."""


class PredictedBlocks:
    """Which slots are expected to hold which blocks."""

    __slots__ = ("_by_expiry", "masks")

    def __init__(self) -> None:
        self.masks = HolderMasks()
        self._by_expiry: dict[float, deque[tuple[Predictions, Prediction]]] = {}
        """By how long a prediction lasts, oldest first: there are two such times at most."""

    def add(self, own: Predictions, prediction: Prediction) -> None:
        """Note a prediction; it is the newest of its replica."""
        del prediction.blocks[own.capacity_blocks :]
        if not prediction.blocks:
            return
        own.newest.update(dict.fromkeys(prediction.blocks, prediction))
        own.order.append(prediction)
        if len(own.order) > own.look_at:
            _drop_superseded(own)
        self._by_expiry.setdefault(prediction.lasts_s, deque()).append((own, prediction))
        self.masks.add(prediction.bit, prediction.blocks)
        self._evict(own)

    def expire(self, now_s: float) -> None:
        """Forget the predictions whose time is up."""
        for queue in self._by_expiry.values():
            while queue and queue[0][1].at_s + queue[0][1].lasts_s <= now_s:
                own, prediction = queue.popleft()
                self._end(own, prediction)

    def forget(self, own: Predictions, blocks: Iterable[int]) -> None:
        """Forget single blocks of one replica, wherever they are in their chains."""
        for block in blocks:
            prediction = own.newest.pop(block, None)
            if prediction is not None:
                self.masks.discard(prediction.bit, (block,))

    def forget_all(self, own: Predictions) -> None:
        """Forget all that was predicted of one replica."""
        for prediction in tuple(own.order):
            self._end(own, prediction)
        own.order.clear()

    @staticmethod
    def abandon(own: Predictions) -> None:
        """Forget all of one replica at once: its slot was retired, so its bits will be swept."""
        own.newest.clear()
        own.order.clear()

    def check_integrity(self, all_own: Sequence[tuple[int, Predictions]]) -> None:
        """Masks and predictions agree, no replica has more than its capacity.

        Args:
            all_own: the slots in use, and what is predicted of them.

        Raises:
            AssertionError: it is not so.
        """
        wanted: dict[int, int] = {}
        for bit, own in all_own:
            assert len(own.newest) <= own.capacity_blocks, "more predicted than fits"
            assert all(one.bit == bit for one in own.order), "a prediction outlived its slot"
            for block, prediction in own.newest.items():
                assert block in prediction.blocks, "a prediction forgot its block"
                assert prediction in own.order, "a prediction cannot be evicted any more"
                wanted[block] = wanted.get(block, 0) | bit
        live = sum(bit for bit, _ in all_own)
        found = {block: held & live for block, held in self.masks.masks() if held & live}
        assert found == wanted, "masks and predictions differ"

    def _evict(self, own: Predictions) -> None:
        excess = len(own.newest) - own.capacity_blocks
        while own.order and (excess > 0 or not own.order[0].blocks):
            oldest = own.order[0]
            gone = []
            while excess > 0 and oldest.blocks:
                block = oldest.blocks.pop()
                if own.newest.get(block) is oldest:
                    del own.newest[block]
                    gone.append(block)
                    excess -= 1
            self.masks.discard(oldest.bit, gone)
            if not oldest.blocks:
                own.order.popleft()

    def _end(self, own: Predictions, prediction: Prediction) -> None:
        newest = own.newest
        # A chain of blocks whose hashes collide may name a block twice.
        gone = [block for block in prediction.blocks if newest.get(block) is prediction]
        for block in gone:
            newest.pop(block, None)
        self.masks.discard(prediction.bit, gone)
        prediction.blocks.clear()
        while own.order and not own.order[0].blocks:
            own.order.popleft()


def _drop_superseded(own: Predictions) -> None:
    """End the predictions that have no block left."""
    alive = set(own.newest.values())
    for prediction in own.order:
        if prediction not in alive:
            prediction.blocks.clear()
    own.order = deque(prediction for prediction in own.order if prediction.blocks)
    own.look_at = 2 * len(own.order) + _SUPERSEDED
