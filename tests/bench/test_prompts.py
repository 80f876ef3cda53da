"""Token ids that are made up for the prompts of a trace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.load import TokenPromptFactory
from baton.domain.hashed_prompt import HashedPrompt
from baton.simulator.workloads.trace import TraceRequest, to_request

IDS = st.lists(st.integers(0, 3), max_size=5).map(tuple)
REQUESTS = st.builds(TraceRequest, st.just(0.0), st.integers(1, 40), st.just(1), IDS)


@given(REQUESTS, REQUESTS, st.integers(1, 9))
def test_prompts_share_their_beginning_exactly_as_far_as_the_trace_says(
    one: TraceRequest, other: TraceRequest, size: int
) -> None:
    maker = TokenPromptFactory(block_tokens=size, vocabulary=1 << 31)
    made = [maker.build_prompt(one, 0), maker.build_prompt(other, 1)]
    assert [len(prompt) for prompt in made] == [one.prompt_tokens, other.prompt_tokens]
    outlines = [
        to_request(request, number, block_tokens=size).prompt_token_ids
        for number, request in enumerate((one, other))
    ]
    shared = 0
    for left, right in zip(*outlines, strict=False):
        if left != right:
            break
        shared += 1
    # Two outlines' made-up tokens may be equal by chance, once in 32,768.
    assert all(isinstance(outline, HashedPrompt) for outline in outlines)
    assert made[0][:shared] == made[1][:shared]
    assert made[0][shared : shared + 1] != made[1][shared : shared + 1] or shared == min(
        map(len, made)
    )


def test_prompts_are_the_same_again_and_others_with_another_seed() -> None:
    one = TraceRequest(0, 50, 1, (1, 2))
    makers = [TokenPromptFactory(block_tokens=16, vocabulary=500, seed=seed) for seed in (0, 0, 1)]
    first, again, other = (maker.build_prompt(one, 3) for maker in makers)
    assert first == again != other
    assert 0 <= min(first) <= max(first) < 500
    assert len(set(first)) > 30


def test_what_has_no_id_is_each_requests_own() -> None:
    maker = TokenPromptFactory(block_tokens=16, vocabulary=10_000)
    one = TraceRequest(0, 40, 1, (1,))
    assert maker.build_prompt(one, 0)[:16] == maker.build_prompt(one, 1)[:16]
    assert not set(maker.build_prompt(one, 0)[16:]) & set(maker.build_prompt(one, 1)[16:])


def test_a_vocabulary_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary of 0"):
        TokenPromptFactory(block_tokens=16, vocabulary=0)
