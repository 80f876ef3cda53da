"""How long prompts and outputs are: models of it, and files that say it of each request."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from baton.domain.errors import TraceInvalid
from baton.simulator.workloads.csv_traces import header_and_rows, parse_cells, parse_columns
from baton.simulator.workloads.lines import parse_lines, parse_tokens

_PROMPT, _OUTPUT = "num_prefill_tokens", "num_decode_tokens"


class Lengths(NamedTuple):
    """Of one request."""

    prompt_tokens: int
    output_tokens: int


LengthModel = Callable[[random.Random], Lengths]
"""Draws the lengths of one request after another."""


def fixed(prompt_tokens: int, output_tokens: int) -> LengthModel:
    """Always the same."""
    lengths = Lengths(prompt_tokens, output_tokens)
    return lambda _rng: lengths


class Lognormal(NamedTuple):
    """Lengths with a mean and a coefficient of variation, cut off at `max_tokens`.

    Source: lengths of prompts are near lognormal in Azure's traces of 2023 and in ShareGPT.
    """

    mean: float
    cv: float
    max_tokens: int = 1 << 17

    def draw(self, rng: random.Random) -> int:
        """One length, at least 1."""
        log_variance = math.log1p(self.cv**2)
        sample = rng.lognormvariate(math.log(self.mean) - log_variance / 2, math.sqrt(log_variance))
        return min(max(round(sample), 1), self.max_tokens)


def lognormal(prompt: Lognormal, output: Lognormal) -> LengthModel:
    """Prompt and output independent of each other."""
    return lambda rng: Lengths(prompt.draw(rng), output.draw(rng))


def sampled_from(lengths: Sequence[Lengths]) -> LengthModel:
    """One of these, any with the same chance."""
    if not lengths:
        raise ValueError("no lengths to draw from, expected at least one")
    return lambda rng: rng.choice(lengths)


def matches_header(header: str) -> bool:
    """Whether a CSV file that begins with this line is one that `read` reads."""
    return {_PROMPT, _OUTPUT} <= set(parse_columns(header))


def read(
    lines: Iterable[str], name: str, *, ignore_invalid: bool = False
) -> tuple[tuple[Lengths, ...], int]:
    """The lengths in a CSV file with `num_prefill_tokens` and `num_decode_tokens`; lines left out.

    Raises:
        TraceInvalid: a line is bad, unless `ignore_invalid`; other columns; no rows.
    """
    rows = header_and_rows(lines, name)
    header = next(rows)[1]
    if not matches_header(header):
        raise TraceInvalid(
            name, 1, f"expected columns {_PROMPT} and {_OUTPUT}, got {header.strip()!r}"
        )
    columns = parse_columns(header)

    def parse(line: str) -> Lengths:
        cells = parse_cells(line, columns)
        return Lengths(
            parse_tokens(cells[_PROMPT], _PROMPT, minimum=1),
            max(parse_tokens(cells[_OUTPUT], _OUTPUT), 1),
        )

    request_lengths, skipped = parse_lines(rows, name, parse, ignore_invalid=ignore_invalid)
    if not request_lengths:
        raise TraceInvalid(name, 0, "holds no requests")
    return tuple(request_lengths), skipped
