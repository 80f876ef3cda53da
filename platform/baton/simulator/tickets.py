"""The bytes of tickets in virtual time."""

from __future__ import annotations

from dataclasses import astuple

from baton.domain.handoff import Ticket
from baton.simulator.engine.orders import SimTicket

_BETWEEN = "\0"


def write_ticket(ticket: SimTicket) -> bytes:
    """A ticket's `params`; ids and layouts have no NUL in them."""
    *texts, tokens, blocks, digest = astuple(ticket)
    return _BETWEEN.join([*texts, str(tokens), str(blocks), digest.hex()]).encode()


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
