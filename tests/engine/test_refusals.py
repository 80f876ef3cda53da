"""How an engine process says that a request is wrong, rather than that it has failed."""

from __future__ import annotations

import warnings
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from baton.domain.request import FinishReason

with warnings.catch_warnings():
    # The vendors' modules warn while they are imported.
    warnings.simplefilter("ignore")
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine import FinishReason as EngineFinishReason
    from vllm.v1.engine.core import EngineCoreProc

    from baton.engine.vllm.patches import refusals
    from baton.engine.vllm.wire.codec import EngineCodec


def finish_of(error: BaseException, *, compiling: bool = False) -> tuple[FinishReason, str] | None:
    """What a leg's last output says once the adapter has read what the engine said."""
    reason = refusals.reason_of(error, compiling=compiling)
    said = EngineCoreOutput("l", [], finish_reason=EngineFinishReason.ERROR, stop_reason=reason)
    output = EngineCodec().decode_output(said, prompt_tokens=3)
    if output.finish is FinishReason.ERROR:
        return None
    assert output.finish is not None
    return output.finish, str(output.stop_reason)


@pytest.mark.parametrize(
    ("error", "finish"),
    [
        (ValueError("no such backend"), FinishReason.INVALID),
        (VLLMValidationError("too many"), FinishReason.INVALID),
        (OverflowError("too large"), FinishReason.INVALID),
        (ImportError("no module outlines"), FinishReason.REJECTED),
        (RuntimeError("a bug"), FinishReason.REJECTED),
        (AssertionError(), FinishReason.REJECTED),
        (MemoryError(), None),
        (OSError("disk full"), None),
    ],
)
def test_the_exception_says_whether_the_client_is_at_fault(
    error: Exception, finish: FinishReason | None
) -> None:
    told = finish_of(error)
    assert (told and told[0]) == finish
    if told is not None:
        assert told[1] == (str(error) or type(error).__name__)


@pytest.mark.parametrize("error", [RuntimeError("rule not found"), TimeoutError("too slow")])
def test_every_error_of_a_grammar_compiler_names_the_grammar(error: Exception) -> None:
    assert finish_of(error, compiling=True) == (FinishReason.INVALID, str(error))


def test_only_one_line_is_said_and_not_too_much_of_it() -> None:
    told = finish_of(ValueError("a" * 900 + "\n  at secret.py"))
    assert told == (FinishReason.INVALID, "a" * 300)


@pytest.mark.parametrize("said", [None, 7, "stop", "ERROR"])
def test_an_engines_own_failure_stays_one(said: int | str | None) -> None:
    output = EngineCoreOutput("l", [], finish_reason=EngineFinishReason.ERROR, stop_reason=said)
    assert EngineCodec().decode_output(output, prompt_tokens=3).finish is FinishReason.ERROR


def test_a_stop_string_is_not_taken_for_a_refusal() -> None:
    said = "baton-invalid: x"
    output = EngineCoreOutput("l", [7], finish_reason=EngineFinishReason.STOP, stop_reason=said)
    assert EngineCodec().decode_output(output, prompt_tokens=3).finish is FinishReason.STOP


def test_the_installed_engine_can_say_it() -> None:
    assert refusals.find_incompatibility(EngineCoreProc, Scheduler) is None


def test_an_engine_that_works_in_another_way_is_let_be() -> None:
    class Core:
        def _handle_request_preproc_error(self, request: object) -> None:
            """In another way."""

    assert "does not use" in str(refusals.find_incompatibility(Core, Scheduler))
    assert "has no update_from_output" in str(refusals.find_incompatibility(EngineCoreProc, object))


# ---------------------------------------------------------------------- in an engine process


def core() -> SimpleNamespace:
    """As much of an engine as its method looks at."""
    return SimpleNamespace(output_queue=SimpleQueue(), sent=[])


def prepare(engine: SimpleNamespace, error: Exception) -> None:
    def ended(request_id: str, reason: str) -> tuple[str, str]:
        return request_id, reason

    def vllms_own(engine: SimpleNamespace, request: SimpleNamespace) -> None:
        engine.sent.append(request.request_id)

    told = refusals.wrap_preprocess_error(vllms_own, ended)
    try:
        raise error
    except type(error):
        told(engine, SimpleNamespace(request_id="r", client_index=4))


def test_a_failed_preparation_is_reported_to_the_client_that_asked() -> None:
    engine = core()
    prepare(engine, ValueError("no such backend"))
    assert engine.output_queue.get_nowait() == (4, ("r", "baton-invalid: no such backend"))
    assert engine.sent == []


def test_an_error_that_another_engine_may_not_have_ends_the_leg_as_before() -> None:
    engine = core()
    prepare(engine, MemoryError())
    assert (engine.sent, engine.output_queue.empty()) == (["r"], True)


def test_of_those_whose_grammars_do_not_compile_it_is_said_and_of_no_others() -> None:
    def vllms_own(scheduler: SimpleNamespace) -> dict[int, SimpleNamespace]:
        outputs = [EngineCoreOutput(i, [], finish_reason=EngineFinishReason.ERROR) for i in "abc"]
        scheduler.grammar_compile_error_reqs.clear()
        scheduler.requests.clear()
        return {0: SimpleNamespace(outputs=outputs)}

    def asked(grammar: object) -> SimpleNamespace:
        return SimpleNamespace(structured_output_request=SimpleNamespace(grammar=grammar))

    scheduler = SimpleNamespace(
        grammar_compile_error_reqs={"a", "c"},
        requests={"a": asked(RuntimeError("no rule root")), "b": asked(None), "c": asked(None)},
    )
    told = refusals.wrap_grammar_errors(vllms_own)(scheduler)
    said = {output.request_id: output.stop_reason for output in told[0].outputs}
    assert said == {"a": "baton-invalid: no rule root", "b": None, "c": None}


def test_a_step_without_any_is_vllms_own() -> None:
    scheduler = SimpleNamespace(grammar_compile_error_reqs=set(), requests=None)
    assert refusals.wrap_grammar_errors(lambda _scheduler: "as ever")(scheduler) == "as ever"
