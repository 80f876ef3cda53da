"""A smaller token budget for steps that streams wait for.

Theory of operation: vLLM has a token budget for every step. A large one computes prompts faster,
but a stream beside them waits for the whole step. A decode pool gets a small budget, and is slow at
prompts after a role change or for prompts that are deflected to idle replicas. Here a step has the
small budget while any request decodes, and vLLM's budget otherwise. Role changes need no notice,
and streams that outlive one keep their pace.

vLLM's scheduler reads its budget, an attribute, when it begins to choose a step, so
`with_decode_budget` lowers it around that. The row `STEP_BUDGET` of `table` checks these private
names, and an engine whose second budget cannot work does not start.
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
"""In the environment of engine processes with two budgets: the smaller one."""

_MARK = "_baton_decode_budget"
_BUDGET = "max_num_scheduled_tokens"


class RequestLike(Protocol):
    """The part of vLLM's request that this needs. Source: vLLM 0.32, v1/request.py."""

    max_tokens: int
    is_prefill_chunk: bool


class SchedulerLike(Protocol):
    """The part of its scheduler that this needs. Source: vLLM 0.32, v1/core/sched/scheduler.py."""

    running: Sequence[RequestLike]
    max_num_scheduled_tokens: int


Schedule: TypeAlias = Callable[..., object]


def apply(max_num_batched_tokens_while_decoding: int) -> None:
    """Have the schedulers of this process keep to it. Idempotent."""
    # Only here: a caller that needs only the variable's name does not load vLLM's scheduler.
    from vllm.v1.core.sched.scheduler import Scheduler

    if not hasattr(Scheduler.schedule, _MARK):
        schedule = with_decode_budget(Scheduler.schedule, max_num_batched_tokens_while_decoding)
        replace_attributes(Scheduler, schedule=schedule)


def find_incompatibility(scheduler: type, request: type) -> str | None:
    """Why that scheduler's budget cannot be lowered for a step, or None."""
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
    """Whether a stream waits for a running request's next token.

    Not while it computes its prompt. Nor if it ends with its first token, like a prefill leg: with
    asynchronous scheduling it runs for one more step.
    """
    return not request.is_prefill_chunk and request.max_tokens > 1


class LimitsLike(Protocol):
    """The part of vLLM's scheduler configuration that this needs.

    Source: vLLM 0.32, config/scheduler.py.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int


def limits_problem(
    max_num_batched_tokens_while_decoding: int, limits: LimitsLike, *, tokens_per_stream: int = 1
) -> str | None:
    """Why an engine with such limits cannot keep to the budget, or None.

    Streams need `tokens_per_stream` of a step. Without chunked prefill a prompt would wait for the
    last stream. With bounded chunks, streams admitted behind a prompt get the rest of the budget.
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
    """Why an engine with that class of scheduler would not keep to the budget, or None."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    reason = find_incompatibility(Scheduler, Request)
    if getattr(scheduler, "schedule", None) is not Scheduler.schedule:
        reason = f"{scheduler.__name__} chooses steps in its own way"
    return (
        None
        if reason is None
        else _unsupported_message(max_num_batched_tokens_while_decoding, reason)
    )


def _unsupported_message(max_num_batched_tokens_while_decoding: int, reason: str) -> str:
    return (
        f"max_num_batched_tokens_while_decoding={max_num_batched_tokens_while_decoding} cannot be"
        f" kept with this vLLM: {reason}; remove it from the engine, or install the vLLM that"
        " this release names"
    )
