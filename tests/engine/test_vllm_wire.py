"""The wire: nothing of a client's request is lost between the frontend and the engine."""

from __future__ import annotations

import string
import warnings
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.commands import Delivery
from baton.domain.handoff import CacheUse, KvHandle, Leg, LegKind
from baton.domain.names.trace_context import TraceContext, span_id
from baton.domain.request import FinishReason, LocalOnlyReason, Request
from baton.domain.value import evolve
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root
from baton.runtime.link import codec, frames
from tests.fakes import frontends
from tests.fakes.scripted_engine import make_leg

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    import torch
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import (
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine import FinishReason as EngineFinishReason
    from vllm.v1.engine.parallel_sampling import ParentRequest
    from vllm.v1.metrics.stats import PrefillStats
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors
    from vllm.v1.request import Request as EngineSideRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from baton.engine.vllm.wire.codec import (
        PREFILL_KV_PARAMS,
        EngineCodec,
        FrontendCodec,
        UnsupportedRequest,
        release_request,
    )
    from baton.engine.vllm.wire.identity import MAX_SALT_CHARS, TRACE_ARG, Caller, with_caller

MAX_LEN_TOKENS = 4096
PROMPT = tuple(range(5, 45))
TICKET_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "an-engine",
    "remote_request_id": "leg-0",
    "remote_host": "10.0.0.1",
    "remote_port": 20000,
    "tp_size": 1,
    "remote_num_tokens": len(PROMPT),
}
HOSTILE_PARAMS = {"do_remote_prefill": True, "remote_host": "169.254.169.254", "remote_port": 80}

ids = st.integers(min_value=0, max_value=8191)
words = st.text(string.ascii_letters, min_size=1, max_size=8)
SAMPLING_FIELDS: dict[str, st.SearchStrategy[object]] = {
    "n": st.integers(1, 4),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 2),
    "temperature": st.floats(0.1, 2),
    "watermarking": st.none() | st.booleans(),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(0, 50),
    "min_p": st.floats(0, 1),
    "seed": st.none() | st.integers(0, 2**31),
    "stop": st.lists(words, max_size=3),
    "stop_token_ids": st.lists(ids, max_size=3),
    "ignore_eos": st.booleans(),
    "max_tokens": st.integers(10, 500),
    "min_tokens": st.integers(0, 9),
    "logprobs": st.none() | st.integers(0, 20),
    "prompt_logprobs": st.none() | st.integers(0, 20),
    "prompt_logprob_token_ids": st.none()
    | st.integers(1, 60).map(lambda rows: np.arange(rows * 3).reshape(rows, 3)),
    "prompt_logprob_start": st.none() | st.integers(0, 5),
    "logprob_token_ids": st.none() | st.lists(ids, max_size=3),
    "flat_logprobs": st.booleans(),
    "detokenize": st.sampled_from([True]),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "output_kind": st.sampled_from(RequestOutputKind),
    "stream_interval": st.none() | st.integers(1, 5),
    "skip_clone": st.booleans(),
    "output_text_buffer_length": st.just(0),
    "_eos_token_id": st.none() | ids,
    "_all_stop_token_ids": st.sets(ids, max_size=3),
    "_watermarking_skipped": st.booleans(),
    "structured_outputs": st.none()
    | st.builds(StructuredOutputsParams, regex=words)
    | st.just({"type": "object"}).map(lambda schema: StructuredOutputsParams(json=schema)),
    "logit_bias": st.none() | st.dictionaries(ids, st.floats(-100, 100), max_size=3),
    "allowed_token_ids": st.none() | st.lists(ids, min_size=1, max_size=3),
    "extra_args": st.none() | st.dictionaries(words, st.integers(0, 9), min_size=1, max_size=3),
    "bad_words": st.lists(words, max_size=3),
    "_bad_words_token_ids": st.none() | st.lists(st.lists(ids, max_size=2), max_size=2),
    "skip_reading_prefix_cache": st.booleans(),
    "thinking_token_budget": st.none() | st.integers(0, 100),
    "repetition_detection": st.none()
    | st.just(RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=2, min_count=3)),
    "routed_experts_prompt_start": st.integers(0, 9),
    "trace_decode_token_ids": st.none() | st.lists(ids, min_size=1, max_size=4),
}
sampling_params = st.fixed_dictionaries({}, optional=SAMPLING_FIELDS).map(
    lambda fields: SamplingParams(**fields)
)


def engine_request(**changes: object) -> EngineCoreRequest:
    fields: dict[str, object] = {
        "external_req_id": "cmpl-1",
        "prompt_token_ids": list(PROMPT),
        "sampling_params": SamplingParams(max_tokens=20),
        "arrival_time": 12.5,
    }
    return frontends.engine_request("cmpl-1-0123abcd", **(fields | changes))


def split(request: EngineCoreRequest) -> Request:
    frames = MsgpackEncoder().encode(request)
    wire = FrontendCodec(max_len_tokens=MAX_LEN_TOKENS)
    return wire.decode_request(wire.decode_engine_request(frames), now_s=3.0)


def received(leg: Leg) -> Leg:
    """The leg after its way over the fleet link."""
    submitted = codec.decode_from_coordinator(codec.encode(frames.Submit(leg)))
    assert isinstance(submitted, frames.Submit)
    return submitted.leg


def leg_of(
    request: Request, kind: LegKind = LegKind.LOCAL, *, ticket: KvHandle | None = None
) -> Leg:
    return Leg(
        leg_id="leg-1",
        request_id=request.request_id,
        kind=kind,
        prompt_token_ids=request.prompt_token_ids,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        priority=request.priority,
        kv_handle=ticket,
        payload=request.payload,
    )


def ticket(
    tokens: int = len(PROMPT), *, changes: Mapping[str, object] = MappingProxyType({})
) -> KvHandle:
    params = msgspec.msgpack.encode(TICKET_PARAMS | dict(changes))
    return KvHandle(tokens=tokens, blocks=3, params=params)


def resumed(leg: Leg, generated: tuple[int, ...]) -> Leg:
    return Leg(
        leg_id="leg-2",
        request_id=leg.request_id,
        kind=leg.kind,
        prompt_token_ids=(*leg.prompt_token_ids, *generated),
        resumed_tokens=len(generated),
        max_tokens=leg.max_tokens - len(generated),
        min_tokens=0,
        payload=leg.payload,
    )


def plain(value: object) -> object:
    """A value that compares by content: arrays and tensors do not."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    return value


def fields_of(struct: msgspec.Struct, *, without: tuple[str, ...] = ()) -> dict[str, object]:
    names = set(struct.__struct_fields__) - set(without)
    return {name: plain(getattr(struct, name)) for name in names}


def as_sent(params: SamplingParams) -> SamplingParams:
    """What vLLM's own wire makes of sampling parameters, without us on the way."""
    decoder = MsgpackDecoder(EngineCoreRequest)
    sent = MsgpackEncoder().encode(engine_request(sampling_params=params))
    return decoder.decode([bytearray(frame) for frame in sent]).sampling_params


# ------------------------------------------------------------------ requests
def test_every_sampling_field_has_an_example_here() -> None:
    assert set(SAMPLING_FIELDS) == set(SamplingParams.__struct_fields__)


@settings(deadline=None)
@given(params=sampling_params)
def test_every_sampling_field_survives_the_way_to_a_local_leg(params: SamplingParams) -> None:
    joined = EngineCodec().encode_leg(leg_of(split(engine_request(sampling_params=params))))
    assert fields_of(joined.sampling_params) == fields_of(as_sent(params))


@settings(deadline=None)
@given(params=sampling_params)
def test_a_decode_leg_differs_from_a_local_one_only_in_where_the_blocks_are(
    params: SamplingParams,
) -> None:
    request = split(engine_request(sampling_params=params))
    local = EngineCodec().encode_leg(leg_of(request)).sampling_params
    decode = EngineCodec().encode_leg(leg_of(request, LegKind.DECODE, ticket=ticket()))
    found = decode.sampling_params
    assert fields_of(found, without=("extra_args",)) == fields_of(local, without=("extra_args",))
    assert found.extra_args == (local.extra_args or {}) | {"kv_transfer_params": TICKET_PARAMS}


def test_of_an_adapter_only_the_name_leaves_the_frontend() -> None:
    lora = LoRARequest(lora_name="ada", lora_int_id=1, lora_path="/adapters/ada")
    request = split(engine_request(lora_request=lora))
    assert request.adapter == "ada"
    assert b"/adapters" not in request.payload
    assert EngineCodec().encode_leg(leg_of(request)).lora_request is None


def test_fields_other_than_sampling_reach_the_engine() -> None:
    request = engine_request(
        cache_salt="tenant-1",
        priority=-3,
        trace_headers={"traceparent": "00-1-2-01"},
        session_id="chat-7",
        reasoning_ended=True,
        reasoning_parser_kwargs={"enable_thinking": False},
    )
    joined = EngineCodec().encode_leg(leg_of(split(request)))
    changed = ("request_id", "external_req_id", "sampling_params")
    assert fields_of(joined, without=changed) == fields_of(request, without=changed)


def test_large_tensors_travel_in_frames_of_their_own_and_arrive() -> None:
    embeds = torch.arange(40 * 64, dtype=torch.float32).reshape(40, 64)
    request = engine_request(
        prompt_embeds=embeds,
        prompt_is_token_ids=[True] * 40,
        sampling_params=SamplingParams(prompt_logprob_token_ids=np.arange(300).reshape(100, 3)),
    )
    assert len(MsgpackEncoder().encode(request)) == 3
    joined = EngineCodec().encode_leg(leg_of(split(request)))
    assert torch.equal(joined.prompt_embeds, embeds)
    assert joined.sampling_params.prompt_logprob_token_ids.tolist() == (
        np.arange(300).reshape(100, 3).tolist()
    )
    assert joined.prompt_token_ids == list(PROMPT)


def test_a_request_shows_the_brain_what_it_must_know() -> None:
    request = split(
        engine_request(
            sampling_params=SamplingParams(max_tokens=20, min_tokens=4),
            priority=2,
            cache_salt="salt",
            session_id="s",
        )
    )
    assert request.request_id == "cmpl-1-0123abcd"
    assert request.prompt_token_ids == PROMPT
    assert (request.max_tokens, request.min_tokens, request.priority) == (20, 4, 2)
    assert (request.cache_salt, request.session_id) == ("salt", "s")
    assert request.arrived_at_s == 3.0
    assert request.local_only is None
    assert request.resumable


def test_the_prompt_is_not_sent_twice() -> None:
    long = split(engine_request(prompt_token_ids=list(range(3000))))
    short = split(engine_request(prompt_token_ids=[1]))
    assert len(long.payload) == len(short.payload)


def test_without_max_tokens_a_request_may_fill_the_context() -> None:
    request = split(engine_request(sampling_params=SamplingParams(max_tokens=None)))
    assert request.max_tokens == MAX_LEN_TOKENS - len(PROMPT)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sampling_params": SamplingParams(prompt_logprobs=1)}, LocalOnlyReason.PROMPT_LOGPROBS),
        ({"sampling_params": SamplingParams(n=2)}, LocalOnlyReason.FAN_OUT),
        ({"prompt_embeds": torch.zeros(40, 8)}, LocalOnlyReason.PROMPT_EMBEDS),
        (
            {"prompt_embeds": torch.zeros(40, 8), "prompt_token_ids": None},
            LocalOnlyReason.PROMPT_EMBEDS,
        ),
        (
            {"mm_features": [MultiModalFeatureSpec(None, "image", "a", PlaceholderRange(1, 9))]},
            LocalOnlyReason.MULTIMODAL,
        ),
    ],
)
def test_a_request_that_cannot_be_disaggregated_is_marked(
    changes: dict[str, object], reason: LocalOnlyReason
) -> None:
    assert split(engine_request(**changes)).local_only is reason


def test_children_of_a_fanned_out_request_are_recognized_by_the_ids_that_vllm_gives_them() -> None:
    parent = engine_request(sampling_params=SamplingParams(n=2, max_tokens=3))
    for index in range(2):
        child_id, params = ParentRequest(parent).get_child_info(index)
        child = split(engine_request(request_id=child_id, sampling_params=params))
        assert child.local_only is LocalOnlyReason.FAN_OUT
        assert child.fan_out_id == parent.request_id


def test_answers_that_an_engine_finds_no_prefix_for_are_not_told_to_share_one() -> None:
    parent = engine_request(sampling_params=SamplingParams(n=2, max_tokens=3, prompt_logprobs=1))
    child_id, params = ParentRequest(parent).get_child_info(1)
    child = split(engine_request(request_id=child_id, sampling_params=params))
    assert (child.local_only, child.fan_out_id) == (LocalOnlyReason.PROMPT_LOGPROBS, None)


@pytest.mark.parametrize("external", ["cmpl-1", "0_cmpl-1", "7", "7_7", "0_0_x", "1_-"])
def test_an_odd_id_of_a_client_does_not_look_like_a_child(external: str) -> None:
    request = split(engine_request(request_id=f"{external}-0123abcd", external_req_id=external))
    assert (request.local_only, request.fan_out_id) == (None, None)


STATEFUL = [
    SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+")),
    SamplingParams(presence_penalty=0.5),
    SamplingParams(frequency_penalty=0.5),
    SamplingParams(bad_words=["no"]),
    SamplingParams(repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_count=3)),
]
"""What comes next depends on which of the tokens before it were generated."""
STATELESS = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(seed=4),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(logit_bias={3: 5.0}, min_p=0.1, top_k=5, top_p=0.5, logprobs=5),
    SamplingParams(stop=["x"], stop_token_ids=[9]),
    SamplingParams(n=2),
]


@pytest.mark.parametrize("params", STATEFUL + STATELESS)
def test_generation_can_go_on_elsewhere(params: SamplingParams) -> None:
    assert split(engine_request(sampling_params=params)).resumable


@pytest.mark.parametrize(
    "params",
    [SamplingParams(thinking_token_budget=5), SamplingParams(trace_decode_token_ids=[1, 2])],
)
def test_generation_that_follows_its_own_steps_is_not_resumable(params: SamplingParams) -> None:
    request = split(engine_request(sampling_params=params))
    assert not request.resumable
    with pytest.raises(ValueError, match="leg-2: resumed after 2 tokens, but this engine cannot"):
        EngineCodec().encode_leg(resumed(leg_of(request), (7, 8)))


@pytest.mark.parametrize("params", STATEFUL)
def test_state_over_the_output_is_not_resumed_where_engines_do_not_take_up(
    params: SamplingParams,
) -> None:
    frames_of = MsgpackEncoder().encode(engine_request(sampling_params=params))
    wire = FrontendCodec(max_len_tokens=MAX_LEN_TOKENS, supports_resume=False)
    request = wire.decode_request(wire.decode_engine_request(frames_of), now_s=3.0)
    assert not request.resumable
    EngineCodec().encode_leg(leg_of(request), supports_resume=False)
    with pytest.raises(ValueError, match="leg-2: resumed after 2 tokens, but this engine cannot"):
        EngineCodec().encode_leg(resumed(leg_of(request), (7, 8)), supports_resume=False)


def test_a_client_cannot_pass_its_prompt_off_as_output() -> None:
    params = SamplingParams(
        extra_args={"baton_resumed_tokens": 3, "baton_resumed_ids": [1], "custom": 1}
    )
    joined = EngineCodec().encode_leg(leg_of(split(engine_request(sampling_params=params))))
    assert joined.sampling_params.extra_args == {"custom": 1}


def test_a_client_cannot_make_an_engine_fetch_memory_or_choose_its_rank() -> None:
    params = SamplingParams(
        extra_args={
            "kv_transfer_params": HOSTILE_PARAMS,
            "ec_transfer_params": HOSTILE_PARAMS,
            "harmless": 1,
        }
    )
    request = split(
        engine_request(sampling_params=params, data_parallel_rank=3, abort_immediately=True)
    )
    joined = EngineCodec().encode_leg(leg_of(request))
    assert joined.sampling_params.extra_args == {"harmless": 1}
    assert joined.data_parallel_rank is None
    assert not joined.abort_immediately
    assert b"169.254" not in request.payload


def test_a_pooling_request_is_refused_by_name() -> None:
    request = engine_request(sampling_params=None, pooling_params=PoolingParams(task="embed"))
    with pytest.raises(UnsupportedRequest, match="cmpl-1-0123abcd: got pooling parameters"):
        split(request)


def test_a_prompt_streamed_in_parts_is_refused() -> None:
    with pytest.raises(UnsupportedRequest, match="send it whole"):
        split(engine_request(resumable=True))


def test_garbage_is_told_from_a_request() -> None:
    with pytest.raises(msgspec.DecodeError):
        FrontendCodec(max_len_tokens=MAX_LEN_TOKENS).decode_engine_request([b"\xc1"])


# ------------------------------------------------------------------ legs
def test_a_leg_goes_by_its_own_id_and_numbers() -> None:
    request = split(engine_request(client_index=4, current_wave=2, data_parallel_rank=1))
    leg = make_leg(
        "leg-9",
        request_id=request.request_id,
        max_tokens=7,
        min_tokens=2,
        priority=5,
        payload=request.payload,
    )
    joined = EngineCodec().encode_leg(leg)
    assert (joined.request_id, joined.external_req_id) == ("leg-9", "leg-9")
    assert joined.prompt_token_ids == [1, 2, 3]
    assert (joined.sampling_params.max_tokens, joined.sampling_params.min_tokens) == (7, 2)
    assert joined.priority == 5
    assert (joined.client_index, joined.current_wave, joined.data_parallel_rank) == (0, 0, None)


def test_a_prefill_leg_computes_one_token_and_nothing_costly() -> None:
    params = SamplingParams(
        max_tokens=20,
        min_tokens=5,
        logprobs=20,
        temperature=1.5,
        seed=1,
        stop=["x"],
        stop_token_ids=[9],
        bad_words=["no"],
        logit_bias={3: 5.0},
        structured_outputs=StructuredOutputsParams(regex="a+"),
        extra_args={"custom": 1},
    )
    request = split(engine_request(sampling_params=params, reasoning_ended=False))
    joined = EngineCodec().encode_leg(leg_of(request, LegKind.PREFILL))
    cheapest = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        watermarking=False,
        extra_args={"kv_transfer_params": dict(PREFILL_KV_PARAMS)},
    )
    assert fields_of(joined.sampling_params) == fields_of(cheapest)
    assert joined.reasoning_ended is None


@settings(deadline=None)
@given(params=sampling_params, min_tokens=st.integers(0, 5))
def test_a_prefill_leg_that_gives_its_token_draws_it_as_the_request_wants(
    params: SamplingParams, min_tokens: int
) -> None:
    params.thinking_token_budget = params.trace_decode_token_ids = None
    params.prompt_logprobs = params.prompt_logprob_token_ids = None
    request = split(engine_request(sampling_params=params, reasoning_ended=False))
    leg = evolve(leg_of(request, LegKind.PREFILL), emits_first_token=True, min_tokens=min_tokens)
    told, anew = EngineCodec().encode_leg(leg), EngineCodec().encode_leg(leg_of(request))
    apart = ("extra_args", "max_tokens", "min_tokens")
    found, wanted = told.sampling_params, anew.sampling_params
    assert fields_of(found, without=apart) == fields_of(wanted, without=apart)
    assert (found.max_tokens, found.min_tokens) == (1, min(min_tokens, 1))
    own = {"kv_transfer_params": dict(PREFILL_KV_PARAMS)}
    assert found.extra_args == (wanted.extra_args or {}) | own
    assert told.reasoning_ended is False


def test_a_prefill_leg_that_gives_the_next_token_of_a_resumed_request_is_taken_up() -> None:
    again = resumed(leg_of(split(engine_request()), LegKind.PREFILL), (7, 8))
    joined = EngineCodec().encode_leg(evolve(again, min_tokens=4, emits_first_token=True))
    assert joined.prompt_token_ids == [*PROMPT, 7, 8]
    assert (joined.sampling_params.max_tokens, joined.sampling_params.min_tokens) == (3, 3)
    assert joined.sampling_params.extra_args["baton_resumed_tokens"] == 2


@settings(deadline=None)
@given(params=sampling_params)
def test_a_resumed_leg_says_how_much_was_generated_and_is_bounded_by_the_whole(
    params: SamplingParams,
) -> None:
    params.thinking_token_budget = params.trace_decode_token_ids = None
    params.prompt_logprobs = params.prompt_logprob_token_ids = None
    first = leg_of(split(engine_request(sampling_params=params)))
    again = evolve(resumed(first, (7, 8)), min_tokens=max(0, first.min_tokens - 2))
    told, anew = EngineCodec().encode_leg(again), EngineCodec().encode_leg(first)
    assert told.prompt_token_ids == [*PROMPT, 7, 8]
    apart = ("extra_args", "min_tokens")
    found, wanted = told.sampling_params, anew.sampling_params
    assert fields_of(found, without=apart) == fields_of(wanted, without=apart)
    assert found.extra_args == {**(wanted.extra_args or {}), "baton_resumed_tokens": 2}
    # Two tokens are there: a bound of 1 or 2 holds already.
    assert found.min_tokens == (wanted.min_tokens if wanted.min_tokens > 2 else 0)


@pytest.mark.parametrize("params", STATELESS)
def test_an_engine_that_does_not_take_up_is_asked_for_the_rest(params: SamplingParams) -> None:
    first = leg_of(split(engine_request(sampling_params=params)))
    again = evolve(resumed(first, (7, 8)), min_tokens=3)
    told = EngineCodec().encode_leg(again, supports_resume=False).sampling_params
    assert (told.max_tokens, told.min_tokens) == (first.max_tokens - 2, 3)
    assert told.extra_args is None


def test_a_resumed_decode_leg_says_how_much_to_fetch_beyond_its_prompt() -> None:
    request = split(engine_request())
    first = leg_of(request, LegKind.DECODE, ticket=ticket())
    again = evolve(
        resumed(leg_of(request), (7, 8)), kind=LegKind.DECODE, kv_handle=ticket(len(PROMPT) + 2)
    )
    for takes_up, told in ((True, len(PROMPT) + 2), (False, None)):
        joined = EngineCodec().encode_leg(again, supports_resume=takes_up).sampling_params
        assert joined.extra_args["kv_transfer_params"].get("baton_prefix_tokens") == told
    joined = EngineCodec().encode_leg(first).sampling_params
    assert "baton_prefix_tokens" not in joined.extra_args["kv_transfer_params"]


def test_a_prefill_leg_of_a_resumed_request_is_all_prompt() -> None:
    again = resumed(leg_of(split(engine_request()), LegKind.PREFILL), (7, 8))
    joined = EngineCodec().encode_leg(again)
    assert joined.prompt_token_ids == [*PROMPT, 7, 8]
    assert joined.sampling_params.extra_args.keys() == {"kv_transfer_params"}


def test_a_leg_that_was_generated_from_nothing_is_refused() -> None:
    first = leg_of(split(engine_request()))
    with pytest.raises(ValueError, match="leg-1: 40 of its 40 tokens were generated"):
        EngineCodec().encode_leg(evolve(first, resumed_tokens=len(PROMPT)))


def test_a_resumed_leg_does_not_ask_for_the_prompts_logprobs_again() -> None:
    request = split(engine_request(sampling_params=SamplingParams(prompt_logprobs=2)))
    first = leg_of(request)
    assert EngineCodec().encode_leg(first).sampling_params.prompt_logprobs == 2
    again = EngineCodec().encode_leg(resumed(first, (7, 8))).sampling_params
    assert again.prompt_logprobs is None
    assert not SamplingParams(
        skip_reading_prefix_cache=again.skip_reading_prefix_cache
    ).skip_reading_prefix_cache


def test_a_kv_handle_for_more_than_the_prompt_is_not_used() -> None:
    request = split(engine_request())
    leg = leg_of(request, LegKind.DECODE, ticket=ticket(tokens=len(PROMPT) + 1))
    with pytest.raises(ValueError, match="its KV handle is for 41 tokens, its prompt has 40"):
        EngineCodec().encode_leg(leg)


def test_a_kv_handle_for_the_front_of_a_prompt_says_how_much_to_fetch() -> None:
    request = split(engine_request())
    leg = leg_of(request, LegKind.DECODE, ticket=ticket(tokens=32))
    params = EngineCodec().encode_leg(leg).sampling_params.extra_args["kv_transfer_params"]
    assert params == TICKET_PARAMS | {"baton_prefix_tokens": 32}


@pytest.mark.parametrize(
    "changes",
    [
        {"do_remote_prefill": False},
        {"remote_engine_id": ""},
        {"remote_engine_id": 7},
        {"remote_host": None},
        {"remote_port": 0},
        {"remote_port": 65536},
        {"remote_block_ids": [1, 2, 3]},
        {"remote_block_ids": [[1, 2, -3]]},
        {"remote_block_ids": [[1, 2]]},
        {"tp_size": "1"},
    ],
)
def test_a_kv_handle_that_an_engine_would_choke_on_is_used_for_nothing(
    changes: dict[str, object],
) -> None:
    broken = ticket(changes=changes)
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        EngineCodec().encode_leg(leg_of(split(engine_request()), LegKind.DECODE, ticket=broken))
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        release_request(broken, "release-0")


def test_a_leg_without_payload_is_greedy_and_goes_by_its_own_numbers_and_salt() -> None:
    handle = {"kv_handle": ticket(), "cache_salt": "probe"}
    leg = make_leg("probe-1", LegKind.DECODE, prompt=PROMPT, max_tokens=3, **handle)
    joined = EngineCodec().encode_leg(leg)
    params = joined.sampling_params
    assert (params.temperature, params.max_tokens, params.min_tokens) == (0.0, 3, 0)
    assert params.extra_args == {"kv_transfer_params": TICKET_PARAMS}
    assert (joined.request_id, joined.cache_salt) == ("probe-1", "probe")
    assert joined.prompt_token_ids == list(PROMPT)


def test_a_leg_whose_salt_is_not_that_of_its_payload_is_refused() -> None:
    salted = split(engine_request(cache_salt="tenant-1"))
    leg = leg_of(salted)
    assert EngineCodec().encode_leg(leg).cache_salt == "tenant-1"
    assert EngineCodec().encode_leg(evolve(leg, cache_salt="tenant-1")).cache_salt == "tenant-1"
    with pytest.raises(ValueError, match="its cache salt is not that of its payload"):
        EngineCodec().encode_leg(evolve(leg, cache_salt="tenant-2"))
    unsalted = leg_of(split(engine_request()))
    with pytest.raises(ValueError, match="its cache salt is not that of its payload"):
        EngineCodec().encode_leg(evolve(unsalted, cache_salt="tenant-2"))


def test_a_long_salt_is_known_by_its_digest_and_used_by_the_engine_as_it_was_sent() -> None:
    long, other = "é" * 100_000, "é" * 99_999 + "e"
    request = split(engine_request(cache_salt=long))
    assert request.cache_salt is not None
    assert len(request.cache_salt) <= MAX_SALT_CHARS
    assert request.cache_salt != split(engine_request(cache_salt=other)).cache_salt
    leg = evolve(leg_of(request), cache_salt=request.cache_salt)
    assert EngineCodec().encode_leg(leg).cache_salt == long
    assert EngineCodec().encode_leg(received(leg)).cache_salt == long
    others = leg_of(split(engine_request(cache_salt=other)))
    with pytest.raises(ValueError, match="its cache salt is not that of its payload"):
        EngineCodec().encode_leg(evolve(others, cache_salt=request.cache_salt))


@pytest.mark.parametrize("chars", [1, MAX_SALT_CHARS, MAX_SALT_CHARS + 1, 4096])
def test_every_salt_that_a_client_chooses_gets_over_the_link(chars: int) -> None:
    request = split(engine_request(cache_salt="s" * chars))
    assert (request.cache_salt == "s" * chars) is (chars <= MAX_SALT_CHARS)
    leg = evolve(leg_of(request), cache_salt=request.cache_salt)
    assert received(leg) == leg


def test_a_leg_that_must_give_more_than_it_may_is_refused() -> None:
    payload = split(engine_request()).payload
    leg = make_leg("leg-3", prompt=(1,), max_tokens=2, min_tokens=3, payload=payload)
    with pytest.raises(ValueError, match="min_tokens 3 over max_tokens 2"):
        EngineCodec().encode_leg(leg)


def test_releasing_a_kv_handle_is_a_request_that_ends_as_it_arrives() -> None:
    request = release_request(ticket(), "release-0")
    assert request.abort_immediately
    assert request.sampling_params.extra_args == {"kv_transfer_params": TICKET_PARAMS}


# ------------------------------------------------------------------ outputs
def delivered(output: EngineCoreOutput) -> EngineCoreOutput:
    """An output of an engine as the frontend gets it."""
    leg_output = EngineCodec().decode_output(output, prompt_tokens=len(PROMPT))
    wire = FrontendCodec(max_len_tokens=MAX_LEN_TOKENS)
    return wire.encode_delivery(
        Delivery(
            "request-1",
            leg_output.token_ids,
            leg_output.finish,
            leg_output.stop_reason,
            leg_output.cached_tokens,
            leg_output.engine_payload,
            leg_output.cache_use,
        ),
        prompt_tokens=len(PROMPT),
    )


def test_a_plain_token_needs_no_detail() -> None:
    output = EngineCodec().decode_output(EngineCoreOutput("leg-1", [7, 8]), prompt_tokens=3)
    assert (output.leg_id, output.token_ids, output.finish) == ("leg-1", (7, 8), None)
    assert output.kv_handle is None
    assert output.cached_tokens is None
    assert output.engine_payload is None


@pytest.mark.parametrize("reason", list(EngineFinishReason))
def test_every_way_to_finish_comes_through(reason: EngineFinishReason) -> None:
    output = EngineCoreOutput("leg-1", [7], finish_reason=reason, stop_reason="stop!")
    found = delivered(output)
    assert found.request_id == "request-1"
    assert (found.new_token_ids, found.finish_reason, found.stop_reason) == ([7], reason, "stop!")


def test_our_ways_to_finish_are_the_engines() -> None:
    ours = {FinishReason.INVALID, FinishReason.REJECTED}  # told in an error's stop reason
    engines = {str(reason) for reason in EngineFinishReason}
    assert engines == {str(reason) for reason in FinishReason if reason not in ours}


def test_logprobs_of_every_size_come_through() -> None:
    for width in (3, 400):
        logprobs = LogprobsLists(
            logprob_token_ids=np.arange(width).reshape(1, width),
            logprobs=np.linspace(-9, 0, width, dtype=np.float32).reshape(1, width),
            sampled_token_ranks=np.array([1]),
        )
        prompt = LogprobsTensors(
            logprob_token_ids=torch.arange(width).reshape(1, width),
            logprobs=torch.zeros(1, width),
            selected_token_ranks=torch.ones(1),
        )
        output = EngineCoreOutput(
            "leg-1", [7], new_logprobs=logprobs, new_prompt_logprobs_tensors=prompt
        )
        found = delivered(output)
        assert [plain(part) for part in found.new_logprobs] == [plain(part) for part in logprobs]
        assert [plain(part) for part in found.new_prompt_logprobs_tensors] == (
            [plain(part) for part in prompt]
        )


def test_everything_else_an_output_may_say_comes_through() -> None:
    output = EngineCoreOutput(
        "leg-1",
        [7],
        finish_reason=EngineFinishReason.LENGTH,
        trace_headers={"traceparent": "00-1-2-01"},
        routed_experts=np.arange(12).reshape(3, 4),
        num_nans_in_logits=2,
        mm_cache_miss_hashes=["h"],
        prompt_token_id_logprobs=torch.zeros(2, 3),
    )
    found = delivered(output)
    assert fields_of(found, without=("request_id",)) == fields_of(output, without=("request_id",))


def test_internal_fields_do_not_reach_the_client() -> None:
    output = EngineCoreOutput("leg-1", [7], kv_transfer_params=dict(TICKET_PARAMS))
    found = delivered(output)
    assert found.kv_transfer_params is None


def test_a_finished_prefill_hands_out_a_kv_handle_for_its_prompt() -> None:
    output = EngineCoreOutput(
        "leg-1",
        [7],
        finish_reason=EngineFinishReason.LENGTH,
        kv_transfer_params=TICKET_PARAMS | {"remote_block_ids": [[4, 5], [6]]},
    )
    found = EngineCodec().decode_output(output, prompt_tokens=len(PROMPT)).kv_handle
    assert found is not None
    assert (found.tokens, found.blocks) == (len(PROMPT), 3)
    leg = leg_of(split(engine_request()), LegKind.DECODE, ticket=found)
    params = EngineCodec().encode_leg(leg).sampling_params.extra_args["kv_transfer_params"]
    assert params == TICKET_PARAMS | {"remote_block_ids": [[4, 5], [6]]}


@pytest.mark.parametrize("detailed", [False, True])
def test_every_field_about_the_prompt_reaches_the_frontend_as_the_engine_says_it(
    *, detailed: bool
) -> None:
    stats = PrefillStats()
    stats.set(len(PROMPT), num_local_cached_tokens=16, num_external_cached_tokens=8)
    stats.finalize(len(PROMPT) - 2)
    output = EngineCoreOutput("leg-1", [7], prefill_stats=stats)
    if detailed:
        output.num_nans_in_logits = 1
    told = EngineCodec().decode_output(output, prompt_tokens=len(PROMPT))
    assert (told.cached_tokens, told.cache_use) == (24, CacheUse(8, len(PROMPT) - 26))
    assert delivered(output).prefill_stats == stats
    assert delivered(EngineCoreOutput("leg-1", [7])).prefill_stats is None


def test_cached_tokens_of_a_prompt_of_unknown_length_do_not_exceed_it() -> None:
    delivery = Delivery("request-1", (7,), cached_tokens=32, cache_use=CacheUse(0, 16))
    wire = FrontendCodec(max_len_tokens=MAX_LEN_TOKENS)
    stats = wire.encode_delivery(delivery, prompt_tokens=0).prefill_stats
    assert (stats.num_prompt_tokens, stats.num_computed_tokens) == (48, 16)


def of_caller(caller: Caller, **changes: object) -> Request:
    params = SamplingParams(max_tokens=4, extra_args=with_caller({"mine": 1}, caller))
    prompt = list(range(64))
    return split(engine_request(sampling_params=params, prompt_token_ids=prompt, **changes))


def test_a_request_is_its_callers_and_says_so_to_no_engine() -> None:
    request = of_caller(Caller("acme", "batch", None))
    assert (request.tenant, request.slo_class) == ("acme", "batch")
    params = EngineCodec().encode_leg(received(leg_of(request))).sampling_params
    assert params is not None
    assert params.extra_args == {"mine": 1}
    assert b"acme" not in request.payload


SAMPLED = TraceContext(
    trace_id="0af7651916cd43dd8448eb211c80319c",
    parent_id="b7ad6b7169203331",
    sampled=True,
    state="v=1",
    operation="chat",
)


def of_trace(trace: TraceContext) -> Request:
    params = SamplingParams(max_tokens=4, extra_args=with_caller({"mine": 1}, Caller(), trace))
    return split(engine_request(sampling_params=params))


def test_an_engine_is_told_of_the_span_that_it_works_for() -> None:
    request = of_trace(SAMPLED)
    assert request.trace == SAMPLED
    leg = EngineCodec().encode_leg(received(leg_of(request)))
    own = span_id(SAMPLED.trace_id, request.request_id)
    assert leg.trace_headers == {
        "traceparent": f"00-{SAMPLED.trace_id}-{own}-01",
        "tracestate": "v=1",
    }
    assert leg.sampling_params is not None
    assert leg.sampling_params.extra_args == {"mine": 1}


def test_an_engine_is_not_told_of_a_trace_that_may_not_be_kept() -> None:
    unsampled = SAMPLED._replace(sampled=False)
    request = of_trace(unsampled)
    assert request.trace == unsampled
    assert EngineCodec().encode_leg(received(leg_of(request))).trace_headers is None


def test_a_client_cannot_say_a_trace_in_our_words() -> None:
    forged = SamplingParams(max_tokens=4, extra_args=with_caller({TRACE_ARG: [*SAMPLED]}, Caller()))
    assert split(engine_request(sampling_params=forged)).trace is None


def cached_as(request: Request) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    """The names of its blocks: in an engine of vLLM's, and in the index of a coordinator."""
    leg = EngineCodec().encode_leg(received(leg_of(request)))
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    engine_blocks = tuple(EngineSideRequest.from_engine_core_request(leg, hasher).block_hashes)
    root = chain_root(model="m", block_size_tokens=16, salt=request.cache_salt)
    return engine_blocks, tuple(chain_hashes(root, request.prompt_token_ids, 16))


@pytest.mark.parametrize("salt", [None, "mine"])
def test_a_prompt_is_found_again_within_a_tenant_and_not_across(salt: str | None) -> None:
    """At the engine and in the index alike: neither tells one tenant what another has asked."""
    acme, beta = Caller("acme", None, "acme"), Caller("beta", None, "beta")
    first, second = of_caller(acme, cache_salt=salt), of_caller(beta, cache_salt=salt)
    again = of_caller(acme._replace(slo_class="batch"), cache_salt=salt)
    shared = of_caller(Caller("gamma"), cache_salt=salt)
    also_shared = of_caller(Caller("delta"), cache_salt=salt)
    assert cached_as(first) == cached_as(again)
    assert cached_as(shared) == cached_as(also_shared)
    three = [cached_as(request) for request in (first, second, shared)]
    for side in (0, 1):
        blocks = [set(item[side]) for item in three]
        assert all(len(names) == 4 for names in blocks)
        assert len(set.union(*blocks)) == 12


def test_a_salt_that_looks_like_a_tenants_is_of_no_use() -> None:
    victim = of_caller(Caller("acme", None, "acme"))
    thief = of_caller(Caller("gamma"), cache_salt=victim.cache_salt)
    engine_blocks, index_blocks = cached_as(victim)
    assert not set(engine_blocks) & set(cached_as(thief)[0])
    assert not set(index_blocks) & set(cached_as(thief)[1])
