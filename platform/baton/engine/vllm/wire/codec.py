"""vLLM's EngineCore messages to and from baton's values.

Theory of operation: vLLM's API server tokenizes a client's request and sends an
`EngineCoreRequest`. `FrontendCodec.decode_request` reads the fields that the brain needs and seals
the rest in `Request.payload`. `EngineCodec.encode_leg` opens the payload and makes a request for an
engine. The engine's answer becomes a `LegOutput` (`EngineCodec.decode_output`) and, at the
frontend, an `EngineCoreOutput` (`FrontendCodec.encode_delivery`).

Codecs stash buffers while they work: one instance per thread.

Some keys of a client's request name hosts to fetch memory from, or steer caches:
`kv_transfer_params`, `ec_transfer_params` and `kv_hints`. They are never passed on. The caller
comes with the sampling parameters (`identity`) and goes no further. The cache salt becomes the
caller's here, so that an engine and an index agree on it. Of an adapter only its name travels: each
engine knows its own path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as EngineFinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from baton.control.fleet.adapter_registry import RuntimeAdapter, adapter_key
from baton.domain.commands import Delivery
from baton.domain.handoff import CacheUse, KvHandle, Leg, LegKind, LegOutput, LegTimes
from baton.domain.names.trace_context import TraceContext, span_id, trace_headers
from baton.domain.request import FinishReason, LocalOnlyReason, Request
from baton.domain.value import evolve
from baton.engine.vllm.wire.identity import (
    IDENTITY_ARGS,
    Caller,
    caller_of,
    salt_name,
    scoped_salt,
    trace_of,
)
from baton.engine.vllm.wire.keys import (
    PREFIX_TOKENS_KEY,
    RESUME_ARGS,
    RESUMED_TOKENS_ARG,
    parse_stop_reason,
)

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
_FIRST_ID = 1 << 20
"""Ids of adapters in the configuration count from 1."""
_NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class _Source(msgspec.Struct):
    """The fields that vLLM needs of a pull's source; vLLM checks fewer, and then waits forever."""

    do_remote_prefill: Literal[True]
    remote_engine_id: _NonEmpty
    remote_request_id: _NonEmpty
    remote_host: _NonEmpty
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_block_ids: list[list[Annotated[int, msgspec.Meta(ge=0)]]]
    tp_size: Annotated[int, msgspec.Meta(ge=1)]


class UnusableKvHandle(ValueError):
    """A KV handle from which this prompt can fetch nothing; the prompt is computed instead."""


class UnsupportedRequest(ValueError):
    """A request that no baton engine can run; the frontend answers it with an error."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(request_id, reason)
        self.request_id = request_id
        self.reason = reason

    def __str__(self) -> str:
        return f"request {self.request_id}: {self.reason}"


Identify: TypeAlias = Callable[[EngineCoreRequest], tuple[Caller, TraceContext | None]]
"""Returns the caller and the trace of a request, and may remove fields that clients must not set.

Raises `UnsupportedRequest` without a valid caller.
"""


def identify_by_gate(request: EngineCoreRequest) -> tuple[Caller, TraceContext | None]:
    """The caller and trace that the gate wrote into the sampling parameters."""
    extra_args = request.sampling_params.extra_args
    return caller_of(extra_args), trace_of(extra_args)


class FrontendCodec:
    """The frontend's end: requests from frames, outputs from deliveries."""

    def __init__(
        self,
        *,
        max_len_tokens: int,
        supports_resume: bool = True,
        identify: Identify = identify_by_gate,
    ) -> None:
        """Take the facts that hold for every engine.

        Args:
            max_len_tokens: The context of the model.
            supports_resume: Whether engines restore all sampling state of resumed legs.
            identify: Finds the caller; depends on the frontend.
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
        """Baton's request from vLLM's, which is modified and must not be used again.

        Raises:
            UnsupportedRequest: no generation request, incomplete input, or no valid caller.
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
            # Engines repeat them with every output, so only sampled traces pay for them.
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
            adapter=None if adapter is None else _fleet_adapter_name(adapter),
            # Engines do not look up prefixes of prompts whose log probabilities a client asks for.
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
        """The output for the frontend; `prompt_tokens` only feeds its prompt statistics."""
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
    """The engine's end: engine requests from legs, outputs from its answers."""

    def __init__(self) -> None:
        self._request_decoder = MsgpackDecoder(EngineCoreRequest)
        self._encoder = MsgpackEncoder()

    def encode_leg(self, leg: Leg, *, supports_resume: bool = True) -> EngineCoreRequest:
        """The request for `leg` to an engine that may resume legs (`patches.resume_patch`).

        A leg without a payload is sampled greedily. A KV handle may cover only the front of the
        prompt.

        Raises:
            ValueError: the leg contradicts itself, or this engine cannot run it correctly.
            msgspec.MsgspecError: its payload or its KV handle is not vLLM's.
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
            # Otherwise placement would count on prefixes under another salt than the engine's.
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
                    # Output constraints concern only the decode leg.
                    request.reasoning_ended = request.reasoning_parser_kwargs = None
                _set_kv_params(params, PREFILL_KV_PARAMS)
            case LegKind.DECODE:
                _set_kv_params(params, _pull_params(leg, supports_resume=supports_resume))
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
        """An output of the engine; fields without a counterpart go into `detail`.

        `prompt_tokens` is the length of the leg's prompt, which a KV handle covers. Times arrive
        over several outputs, so the caller collects them.
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
            leg_id=output.request_id,
            token_ids=tuple(output.new_token_ids),
            finish=finish,
            stop_reason=stop_reason,
            kv_handle=_make_kv_handle(output.kv_transfer_params, prompt_tokens),
            cached_tokens=None if stats is None else stats.num_cached_tokens,
            engine_payload=self._detail(output),
            times=times,
            cache_use=None if stats is None else _cache_use(stats),
        )

    def _detail(self, output: EngineCoreOutput) -> bytes | None:
        fields = {}
        for name in _DETAIL_FIELDS:
            value = getattr(output, name)
            # No truth test: tensors and arrays have no truth value.
            if value is not None and not (type(value) is int and value == 0):
                fields[name] = value
        if output.finish_reason is not None and output.trace_headers:
            # The engine repeats them in every output; the frontend reads those of the last.
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
    """A request that never runs; its end makes the issuer of a KV handle free the blocks.

    The engine adds and aborts it at once; its connector then notifies the issuer.

    Raises:
        ValueError: the KV handle contradicts itself.
        msgspec.MsgspecError: it is not vLLM's.
    """
    params = SamplingParams(max_tokens=1, detokenize=False)
    _set_kv_params(params, _release_params(kv_handle))
    request = _bare_request(params)
    request.request_id = request_id
    request.prompt_token_ids = [0]
    request.abort_immediately = True
    return request


def _plain_request(leg: Leg) -> EngineCoreRequest:
    """A request for a leg without a payload, such as a probe: greedy sampling."""
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
    """The id of the request with n > 1 that this one is a child of, or None.

    An ordinary id is the external id, perhaps with `-xxxxxxxx`. A child's is `<index>_` and such an
    id; its external id stays the parent's.
    """
    external = request.external_req_id
    if external is None:
        return None
    index, _, parent = request.request_id.partition("_")
    is_child = index.isdigit() and (parent == external or parent.startswith(external + "-"))
    return parent if is_child else None


def _strip_untrusted(request: EngineCoreRequest, params: SamplingParams) -> None:
    """Drop fields that only an orchestrator may set: here baton, not the client."""
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
    """Whether generation may go on elsewhere without changing the distribution of later tokens.

    A seed alone does not count: without resume support the generator starts anew, which changes the
    sample but not its distribution.

    Args:
        params: The client's sampling parameters.
        supports_resume: Whether engines rebuild output state from a resumed leg's ids.
    """
    if params.thinking_token_budget is not None or params.trace_decode_token_ids:
        # vLLM updates both at each step; ids alone do not restore the position.
        return False
    return supports_resume or not _has_output_state(params)


def _has_output_state(params: SamplingParams) -> bool:
    """Whether later tokens depend on which of the tokens before them were generated.

    vLLM keeps such state beside the KV blocks: penalties count generated tokens, a grammar has read
    them, a seed's generator has drawn once for each. An engine with the resume patch rebuilds it
    from the ids of a resumed leg, as vLLM does after a preemption.
    """
    return bool(
        params.structured_outputs is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.bad_words
        or params.repetition_detection is not None
    )


def _set_length_limits(params: SamplingParams, leg: Leg, *, supports_resume: bool) -> None:
    """Set how much a leg may generate, and how many tokens of its prompt were generated before it.

    An engine that supports resume counts those as output, so the limits include them: after 4 of 10
    tokens it is asked for 10, another engine for 6.

    Raises:
        ValueError: the leg needs an engine that supports resume, or contradicts itself.
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
    """Drop log probabilities of the prompt, which the client got with the first token."""
    if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
        params.prompt_logprobs = params.prompt_logprob_token_ids = None
        params.prompt_logprob_start = params.skip_reading_prefix_cache = None


def _first_token_leg(leg: Leg) -> Leg:
    """The same leg, ending with its first token."""
    return evolve(leg, max_tokens=1, min_tokens=min(leg.min_tokens, 1))


def _prefill_params(params: SamplingParams) -> SamplingParams:
    """Sampling for a leg whose one token is discarded: the cheapest, without constraints."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        skip_reading_prefix_cache=params.skip_reading_prefix_cache,
        watermarking=False,
    )


def to_lora_request(adapter: RuntimeAdapter) -> LoRARequest:
    """The request by which vLLM's handlers know a runtime adapter.

    vLLM's handlers show clients a LoRA request's name. The fleet needs the key of a particular load
    (`control.fleet.adapter_registry`), so the id of the LoRA request carries the number of that
    load.
    """
    return LoRARequest(
        lora_name=adapter.name, lora_int_id=_FIRST_ID + adapter.number, lora_path=adapter.source
    )


def is_runtime_adapter(request: LoRARequest) -> bool:
    """Whether an adapter was loaded at runtime."""
    return bool(request.lora_int_id >= _FIRST_ID)


def _fleet_adapter_name(request: LoRARequest) -> str:
    """The fleet's name for the adapter of a request."""
    name = str(request.lora_name)
    return (
        adapter_key(name, request.lora_int_id - _FIRST_ID) if is_runtime_adapter(request) else name
    )


def _make_kv_handle(kv_params: Mapping[str, Any] | None, prompt_tokens: int) -> KvHandle | None:
    """The KV handle in an engine's `kv_transfer_params` at the end of a leg, or None."""
    if not kv_params or not kv_params.get("do_remote_prefill"):
        return None
    block_ids = kv_params.get("remote_block_ids") or ()
    return KvHandle(
        # Not `remote_num_tokens`: for some models prefill stops short of the last few tokens.
        tokens=prompt_tokens,
        blocks=sum(len(group) for group in block_ids),
        params=msgspec.msgpack.encode(kv_params),
    )


def _pull_params(leg: Leg, *, supports_resume: bool) -> dict[str, Any]:
    """The `kv_transfer_params` with which a decode leg fetches its KV handle's blocks.

    Args:
        leg: The decode leg.
        supports_resume: Whether the engine counts the resumed tokens of its prompt as output.

    Raises:
        UnusableKvHandle: the KV handle is not for this prompt, or not vLLM's.
    """
    kv_handle, prompt_tokens = leg.kv_handle, len(leg.prompt_token_ids)
    if kv_handle is None:
        raise UnusableKvHandle(f"leg {leg.leg_id}: a decode leg without a KV handle")
    if not 0 < kv_handle.tokens <= prompt_tokens:
        # The connector would fetch blocks of another prompt.
        raise UnusableKvHandle(
            f"leg {leg.leg_id}: its KV handle is for {kv_handle.tokens} tokens,"
            f" its prompt has {prompt_tokens}"
        )
    try:
        params = _release_params(kv_handle)
    except (ValueError, msgspec.MsgspecError) as error:
        raise UnusableKvHandle(f"leg {leg.leg_id}: its KV handle: {error}") from error
    if kv_handle.tokens < prompt_tokens or (supports_resume and leg.resumed_tokens):
        # Otherwise the connector takes the remote blocks for those of the whole prompt, without its
        # output.
        params[PREFIX_TOKENS_KEY] = kv_handle.tokens
    return params


def _release_params(kv_handle: KvHandle) -> dict[str, Any]:
    """The `kv_transfer_params` that name a KV handle's blocks.

    Raises:
        ValueError: the KV handle contradicts itself.
        msgspec.MsgspecError: it is not vLLM's.
    """
    source = _decode_source(kv_handle)
    blocks = sum(len(group) for group in source.remote_block_ids)
    if blocks != kv_handle.blocks:
        raise ValueError(f"KV handle: it names {blocks} blocks, expected {kv_handle.blocks}")
    params: dict[str, Any] = msgspec.msgpack.decode(kv_handle.params)
    return params


def source_engine_id(kv_handle: KvHandle) -> str:
    """The id of the engine that issued a KV handle.

    Raises:
        msgspec.MsgspecError: the KV handle is not vLLM's.
    """
    return _decode_source(kv_handle).remote_engine_id


def _decode_source(kv_handle: KvHandle) -> _Source:
    return msgspec.msgpack.decode(kv_handle.params, type=_Source)
