"""The port of the replica's end of the fleet link: what coordinators ask of a replica."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from baton.domain.fleet import LinkTotals, Load
from baton.domain.handoff import KvHandle, Leg


class LinkHandler(Protocol):
    """Who runs the legs. Called synchronously on the event loop; must not wait."""

    def submit(self, leg: Leg) -> None:
        """A coordinator wants a leg run. It is owned from now until it ends."""
        ...

    def abort(self, leg_ids: tuple[str, ...]) -> None:
        """A coordinator wants these owned legs stopped: call `LinkServer.send_legs_aborted`."""
        ...

    def orphan(self, leg_ids: tuple[str, ...]) -> None:
        """Nobody owns these legs any more: stop them; nobody needs to hear of it."""
        ...

    def release(self, kv_handle: KvHandle) -> None:
        """A coordinator says that nobody will pull this ticket's blocks."""
        ...

    def load_status(self) -> tuple[Load, bool]:
        """Return the load and whether the replica drains; called once every `beat_s`.

        The load knows of every leg that was handed to `submit`.
        """
        ...

    def links(self) -> Iterable[LinkTotals]:
        """What was pulled so far, by source; called once every `beat_s`."""
        ...

    def sync_cache(self, *, immediately: bool) -> None:
        """Sessions want a snapshot of the prefix cache through `LinkServer.reports`.

        At once, or as soon as one is due: whoever asks often gets no more than it can read.
        """
        ...

    def check_side_channel(self, source_id: str, address: str) -> bool:
        """Find out whether blocks can be pulled from `source_id`, and tell `LinkServer.reports`.

        False when that will not be done: too much is asked already.
        """
        ...

    def report_broken_agent(self, why: str) -> None:
        """A coordinator says that the engine pulls from nobody, though its sources serve others."""
        ...
