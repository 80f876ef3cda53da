"""Requests that EngineCore itself finds to be wrong, told from those that it failed at.

Theory of operation: vLLM ends a request whose parameters it cannot prepare, or whose grammar does
not compile, with the very word that it has for its own failures, and keeps the reason in its log.
Each other engine would do the same. So in engine processes of ours, where vLLM still has the
exception in hand, the last output says what it was, in its stop reason, which has no use there:

- `EngineCoreProc._handle_request_preproc_error` is called while the exception is handled;
- `Scheduler.update_from_output` ends those whose grammars did not compile, which it has by id.

What the exception is says whose fault it was (`reason_of`). vLLM promises none of this; `misfit`
looks before anything is replaced. Without it such requests are tried again elsewhere, within the
bounds that hold for failures.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

from vllm.exceptions import VLLMClientError

from baton.domain.request import FinishReason
from baton.engine.vllm.patches.step_budget import first_misfit

_MARKS = {
    FinishReason.INVALID: "baton-invalid: ",
    FinishReason.REFUSED: "baton-refused: ",
}
_PASSING = (MemoryError, OSError)
"""Of the machine, at that moment: another engine may do better."""
_REQUESTS_FAULT = (VLLMClientError, ValueError, OverflowError, TimeoutError)
"""What is raised for what somebody asked for; to compile a grammar may take too long."""
_MAX_WHY_CHARS = 300
_DONE = "_baton_says_why"

Method: TypeAlias = Callable[..., Any]


def reason_of(error: BaseException, *, compiling: bool = False) -> str | None:
    """What an output says of an exception; None where another engine may well do better.

    While a grammar is compiled, compilers raise whatever they like for what is wrong with it.
    """
    if isinstance(error, _PASSING) and not isinstance(error, TimeoutError):
        return None
    own = compiling or isinstance(error, _REQUESTS_FAULT)
    mark = _MARKS[FinishReason.INVALID if own else FinishReason.REFUSED]
    return mark + first_line(error)


def first_line(error: BaseException) -> str:
    """What an exception says, in one line that fits into an answer."""
    said = str(error).strip().partition("\n")[0] or type(error).__name__
    return said[:_MAX_WHY_CHARS]


def refusal(stop_reason: object) -> tuple[FinishReason, str] | None:
    """Which end a stop reason tells of, and why; None for any other."""
    if isinstance(stop_reason, str):
        for finish, mark in _MARKS.items():
            if stop_reason.startswith(mark):
                return finish, stop_reason.removeprefix(mark)
    return None


def install() -> str | None:
    """Have the engine of this process say why; returns why it cannot. Twice does no more."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine import FinishReason as EngineFinishReason
    from vllm.v1.engine.core import EngineCoreProc

    why = misfit(EngineCoreProc, Scheduler)
    if why is not None or hasattr(Scheduler.update_from_output, _DONE):
        return why

    def ended(request_id: str, reason: str) -> Any:  # noqa: ANN401 - vllm is not followed
        output = EngineCoreOutput(
            request_id, [], finish_reason=EngineFinishReason.ERROR, stop_reason=reason
        )
        return EngineCoreOutputs(finished_requests={request_id}, outputs=[output])

    EngineCoreProc._handle_request_preproc_error = telling_preparation(  # noqa: SLF001 - see above
        EngineCoreProc._handle_request_preproc_error,  # noqa: SLF001 - see above
        ended,
    )
    Scheduler.update_from_output = telling_grammars(Scheduler.update_from_output)
    return None


def misfit(core: type, scheduler: type) -> str | None:
    """Why vLLM's methods are not as they were when this was written; None where they are."""
    return first_misfit(
        (core, "_handle_request_preproc_error", ("_send_error_outputs_to_client",)),
        (scheduler, "update_from_output", ("grammar_compile_error_reqs", "finish_requests")),
    )


def telling_preparation(method: Method, ended: Callable[[str, str], Any]) -> Method:
    """`EngineCoreProc._handle_request_preproc_error` that says why; `ended` makes the message."""

    @functools.wraps(method)
    def told(core: Any, request: Any) -> None:  # noqa: ANN401 - vllm is not followed
        error = sys.exc_info()[1]
        reason = None if error is None else reason_of(error)
        if reason is None:
            method(core, request)
            return
        core.output_queue.put_nowait((request.client_index, ended(request.request_id, reason)))

    return told


def telling_grammars(method: Method) -> Method:
    """`Scheduler.update_from_output` that says why grammars did not compile."""

    @functools.wraps(method)
    def told(scheduler: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - vllm is not followed
        wrong = scheduler.grammar_compile_error_reqs
        if not wrong:
            return method(scheduler, *args, **options)
        reasons = {request_id: _of_grammar(scheduler, request_id) for request_id in wrong}
        by_client = method(scheduler, *args, **options)
        for outputs in by_client.values():
            for output in outputs.outputs:
                if (reason := reasons.get(output.request_id)) is not None:
                    output.stop_reason = reason
        return by_client

    setattr(told, _DONE, True)
    return told


def _of_grammar(scheduler: Any, request_id: str) -> str | None:  # noqa: ANN401 - vllm is not followed
    asked = getattr(scheduler.requests.get(request_id), "structured_output_request", None)
    error = getattr(asked, "grammar", None)
    return reason_of(error, compiling=True) if isinstance(error, Exception) else None
