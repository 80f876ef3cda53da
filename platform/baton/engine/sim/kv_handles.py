"""The bytes of a simulated engine's tickets."""

from __future__ import annotations

import msgspec

from baton.domain.handoff import Ticket
from baton.simulator.engine.commands import SimTicket

_KIND = "baton-sim-ticket-1"


class UnreadableTicketError(ValueError):
    """A ticket that no simulated engine wrote."""


def write_ticket(ticket: SimTicket) -> bytes:
    """A ticket's `params`."""
    return msgspec.msgpack.encode((_KIND, ticket))


def read_ticket(ticket: Ticket) -> SimTicket:
    """What `write_ticket` was given.

    Raises:
        UnreadableTicketError: the bytes are something else, such as a real engine's ticket.
    """
    try:
        kind, read = msgspec.msgpack.decode(ticket.params, type=tuple[str, SimTicket])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableTicketError(f"ticket of {len(ticket.params)} bytes: {error}") from error
    if kind != _KIND:
        raise UnreadableTicketError(f"ticket of kind {kind!r}, wanted {_KIND!r}")
    return read
