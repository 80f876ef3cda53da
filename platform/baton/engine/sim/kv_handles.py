"""The bytes of a simulated engine's tickets."""

from __future__ import annotations

import msgspec

from baton.domain.handoff import KvHandle
from baton.simulator.engine.commands import SimKvHandle

_KIND = "baton-sim-ticket-1"


class UnreadableKvHandleError(ValueError):
    """A ticket that no simulated engine wrote."""


def encode_kv_handle(kv_handle: SimKvHandle) -> bytes:
    """A ticket's `params`."""
    return msgspec.msgpack.encode((_KIND, kv_handle))


def decode_kv_handle(kv_handle: KvHandle) -> SimKvHandle:
    """What `encode_kv_handle` was given.

    Raises:
        UnreadableKvHandleError: the bytes are something else, such as a real engine's ticket.
    """
    try:
        kind, decoded = msgspec.msgpack.decode(kv_handle.params, type=tuple[str, SimKvHandle])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableKvHandleError(
            f"ticket of {len(kv_handle.params)} bytes: {error}"
        ) from error
    if kind != _KIND:
        raise UnreadableKvHandleError(f"ticket of kind {kind!r}, wanted {_KIND!r}")
    return decoded
