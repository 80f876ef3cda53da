"""The bytes of tickets in virtual time."""

from __future__ import annotations

from baton.domain.handoff import KvHandle
from baton.simulator.engine.commands import SimKvHandle

_SEPARATOR = "\0"


def encode_kv_handle(kv_handle: SimKvHandle) -> bytes:
    """A ticket's `params`; ids and layouts have no NUL in them."""
    parts = (
        *(kv_handle.engine_id, kv_handle.leg_id, kv_handle.address, kv_handle.layout),
        *(str(kv_handle.tokens), str(kv_handle.blocks), kv_handle.prompt_digest.hex()),
    )
    return _SEPARATOR.join(parts).encode()


def decode_kv_handle(kv_handle: KvHandle) -> SimKvHandle:
    """What `encode_kv_handle` was given."""
    engine_id, leg_id, address, layout, tokens, blocks, digest = kv_handle.params.decode().split(
        _SEPARATOR
    )
    return SimKvHandle(
        engine_id=engine_id,
        leg_id=leg_id,
        address=address,
        layout=layout,
        tokens=int(tokens),
        blocks=int(blocks),
        prompt_digest=bytes.fromhex(digest),
    )
