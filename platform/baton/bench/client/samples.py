"""The measurements of one request."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.bench.client.client import CompletionResponse
from baton.policy.admission.slo_classes import DEFAULT_CLASS
from baton.simulator.outcome import Outcome

LATE_SEND_THRESHOLD_S = 0.02
"""A longer delay counts as late: about one step of an engine."""


class RequestSample(NamedTuple):
    """A NamedTuple, because there may be millions. Times are seconds since the run began."""

    request_index: int
    due_s: float
    """When it should have been sent."""
    sent_s: float
    first_token_s: float | None
    last_token_s: float | None
    ended_s: float
    prompt_tokens: int
    """As the endpoint counted them, else as requested."""
    output_tokens: int
    """Likewise, else the number of pieces."""
    gaps_s: Sequence[float] = ()
    cached_tokens: int = 0
    requested_prompt_tokens: int = 0
    requested_output_tokens: int = 0
    has_usage: bool = True
    ok: bool = True
    failure: str | None = None
    failure_kind: str | None = None
    slo_class: str = DEFAULT_CLASS

    @property
    def send_delay_s(self) -> float:
        """From due to sent."""
        return self.sent_s - self.due_s

    @property
    def is_late(self) -> bool:
        """Whether it was sent more than `LATE_SEND_THRESHOLD_S` after it was due."""
        return self.send_delay_s > LATE_SEND_THRESHOLD_S

    @property
    def ttft_s(self) -> float:
        """From due to the first token; infinite without one."""
        return math.inf if self.first_token_s is None else self.first_token_s - self.due_s

    @property
    def ttft_from_send_s(self) -> float:
        """From sent to the first token, as `vllm bench serve` counts."""
        return self.ttft_s - self.send_delay_s

    @property
    def tpot_s(self) -> float:
        """(last token - first token) / (output tokens - 1); 0 with fewer than two."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens <= 1:
            return 0.0
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From due to the last token, or to the failure."""
        return self.completed_s - self.due_s

    @property
    def completed_s(self) -> float:
        """The time of the last token, or of the failure."""
        return self.last_token_s if self.ok and self.last_token_s is not None else self.ended_s

    @property
    def is_short(self) -> bool:
        """Whether it finished with fewer tokens than requested."""
        return self.ok and self.has_usage and self.output_tokens < self.requested_output_tokens

    def to_outcome(self, origin_s: float = 0.0) -> Outcome:
        """The same for a report, with arrival since `origin_s`."""
        return Outcome(
            arrived_at_s=self.due_s - origin_s,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            e2e_s=self.e2e_s,
            ok=self.ok,
            max_itl_s=max(self.gaps_s, default=0.0),
            slo_class=self.slo_class,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """The fields of a sample that its request determines."""

    index: int
    due_at_s: float
    prompt_tokens: int
    output_tokens: int
    slo_class: str | None = None


def build_sample(
    request: SentRequest, answer: CompletionResponse, start_at_s: float
) -> RequestSample:
    """The sample of a request and its answer."""

    def relative_s(at_s: float | None) -> float | None:
        return None if at_s is None else at_s - start_at_s

    reported_prompt_tokens = answer.prompt_tokens
    return RequestSample(
        request_index=request.index,
        due_s=request.due_at_s - start_at_s,
        sent_s=answer.sent_at_s - start_at_s,
        first_token_s=relative_s(answer.first_token_at_s),
        last_token_s=relative_s(answer.last_token_at_s),
        ended_s=answer.ended_at_s - start_at_s,
        prompt_tokens=request.prompt_tokens
        if reported_prompt_tokens is None
        else reported_prompt_tokens,
        output_tokens=answer.output_tokens or answer.chunks,
        gaps_s=array("d", answer.gaps_s),
        cached_tokens=answer.cached_tokens,
        requested_prompt_tokens=request.prompt_tokens,
        requested_output_tokens=request.output_tokens,
        has_usage=answer.output_tokens is not None,
        ok=answer.is_finished and answer.failure is None,
        failure=answer.failure,
        failure_kind=answer.failure_kind,
        slo_class=request.slo_class or DEFAULT_CLASS,
    )
