"""Steps that streams wait for, kept shorter than those that only prompts wait for.

Theory of operation: vLLM has one budget of tokens for every step. A large one computes prompts
faster; a stream that runs beside them waits for as long as such a step takes. A pool that decodes
gets a small one, and is slow at prompts when its replicas are asked to prefill: in a flip, or with
prompts that are deflected to idle ones. Here a step has the small budget while anybody decodes, and
all of vLLM's otherwise. Nothing has to be told when roles change, and what decodes on through a
flip keeps its pace.

vLLM's scheduler reads its budget, an attribute, as it begins to choose a step, so it is lowered
around that (`with_decode_budget`). vLLM promises neither; the row `STEP_BUDGET` of `table` looks
before anything is replaced, and an engine that should have had two budgets does not start with one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from baton.runtime.patch import replace_attributes
from baton.runtime.patch_guards import first_incompatibility

if TYPE_CHECKING:
    from collections.abc import Sequence

DECODE_BUDGET_VARIABLE = "BATON_MAX_NUM_BATCHED_TOKENS_WHILE_DECODING"
"""Set in the environment of engine processes that have two budgets: the smaller one."""

_MARK = "_baton_decode_budget"
_BUDGET = "max_num_scheduled_tokens"


class RequestLike(Protocol):
    """What of vLLM's request this needs. Source: vLLM 0.32, v1/request.py."""

    max_tokens: int
    is_prefill_chunk: bool


class SchedulerLike(Protocol):
    """What of vLLM's scheduler this needs. Source: vLLM 0.32, v1/core/sched/scheduler.py."""

    running: Sequence[RequestLike]
    max_num_scheduled_tokens: int


Schedule: TypeAlias = Callable[..., object]


def apply(max_num_batched_tokens_while_decoding: int) -> None:
    """Have the schedulers of this process keep to it. Idempotent."""
    # Only here: a caller that needs the variable's name need not load vLLM's scheduler.
    from vllm.v1.core.sched.scheduler import Scheduler

    if not hasattr(Scheduler.schedule, _MARK):
        schedule = with_decode_budget(Scheduler.schedule, max_num_batched_tokens_while_decoding)
        replace_attributes(Scheduler, schedule=schedule)


def find_incompatibility(scheduler: type, request: type) -> str | None:
    """Why that scheduler's budget cannot be lowered for a step; None where it can."""
    return first_incompatibility(
        (scheduler, "__init__", ("running", _BUDGET)),
        (scheduler, "schedule", ("running", _BUDGET)),
        (request, "__init__", ("max_tokens", "is_prefill_chunk")),
    )


def with_decode_budget(schedule: Schedule, max_num_batched_tokens_while_decoding: int) -> Schedule:
    """`Scheduler.schedule` with a smaller budget while a stream waits for the step."""

    @functools.wraps(schedule)
    def schedule_step(scheduler: SchedulerLike, *args: object, **options: object) -> object:
        whole = scheduler.max_num_scheduled_tokens
        if max_num_batched_tokens_while_decoding >= whole or not any(
            map(is_streaming, scheduler.running)
        ):
            return schedule(scheduler, *args, **options)
        scheduler.max_num_scheduled_tokens = max_num_batched_tokens_while_decoding
        try:
            return schedule(scheduler, *args, **options)
        finally:
            scheduler.max_num_scheduled_tokens = whole

    setattr(schedule_step, _MARK, max_num_batched_tokens_while_decoding)
    return schedule_step


def is_streaming(request: RequestLike) -> bool:
    """Whether somebody waits for a running request's next token.

    Not one that still computes its prompt; nor one that ends with its first token, as those do
    whose blocks another engine will fetch: with steps prepared ahead it runs on for one more.
    """
    return not request.is_prefill_chunk and request.max_tokens > 1


class LimitsLike(Protocol):
    """What of vLLM's scheduler configuration this needs. Source: vLLM 0.32, config/scheduler.py."""

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int


def limits_problem(
    max_num_batched_tokens_while_decoding: int, limits: LimitsLike, *, tokens_per_stream: int = 1
) -> str | None:
    """Why an engine with such limits cannot keep to it; None where it can.

    Streams need `tokens_per_stream` of a step. A prompt that may not be cut would wait for the
    last of them; one whose pieces are bounded lets streams be admitted behind it, which get what
    it leaves.
    """
    subject, min_tokens = (
        f"max_num_batched_tokens_while_decoding is {max_num_batched_tokens_while_decoding}",
        limits.max_num_seqs * tokens_per_stream,
    )
    if max_num_batched_tokens_while_decoding < min_tokens:
        return (
            f"{subject}, expected at least {min_tokens}, {tokens_per_stream} for each of"
            f" max_num_seqs={limits.max_num_seqs} streams: raise it or lower max_num_seqs"
        )
    if max_num_batched_tokens_while_decoding > limits.max_num_batched_tokens:
        max_tokens = limits.max_num_batched_tokens
        return (
            f"{subject}, expected at most max_num_batched_tokens, {max_tokens}: lower it or"
            " raise that"
        )
    if not limits.enable_chunked_prefill:
        return f"{subject}, and enable_chunked_prefill is false: remove one of them from the engine"
    if limits.long_prefill_token_threshold > 0:
        threshold = limits.long_prefill_token_threshold
        return f"{subject}, and long_prefill_token_threshold {threshold}: remove one of them"
    return None


def scheduler_problem(max_num_batched_tokens_while_decoding: int, scheduler: type) -> str | None:
    """Why an engine with that class of scheduler would not keep to it; None where it would."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    why = find_incompatibility(Scheduler, Request)
    if getattr(scheduler, "schedule", None) is not Scheduler.schedule:
        why = f"{scheduler.__name__} chooses steps in its own way"
    return None if why is None else _unsupported_message(max_num_batched_tokens_while_decoding, why)


def _unsupported_message(max_num_batched_tokens_while_decoding: int, why: str) -> str:
    return (
        f"max_num_batched_tokens_while_decoding={max_num_batched_tokens_while_decoding} cannot be"
        f" kept with this vLLM: {why}; remove it from the engine, or install the vLLM that"
        " this release names"
    )
