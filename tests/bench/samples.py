"""Samples as tests make them."""

from __future__ import annotations

from baton.bench.client.client import Api
from baton.bench.client.samples import RequestSample
from baton.bench.load import LoadPlan, RequestSource, SyntheticRequests, TokenRange, WarmUp


def sample(number: int = 0, due_s: float = 0.0, **fields: object) -> RequestSample:
    """A request of 3 tokens: sent when due, its first token after 1 s, one each further second."""
    defaults = {
        "sent_s": due_s,
        "first_token_s": due_s + 1,
        "last_token_s": due_s + 3,
        "ended_s": due_s + 3,
        "prompt_tokens": 10,
        "output_tokens": 3,
        "gaps_s": (1.0, 1.0),
    }
    return RequestSample(request_index=number, due_s=due_s, **defaults | fields)  # type: ignore[arg-type]  # a test's


def failed_sample(number: int = 0, due_s: float = 0.0, *, kind: str = "timeout") -> RequestSample:
    """A request that got nothing, and was given up after 5 s."""
    no_output = {"first_token_s": None, "last_token_s": None, "output_tokens": 0, "gaps_s": ()}
    failure_fields = {
        "ended_s": due_s + 5,
        "ok": False,
        "failure_kind": kind,
        "failure": f"why: {kind}",
    }
    return sample(number, due_s, **no_output, **failure_fields)


def source(**fields: object) -> RequestSource:
    content = SyntheticRequests(prompt=TokenRange(20, 20), output=TokenRange(3, 3))
    all_fields = {
        "requests": content,
        "api": Api.COMPLETIONS,
        "seed": "0",
        "text_seed": "0",
    } | fields
    return RequestSource(**all_fields)  # type: ignore[arg-type]  # a test's


def plan(*starts_s: float, warm_up: WarmUp | None = None, **fields: object) -> LoadPlan:
    all_fields = {"source": source(), "starts_s": starts_s, "warm_up": warm_up or WarmUp()} | fields
    return LoadPlan(**all_fields)  # type: ignore[arg-type]  # a test's
