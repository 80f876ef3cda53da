"""A request, its phases, and how it may end."""

from __future__ import annotations

from enum import StrEnum

from baton.domain.hashed_prompt import TokenIds
from baton.domain.names.trace_context import TraceContext
from baton.domain.tenant import DEFAULT_TENANT
from baton.domain.value import Value


class Phase(StrEnum):
    """Where a request is. Edges between phases are in `control.state.request_state`."""

    ARRIVED = "arrived"
    QUEUED = "queued"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    RESUME = "resume"
    FINISHED = "finished"
    SHED = "shed"
    EVICTED = "evicted"
    FAILED = "failed"
    CANCELLED = "cancelled"


class FinishReason(StrEnum):
    """Why an engine stopped producing tokens for a leg."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"
    INVALID = "invalid"
    """The request itself is wrong: any engine would end it so. The stop reason says why."""
    REJECTED = "rejected"
    """The engine cannot run it, and has not failed: a retry would end the same. Likewise."""


class LocalOnlyReason(StrEnum):
    """Why one replica must run both phases of a request."""

    PROMPT_LOGPROBS = "prompt_logprobs"
    FAN_OUT = "fan_out"
    MULTIMODAL = "multimodal"
    PROMPT_EMBEDS = "prompt_embeds"
    HANDOFF_FAILED = "handoff_failed"


class Request(Value, kw_only=True):
    """One tokenized generation asked for by a client.

    `payload` is the engine's own encoding of everything the brain need not know (sampling
    parameters, trace headers); it travels unread from the frontend to the engine.
    """

    request_id: str
    prompt_token_ids: TokenIds
    max_tokens: int
    min_tokens: int = 0
    arrived_at_s: float
    priority: int = 0
    session_id: str | None = None
    tenant: str = DEFAULT_TENANT
    """The tenant that asks."""
    slo_class: str | None = None
    """The class that it asks to be served in; None leaves that to rules and to its tenant."""
    cache_salt: str | None = None
    adapter: str | None = None
    """The LoRA adapter over the model that it asks for; None: the model as it is."""
    fan_out_id: str | None = None
    """One for all answers to one prompt that a client asked for at once (n > 1); else None."""
    local_only: LocalOnlyReason | None = None
    """Set when the request must not be disaggregated."""
    resumable: bool = True
    """Whether generation may go on elsewhere after tokens have reached the client."""
    trace: TraceContext | None = None
    """The trace that it belongs to; None where no client traces it."""
    payload: bytes = b""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids and self.local_only is not LocalOnlyReason.PROMPT_EMBEDS:
            raise ValueError(f"request {self.request_id!r} has no prompt tokens")
        if self.max_tokens < 1:
            raise ValueError(
                f"request {self.request_id!r}: max_tokens is {self.max_tokens}, expected at least 1"
            )
