"""A prompt known by its blocks rather than its tokens, as in traces.

A trace says how long a prompt is and which blocks equal those of other prompts, never the tokens. A
`HashedPrompt` is such a prompt. It replaces a tuple of token ids in all decisions: it has a length,
can be cut and extended, and its blocks have chained hashes. Tokens are made only by iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

_HASH_MASK = (1 << 60) - 1
_VOCABULARY_SIZE = 1 << 15
"""The ids that iteration makes up are below this: within any vocabulary of today."""


class HashedPrompt(Sequence[int]):
    """`length` tokens; those of block i are what `ids[i]` names, equal ids meaning equal tokens.

    `block_ids` may go on behind the prompt: they then say what will be generated, so that the
    prompt of a session's next turn equals this prompt and output. Behind `block_ids` the tokens are
    this outline's own: two outlines share them only if they have the same `own`.
    """

    __slots__ = ("_cached_chain", "_length", "block_ids", "block_tokens", "tail_id")

    def __init__(
        self, block_ids: tuple[int, ...], length: int, *, block_tokens: int, tail_id: int = 0
    ) -> None:
        if length < 0 or block_tokens < 1:
            raise ValueError(
                f"an outline of {length} tokens in blocks of {block_tokens},"
                " expected at least 0 and at least 1"
            )
        self.block_ids = block_ids
        self.block_tokens = block_tokens
        self.tail_id = tail_id
        self._length = length
        self._cached_chain: tuple[int, int, list[int]] | None = None

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HashedPrompt):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"Outline({len(self)} tokens, {len(self.block_ids)} blocks of {self.block_tokens})"

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice[int | None]) -> HashedPrompt: ...
    def __getitem__(self, index: int | slice[int | None]) -> int | HashedPrompt:
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
            return self._with_length(min(max(stop, 0), self._length))
        position = index + self._length if index < 0 else index
        if not 0 <= position < self._length:
            raise IndexError(f"token {index} of an outline of {self._length}")
        block, offset = divmod(position, self.block_tokens)
        return hash((self._block_id(block), offset)) % _VOCABULARY_SIZE

    def __iter__(self) -> Iterator[int]:
        return (self[index] for index in range(self._length))

    def extended(self, tokens: int) -> HashedPrompt:
        """This outline and the `tokens` that come next."""
        return self._with_length(self._length + tokens)

    def chain_hashes(
        self, previous: int, block_size_tokens: int, *, first_block: int = 0
    ) -> list[int]:
        """The chained hashes of its full blocks of a size, from block `first_block` on.

        `previous` is the hash before them. Equal for outlines with equal tokens so far and the same
        `block_tokens`; not equal to those of the tokens that iteration makes up. The last chain
        from the first block on is cached, because callers of one prompt ask for the same chain.
        """
        if first_block:
            return self._compute_hashes(previous, block_size_tokens, first_block)
        cached = self._cached_chain
        if cached is None or cached[0] != previous or cached[1] != block_size_tokens:
            hashes = self._compute_hashes(previous, block_size_tokens, 0)
            self._cached_chain = cached = (previous, block_size_tokens, hashes)
        return cached[2]

    def _compute_hashes(self, previous: int, size: int, first: int) -> list[int]:
        block_tokens, stop = self.block_tokens, self._length // size
        hashes_per_id = block_tokens // size
        if hashes_per_id * size != block_tokens:
            return self._hash_unaligned(previous, size, range(first, stop))
        identified_blocks = min(
            len(self.block_ids) * hashes_per_id, stop
        )  # blocks inside a named block
        hashes: list[int] = []
        for block in range(first // hashes_per_id, -(-identified_blocks // hashes_per_id)):
            first_sub_id = self.block_ids[block] * hashes_per_id
            low = max(0, first - block * hashes_per_id)
            sub_ids = range(
                first_sub_id + low,
                first_sub_id + min(hashes_per_id, identified_blocks - block * hashes_per_id),
            )
            hashes += [previous := hash((previous, mark)) & _HASH_MASK for mark in sub_ids]
        tail_id, tail_blocks = self.tail_id, range(max(first, identified_blocks), stop)
        hashes += [
            previous := hash((previous, tail_id, block)) & _HASH_MASK for block in tail_blocks
        ]
        return hashes

    def _hash_unaligned(self, previous: int, size: int, blocks: range) -> list[int]:
        """The hashes of blocks of which one may hold parts of several that have names."""
        block_tokens, hashes = self.block_tokens, []
        for block in blocks:
            start = block * size
            covered = range(start // block_tokens, (start + size - 1) // block_tokens + 1)
            content = (start % block_tokens, *(self._block_id(value) for value in covered))
            previous = hash((previous, content)) & _HASH_MASK
            hashes.append(previous)
        return hashes

    def _block_id(self, block: int) -> int:
        tail_offset = block - len(self.block_ids)
        return (
            self.block_ids[block] if tail_offset < 0 else ~hash((self.tail_id, block)) & _HASH_MASK
        )

    def _with_length(self, length: int) -> HashedPrompt:
        if length == self._length:
            return self
        return HashedPrompt(
            self.block_ids, length, block_tokens=self.block_tokens, tail_id=self.tail_id
        )

    def _key(self) -> tuple[tuple[int, ...], int, int, int]:
        return self.block_ids, self._length, self.block_tokens, self.tail_id


TokenIds = tuple[int, ...] | HashedPrompt
"""A prompt: its token ids, or its outline from a trace."""
