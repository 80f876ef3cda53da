"""What one request met, as its client saw it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.bench.client.client import Answer
from baton.policy.admission.slo_classes import DEFAULT_CLASS
from baton.simulator.outcome import Outcome


class Sample(NamedTuple):
    """One request. A NamedTuple: there may be millions. Times are seconds since the run began."""

    number: int
    """Its place in the load."""
    due_s: float
    """When it should have been sent: its user came then."""
    sent_s: float
    first_s: float | None
    """Its first token; None when none came."""
    last_s: float | None
    ended_s: float
    prompt_tokens: int
    """As the endpoint counted them, else as they were asked for."""
    output_tokens: int
    """Likewise, else as many as there were pieces."""
    gaps_s: Sequence[float] = ()
    """Between the pieces of the answer, in order."""
    cached_tokens: int = 0
    asked_prompt_tokens: int = 0
    asked_output_tokens: int = 0
    counted: bool = True
    """Whether the endpoint said how many tokens it generated."""
    ok: bool = True
    failure: str | None = None
    kind: str | None = None
    """Of the failure."""
    slo_class: str = DEFAULT_CLASS

    @property
    def late_s(self) -> float:
        """How much later than it was due it was sent."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """From when it was due to its first token; infinite when none came."""
        return math.inf if self.first_s is None else self.first_s - self.due_s

    @property
    def sent_ttft_s(self) -> float:
        """The same from when it was sent, as `vllm bench serve` counts."""
        return self.ttft_s - self.late_s

    @property
    def tpot_s(self) -> float:
        """(last token - first token) / (output tokens - 1); 0 with fewer than two."""
        if self.first_s is None or self.last_s is None or self.output_tokens <= 1:
            return 0.0
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From when it was due to its last token, or until it was given up."""
        return self.end_s - self.due_s

    @property
    def end_s(self) -> float:
        """When its last token came, or it was given up."""
        return self.last_s if self.ok and self.last_s is not None else self.ended_s

    @property
    def short(self) -> bool:
        """Whether it finished with fewer tokens than were asked for."""
        return self.ok and self.counted and self.output_tokens < self.asked_output_tokens

    def outcome(self, since_s: float = 0.0) -> Outcome:
        """The same for a report, its arrival counted from `since_s`."""
        return Outcome(
            arrived_at_s=self.due_s - since_s,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            e2e_s=self.e2e_s,
            ok=self.ok,
            worst_gap_s=max(self.gaps_s, default=0.0),
            slo_class=self.slo_class,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a sample has to say of its request, besides the answer."""

    number: int
    due_at_s: float
    """Of the monotonic clock."""
    prompt_tokens: int
    output_tokens: int
    slo_class: str | None = None


def sample_of(asked: Asked, answer: Answer, began_at_s: float) -> Sample:
    """A request and its answer, with times from when the run began."""

    def since(at_s: float | None) -> float | None:
        return None if at_s is None else at_s - began_at_s

    counted = answer.prompt_tokens
    return Sample(
        number=asked.number,
        due_s=asked.due_at_s - began_at_s,
        sent_s=answer.sent_at_s - began_at_s,
        first_s=since(answer.first_at_s),
        last_s=since(answer.last_at_s),
        ended_s=answer.ended_at_s - began_at_s,
        prompt_tokens=asked.prompt_tokens if counted is None else counted,
        output_tokens=answer.output_tokens or answer.chunks,
        gaps_s=array("d", answer.gaps_s),
        cached_tokens=answer.cached_tokens,
        asked_prompt_tokens=asked.prompt_tokens,
        asked_output_tokens=asked.output_tokens,
        counted=answer.output_tokens is not None,
        ok=answer.finished and answer.failure is None,
        failure=answer.failure,
        kind=answer.kind,
        slo_class=asked.slo_class or DEFAULT_CLASS,
    )
