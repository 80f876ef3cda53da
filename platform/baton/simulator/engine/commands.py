"""What a simulated engine's core asks of the world outside it, and the tickets it is about."""

from __future__ import annotations

from baton.domain.value import Value


class SimKvHandle(Value, kw_only=True):
    """What a simulated engine's ticket says."""

    engine_id: str
    leg_id: str
    address: str
    layout: str
    tokens: int
    blocks: int
    prompt_digest: bytes
    """Of the salt and the `tokens` ids whose KV the blocks hold: the puller must have the same."""


class StartPull(Value, kw_only=True):
    """Fetch blocks; answered by `pull_done` or `pull_failed`."""

    leg_id: str
    kv_handle: SimKvHandle
    blocks: int


class LoadBlocks(Value, kw_only=True):
    """Bring blocks back from the host's memory; answered by `load_done`."""

    leg_id: str
    blocks: int


class CancelFetch(Value, kw_only=True):
    """Stop a pull or a load that nobody waits for; not answered."""

    leg_id: str


class FreeSource(Value, kw_only=True):
    """Tell the engine that issued this ticket that nobody will pull it (any more)."""

    kv_handle: SimKvHandle


EngineCommand = StartPull | LoadBlocks | CancelFetch | FreeSource
