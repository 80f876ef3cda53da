"""The bytes of tickets in virtual time."""

from __future__ import annotations

from baton.domain.handoff import Ticket
from baton.simulator.engine.commands import SimTicket

_BETWEEN = "\0"


def write_ticket(ticket: SimTicket) -> bytes:
    """A ticket's `params`; ids and layouts have no NUL in them."""
    parts = (
        *(ticket.engine_id, ticket.leg_id, ticket.address, ticket.layout),
        *(str(ticket.tokens), str(ticket.blocks), ticket.prompt_digest.hex()),
    )
    return _BETWEEN.join(parts).encode()


def read_ticket(ticket: Ticket) -> SimTicket:
    """What `write_ticket` was given."""
    engine_id, leg_id, address, layout, tokens, blocks, digest = ticket.params.decode().split(
        _BETWEEN
    )
    return SimTicket(
        engine_id=engine_id,
        leg_id=leg_id,
        address=address,
        layout=layout,
        tokens=int(tokens),
        blocks=int(blocks),
        prompt_digest=bytes.fromhex(digest),
    )
