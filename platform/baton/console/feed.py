"""The data of the console, and its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from baton.domain.commands import RecordSelection

Row = Mapping[str, object]


class Feed(Protocol):
    """Plain values, as `baton ... -o json` prints them; nothing here changes anything.

    Every call has a deadline of its own and raises `BatonError` when it cannot be answered.
    """

    async def overview(self) -> Row:
        """Pools, classes, demand, autoscaler, ingresses: the output of `baton status -o json`."""
        ...

    async def links(self) -> Sequence[Row]:
        """Every pair of replicas: `links` in the output of `baton links -o json`."""
        ...

    async def requests(self, count: int, order: RecordSelection) -> Sequence[Row]:
        """Stories of requests that have ended lately (`telemetry.requests.request_log`)."""
        ...

    async def request(self, request_id: str) -> Sequence[Row]:
        """The records of one request; empty when no ingress remembers it."""
        ...

    async def ticks(self, count: int) -> Sequence[Row]:
        """The autoscaler's last ticks, newest last; see `baton explain scale -o json`."""
        ...

    async def config(self) -> str:
        """The configuration that holds, as YAML; secrets are not shown."""
        ...
