"""A protection, where it is, how it is taken away, and the tests that must notice."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One protection."""

    what: str
    """What is taken away."""
    file: str
    old: str
    """A text that is in the file once."""
    new: str
    tests: tuple[str, ...]
    """What pytest is given."""
