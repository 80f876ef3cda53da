"""Commands of a simulated engine's core to its caller, and its KV handles."""

from __future__ import annotations

from baton.domain.handoff import KvHandle
from baton.domain.value import Value

_SEPARATOR = "\0"


class SimKvHandle(Value, kw_only=True):
    """Content of a simulated engine's KV handle."""

    engine_id: str
    leg_id: str
    address: str
    layout: str
    tokens: int
    blocks: int
    prompt_digest: bytes
    """Of the salt and the `tokens` ids whose KV the blocks hold: the target must have the same."""


class StartPull(Value, kw_only=True):
    """Fetch blocks; answered by `pull_done` or `pull_failed`."""

    leg_id: str
    kv_handle: SimKvHandle
    blocks: int


class LoadBlocks(Value, kw_only=True):
    """Load blocks from the host tier; answered by `load_done`."""

    leg_id: str
    blocks: int


class CancelFetch(Value, kw_only=True):
    """Stop the pull or load of an aborted leg; no answer."""

    leg_id: str


class FreeSource(Value, kw_only=True):
    """Tell the engine that issued this KV handle that no engine will pull it."""

    kv_handle: SimKvHandle


EngineCommand = StartPull | LoadBlocks | CancelFetch | FreeSource


def encode_kv_handle(kv_handle: SimKvHandle) -> bytes:
    """The `params` of a KV handle; ids and layouts must not contain NUL."""
    parts = (
        *(kv_handle.engine_id, kv_handle.leg_id, kv_handle.address, kv_handle.layout),
        *(str(kv_handle.tokens), str(kv_handle.blocks), kv_handle.prompt_digest.hex()),
    )
    return _SEPARATOR.join(parts).encode()


def decode_kv_handle(kv_handle: KvHandle) -> SimKvHandle:
    """Inverse of `encode_kv_handle`."""
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
