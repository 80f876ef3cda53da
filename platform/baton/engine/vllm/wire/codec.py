"""vLLM's EngineCore messages to and from our own values.

Theory of operation: a client's request is tokenized by vLLM's API server and arrives as an
`EngineCoreRequest`. `FrontendCodec.decode_request` takes from it what the brain must know and seals
the rest in `Request.payload`. Whoever runs a leg of it opens the payload with
`EngineCodec.encode_leg` and gets a request for that engine; what the engine answers becomes a
`LegOutput` (`EngineCodec.decode_output`) and, at the frontend again, an `EngineCoreOutput`
(`FrontendCodec.encode_delivery`).

Both ends hold codecs that stash buffers while they work: one instance per thread.

Two keys of a client's request are never passed on, because they name hosts to fetch memory from
or steer caches: `kv_transfer_params` / `ec_transfer_params` and `kv_hints`. Who asks comes with the
sampling parameters (`identity`) and goes no further; the cache salt becomes that of the caller
here, so that an engine and an index mean the same by it.

Of an adapter only its name travels, beside the payload: where it is kept is for each engine to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as EngineFinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from baton.domain.commands import Delivery
from baton.domain.handoff import CacheUse, KvHandle, Leg, LegKind, LegOutput, LegTimes
from baton.domain.names.trace_context import TraceContext, span_id, trace_headers
from baton.domain.request import FinishReason, LocalOnlyReason, Request
from baton.domain.value import evolve
from baton.engine.vllm.wire.adapter_ids import fleet_adapter_name
from baton.engine.vllm.wire.identity import (
    IDENTITY_ARGS,
    Caller,
    caller_of,
    salt_name,
    scoped_salt,
    trace_of,
)
from baton.engine.vllm.wire.kv_handles import make_kv_handle, pull_params, release_params
from baton.engine.vllm.wire.resume_keys import RESUME_ARGS, RESUMED_TOKENS_ARG
from baton.engine.vllm.wire.stop_reasons import parse_stop_reason

Frame: TypeAlias = bytes | bytearray | memoryview
KV_PARAMS_KEY = "kv_transfer_params"
PREFILL_KV_PARAMS: Mapping[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Asks an engine to keep the blocks of a finished prompt for another engine to fetch."""
_UNTRUSTED_ARGS = IDENTITY_ARGS | RESUME_ARGS | {KV_PARAMS_KEY, "ec_transfer_params"}
_PLAIN_OUTPUT_FIELDS = frozenset(
    {
        "request_id",
        "new_token_ids",
        "finish_reason",
        "stop_reason",
        "kv_transfer_params",
        "ec_transfer_params",
        "prefill_stats",
        # Monotonic times of another machine: the frontend could only misread them.
        "events",
        "trace_headers",
    }
)
_DETAIL_FIELDS = tuple(
    name for name in EngineCoreOutput.__struct_fields__ if name not in _PLAIN_OUTPUT_FIELDS
)
_FROM_ENGINE = {reason: FinishReason(str(reason)) for reason in EngineFinishReason}
_TO_ENGINE = {ours: theirs for theirs, ours in _FROM_ENGINE.items()}


class UnsupportedRequest(ValueError):
    """A request that no baton engine can run; the frontend should answer it with an error."""

    def __init__(self, request_id: str, why: str) -> None:
        super().__init__(request_id, why)
        self.request_id = request_id
        self.why = why

    def __str__(self) -> str:
        return f"request {self.request_id}: {self.why}"


Identify: TypeAlias = Callable[[EngineCoreRequest], tuple[Caller, TraceContext | None]]
"""Says who asks, and in which trace; may take from a request what its client may not say. Raises
`UnsupportedRequest` for one that nobody asked in a way that counts."""


def identify_by_gate(request: EngineCoreRequest) -> tuple[Caller, TraceContext | None]:
    """As the gate before vLLM's Python frontend wrote it into the sampling parameters."""
    extra_args = request.sampling_params.extra_args
    return caller_of(extra_args), trace_of(extra_args)


class FrontendCodec:
    """The end at the frontend: requests out of frames, outputs out of deliveries."""

    def __init__(
        self,
        *,
        max_len_tokens: int,
        supports_resume: bool = True,
        identify: Identify = identify_by_gate,
    ) -> None:
        """Take what holds for every engine.

        Args:
            max_len_tokens: The context of the model.
            supports_resume: Whether engines take up resumed legs with all state of their sampling.
            identify: Who asks, by the frontend that is at this end.
        """
        self._max_len_tokens = max_len_tokens
        self._supports_resume = supports_resume
        self._identify = identify
        self._request_decoder = MsgpackDecoder(EngineCoreRequest)
        self._output_decoder = MsgpackDecoder(EngineCoreOutput)
        self._encoder = MsgpackEncoder()

    def decode_engine_request(self, frames: Sequence[Frame]) -> EngineCoreRequest:
        """VLLM's request in an ADD message (its frames without the type frame).

        Raises:
            msgspec.DecodeError: the frames are not an `EngineCoreRequest`.
        """
        head, *tensors = frames
        # Writable, because torch warns about tensors over read-only memory.
        request: EngineCoreRequest = self._request_decoder.decode([head, *map(bytearray, tensors)])
        return request

    def decode_request(self, engine_request: EngineCoreRequest, *, now_s: float) -> Request:
        """Our request out of vLLM's, which is taken apart: it and its parameters are ours now.

        Raises:
            UnsupportedRequest: not a generation request, or one whose input is not complete, or
                that nobody asked.
        """
        request_id = engine_request.request_id
        params = engine_request.sampling_params
        if params is None:
            raise UnsupportedRequest(request_id, "got pooling parameters, expected a generation")
        if engine_request.resumable:
            raise UnsupportedRequest(request_id, "its prompt is streamed in parts; send it whole")
        caller, trace = self._identify(engine_request)
        prompt_token_ids = tuple(engine_request.prompt_token_ids or ())
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(1, self._max_len_tokens - len(prompt_token_ids))
        local_only = _local_only(engine_request, params)
        resumable = (
            _can_be_resumed(params, supports_resume=self._supports_resume)
            and local_only is not LocalOnlyReason.PROMPT_EMBEDS
        )
        engine_request.cache_salt = scoped_salt(caller.cache_scope, engine_request.cache_salt)
        _strip_untrusted(engine_request, params)
        if trace is not None and trace.sampled:
            # Engines repeat them with every output, so only where somebody will look at them.
            own_span_id = span_id(trace.trace_id, request_id)
            engine_request.trace_headers = trace_headers(trace, own_span_id)
        engine_request.prompt_token_ids = None
        adapter, engine_request.lora_request = engine_request.lora_request, None
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            arrived_at_s=now_s,
            priority=engine_request.priority,
            session_id=engine_request.session_id,
            tenant=caller.tenant,
            slo_class=caller.slo_class,
            cache_salt=salt_name(engine_request.cache_salt),
            adapter=None if adapter is None else fleet_adapter_name(adapter),
            # Engines look for no prefix of a prompt whose log probabilities are asked for.
            fan_out_id=None
            if local_only is LocalOnlyReason.PROMPT_LOGPROBS
            else _parent_id(engine_request),
            local_only=local_only,
            resumable=resumable,
            trace=trace,
            payload=pack_frames(self._encoder.encode(engine_request)),
        )

    def encode_delivery(
        self, delivery: Delivery, *, prompt_tokens: int | None = None
    ) -> EngineCoreOutput:
        """The output to send to the frontend; `prompt_tokens` only feeds its prompt statistics."""
        request_id, token_ids, finish = delivery.request_id, delivery.token_ids, delivery.finish
        cached_tokens, detail = delivery.cached_tokens, delivery.engine_payload
        if finish is None and cached_tokens is None and detail is None:
            return EngineCoreOutput(request_id, list(token_ids))  # nearly all of them
        finish_reason = None if finish is None else _TO_ENGINE[finish]
        stats = None
        if cached_tokens is not None:
            stats = _prefill_stats(cached_tokens, delivery.cache_use or CacheUse(), prompt_tokens)
        if detail is None:
            return EngineCoreOutput(
                request_id,
                list(token_ids),
                finish_reason=finish_reason,
                stop_reason=delivery.stop_reason,
                prefill_stats=stats,
            )
        output: EngineCoreOutput = self._output_decoder.decode(unpack_frames(detail))
        output.request_id = request_id
        output.new_token_ids = list(token_ids)
        output.finish_reason = finish_reason
        output.stop_reason = delivery.stop_reason
        output.prefill_stats = stats
        return output


class EngineCodec:
    """The end at the engine: engine requests out of legs, outputs out of what it answers."""

    def __init__(self) -> None:
        self._request_decoder = MsgpackDecoder(EngineCoreRequest)
        self._encoder = MsgpackEncoder()

    def encode_leg(self, leg: Leg, *, supports_resume: bool = True) -> EngineCoreRequest:
        """The request for `leg` to an engine that may resume legs (`patches.resume_patch`).

        A leg without a payload gets the likeliest tokens; one whose ticket covers the front of its
        prompt only fetches that and computes the rest.

        Raises:
            ValueError: the leg contradicts itself, or this engine could not run it rightly.
            msgspec.MsgspecError: its payload or its ticket is none of vLLM's.
        """
        if leg.min_tokens > leg.max_tokens:
            raise ValueError(
                f"leg {leg.leg_id}: min_tokens {leg.min_tokens} over max_tokens {leg.max_tokens}"
            )
        request = self._decode_payload(leg) if leg.payload else _plain_request(leg)
        params = request.sampling_params
        if params is None:
            raise ValueError(f"leg {leg.leg_id}: its payload has no sampling parameters")
        salt = salt_name(leg.cache_salt)
        if salt not in (None, salt_name(request.cache_salt)):
            # Placement believed in prefixes under one salt, the engine would look under another.
            raise ValueError(f"leg {leg.leg_id}: its cache salt is not that of its payload")
        request.request_id = request.external_req_id = leg.leg_id
        request.prompt_token_ids = list(leg.prompt_token_ids) or None
        request.priority = leg.priority
        request.data_parallel_rank = None
        request.client_index = request.current_wave = 0
        match leg.kind:
            case LegKind.PREFILL:
                if leg.emits_first_token:
                    _set_length_limits(
                        params, _first_token_leg(leg), supports_resume=supports_resume
                    )
                else:
                    request.sampling_params = params = _prefill_params(params)
                    # Output constraints are the decode leg's affair.
                    request.reasoning_ended = request.reasoning_parser_kwargs = None
                _set_kv_params(params, PREFILL_KV_PARAMS)
            case LegKind.DECODE:
                _set_kv_params(params, pull_params(leg, supports_resume=supports_resume))
                _set_length_limits(params, leg, supports_resume=supports_resume)
            case LegKind.LOCAL:
                _set_length_limits(params, leg, supports_resume=supports_resume)
        return request

    def _decode_payload(self, leg: Leg) -> EngineCoreRequest:
        request: EngineCoreRequest = self._request_decoder.decode(unpack_frames(leg.payload))
        return request

    def decode_output(
        self, output: EngineCoreOutput, *, prompt_tokens: int, times: LegTimes | None = None
    ) -> LegOutput:
        """What `output` says, in our words; what we have no word for goes into `detail`.

        `prompt_tokens` is the length of the leg's prompt: what a ticket is for. The `times` of a
        leg are told over several outputs, so whoever has seen them all gives them.
        """
        finish_reason = output.finish_reason
        stats = output.prefill_stats
        finish = None if finish_reason is None else _FROM_ENGINE[finish_reason]
        stop_reason = output.stop_reason
        if (
            finish is FinishReason.ERROR
            and (rejection := parse_stop_reason(stop_reason)) is not None
        ):
            finish, stop_reason = rejection
        return LegOutput(
            output.request_id,
            tuple(output.new_token_ids),
            finish,
            stop_reason,
            make_kv_handle(output.kv_transfer_params, prompt_tokens),
            None if stats is None else stats.num_cached_tokens,
            self._detail(output),
            times,
            None if stats is None else _cache_use(stats),
        )

    def _detail(self, output: EngineCoreOutput) -> bytes | None:
        fields = {}
        for name in _DETAIL_FIELDS:
            value = getattr(output, name)
            # Not by truth: tensors and arrays have none.
            if value is not None and not (type(value) is int and value == 0):
                fields[name] = value
        if output.finish_reason is not None and output.trace_headers:
            # The engine repeats them in every output; the frontend reads the last one's.
            fields["trace_headers"] = output.trace_headers
        if not fields:
            return None
        return pack_frames(self._encoder.encode(EngineCoreOutput("", [], **fields)))


def pack_frames(frames: Sequence[Frame]) -> bytes:
    """One byte string of several frames."""
    return msgspec.msgpack.encode([bytes(frame) for frame in frames])


def unpack_frames(packed: bytes) -> list[bytearray]:
    """The frames again; writable, because torch warns about tensors over read-only memory."""
    return msgspec.msgpack.decode(packed, type=list[bytearray])


def release_request(kv_handle: KvHandle, request_id: str) -> EngineCoreRequest:
    """A request that never runs but whose end tells the ticket's issuer to free its blocks.

    The engine adds and aborts it in one go; its connector then notifies the issuer.

    Raises:
        ValueError: the ticket contradicts itself.
        msgspec.MsgspecError: it is none of vLLM's.
    """
    params = SamplingParams(max_tokens=1, detokenize=False)
    _set_kv_params(params, release_params(kv_handle))
    request = _bare_request(params)
    request.request_id = request_id
    request.prompt_token_ids = [0]
    request.abort_immediately = True
    return request


def _plain_request(leg: Leg) -> EngineCoreRequest:
    """What a leg without a payload asks for: the likeliest tokens. Nobody's client sent it."""
    request = _bare_request(SamplingParams(temperature=0.0, detokenize=False))
    request.cache_salt = leg.cache_salt
    return request


def _bare_request(params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="",
        prompt_token_ids=None,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def _local_only(request: EngineCoreRequest, params: SamplingParams) -> LocalOnlyReason | None:
    if request.prompt_embeds is not None or not request.prompt_token_ids:
        return LocalOnlyReason.PROMPT_EMBEDS
    if request.mm_features:
        return LocalOnlyReason.MULTIMODAL
    if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
        return LocalOnlyReason.PROMPT_LOGPROBS
    if params.n > 1 or _parent_id(request) is not None:
        return LocalOnlyReason.FAN_OUT
    return None


def _parent_id(request: EngineCoreRequest) -> str | None:
    """The id of the request with n > 1 that the frontend made this one of; None: of no such.

    An ordinary id is the external id, or that and `-xxxxxxxx`; a child's is `<index>_` and such an
    id, while its external id stays the parent's.
    """
    external = request.external_req_id
    if external is None:
        return None
    index, _, parent = request.request_id.partition("_")
    is_child = index.isdigit() and (parent == external or parent.startswith(external + "-"))
    return parent if is_child else None


def _strip_untrusted(request: EngineCoreRequest, params: SamplingParams) -> None:
    """Drop what only an orchestrator may say; here that is us, not the client."""
    request.kv_hints = None
    request.data_parallel_rank = None
    request.abort_immediately = False
    if params.extra_args:
        trusted = {k: v for k, v in params.extra_args.items() if k not in _UNTRUSTED_ARGS}
        params.extra_args = trusted or None


def _set_kv_params(params: SamplingParams, kv_params: Mapping[str, Any]) -> None:
    params.extra_args = dict(params.extra_args or {}, **{KV_PARAMS_KEY: dict(kv_params)})


def _cache_use(stats: PrefillStats) -> CacheUse:
    return CacheUse(stats.num_external_cached_tokens, stats.num_cache_creation_tokens)


def _prefill_stats(cached_tokens: int, cache: CacheUse, prompt_tokens: int | None) -> PrefillStats:
    external_tokens, created_tokens = cache
    stats = PrefillStats()
    stats.set(
        max(prompt_tokens or 0, cached_tokens + created_tokens),
        num_local_cached_tokens=cached_tokens - external_tokens,
        num_external_cached_tokens=external_tokens,
    )
    stats.num_cache_creation_tokens = created_tokens
    return stats


def _can_be_resumed(params: SamplingParams, *, supports_resume: bool) -> bool:
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
    return supports_resume or not _has_output_state(params)


def _has_output_state(params: SamplingParams) -> bool:
    """Whether what comes next depends on which of the tokens before it were generated.

    Such state is what vLLM keeps of a request besides its KV blocks: penalties count generated
    tokens, a grammar has read them, a seed's generator has drawn once for each. An engine with the
    resume patch rebuilds it from the ids of a resumed leg, as vLLM does after a preemption.
    """
    return bool(
        params.structured_outputs is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.bad_words
        or params.repetition_detection is not None
    )


def _set_length_limits(params: SamplingParams, leg: Leg, *, supports_resume: bool) -> None:
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
            " expected at least one prompt token"
        )
    if resumed_tokens and not _can_be_resumed(params, supports_resume=supports_resume):
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


def _first_token_leg(leg: Leg) -> Leg:
    """A leg, but for that it ends with its first token."""
    return evolve(leg, max_tokens=1, min_tokens=min(leg.min_tokens, 1))


def _prefill_params(params: SamplingParams) -> SamplingParams:
    """Sampling for a leg whose one token is thrown away: the cheapest, without constraints."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        skip_reading_prefix_cache=params.skip_reading_prefix_cache,
        watermarking=False,
    )
