"""How long prompts and outputs are: models of it, and files that say it of each request."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from baton.domain.errors import BadTrace
from baton.simulator.workloads.csv_traces import cells_of, columns_of, header_and_rows
from baton.simulator.workloads.lines import parsed, tokens

_PROMPT, _OUTPUT = "num_prefill_tokens", "num_decode_tokens"


class Lengths(NamedTuple):
    """Of one request."""

    prompt_tokens: int
    output_tokens: int


LengthModel = Callable[[random.Random], Lengths]
"""Draws the lengths of one request after another."""


def fixed(prompt_tokens: int, output_tokens: int) -> LengthModel:
    """Always the same."""
    same = Lengths(prompt_tokens, output_tokens)
    return lambda _rng: same


class Lognormal(NamedTuple):
    """Lengths with a mean and a coefficient of variation, cut off at `most`.

    Source: lengths of prompts are near lognormal in Azure's traces of 2023 and in ShareGPT.
    """

    mean: float
    cv: float
    most: int = 1 << 17

    def draw(self, rng: random.Random) -> int:
        """One length, at least 1."""
        spread = math.log1p(self.cv**2)
        drawn = rng.lognormvariate(math.log(self.mean) - spread / 2, math.sqrt(spread))
        return min(max(round(drawn), 1), self.most)


def lognormal(prompt: Lognormal, output: Lognormal) -> LengthModel:
    """Prompt and output independent of each other."""
    return lambda rng: Lengths(prompt.draw(rng), output.draw(rng))


def among(lengths: Sequence[Lengths]) -> LengthModel:
    """One of these, any with the same chance."""
    if not lengths:
        raise ValueError("no lengths to draw from, wanted at least one")
    return lambda rng: rng.choice(lengths)


def recognises(header: str) -> bool:
    """Whether a CSV file that begins with this line is one that `read` reads."""
    return {_PROMPT, _OUTPUT} <= set(columns_of(header))


def read(
    lines: Iterable[str], name: str, *, skip_bad: bool = False
) -> tuple[tuple[Lengths, ...], int]:
    """The lengths in a CSV file with `num_prefill_tokens` and `num_decode_tokens`; lines left out.

    Raises:
        BadTrace: a line is bad, unless `skip_bad`; other columns; no rows.
    """
    rows = header_and_rows(lines, name)
    header = next(rows)[1]
    if not recognises(header):
        raise BadTrace(name, 1, f"wanted columns {_PROMPT} and {_OUTPUT}, got {header.strip()!r}")
    columns = columns_of(header)

    def parse(line: str) -> Lengths:
        cells = cells_of(line, columns)
        return Lengths(
            tokens(cells[_PROMPT], _PROMPT, at_least=1),
            max(tokens(cells[_OUTPUT], _OUTPUT), 1),
        )

    good, skipped = parsed(rows, name, parse, skip_bad=skip_bad)
    if not good:
        raise BadTrace(name, 0, "holds no requests")
    return tuple(good), skipped
