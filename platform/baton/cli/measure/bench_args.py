"""The arguments of `baton bench`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.bench.client.client import Api
from baton.bench.client.trust import TlsTrust
from baton.bench.findings.metrics import SloObjectives
from baton.bench.load import ArrivalProcess, MeasuredLength, TokenRange, WarmUp
from baton.simulator.workloads.arrivals import TimeUnit

ENDPOINT = "endpoint"
"""For `--tokenizer`: the endpoint's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The endpoint, and how to ask it."""

    url: str
    model: str | None
    api: Api
    deadline_s: float
    max_in_flight: int
    clients: int
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """May hold a key."""
    trust: TlsTrust = field(default_factory=TlsTrust)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptArgs:
    """The source of prompts: a file, a trace, a workload, or a generator."""

    dataset: Path | None
    trace: Path | None
    time_unit: TimeUnit | None
    workload: str | None
    as_words: bool
    """Prompts of words instead of token ids."""
    tokenizer: str
    prompt: TokenRange
    output: TokenRange | None
    """None for a file's length of each prompt, else for the usual length."""
    shared_tokens: int
    shared_prompts: int
    classes: tuple[tuple[str, float], ...]
    vocabulary: int
    ignore_invalid: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadArgs:
    """When it is asked."""

    rates_per_s: tuple[float, ...]
    streams: tuple[int, ...]
    pace: ArrivalProcess
    burstiness: float
    length: MeasuredLength
    """Without a limit for as long as a trace is."""
    warm_up: WarmUp
    turns: int
    think_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchArgs:
    """All arguments."""

    endpoint: Endpoint
    prompts: PromptArgs
    load: LoadArgs
    slo: SloObjectives
    find_knee: bool
    repeats: int
    seed: int
    command: str
