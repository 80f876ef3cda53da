"""The demonstration: a few streamed chat requests, and where each of them ran."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import httpx

from baton.runtime.process.progress import Progress
from baton.serving.operator.local_deployment import LocalDeployment, query_all
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
PullTotals = tuple[int, float]
"""Bytes, and seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """One request, measured at the client, by the ingress, and by the engines' counters."""

    ok: bool
    error: str
    ttft_s: float
    tpot_s: float
    prefill_replica: str
    decode_replica: str
    moved_bytes: int
    transfer_s: float
    answer: str = ""
    """The text that the model streamed."""


def send_prompts(
    deployment: LocalDeployment, model: str, progress: Progress
) -> list[RequestResult]:
    """Send the prompts one after the other, so that counters can be distinguished."""
    results = []
    for number, prompt in enumerate(PROMPTS, start=1):
        result = _send_prompt(deployment, model, number, prompt)
        progress(_line(number, result))
        results.append(result)
    for line in answer_lines(PROMPTS, results):
        progress(line)
    return results


def answer_lines(prompts: Sequence[str], results: Sequence[RequestResult]) -> list[str]:
    """The first prompt that was answered, and its answer, each on one line."""
    for prompt, result in zip(prompts, results, strict=True):
        if result.ok:
            text = "".join(c if c.isprintable() else " " for c in result.answer)
            return [f"prompt: {prompt}", f"answer: {' '.join(text.split())}"]
    return []


def summary(results: list[RequestResult]) -> dict[str, object]:
    """Measured figures of the requests that succeeded."""
    succeeded = [result for result in results if result.ok]

    def median(value: Callable[[RequestResult], float]) -> float | None:
        return round(statistics.median(map(value, succeeded)), 6) if succeeded else None

    transfer_times_s = [request.transfer_s for request in succeeded if request.moved_bytes]
    return {
        "requests": len(results),
        "ok": len(succeeded),
        "bytes_moved": sum(request.moved_bytes for request in succeeded),
        "transfer_p50_s": round(statistics.median(transfer_times_s), 6)
        if transfer_times_s
        else None,
        "ttft_p50_s": median(lambda row: row.ttft_s),
        "tpot_p50_s": median(lambda row: row.tpot_s),
    }


def _send_prompt(
    deployment: LocalDeployment, model: str, number: int, prompt: str
) -> RequestResult:
    before = _transfers()
    request_id = f"demo-{number}-{time.monotonic_ns()}"
    error, token_times_s, sent_at_s, answer = _stream(deployment, model, request_id, prompt)
    report = _request_report(request_id)
    decode_replica = str(report.get("decode_replica"))
    moved_bytes, transfer_s = 0, 0.0
    until_s = time.monotonic() + _SETTLE_S
    while report.get("mode") == "pull" and not moved_bytes and time.monotonic() < until_s:
        moved_bytes, transfer_s = pulled_between(before, _transfers(), decode_replica)
    first, last = (token_times_s[0], token_times_s[-1]) if token_times_s else (0.0, 0.0)
    return RequestResult(
        ok=not error,
        error=error,
        ttft_s=first - sent_at_s,
        tpot_s=(last - first) / max(1, len(token_times_s) - 1),
        prefill_replica=str(report.get("prefill_replica")),
        decode_replica=decode_replica,
        moved_bytes=moved_bytes,
        transfer_s=transfer_s,
        answer=answer,
    )


def _stream(
    deployment: LocalDeployment, model: str, request_id: str, prompt: str
) -> tuple[str, list[float], float, str]:
    """Send a request as a client.

    Returns a problem or "", the times of chunks, the start, and the text.
    """
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
    texts: list[str] = []
    sent_at_s = time.monotonic()
    with (
        httpx.Client(base_url=deployment.state.http_url, timeout=120.0, trust_env=False) as client,
        client.stream(
            "POST", "/v1/chat/completions", json=body, headers={"X-Request-Id": request_id}
        ) as response,
    ):
        if response.is_error:
            return f"HTTP {response.status_code}: {response.read()[:200]!r}", [], sent_at_s, ""
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data in {"", "[DONE]"}:
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                return str(chunk["error"]), times_s, sent_at_s, "".join(texts)
            text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            if text:
                times_s.append(time.monotonic())
                texts.append(text)
    problem = "" if times_s else "the stream had no tokens"
    return problem, times_s, sent_at_s, "".join(texts)


def _request_report(request_id: str) -> Mapping[str, object]:
    for answer in query_all(INGRESS, "explain", request_id).values:
        for report in cast("list[Mapping[str, object]]", answer):
            return report
    return {}


def _transfers() -> dict[str, PullTotals]:
    """All pulls so far of each replica, as decode engines counted them."""
    (report, *_) = query_all(INGRESS, "status").values
    rows = cast("list[Mapping[str, float]]", cast("Mapping[str, object]", report)["replicas"])
    return {str(row["replica_id"]): (int(row["moved_bytes"]), row["transfer_s"]) for row in rows}


def pulled_between(
    before: Mapping[str, PullTotals], after: Mapping[str, PullTotals], replica_id: str
) -> PullTotals:
    """The pulls of one replica; none of a replica that has ended."""
    first_bytes, first_s = before.get(replica_id, (0, 0.0))
    last_bytes, last_s = after.get(replica_id, (first_bytes, first_s))
    return last_bytes - first_bytes, last_s - first_s


def _line(number: int, result: RequestResult) -> str:
    if not result.ok:
        return f"request {number}: failed: {result.error}"
    transfer_text = (
        f"{result.moved_bytes / 1024:.0f} KiB moved in {result.transfer_s * 1000:.1f} ms"
        if result.moved_bytes
        else "nothing moved"
    )
    return (
        f"request {number}: TTFT {result.ttft_s * 1000:.0f} ms, TPOT {result.tpot_s * 1000:.1f}"
        " ms, "
        f"prefilled at {result.prefill_replica}, decoded at {result.decode_replica},"
        f" {transfer_text}"
    )
