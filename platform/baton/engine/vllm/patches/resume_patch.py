"""Resume in a vLLM engine: a resumed leg keeps all its sampling state.

Theory of operation: a resumed leg has tokens that were generated elsewhere at the end of its
prompt, and `RESUMED_TOKENS_ARG` says how many. vLLM has no request that arrives with output, but it
has preempted requests, which continue with output. So `apply`, which runs in each process of an
engine before its first request (see `plugin`), makes the former into the latter:

- the scheduler's request gets those ids as its output (`restore`); length bounds, stop tokens,
  repetition detection and the KV cache then use them;
- its grammar reads them when it is compiled (`advance_grammar`);
- the model runner's state gets them as its output, for penalties, bad words and `min_tokens`.
  vLLM's newer runner does this by itself, and derives a seed's draws from positions;
- a seed's generator draws once for each of them, by the sampler's own code, before it draws for the
  first new token (`ReplayableGenerator`).

These are private names of vLLM. `find_incompatibility` first tries them on vLLM's own objects; if
something does not fit, nothing is replaced and the engine reports no support
(`RESUME_SUPPORT_CALL`). Requests that are not resumed stay unchanged, with one exception. When a
prompt is computed in parts, vLLM undoes a draw after each part. Generators on a CPU cannot, and the
engine dies. Resumes make such prompts likely, so these generators can.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.worker_base import WorkerBase

from baton.engine.vllm.wire.keys import (
    RESUME_SUPPORT_CALL,
    RESUMED_IDS_ARG,
    RESUMED_TOKENS_ARG,
)
from baton.runtime.patch import replace_attributes

_ENGINE_CORE = "vllm.v1.engine.core"
_MARK = "_baton_takes_up"
_SHAPES: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (Request, "from_engine_core_request", ("request", "block_hasher")),
    (StructuredOutputManager, "_create_grammar", ("self", "request")),
    (
        StructuredOutputManager,
        "_get_constraint_bounds",
        ("self", "request", "spec_tokens", "spec_tokens_committed"),
    ),
    (StructuredOutputGrammar, "accept_tokens", ("self", "request_id", "tokens")),
    (TopKTopPSampler, "forward_native", ("self", "logits", "generators", "k", "p")),
)
"""Methods that this replaces or calls, and their parameters. Source: vLLM 0.32."""

Draw: TypeAlias = Callable[..., Any]
"""A sampler's `forward`: logits, generators by row, top k, top p."""


class ReplayableGenerator(torch.Generator):  # type: ignore[misc]  # torch is not followed
    """A seed's generator with pending draws, whose last draw can be undone on a CPU, too."""

    pending_draws = 0
    """One for each token that was generated elsewhere."""
    _previous_state: torch.Tensor | None = None
    """Before its last draw; on a CPU only."""

    @classmethod
    def copy_of(cls, generator: torch.Generator, *, pending_draws: int) -> ReplayableGenerator:
        """Make a generator in the state of another."""
        copy = cls(device=generator.device)
        copy.set_state(generator.get_state())
        copy.pending_draws = pending_draws
        return copy

    @property
    def is_counter_based(self) -> bool:
        """Whether each draw for a row advances a counter by the same, as on a GPU."""
        return bool(self.device.type != "cpu")

    def save_before_draw(self) -> None:
        """Save the state for an undo."""
        if not self.is_counter_based:
            self._previous_state = self.get_state()

    def get_offset(self) -> int:
        """The counter; on a CPU always 0, so that any lower offset undoes a draw."""
        return int(super().get_offset()) if self.is_counter_based else 0

    def set_offset(self, offset: int) -> None:
        """Set the counter; on a CPU, undo the last draw."""
        if self.is_counter_based:
            super().set_offset(offset)
        elif self._previous_state is not None:
            self.set_state(self._previous_state)


# ------------------------------------------------------------------ scheduler
def restore(request: Request) -> None:
    """Make the last tokens of a resumed leg's prompt its output; other requests stay unchanged."""
    extra = request.sampling_params and request.sampling_params.extra_args
    count = extra.pop(RESUMED_TOKENS_ARG, 0) if extra else 0
    if not count:
        return
    tokens = request.prompt_token_ids
    request.prompt_token_ids, output = tokens[:-count], tokens[-count:]
    request.num_prompt_tokens = len(request.prompt_token_ids)
    request._output_token_ids.extend(output)  # noqa: SLF001 - as its constructor fills it
    # vLLM asserts that a new request has no more cached tokens than its prompt; here, output may
    # be.
    request.prefill_stats = None
    extra[RESUMED_IDS_ARG] = output


def advance_grammar(
    manager: StructuredOutputManager, request: Request, grammar: StructuredOutputGrammar
) -> None:
    """Have a grammar read the tokens that were generated elsewhere, from where it applies.

    As `StructuredOutputManager.accept_tokens` does for the tokens of a step.

    Raises:
        ValueError: the grammar does not accept them; the request then ends in an error.
    """
    tokens = resumed_ids(request.sampling_params)
    if not tokens:
        return
    constraint_start, _ = manager._get_constraint_bounds(  # noqa: SLF001 - as the manager itself does
        request, tokens, spec_tokens_committed=True
    )
    if constraint_start > len(tokens):
        return  # the model is still reasoning
    request.structured_output_request.reasoning_ended = True
    if not grammar.accept_tokens(request.request_id, tokens[constraint_start:]):
        raise ValueError(
            f"request {request.request_id}: its grammar does not accept the {len(tokens)} tokens"
            " that were generated before it was resumed"
        )


def resumed_ids(params: SamplingParams | None) -> list[int]:
    """The tokens of a resumed request that were generated elsewhere."""
    extra = None if params is None else params.extra_args
    ids: list[int] = extra.get(RESUMED_IDS_ARG, []) if extra else []
    return ids


# ------------------------------------------------------------------ worker
def restore_state(state: CachedRequestState) -> None:
    """Give a worker's new state the output that its request came with."""
    tokens = [] if state.output_token_ids else resumed_ids(state.sampling_params)
    state.output_token_ids.extend(tokens)
    generator = state.generator
    if generator is not None and (tokens or generator.device.type == "cpu"):
        state.generator = ReplayableGenerator.copy_of(generator, pending_draws=len(tokens))


def replay_pending_first(draw: Draw) -> Draw:
    """A sampler's `forward` that first replays its generators' pending draws."""

    @functools.wraps(draw)
    def replay_and_draw(
        logits: torch.Tensor,
        generators: Mapping[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> Any:  # noqa: ANN401 - vLLM's own, passed on
        for row, generator in generators.items():
            if not isinstance(generator, ReplayableGenerator):
                continue
            if generator.pending_draws:
                _replay_pending(draw, logits[row : row + 1], generator)
            generator.save_before_draw()
        return draw(logits, generators, k, p)

    return replay_and_draw


def _replay_pending(draw: Draw, logits: torch.Tensor, generator: ReplayableGenerator) -> None:
    """Make the pending draws, and discard them."""

    def draw_once() -> None:
        draw(logits.clone(), {0: generator}, None, None)

    pending_draws, generator.pending_draws = generator.pending_draws, 0
    if not generator.is_counter_based:
        for _ in range(pending_draws):
            draw_once()
        return
    offset_before = generator.get_offset()
    draw_once()
    step = generator.get_offset() - offset_before
    generator.set_offset(offset_before + pending_draws * step)


# ------------------------------------------------------------------ installing
def find_incompatibility() -> str | None:
    """How the installed vLLM differs from the expected one, or None."""
    try:
        for owner, name, expected in _SHAPES:
            parameters = tuple(inspect.signature(getattr(owner, name)).parameters)
            if parameters != expected:
                return f"{owner.__name__}.{name} takes {parameters}, expected {expected}"
        if "prefill_token_ids" not in NewRequestData.__dataclass_fields__:
            return "NewRequestData has no prefill_token_ids"
        return _try_restore()
    except (AttributeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _try_restore() -> str | None:
    params = SamplingParams(seed=1, max_tokens=9, extra_args={RESUMED_TOKENS_ARG: 2})
    request = Request.from_engine_core_request(
        EngineCoreRequest("", [5, 6, 7, 8, 9], None, params, None, 0.0, None, None, None), None
    )
    if not hasattr(request, "prefill_stats"):
        return "Request has no prefill_stats"
    restore(request)
    counts = (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens)
    if counts != (3, 2, 5) or list(request.output_token_ids) != [8, 9]:
        return f"a request with 2 of 5 tokens as output counts {counts}"
    state = CachedRequestState(
        req_id="",
        prompt_token_ids=request.prompt_token_ids,
        mm_features=[],
        sampling_params=params,
        generator=torch.Generator(),
        block_ids=([],),
        num_computed_tokens=0,
        output_token_ids=[],
    )
    restore_state(state)
    if (state.num_tokens, state.get_token_id(4)) != (5, 9):
        return f"a worker's state with 2 of 5 tokens as output counts {state.num_tokens}"
    return None


def apply() -> None:
    """Have this process resume legs. Idempotent."""
    if not hasattr(WorkerBase, _MARK):
        _replace()
        setattr(WorkerBase, _MARK, True)
        setattr(WorkerBase, RESUME_SUPPORT_CALL, lambda _worker: True)
    core = sys.modules.get(_ENGINE_CORE)
    if core is not None:  # the process with the scheduler
        setattr(
            core.EngineCore,
            RESUME_SUPPORT_CALL,
            lambda core: all(core.collective_rpc(RESUME_SUPPORT_CALL)),
        )


def _replace() -> None:
    make = Request.from_engine_core_request.__func__
    compile_grammar = StructuredOutputManager._create_grammar  # noqa: SLF001
    begin_state = CachedRequestState.__post_init__
    begin_sampler = TopKTopPSampler.__init__

    @functools.wraps(make)
    def make_restored(*args: Any, **kwargs: Any) -> Request:  # noqa: ANN401
        request = make(*args, **kwargs)
        restore(request)
        return request

    @functools.wraps(compile_grammar)
    def compile_advanced(
        manager: StructuredOutputManager, request: Request
    ) -> StructuredOutputGrammar:
        grammar = compile_grammar(manager, request)
        advance_grammar(manager, request, grammar)
        return grammar

    @functools.wraps(begin_state)
    def begin_restored(state: CachedRequestState) -> None:
        begin_state(state)
        restore_state(state)

    @functools.wraps(begin_sampler)
    def begin_with_replay(sampler: TopKTopPSampler, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        begin_sampler(sampler, *args, **kwargs)
        sampler.forward = replay_pending_first(sampler.forward)

    replace_attributes(Request, from_engine_core_request=classmethod(make_restored))
    replace_attributes(StructuredOutputManager, _create_grammar=compile_advanced)
    replace_attributes(CachedRequestState, __post_init__=begin_restored)
    replace_attributes(TopKTopPSampler, __init__=begin_with_replay)
