"""Lengths of prompts and outputs: models, and files that list them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
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


def fixed(prompt_tokens: int, output_tokens: int) -> LengthModel:
    """Constant lengths."""
    lengths = Lengths(prompt_tokens, output_tokens)
    return lambda _rng: lengths


class Lognormal(NamedTuple):
    """Lengths with a mean and a coefficient of variation, cut off at `max_tokens`.

    Source: prompt lengths are near lognormal in Azure's traces of 2023 and in ShareGPT.
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
    """Independent prompt and output lengths."""
    return lambda rng: Lengths(prompt.draw(rng), output.draw(rng))


def matches_header(header: str) -> bool:
    """Whether `read` reads a CSV file with this first line."""
    return {_PROMPT, _OUTPUT} <= set(parse_columns(header))


def read(
    lines: Iterable[str], name: str, *, ignore_invalid: bool = False
) -> tuple[tuple[Lengths, ...], int]:
    """The lengths in a CSV file, and the number of skipped lines.

    Raises:
        TraceInvalid: an invalid line, unless `ignore_invalid`; other columns; no rows.
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
