"""The load: bodies of a given length in tokens, and the generator in C that sends them."""

from __future__ import annotations

import json
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from benchmarks._load import completion_body

MODEL = "tiny"
_TIMEOUT_S = 240
_LONG_TOKENS = 4096


class LoadError(RuntimeError):
    """A load that could not be put on an endpoint at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """One load: its streams at a time, and the tokens of its prompts."""

    concurrency: int
    prompt_tokens: int

    @property
    def name(self) -> str:
        """What it is called in results."""
        return f"{self.concurrency}x{self.prompt_tokens}"

    @property
    def max_tokens(self) -> int:
        """To be generated. One at a time it is the first token that counts: more requests fit."""
        return 64 if self.concurrency > 1 else 16

    @property
    def requests(self) -> int:
        """Sent in a run: of seconds where they are short, or chance tells more than the load."""
        if self.prompt_tokens < _LONG_TOKENS:
            return max(64, 12 * self.concurrency)
        return max(32, 2 * self.concurrency)


class GeneratorResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the generator saw; one entry in each list for each complete request."""

    wall_s: float
    own_cpu_s: float
    failed: int
    problems: list[str]
    ttft_s: list[float]
    gap_max_s: list[float]
    took_s: list[float]
    events: list[int]
    tokens: list[int]


class PromptFiles:
    """Draws bodies whose prompts have about the wanted number of tokens."""

    def __init__(self, model: Path) -> None:
        rng = random.Random(0)  # noqa: S311 - a load, no secret
        sample = json.loads(completion_body(rng, model=MODEL, words=2000, max_tokens=1))["prompt"]
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        tokens = len(tokenizer.encode(sample).ids)
        self._words_per_token = 2000 / tokens
        self.bytes_per_token = len(sample) / tokens

    def write_bodies(self, file: Path, point: LoadPoint, *, count: int, seed: str) -> None:
        """One body per line; the same seed draws the same."""
        rng = random.Random(seed)  # noqa: S311 - a load, no secret
        words = round(point.prompt_tokens * self._words_per_token)
        lines = (
            completion_body(rng, model=MODEL, words=words, max_tokens=point.max_tokens)
            for _ in range(count)
        )
        file.write_bytes(b"\n".join(lines) + b"\n")


def run_generator(
    generator: Path, *, port: int, point: LoadPoint, bodies: Path, requests: int, quickack: bool
) -> GeneratorResult:
    """Put a load on an endpoint and wait for its end.

    Raises:
        LoadError: there is no listener, or it did not end in time.
    """
    command = [str(generator), "--port", str(port), "--bodies", str(bodies)]
    command += ["--streams", str(min(point.concurrency, requests)), "--requests", str(requests)]
    # Spread over about as long as a request takes.
    command += ["--ramp-ms", "500" if point.concurrency > 1 else "0", "--limit-s", str(_TIMEOUT_S)]
    command += ["--quickack"] * quickack
    result = subprocess.run(  # noqa: S603 - our own program
        command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S + 10
    )
    if result.returncode != 0:
        raise LoadError(result.stderr.strip())
    return msgspec.json.decode(result.stdout, type=GeneratorResult)
