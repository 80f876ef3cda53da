"""What long prompts cost before an engine: follow-up turns of a conversation, and 400 KB at once.

Starts vLLM's own API server (`bare`) and all of baton (`baton_local`) in turn, several times over,
each alone on the machine and before the same simulated engine, and sends each, one at a time:

- `follow_up`: the turns of conversations that are 16,000 tokens long by then, a question more each;
- `new_400kb`: 400 KB that no request has sent before, as one message.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import asdict

import httpx

from benchmarks._load import completion_body
from benchmarks._program import say
from benchmarks._statistics import RepeatSpread, cpu_used, percentiles, round_floats
from benchmarks._systems import (
    API,
    HAPROXY,
    BareVllm,
    BatonDeployment,
    CpuMeter,
    System,
    load_scenario,
)

SCENARIO = "long-prompts"
FOLLOW_UP, NEW = "follow_up", "new_400kb"
_CONVERSATIONS, _TURNS, _TURN_WORDS, _OLD_WORDS = 2, 20, 40, 10_000
_NEW_PROMPTS, _NEW_BYTES = 12, 400_000
_LIMIT_S = 60.0
Figures = dict[str, float]
Prompt = tuple[bool, list[str]]
"""Whether it is measured, and its messages, the user's first."""
Runs = dict[str, list[dict[str, Figures]]]
"""By system, then repeat, then kind of prompt."""


def measure_all(repeats: int) -> tuple[dict[str, object], Runs]:
    """Visit both systems as often as asked for; returns the figures, and those of each repeat."""
    # The simulated engine does not mind that the tiny model's own context is shorter.
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    runs: Runs = {"bare": [], "baton_local": []}
    for repeat in range(repeats):
        for system in (BareVllm(load_scenario(SCENARIO)), BatonDeployment("baton_local", SCENARIO)):
            runs[system.name].append(visit(system, seed=repeat))
            say(f"{system.name} {json.dumps(round_floats(runs[system.name][-1]))}")
    quoted: dict[str, object] = {
        f"{kind}_{what}": asdict(RepeatSpread.from_values(values))
        for kind in (FOLLOW_UP, NEW)
        for what, values in compared(runs, kind).items()
    }
    return quoted, runs


def compared(runs: Runs, kind: str) -> dict[str, list[float]]:
    """What each repeat tells of one kind of prompt."""
    pairs = [
        (bare[kind], ours[kind])
        for bare, ours in zip(runs["bare"], runs["baton_local"], strict=True)
    ]
    return {
        "added_ttft_ms": [ours["ttft_p50_ms"] - bare["ttft_p50_ms"] for bare, ours in pairs],
        "cpu_ms_per_request": [ours["cpu_ms"] for _, ours in pairs],
        "bare_cpu_ms_per_request": [bare["cpu_ms"] for bare, _ in pairs],
        "prompt_tokens": [ours["prompt_tokens"] for _, ours in pairs],
    }


def visit(system: System, *, seed: int) -> dict[str, Figures]:
    """Start it alone, ask, end it; the requests depend on the seed only."""
    try:
        system.start()
        with httpx.Client(base_url=system.url, timeout=_LIMIT_S) as client:
            # Imports and compilation of the first use are not measured.
            for _ in range(5):
                ask(client, next(new_prompts(random.Random("warm")))[1])  # noqa: S311 - no secret
            rng = random.Random(seed)  # noqa: S311 - a load, no secret
            return {
                FOLLOW_UP: measure(system, client, follow_ups(rng)),
                NEW: measure(system, client, new_prompts(rng)),
            }
    finally:
        if left := system.stop():
            say(f"{system.name}: processes had to be killed: {left}")


def follow_ups(rng: random.Random) -> Iterator[Prompt]:
    """Conversations that are long from the first prompt on, which follows no other."""
    for _ in range(_CONVERSATIONS):
        said = [words(rng, _OLD_WORDS // 20) for _ in range(21)]
        for turn in range(_TURNS):
            yield turn > 0, said
            said = [*said, words(rng, _TURN_WORDS), words(rng, _TURN_WORDS)]


def new_prompts(rng: random.Random) -> Iterator[Prompt]:
    """Messages that have nothing in common."""
    for _ in range(_NEW_PROMPTS):
        yield True, [words(rng, _NEW_BYTES // 4)[:_NEW_BYTES]]


def words(rng: random.Random, count: int) -> str:
    """`count` words of text."""
    body = completion_body(rng, model="", words=count, max_tokens=1)
    text: str = json.loads(body)["prompt"]
    return text


def measure(system: System, client: httpx.Client, prompts: Iterator[Prompt]) -> Figures:
    """Ask one at a time."""
    ttft_s, tokens, cpu_s, asked = [], 0, 0.0, 0
    for counts, said in prompts:
        meter = CpuMeter(system.process_groups())
        before = meter.read()
        took_s, prompt_tokens = ask(client, said)
        used = cpu_used(before, meter.read())
        if not counts:
            continue
        asked += 1
        ttft_s.append(took_s)
        tokens += prompt_tokens
        cpu_s += used.get(API, 0.0) + used.get(HAPROXY, 0.0)
    return {
        "requests": asked,
        "prompt_tokens": tokens / asked,
        "ttft_p50_ms": percentiles(ttft_s)["p50"] * 1e3,
        "ttft_p99_ms": percentiles(ttft_s)["p99"] * 1e3,
        "cpu_ms": cpu_s / asked * 1e3,
    }


def ask(client: httpx.Client, said: list[str]) -> tuple[float, int]:
    """Seconds to the first token of a stream, and the prompt's length in tokens."""
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(said)
    ]
    body = {
        "model": "tiny",
        "messages": messages,
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s, first_s, tokens = time.perf_counter(), 0.0, 0
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if not answer.is_success:
            raise SystemExit(f"{answer.status_code}: {answer.read().decode()[:300]}")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.perf_counter()
                tokens = (json.loads(line[6:]).get("usage") or {}).get("prompt_tokens", tokens)
    return first_s - began_s, tokens
