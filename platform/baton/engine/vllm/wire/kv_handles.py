"""Tickets in vLLM's own words: what a prefill engine hands out, and how a pull is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from baton.domain.handoff import Leg, Ticket
from baton.engine.vllm.wire.transfer_keys import PREFIX_TOKENS_KEY

_Word = Annotated[str, msgspec.Meta(min_length=1)]


class _Source(msgspec.Struct):
    """What vLLM needs to know of whom it pulls from; it checks less, and then waits for ever."""

    do_remote_prefill: Literal[True]
    remote_engine_id: _Word
    remote_request_id: _Word
    remote_host: _Word
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_block_ids: list[list[Annotated[int, msgspec.Meta(ge=0)]]]
    tp_size: Annotated[int, msgspec.Meta(ge=1)]


class UnusableTicket(ValueError):
    """A ticket by which nothing can be fetched for this prompt; it is computed instead."""


def issue_ticket(kv_params: Mapping[str, Any] | None, prompt_tokens: int) -> Ticket | None:
    """The ticket in what an engine says at the end of a leg; None when it keeps nothing."""
    if not kv_params or not kv_params.get("do_remote_prefill"):
        return None
    block_ids = kv_params.get("remote_block_ids") or ()
    return Ticket(
        # Not `remote_num_tokens`: for some models prefill stops short of the last few tokens.
        tokens=prompt_tokens,
        blocks=sum(len(group) for group in block_ids),
        params=msgspec.msgpack.encode(kv_params),
    )


def pull_params(leg: Leg, *, takes_up: bool) -> dict[str, Any]:
    """The `kv_transfer_params` with which a decode leg fetches what its ticket is for.

    Args:
        leg: The decode leg.
        takes_up: Whether the engine counts the resumed tokens of its prompt as output.

    Raises:
        UnusableTicket: the ticket is not for this prompt, or none of vLLM's.
    """
    ticket, prompt_tokens = leg.ticket, len(leg.prompt_token_ids)
    if ticket is None:
        raise UnusableTicket(f"leg {leg.leg_id}: a decode leg without a ticket")
    if not 0 < ticket.tokens <= prompt_tokens:
        # The connector would fetch what is not this prompt's.
        raise UnusableTicket(
            f"leg {leg.leg_id}: its ticket is for {ticket.tokens} tokens,"
            f" its prompt has {prompt_tokens}"
        )
    try:
        params = release_params(ticket)
    except (ValueError, msgspec.MsgspecError) as error:
        raise UnusableTicket(f"leg {leg.leg_id}: its ticket: {error}") from error
    if ticket.tokens < prompt_tokens or (takes_up and leg.resumed_tokens):
        # Left alone, the connector would take the remote blocks for those of the whole prompt, and
        # of no more than that.
        params[PREFIX_TOKENS_KEY] = ticket.tokens
    return params


def release_params(ticket: Ticket) -> dict[str, Any]:
    """The `kv_transfer_params` that name a ticket's blocks.

    Raises:
        ValueError: the ticket contradicts itself.
        msgspec.MsgspecError: it is none of vLLM's.
    """
    source = _source(ticket)
    blocks = sum(len(group) for group in source.remote_block_ids)
    if blocks != ticket.blocks:
        raise ValueError(f"ticket: it names {blocks} blocks, wanted {ticket.blocks}")
    params: dict[str, Any] = msgspec.msgpack.decode(ticket.params)
    return params


def source_engine(ticket: Ticket) -> str:
    """The id of the engine that issued a ticket.

    Raises:
        msgspec.MsgspecError: the ticket is none of vLLM's.
    """
    return _source(ticket).remote_engine_id


def _source(ticket: Ticket) -> _Source:
    return msgspec.msgpack.decode(ticket.params, type=_Source)
