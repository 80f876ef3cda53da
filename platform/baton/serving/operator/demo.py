"""The demonstration: a few streamed chat requests, and where each of them ran."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import httpx

from baton.serving.operator.local_deployment import LocalDeployment, Progress, ask_all
from baton.serving.shared.names import INGRESS

PROMPTS = (
    "Write a haiku about two runners who pass a baton.",
    "Why do prefill and decode disturb each other on one accelerator?",
    "Count from one to ten and explain every step.",
    "def fibonacci(n):",
    "Summarize: the key-value cache of a prompt is computed once and then read for every token.",
)
_MAX_TOKENS = 48
_SETTLE_S = 3.0
"""Loads reach the ingress with the next heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one request showed: at the client, in the ingress' records, in the engines' counters."""

    ok: bool
    problem: str
    ttft_s: float
    tpot_s: float
    prefilled_at: str
    decoded_at: str
    moved_bytes: int
    transfer_s: float


def send_prompts(deployment: LocalDeployment, model: str, progress: Progress) -> list[Asked]:
    """Send the demo's prompts one after the other, so that counters can be told apart."""
    asked = []
    for number, prompt in enumerate(PROMPTS, start=1):
        one = _ask(deployment, model, number, prompt)
        progress(_line(number, one))
        asked.append(one)
    return asked


def summary(asked: list[Asked]) -> dict[str, object]:
    """The figures of a demo. Measured; of the requests that succeeded."""
    good = [one for one in asked if one.ok]

    def median(value: Callable[[Asked], float]) -> float | None:
        return round(statistics.median(map(value, good)), 6) if good else None

    pulled = [one.transfer_s for one in good if one.moved_bytes]
    return {
        "requests": len(asked),
        "ok": len(good),
        "bytes_moved": sum(one.moved_bytes for one in good),
        "transfer_p50_s": round(statistics.median(pulled), 6) if pulled else None,
        "ttft_p50_s": median(lambda one: one.ttft_s),
        "tpot_p50_s": median(lambda one: one.tpot_s),
    }


def _ask(deployment: LocalDeployment, model: str, number: int, prompt: str) -> Asked:
    before = _transfers()
    request_id = f"demo-{number}-{time.monotonic_ns()}"
    problem, token_times_s, asked_at_s = _stream(deployment, model, request_id, prompt)
    story = _story(request_id)
    after = before
    until_s = time.monotonic() + _SETTLE_S
    while story.get("mode") == "pull" and after == before and time.monotonic() < until_s:
        after = _transfers()
    first, last = (token_times_s[0], token_times_s[-1]) if token_times_s else (0.0, 0.0)
    return Asked(
        ok=not problem,
        problem=problem,
        ttft_s=first - asked_at_s,
        tpot_s=(last - first) / max(1, len(token_times_s) - 1),
        prefilled_at=str(story.get("prefill_replica")),
        decoded_at=str(story.get("decode_replica")),
        moved_bytes=int(after[0] - before[0]),
        transfer_s=after[1] - before[1],
    )


def _stream(
    deployment: LocalDeployment, model: str, request_id: str, prompt: str
) -> tuple[str, list[float], float]:
    """Ask as any client would; returns a problem or "", when chunks came, and when it was asked."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        # The tiny model's weights are random: it would end its answer anywhere.
        "ignore_eos": True,
    }
    times_s: list[float] = []
    asked_at_s = time.monotonic()
    with (
        httpx.Client(base_url=deployment.state.http_url, timeout=120.0, trust_env=False) as client,
        client.stream(
            "POST", "/v1/chat/completions", json=body, headers={"X-Request-Id": request_id}
        ) as response,
    ):
        if response.is_error:
            return f"HTTP {response.status_code}: {response.read()[:200]!r}", [], asked_at_s
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data in {"", "[DONE]"}:
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                return str(chunk["error"]), times_s, asked_at_s
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                times_s.append(time.monotonic())
    return ("" if times_s else "the stream had no tokens"), times_s, asked_at_s


def _story(request_id: str) -> Mapping[str, object]:
    for answer in ask_all(INGRESS, "explain", request_id):
        for story in cast("list[Mapping[str, object]]", answer):
            return story
    return {}


def _transfers() -> tuple[int, float]:
    """Bytes and seconds of all pulls so far, as the decode engines counted them."""
    (report, *_) = ask_all(INGRESS, "status")
    rows = cast("list[Mapping[str, float]]", cast("Mapping[str, object]", report)["replicas"])
    return sum(int(row["moved_bytes"]) for row in rows), sum(row["transfer_s"] for row in rows)


def _line(number: int, one: Asked) -> str:
    if not one.ok:
        return f"request {number}: failed: {one.problem}"
    moved = (
        f"{one.moved_bytes / 1024:.0f} KiB moved in {one.transfer_s * 1000:.1f} ms"
        if one.moved_bytes
        else "nothing moved"
    )
    return (
        f"request {number}: TTFT {one.ttft_s * 1000:.0f} ms, TPOT {one.tpot_s * 1000:.1f} ms, "
        f"prefilled at {one.prefilled_at}, decoded at {one.decoded_at}, {moved}"
    )
