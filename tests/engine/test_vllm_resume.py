"""A leg that goes on elsewhere, on vLLM's own objects: what was generated counts as output."""

from __future__ import annotations

import string
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    import torch
    import xgrammar
    from vllm.sampling_params import (
        RepetitionDetectionParams,
        SamplingParams,
        StructuredOutputsParams,
    )
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.worker_base import WorkerBase

    from baton.engine.vllm.patches import resume_patch as resume
    from baton.engine.vllm.patches import table
    from baton.engine.vllm.patches.connector import NixlConnector
    from baton.engine.vllm.patches.engine_reports import query_resume_support
    from baton.engine.vllm.wire import keys

PROMPT = [5, 6, 7]
OUTPUT = [8, 9]
VOCABULARY = [*string.ascii_lowercase, "</s>"]


@pytest.fixture(autouse=True)
def sampler_of_this_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for CUDA draws on GPUs as torch does, and has no operation for draws on CPUs."""
    if not hasattr(torch.ops._C, "fused_gumbel_argmax"):
        monkeypatch.setattr(TopKTopPSampler, "forward_cpu", TopKTopPSampler.forward_native)


def taken_up(
    *,
    output: list[int] = OUTPUT,
    pull: dict[str, object] | None = None,
    **sampling: Any,  # noqa: ANN401
) -> Request:
    extra: dict[str, object] = {"custom": 1}
    if output:
        extra[keys.RESUMED_TOKENS_ARG] = len(output)
    if pull:
        extra["kv_transfer_params"] = pull
    params = SamplingParams(extra_args=extra, **({"max_tokens": 9} | sampling))
    request = Request.from_engine_core_request(
        EngineCoreRequest("leg", PROMPT + output, None, params, None, 0.0, None, None, None), None
    )
    resume.restore(request)
    return request


def state_of(request: Request) -> CachedRequestState:
    params = request.sampling_params
    generator = None if params.seed is None else torch.Generator().manual_seed(params.seed)
    state = CachedRequestState(
        req_id="leg",
        prompt_token_ids=request.prompt_token_ids,
        mm_features=[],
        sampling_params=params,
        generator=generator,
        block_ids=([],),
        num_computed_tokens=0,
        output_token_ids=[],
    )
    resume.restore_state(state)
    return state


def test_everything_fits_this_vllm() -> None:
    assert table.RESUME.find_incompatibility() is None


# ------------------------------------------------------------------ scheduler
def test_tokens_generated_elsewhere_are_output_and_no_prompt() -> None:
    request = taken_up()
    assert (request.prompt_token_ids, list(request.output_token_ids)) == (PROMPT, OUTPUT)
    assert list(request.all_token_ids) == PROMPT + OUTPUT
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (3, 2, 5)
    assert request.prefill_stats is None


def test_a_request_that_is_not_resumed_is_left_alone() -> None:
    request = taken_up(output=[])
    assert (request.num_prompt_tokens, request.num_output_tokens) == (3, 0)
    assert request.prefill_stats is not None
    assert request.sampling_params.extra_args == {"custom": 1}
    assert state_of(request).output_token_ids == []


@pytest.mark.parametrize(("max_tokens", "stops"), [(3, True), (4, False)])
def test_max_tokens_counts_what_was_generated_before(max_tokens: int, *, stops: bool) -> None:
    request = taken_up(max_tokens=max_tokens)
    request.append_output_token_ids(10)
    assert check_stop(request, 100) is stops


def test_a_repetition_is_found_across_the_break() -> None:
    detection = RepetitionDetectionParams(max_pattern_size=2, min_count=2)
    request = taken_up(repetition_detection=detection)
    request.append_output_token_ids(8)
    assert not check_stop(request, 100)
    request.append_output_token_ids(9)
    assert check_stop(request, 100)
    assert request.status is RequestStatus.FINISHED_REPETITION


def test_a_pull_brings_what_was_generated_too() -> None:
    request = taken_up(pull={"do_remote_prefill": True, "baton_prefix_tokens": 5})
    bare = object.__new__(NixlConnector)
    bare.connector_scheduler = cast("Any", SimpleNamespace(can_pull=lambda: True))
    assert bare.get_num_new_matched_tokens(request, 1) == (4, True)


def test_a_request_that_waits_for_its_turn_to_pull_is_asked_about_again() -> None:
    request = taken_up(pull={"do_remote_prefill": True, "baton_prefix_tokens": 5})
    bare = object.__new__(NixlConnector)
    bare.connector_scheduler = cast("Any", SimpleNamespace(can_pull=lambda: False))
    assert bare.get_num_new_matched_tokens(request, 1) == (None, False)
    assert bare.get_num_new_matched_tokens(request, 5) == (0, False)  # nothing is to be pulled


# ------------------------------------------------------------------ grammars
def grammar_of(regex: str) -> XgrammarGrammar:
    info = xgrammar.TokenizerInfo(
        VOCABULARY, vocab_size=len(VOCABULARY), stop_token_ids=[len(VOCABULARY) - 1]
    )
    compiled = xgrammar.GrammarCompiler(info).compile_regex(regex)
    return XgrammarGrammar(
        matcher=xgrammar.GrammarMatcher(compiled), vocab_size=len(VOCABULARY), ctx=compiled
    )


def manager(*, reasoner: object = None) -> StructuredOutputManager:
    made = object.__new__(StructuredOutputManager)
    made.reasoner_cls = reasoner
    made.enable_in_reasoning = False
    return made


def guided(text: str) -> Request:
    ids = [VOCABULARY.index(letter) for letter in text]
    return taken_up(output=ids, structured_outputs=StructuredOutputsParams(regex="ab[cd]e"))


def allowed_next(grammar: XgrammarGrammar) -> set[str]:
    mask = xgrammar.allocate_token_bitmask(1, len(VOCABULARY))
    grammar.fill_bitmask(mask, 0)
    bits = int(mask[0, 0])
    return {word for index, word in enumerate(VOCABULARY) if bits >> index & 1}


@pytest.mark.parametrize(("before", "after"), [("a", {"b"}), ("ab", {"c", "d"}), ("abc", {"e"})])
def test_a_grammar_goes_on_where_it_was(before: str, after: set[str]) -> None:
    request, grammar = guided(before), grammar_of("ab[cd]e")
    resume.advance_grammar(manager(), request, grammar)
    assert allowed_next(grammar) == after
    assert request.structured_output_request.reasoning_ended


def test_a_grammar_of_a_request_that_is_not_resumed_reads_nothing() -> None:
    grammar = grammar_of("ab[cd]e")
    resume.advance_grammar(manager(), guided(""), grammar)
    assert allowed_next(grammar) == {"a"}


def test_tokens_that_are_none_of_the_grammars_are_an_error() -> None:
    with pytest.raises(ValueError, match="leg: its grammar does not accept the 2 tokens"):
        resume.advance_grammar(manager(), guided("ax"), grammar_of("ab[cd]e"))


class Reasoner:
    """Reasons until the first `z`."""

    def __init__(self, tokenizer: object) -> None:
        self._end = VOCABULARY.index("z")

    def is_reasoning_end(self, ids: list[int]) -> bool:
        return self._end in ids

    def is_reasoning_end_streaming(self, ids: object, delta: list[int]) -> bool:
        return self._end in delta


@pytest.mark.parametrize(
    ("before", "after"), [("xy", {"a"}), ("xyz", {"a"}), ("xza", {"b"}), ("zabd", {"e"})]
)
def test_a_grammar_reads_only_what_came_after_the_reasoning(before: str, after: set[str]) -> None:
    one = manager(reasoner=Reasoner)
    one.tokenizer = None
    request, grammar = guided(before), grammar_of("ab[cd]e")
    resume.advance_grammar(one, request, grammar)
    assert allowed_next(grammar) == after
    assert request.structured_output_request.reasoning_ended is ("z" in before)


# ------------------------------------------------------------------ worker
def test_a_workers_state_begins_with_the_output() -> None:
    state = state_of(taken_up())
    assert (state.num_prompt_tokens, state.output_token_ids, state.num_tokens) == (3, OUTPUT, 5)
    assert state.generator is None


@pytest.mark.parametrize("fp64", [False, True])
def test_a_seed_goes_on_with_the_draws_that_come_next(*, fp64: bool) -> None:
    logits = torch.zeros(1, 997)  # all alike: the draw alone decides
    whole = torch.Generator().manual_seed(3)
    sampler = TopKTopPSampler(use_fp64_gumbel=fp64)

    def sample(forward: Any, generator: torch.Generator) -> int:  # noqa: ANN401
        ids, _ = forward(logits.clone(), {0: generator}, None, None)
        return int(ids[0])

    unbroken = [sample(sampler.forward, whole) for _ in range(6)]
    generator = state_of(taken_up(seed=3)).generator
    forward = resume.replay_pending_first(sampler.forward)
    assert [sample(forward, generator) for _ in range(4)] == unbroken[2:]
    assert len(set(unbroken)) > 3, "a sampler that always says the same proves nothing"


@pytest.mark.parametrize("before", [[], OUTPUT])
def test_a_draw_for_a_prompt_that_is_not_complete_is_undone(before: list[int]) -> None:
    logits = torch.zeros(1, 997)
    forward = resume.replay_pending_first(TopKTopPSampler().forward)

    def draws(*, parts: int) -> list[int]:
        generator = state_of(taken_up(seed=3, output=before)).generator
        drawn = []
        for n in range(parts + 4):
            drawn.append(int(forward(logits.clone(), {0: generator}, None, None)[0][0]))
            if n < parts:  # as vLLM does with what it draws for a part of a prompt
                generator.set_offset(generator.get_offset() - 4)
        return drawn[parts:]

    assert draws(parts=3) == draws(parts=0)


def test_draws_are_made_up_at_once_where_a_generator_is_a_counter() -> None:
    drawn: list[int] = []
    generator = Counter()
    generator.pending_draws = 5

    def draw(_logits: object, generators: dict[int, Counter], *_: object) -> None:
        drawn.append(generators[0].at)
        generators[0].at += 4

    forward = resume.replay_pending_first(draw)
    forward(torch.zeros(1, 9), {0: generator}, None, None)
    forward(torch.zeros(1, 9), {0: generator}, None, None)
    assert drawn == [0, 20, 24]


class Counter(resume.ReplayableGenerator):
    """A generator as on a GPU."""

    at = 0
    is_counter_based = True

    def get_offset(self) -> int:
        return self.at

    def set_offset(self, offset: int) -> None:
        self.at = offset


def test_pending_draws_are_replayed_for_their_row_only() -> None:
    owing = state_of(taken_up(seed=3)).generator
    other = torch.Generator().manual_seed(4)
    untouched = other.get_state()
    rows: list[tuple[list[float], list[int]]] = []

    def draw(logits: torch.Tensor, generators: dict[int, torch.Generator], *_: object) -> None:
        rows.append((logits[:, 0].tolist(), list(generators)))

    logits = torch.arange(3.0).reshape(3, 1)
    resume.replay_pending_first(draw)(logits, {0: other, 2: owing}, None, None)
    assert rows == [([2.0], [0]), ([2.0], [0]), ([0.0, 1.0, 2.0], [0, 2])]
    assert torch.equal(other.get_state(), untouched)
    assert owing.pending_draws == 0


# ------------------------------------------------------------------ installing
@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for owner, name in (
        (Request, "from_engine_core_request"),
        (StructuredOutputManager, "_create_grammar"),
        (CachedRequestState, "__post_init__"),
        (TopKTopPSampler, "__init__"),
    ):
        monkeypatch.setattr(owner, name, owner.__dict__[name])  # put back afterwards
    assert table.RESUME.install()
    assert table.RESUME.install()
    yield
    for name in (keys.RESUME_SUPPORT_CALL, resume._MARK):
        delattr(WorkerBase, name)


@pytest.mark.usefixtures("installed")
def test_an_engine_resumes_legs_that_come_by_vllms_own_api() -> None:
    params = SamplingParams(seed=3, max_tokens=9, extra_args={keys.RESUMED_TOKENS_ARG: 2})
    request = Request.from_engine_core_request(
        EngineCoreRequest("leg", PROMPT + OUTPUT, None, params, None, 0.0, None, None, None), None
    )
    assert list(request.output_token_ids) == OUTPUT
    state = CachedRequestState("leg", PROMPT, [], params, torch.Generator(), ([],), 0, [])
    assert state.output_token_ids == OUTPUT
    assert isinstance(state.generator, resume.ReplayableGenerator)
    TopKTopPSampler().forward(torch.zeros(1, 9), {0: state.generator}, None, None)
    assert state.generator.pending_draws == 0
    assert WorkerBase.baton_takes_up(object())


class Core:
    """vLLM's client, as far as it is asked here."""

    def __init__(self, answer: object) -> None:
        self._answer = answer
        self.asked: list[str] = []

    async def call_utility_async(self, method: str, *_: object) -> object:
        self.asked.append(method)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    ("answer", "takes_up"),
    [(True, True), (False, False), (None, False), (Exception("no such method"), False)],
)
async def test_an_engine_that_does_not_say_so_does_not_take_up(
    answer: object, *, takes_up: bool
) -> None:
    core = Core(answer)
    assert await query_resume_support(core) is takes_up
    assert core.asked == [keys.RESUME_SUPPORT_CALL]


@pytest.mark.parametrize(
    ("owner", "name", "changed"),
    [
        (StructuredOutputManager, "_create_grammar", lambda _self, _request, _more: None),
        (TopKTopPSampler, "forward_native", lambda _self, _logits: None),
        (CachedRequestState, "get_token_id", lambda _self, _index: -1),
        (Request, "num_output_tokens", 0),
    ],
)
def test_a_vllm_that_does_not_fit_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, changed: object
) -> None:
    before = Request.__dict__["from_engine_core_request"]
    monkeypatch.setattr(owner, name, changed)
    assert not table.RESUME.install()
    assert Request.__dict__["from_engine_core_request"] is before
    assert not hasattr(WorkerBase, keys.RESUME_SUPPORT_CALL)
