"""Requests that EngineCore itself finds invalid, distinguished from its own failures.

Theory of operation: vLLM ends a request with invalid parameters, or with a grammar that does not
compile, like its own failures, and keeps the reason in its log. Each other engine would do the
same. So in baton's engine processes, while vLLM still has the exception, the last output gets the
reason as its stop reason, which has no other use there:

- `EngineCoreProc._handle_request_preproc_error` is called while the exception is handled;
- `Scheduler.update_from_output` ends requests whose grammars did not compile, which it has by id.

The exception tells whose fault it was (`reason_of`). These are private names of vLLM, so
`find_incompatibility` checks them first (row `REFUSALS` of `table`). Without the patch, such
requests are retried elsewhere, within the limits for failures.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

from vllm.exceptions import VLLMClientError

from baton.domain.request import FinishReason
from baton.engine.vllm.wire.keys import STOP_REASON_MARKS
from baton.runtime.patch import wrap_attribute
from baton.runtime.patch_guards import first_incompatibility

_TRANSIENT_ERRORS = (MemoryError, OSError)
"""Of the machine, at that moment: another engine may succeed."""
_REQUEST_ERRORS = (VLLMClientError, ValueError, OverflowError, TimeoutError)
"""Errors that a request causes; the compilation of a grammar may also time out."""
_MAX_REASON_CHARS = 300
_INSTALLED_MARK = "_baton_says_why"

Method: TypeAlias = Callable[..., Any]


def reason_of(error: BaseException, *, compiling: bool = False) -> str | None:
    """The stop reason for an exception; None where another engine may well succeed.

    With `compiling`, any exception is the request's fault: compilers of grammars raise various
    types.
    """
    if isinstance(error, _TRANSIENT_ERRORS) and not isinstance(error, TimeoutError):
        return None
    is_request_error = compiling or isinstance(error, _REQUEST_ERRORS)
    mark = STOP_REASON_MARKS[FinishReason.INVALID if is_request_error else FinishReason.REJECTED]
    return mark + first_line(error)


def first_line(error: BaseException) -> str:
    """An exception's text, in one line that fits into an answer."""
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return line[:_MAX_REASON_CHARS]


def apply() -> None:
    """Have the engine of this process report reasons. Idempotent."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine import FinishReason as EngineFinishReason
    from vllm.v1.engine.core import EngineCoreProc

    if hasattr(Scheduler.update_from_output, _INSTALLED_MARK):
        return

    def make_error_outputs(request_id: str, reason: str) -> Any:  # noqa: ANN401 - vllm is not followed
        output = EngineCoreOutput(
            request_id, [], finish_reason=EngineFinishReason.ERROR, stop_reason=reason
        )
        return EngineCoreOutputs(finished_requests={request_id}, outputs=[output])

    wrap_attribute(
        EngineCoreProc,
        "_handle_request_preproc_error",
        lambda method: wrap_preprocess_error(method, make_error_outputs),
    )
    wrap_attribute(Scheduler, "update_from_output", wrap_grammar_errors)


def find_incompatibility(core: type, scheduler: type) -> str | None:
    """Why vLLM's methods have changed, or None."""
    return first_incompatibility(
        (core, "_handle_request_preproc_error", ("_send_error_outputs_to_client",)),
        (scheduler, "update_from_output", ("grammar_compile_error_reqs", "finish_requests")),
    )


def wrap_preprocess_error(method: Method, make_error_outputs: Callable[[str, str], Any]) -> Method:
    """`EngineCoreProc._handle_request_preproc_error` with a reason.

    `make_error_outputs` makes the message.
    """

    @functools.wraps(method)
    def wrapped(core: Any, request: Any) -> None:  # noqa: ANN401 - vllm is not followed
        error = sys.exc_info()[1]
        reason = None if error is None else reason_of(error)
        if reason is None:
            method(core, request)
            return
        core.output_queue.put_nowait(
            (request.client_index, make_error_outputs(request.request_id, reason))
        )

    return wrapped


def wrap_grammar_errors(method: Method) -> Method:
    """`Scheduler.update_from_output` with reasons of grammars that did not compile."""

    @functools.wraps(method)
    def wrapped(scheduler: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - vllm is not followed
        wrong = scheduler.grammar_compile_error_reqs
        if not wrong:
            return method(scheduler, *args, **options)
        reasons = {request_id: _grammar_reason(scheduler, request_id) for request_id in wrong}
        by_client = method(scheduler, *args, **options)
        for outputs in by_client.values():
            for output in outputs.outputs:
                if (reason := reasons.get(output.request_id)) is not None:
                    output.stop_reason = reason
        return by_client

    setattr(wrapped, _INSTALLED_MARK, True)
    return wrapped


def _grammar_reason(scheduler: Any, request_id: str) -> str | None:  # noqa: ANN401 - vllm is not followed
    grammar_request = getattr(scheduler.requests.get(request_id), "structured_output_request", None)
    error = getattr(grammar_request, "grammar", None)
    return reason_of(error, compiling=True) if isinstance(error, Exception) else None
