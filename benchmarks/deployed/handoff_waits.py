"""Whether answers stay right while handoffs wait longer than a lease lasts: real vLLM on the CPU.

One prefill and one decode replica behind `baton up`. More prompts are handed over at once than
decode has places for, so that blocks wait on the prefill replica for many times their lease, while
other prompts want its memory. Each answer is compared, token by token, with that of the same prompt
where nothing is handed over (`router.disaggregate: never`, applied live, with a cache salt of its
own), in float32 and greedily. Cases:

- `short`: a lease and a deadline of 2 s, 48 prompts of about 400 tokens, 30 others behind them;
- `default`: a lease of 30 s, 70 prompts with 900 tokens out, 25 others from second 31 on;
- `early`: as `short`, with first tokens that the prefill gives (`transfer.early_first_token`).

The part fails when an answer differs, a request fails, or no block was pulled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from benchmarks._program import say
from benchmarks._systems import BatonDeployment, run_baton
from benchmarks.deployed.part import Found

SCENARIO = "handoff-waits"
_REQUEST_S = 900.0
_FIRST_ID, _LAST_ID = 100, 8000
"""Token ids of prompts: ordinary ones of the tiny model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Requests that are sent together."""

    count: int
    prompt_tokens: int
    output_tokens: int
    after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration and a load."""

    sets: tuple[str, ...]
    groups: tuple[Group, ...]


_SHORT = ("transfer.lease=2s", "transfer.deadline=2s")
_SHORT_LOAD = (
    Group(count=48, prompt_tokens=400, output_tokens=250),
    Group(count=30, prompt_tokens=380, output_tokens=16, after_s=1.0),
)
CASES: Mapping[str, Case] = {
    "short": Case(sets=_SHORT, groups=_SHORT_LOAD),
    "default": Case(
        sets=("pools.prefill.engine.kv_cache=64MiB",),
        groups=(
            Group(count=70, prompt_tokens=200, output_tokens=900),
            Group(count=25, prompt_tokens=400, output_tokens=16, after_s=31.0),
        ),
    ),
    "early": Case(sets=(*_SHORT, "transfer.early_first_token=true"), groups=_SHORT_LOAD),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request."""

    prompt: tuple[int, ...]
    output_tokens: int
    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of it."""

    tokens: tuple[int, ...]
    took_s: float
    problem: str = ""


def requests(case: Case, seed: str) -> list[Asked]:
    """The requests of a case; the same for the same seed."""
    rng = random.Random(seed)  # noqa: S311 - a load, no secret
    return [
        Asked(
            prompt=tuple(
                rng.randrange(_FIRST_ID, _LAST_ID)
                for _ in range(group.prompt_tokens + rng.randrange(-40, 40))
            ),
            output_tokens=group.output_tokens,
            after_s=group.after_s,
        )
        for group in case.groups
        for _ in range(group.count)
    ]


async def _ask(client: httpx.AsyncClient, asked: Asked, salt: str) -> Answer:
    await asyncio.sleep(asked.after_s)
    body = {
        "model": "tiny",
        "prompt": list(asked.prompt),
        "max_tokens": asked.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": salt,
    }
    began_s = time.perf_counter()
    try:
        answer = await client.post("/v1/completions", json=body)
        if answer.is_error:
            return Answer(
                tokens=(), took_s=time.perf_counter() - began_s, problem=_error_text(answer)
            )
        tokens = tuple(answer.json()["choices"][0]["token_ids"])
        problem = "" if len(tokens) == asked.output_tokens else f"{len(tokens)} tokens came"
    except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
        tokens, problem = (), f"{type(error).__name__}: {error}"
    return Answer(tokens=tokens, took_s=time.perf_counter() - began_s, problem=problem)


def _error_text(refusal: httpx.Response) -> str:
    return f"HTTP {refusal.status_code}: {refusal.text[:200]}"


async def ask_all(url: str, asked: Sequence[Asked], salt: str) -> list[Answer]:
    """Send each when its time has come; returns when all have ended."""
    limits = httpx.Limits(max_connections=len(asked))
    async with httpx.AsyncClient(base_url=url, timeout=_REQUEST_S, limits=limits) as client:
        return list(await asyncio.gather(*(_ask(client, other, salt) for other in asked)))


def moved() -> dict[str, int]:
    """What replicas have counted so far: pulls, those that came too late, leases that expired."""
    status = json.loads(run_baton("status", "-o", "json"))
    totals = dict.fromkeys(("pulls", "void_pulls", "expired_leases", "transfer_failures"), 0)
    for view in status["ingresses"][0]["replicas"]:
        for name in totals:
            totals[name] += int(view[name])
    return totals


def compare(handed: Sequence[Answer], alone: Sequence[Answer]) -> dict[str, Any]:
    """How many answers differ, and how long they took."""
    pairs = list(zip(handed, alone, strict=True))
    whole = [(answer, other) for answer, other in pairs if not (answer.problem or other.problem)]
    return {
        "requests": len(pairs),
        "failed": len(pairs) - len(whole),
        "problems": sorted({a.problem for pair in pairs for a in pair if a.problem})[:5],
        "differ": sum(answer.tokens != other.tokens for answer, other in whole),
        "longest_s": round(max(answer.took_s for answer in handed), 1),
    }


def run(name: str, case: Case) -> dict[str, Any]:
    """One case: handed over, then alone."""
    system = BatonDeployment(name, SCENARIO, sets=case.sets)
    asked = requests(case, name)
    try:
        system.start()
        say(f"{name}: {len(asked)} requests, handed over")
        handed = asyncio.run(ask_all(system.url, asked, "handed over"))
        counted = moved()
        # From now on every prompt stays where it is decoded.
        system.apply("router.disaggregate=never")
        say(f"{name}: the same, alone")
        alone = asyncio.run(ask_all(system.url, asked, "alone"))
    finally:
        left = system.stop()
    found = {**compare(handed, alone), **counted, "left_behind": len(left)}
    say(f"{name}: {json.dumps(found)}")
    return found


def is_right(found: Mapping[str, Any]) -> bool:
    """Whether a case counts, and every answer was right."""
    return not found["differ"] and not found["failed"] and found["pulls"] > 0


def chosen(text: str) -> Mapping[str, Case]:
    """The cases of an argument: names, with commas between them."""
    names = text.split(",")
    if unknown := set(names) - CASES.keys():
        raise argparse.ArgumentTypeError(
            f"got {', '.join(sorted(unknown))}, expected {', '.join(CASES)}"
        )
    return {name: CASES[name] for name in names}


def measure(options: argparse.Namespace) -> Found:
    """Run `options.cases`, each on a deployment of its own."""
    cases: Mapping[str, Case] = options.cases
    found = {name: run(name, case) for name, case in cases.items()}
    details = {"cases": {name: asdict(case) for name, case in cases.items()}}
    return Found(figures=found, details=details, good=all(map(is_right, found.values())))
