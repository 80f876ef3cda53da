"""The port through which the console reads the fleet's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.console.history import History
from baton.domain.commands import RecordSelection

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTarget:
    """Addresses, models and keys of the deployment's API."""

    urls: tuple[str, ...]
    """Addresses of the same API, tried in order until one accepts a connection."""
    models: tuple[str, ...]
    takes_key: bool
    """Whether a tenant has API keys."""
    needs_key: bool
    """Whether callers without a key are rejected."""
    cert_file: str | None = None
    """The front's certificate, which alone is trusted; None: plain text."""
    total_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatUnavailable:
    """Why there is no playground."""

    reason: str


class Feed(Protocol):
    """Plain values, as `baton ... -o json` prints them; every call only reads.

    Every call has its own deadline and raises `BatonError` when it fails.
    """

    @property
    def points(self) -> History:
        """The points of the charts, which the controller adds at each tick."""
        ...

    def chat_target(self) -> ChatTarget | ChatUnavailable:
        """The API that the playground chats with; does no I/O."""
        ...

    async def overview(self) -> Row:
        """Pools, classes, demand, autoscaler, ingresses: the output of `baton status -o json`."""
        ...

    async def links(self) -> Sequence[Row]:
        """Every pair of replicas: `links` in the output of `baton links -o json`."""
        ...

    async def requests(self, count: int, order: RecordSelection) -> Sequence[Row]:
        """Reports of recently ended requests (`telemetry.requests.request_log`)."""
        ...

    async def request(self, request_id: str) -> Sequence[Row]:
        """The records of one request; empty when no ingress has them."""
        ...

    async def ticks(self, count: int) -> Sequence[Row]:
        """The autoscaler's last ticks, newest last; see `baton explain scale -o json`."""
        ...

    async def config(self) -> str:
        """The current configuration as YAML, without secrets."""
        ...
