"""What a request's sampling parameters mean for its legs: which can be resumed, and what they say.

State over the output is what vLLM keeps of a request besides its KV blocks: penalties count tokens
that were generated, a grammar has read them, a seed's generator has drawn once for each. An engine
that takes up (`resume_patch`) has all of it from the ids of a resumed leg, as vLLM has for a
request that it put back to wait itself.
"""

from __future__ import annotations

from vllm.sampling_params import SamplingParams

from baton.domain.handoff import Leg
from baton.domain.value import evolve
from baton.engine.vllm.wire.resume_keys import RESUMED_TOKENS_ARG


def can_be_resumed(params: SamplingParams, *, supports_resume: bool) -> bool:
    """Whether generation may go on elsewhere without changing what comes next.

    A seed alone does not count: an engine that does not take up starts its generator anew, which
    changes the sample but not what it is drawn from.

    Args:
        params: What the client asks for.
        supports_resume: Whether engines have state over the output from a resumed leg's ids.
    """
    if params.thinking_token_budget is not None or params.trace_decode_token_ids:
        # vLLM follows both from step to step; from the ids alone it would begin in the wrong place.
        return False
    return supports_resume or not has_output_state(params)


def has_output_state(params: SamplingParams) -> bool:
    """Whether what comes next depends on which of the tokens before it were generated."""
    return bool(
        params.structured_outputs is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.bad_words
        or params.repetition_detection is not None
    )


def set_length_limits(params: SamplingParams, leg: Leg, *, supports_resume: bool) -> None:
    """Say how much a leg may generate, and which end of its prompt was generated before it.

    An engine that takes up counts what was generated before as output, so its bounds do, too: after
    4 of 10 tokens they are still 10, where another is asked for 6.

    Raises:
        ValueError: the leg needs an engine that takes up, or contradicts itself.
    """
    resumed_tokens = leg.resumed_tokens
    if resumed_tokens >= len(leg.prompt_token_ids) > 0:
        raise ValueError(
            f"leg {leg.leg_id}: {resumed_tokens} of its {len(leg.prompt_token_ids)} tokens were"
            " generated,"
            " wanted at least one that was not"
        )
    if resumed_tokens and not can_be_resumed(params, supports_resume=supports_resume):
        raise ValueError(
            f"leg {leg.leg_id}: resumed after {resumed_tokens} tokens, but this engine cannot"
            " take up the"
            " state that its sampling parameters keep over them"
        )
    counted_tokens = resumed_tokens if supports_resume else 0
    params.max_tokens = leg.max_tokens + counted_tokens
    params.min_tokens = leg.min_tokens + counted_tokens if leg.min_tokens else 0
    if counted_tokens:
        params.extra_args = dict(params.extra_args or {}, **{RESUMED_TOKENS_ARG: counted_tokens})
    if resumed_tokens:
        _drop_prompt_logprobs(params)


def _drop_prompt_logprobs(params: SamplingParams) -> None:
    """They were given, with the first token."""
    if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
        params.prompt_logprobs = params.prompt_logprob_token_ids = None
        params.prompt_logprob_start = params.skip_reading_prefix_cache = None


def first_token_leg(leg: Leg) -> Leg:
    """A leg, but for that it ends with its first token."""
    return evolve(leg, max_tokens=1, min_tokens=min(leg.min_tokens, 1))


def prefill_params(params: SamplingParams) -> SamplingParams:
    """Sampling for a leg whose one token is thrown away: the cheapest, without constraints."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        skip_reading_prefix_cache=params.skip_reading_prefix_cache,
        watermarking=False,
    )
