"""What a simulated engine's core asks of the world outside it, and the tickets it is about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SimTicket:
    """What a simulated engine's ticket says."""

    engine_id: str
    leg_id: str
    address: str
    layout: str
    tokens: int
    blocks: int
    prompt_digest: bytes
    """Of the salt and the `tokens` ids whose KV the blocks hold: the puller must have the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPull:
    """Fetch blocks; answered by `pull_done` or `pull_failed`."""

    leg_id: str
    ticket: SimTicket
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBlocks:
    """Bring blocks back from the host's memory; answered by `load_done`."""

    leg_id: str
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelFetch:
    """Stop a pull or a load that nobody waits for; not answered."""

    leg_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSource:
    """Tell the engine that issued this ticket that nobody will pull it (any more)."""

    ticket: SimTicket


Order = StartPull | LoadBlocks | CancelFetch | FreeSource
