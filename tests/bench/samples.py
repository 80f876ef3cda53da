"""Samples as tests make them."""

from __future__ import annotations

from baton.bench.client.client import Api
from baton.bench.client.samples import Sample
from baton.bench.load import MadeUp, Plan, Source, Span, WarmUp


def sample(number: int = 0, due_s: float = 0.0, **fields: object) -> Sample:
    """A request of 3 tokens: sent when due, its first token after 1 s, one each further second."""
    whole = {
        "sent_s": due_s,
        "first_s": due_s + 1,
        "last_s": due_s + 3,
        "ended_s": due_s + 3,
        "prompt_tokens": 10,
        "output_tokens": 3,
        "gaps_s": (1.0, 1.0),
    }
    return Sample(number=number, due_s=due_s, **whole | fields)  # type: ignore[arg-type]  # a test's


def failed(number: int = 0, due_s: float = 0.0, *, kind: str = "timeout") -> Sample:
    """A request that got nothing, and was given up after 5 s."""
    nothing = {"first_s": None, "last_s": None, "output_tokens": 0, "gaps_s": ()}
    what = {"ended_s": due_s + 5, "ok": False, "kind": kind, "failure": f"why: {kind}"}
    return sample(number, due_s, **nothing, **what)


def source(**fields: object) -> Source:
    what = MadeUp(prompt=Span(20, 20), output=Span(3, 3))
    whole = {"what": what, "api": Api.COMPLETIONS, "seed": "0", "texts": "0"} | fields
    return Source(**whole)  # type: ignore[arg-type]  # a test's


def plan(*starts_s: float, warm_up: WarmUp | None = None, **fields: object) -> Plan:
    whole = {"source": source(), "starts_s": starts_s, "warm_up": warm_up or WarmUp()} | fields
    return Plan(**whole)  # type: ignore[arg-type]  # a test's
