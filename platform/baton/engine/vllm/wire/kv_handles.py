"""Tickets in vLLM's own words: what a prefill engine hands out, and how a pull is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from baton.domain.handoff import KvHandle, Leg
from baton.engine.vllm.wire.transfer_keys import PREFIX_TOKENS_KEY

_NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class _Source(msgspec.Struct):
    """What vLLM needs to know of whom it pulls from; it checks less, and then waits for ever."""

    do_remote_prefill: Literal[True]
    remote_engine_id: _NonEmpty
    remote_request_id: _NonEmpty
    remote_host: _NonEmpty
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_block_ids: list[list[Annotated[int, msgspec.Meta(ge=0)]]]
    tp_size: Annotated[int, msgspec.Meta(ge=1)]


class UnusableKvHandle(ValueError):
    """A ticket by which nothing can be fetched for this prompt; it is computed instead."""


def make_kv_handle(kv_params: Mapping[str, Any] | None, prompt_tokens: int) -> KvHandle | None:
    """The ticket in what an engine says at the end of a leg; None when it keeps nothing."""
    if not kv_params or not kv_params.get("do_remote_prefill"):
        return None
    block_ids = kv_params.get("remote_block_ids") or ()
    return KvHandle(
        # Not `remote_num_tokens`: for some models prefill stops short of the last few tokens.
        tokens=prompt_tokens,
        blocks=sum(len(group) for group in block_ids),
        params=msgspec.msgpack.encode(kv_params),
    )


def pull_params(leg: Leg, *, supports_resume: bool) -> dict[str, Any]:
    """The `kv_transfer_params` with which a decode leg fetches what its ticket is for.

    Args:
        leg: The decode leg.
        supports_resume: Whether the engine counts the resumed tokens of its prompt as output.

    Raises:
        UnusableKvHandle: the ticket is not for this prompt, or none of vLLM's.
    """
    kv_handle, prompt_tokens = leg.kv_handle, len(leg.prompt_token_ids)
    if kv_handle is None:
        raise UnusableKvHandle(f"leg {leg.leg_id}: a decode leg without a ticket")
    if not 0 < kv_handle.tokens <= prompt_tokens:
        # The connector would fetch what is not this prompt's.
        raise UnusableKvHandle(
            f"leg {leg.leg_id}: its ticket is for {kv_handle.tokens} tokens,"
            f" its prompt has {prompt_tokens}"
        )
    try:
        params = release_params(kv_handle)
    except (ValueError, msgspec.MsgspecError) as error:
        raise UnusableKvHandle(f"leg {leg.leg_id}: its ticket: {error}") from error
    if kv_handle.tokens < prompt_tokens or (supports_resume and leg.resumed_tokens):
        # Left alone, the connector would take the remote blocks for those of the whole prompt, and
        # of no more than that.
        params[PREFIX_TOKENS_KEY] = kv_handle.tokens
    return params


def release_params(kv_handle: KvHandle) -> dict[str, Any]:
    """The `kv_transfer_params` that name a ticket's blocks.

    Raises:
        ValueError: the ticket contradicts itself.
        msgspec.MsgspecError: it is none of vLLM's.
    """
    source = _decode_source(kv_handle)
    blocks = sum(len(group) for group in source.remote_block_ids)
    if blocks != kv_handle.blocks:
        raise ValueError(f"ticket: it names {blocks} blocks, expected {kv_handle.blocks}")
    params: dict[str, Any] = msgspec.msgpack.decode(kv_handle.params)
    return params


def source_engine_id(kv_handle: KvHandle) -> str:
    """The id of the engine that issued a ticket.

    Raises:
        msgspec.MsgspecError: the ticket is none of vLLM's.
    """
    return _decode_source(kv_handle).remote_engine_id


def _decode_source(kv_handle: KvHandle) -> _Source:
    return msgspec.msgpack.decode(kv_handle.params, type=_Source)
