"""A prompt known by its blocks rather than its tokens: what traces tell of prompts.

A trace says how long a prompt is and which of its blocks equal which of another's, never the
tokens. An `Outline` is such a prompt. It stands where a tuple of token ids stands, as far as the
brain handles prompts: it has a length, a beginning can be cut off, generated tokens can be added,
and its blocks have chained hashes. No token of it is ever written down unless someone iterates over
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

_KEPT_BITS = (1 << 60) - 1
_TOKEN_IDS = 1 << 15
"""The ids that iteration makes up are below this: within any vocabulary of today."""


class Outline(Sequence[int]):
    """`length` tokens; those of block i are what `ids[i]` names, equal ids meaning equal tokens.

    `ids` may go on behind the prompt: they then say what will be generated, so that the prompt of a
    session's next turn equals this one's prompt and output. Behind `ids` the tokens are this
    outline's own: two outlines share them only if they have the same `own`.
    """

    __slots__ = ("_known", "_length", "block_tokens", "ids", "own")

    def __init__(
        self, ids: tuple[int, ...], length: int, *, block_tokens: int, own: int = 0
    ) -> None:
        if length < 0 or block_tokens < 1:
            raise ValueError(
                f"an outline of {length} tokens in blocks of {block_tokens},"
                " wanted at least 0 and at least 1"
            )
        self.ids = ids
        self.block_tokens = block_tokens
        self.own = own
        self._length = length
        self._known: tuple[int, int, list[int]] | None = None

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Outline):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"Outline({len(self)} tokens, {len(self.ids)} blocks of {self.block_tokens})"

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice[int | None]) -> Outline: ...
    def __getitem__(self, index: int | slice[int | None]) -> int | Outline:
        """One made-up token, or a beginning of the outline; other slices do not exist.

        Raises:
            ValueError: a slice that is not a beginning.
            IndexError: no such token.
        """
        if isinstance(index, slice):
            if index.start not in {None, 0} or index.step not in {None, 1}:
                raise ValueError(f"only a beginning of an outline can be cut off, not {index}")
            stop = self._length if index.stop is None else index.stop
            stop = stop + self._length if stop < 0 else stop
            return self._of_length(min(max(stop, 0), self._length))
        at = index + self._length if index < 0 else index
        if not 0 <= at < self._length:
            raise IndexError(f"token {index} of an outline of {self._length}")
        block, offset = divmod(at, self.block_tokens)
        return hash((self._id(block), offset)) % _TOKEN_IDS

    def __iter__(self) -> Iterator[int]:
        return (self[index] for index in range(self._length))

    def extended(self, tokens: int) -> Outline:
        """This outline and the `tokens` that come next."""
        return self._of_length(self._length + tokens)

    def chain(self, previous: int, block_size_tokens: int, *, first_block: int = 0) -> list[int]:
        """The chained hashes of its full blocks of a size, from block `first_block` on.

        `previous` is the hash before them. Equal for outlines with equal tokens so far and the same
        `block_tokens`; not equal to those of the tokens that iteration makes up. The last chain
        from the first block on is remembered: whoever handles one prompt asks for the same,
        and nobody changes it.
        """
        if first_block:
            return self._hashes(previous, block_size_tokens, first_block)
        known = self._known
        if known is None or known[0] != previous or known[1] != block_size_tokens:
            hashes = self._hashes(previous, block_size_tokens, 0)
            self._known = known = (previous, block_size_tokens, hashes)
        return known[2]

    def _hashes(self, previous: int, size: int, first: int) -> list[int]:
        own, stop = self.block_tokens, self._length // size
        parts = own // size
        if parts * size != own:
            return self._straddling(previous, size, range(first, stop))
        named = min(len(self.ids) * parts, stop)  # blocks that lie within one that has a name
        hashes: list[int] = []
        for block in range(first // parts, -(-named // parts)):
            name = self.ids[block] * parts
            low = max(0, first - block * parts)
            marks = range(name + low, name + min(parts, named - block * parts))
            hashes += [previous := hash((previous, mark)) & _KEPT_BITS for mark in marks]
        mine, rest = self.own, range(max(first, named), stop)
        hashes += [previous := hash((previous, mine, block)) & _KEPT_BITS for block in rest]
        return hashes

    def _straddling(self, previous: int, size: int, blocks: range) -> list[int]:
        """The hashes of blocks of which one may hold parts of several that have names."""
        own, hashes = self.block_tokens, []
        for block in blocks:
            start = block * size
            covered = range(start // own, (start + size - 1) // own + 1)
            content = (start % own, *(self._id(one) for one in covered))
            previous = hash((previous, content)) & _KEPT_BITS
            hashes.append(previous)
        return hashes

    def _id(self, block: int) -> int:
        beyond = block - len(self.ids)
        return self.ids[block] if beyond < 0 else ~hash((self.own, block)) & _KEPT_BITS

    def _of_length(self, length: int) -> Outline:
        if length == self._length:
            return self
        return Outline(self.ids, length, block_tokens=self.block_tokens, own=self.own)

    def _key(self) -> tuple[tuple[int, ...], int, int, int]:
        return self.ids, self._length, self.block_tokens, self.own


TokenIds = tuple[int, ...] | Outline
"""A prompt: its token ids, or what a trace knows of them."""
