"""What the console shows, asked of the controller that serves it and of every ingress.

Viewers share one poll (`console.hub`); what is here asks anew each time it is called. An ingress
that does not answer costs nobody else's answer, and is named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, cast

from baton.config.schema.deployment import DeploymentConfig
from baton.config.write.render import render_redacted
from baton.console.feed import Row
from baton.domain.commands import RecordSelection
from baton.domain.errors import NotRunning, TimedOut
from baton.serving.ray import serve_control
from baton.serving.ray.packing import unpack
from baton.serving.ray.serve_control import CallResults
from baton.serving.shared.names import INGRESS
from baton.serving.shared.reports import merge_link_reports, merge_request_reports

_QUERY_TIMEOUT_S = 3.0
"""Answers take milliseconds; a viewer waits no longer than this to hear that there are none."""

Rows = Sequence[Row]


class CallIngresses(Protocol):
    """Calls a method of every ingress."""

    def __call__(self, method: str, *arguments: object) -> Awaitable[CallResults]:
        """What they said, and who said nothing."""
        ...


def call_ingresses(app: str) -> CallIngresses:
    """Asks the ingresses of an application on Ray Serve."""

    async def call(method: str, *arguments: object) -> CallResults:
        return await serve_control.call_all(
            app, INGRESS, method, *arguments, timeout_s=_QUERY_TIMEOUT_S
        )

    return call


class LiveFeed:
    """A `console.feed.Feed` of a deployment that runs."""

    def __init__(
        self,
        *,
        status: Callable[[], Awaitable[Row]],
        ticks: Callable[[int], Row],
        config: Callable[[], DeploymentConfig],
        call: CallIngresses,
    ) -> None:
        """Take whom to ask; `status` and `ticks` are the controller's, see `ControllerService`."""
        self._status = status
        self._ticks = ticks
        self._config = config
        self._call = call

    async def overview(self) -> Row:
        """See `Feed.overview`; ingresses that are silent are under `unresponsive`.

        Raises:
            TimedOut: the controller has not seen the fleet yet.
        """
        try:
            async with asyncio.timeout(_QUERY_TIMEOUT_S):
                status = await self._status()
        except TimeoutError as error:
            raise TimedOut("the controller has seen no replica yet", "wait") from error
        answers = await self._call("status")
        ingresses = [unpack(value) for value in answers.values]
        unresponsive = {"silent": list(answers.failures)} if answers.failures else {}
        return {**status, "ingresses": ingresses, **unresponsive}

    async def links(self) -> Rows:
        """See `Feed.links`.

        Raises:
            NotRunning: no ingress answers.
        """
        return merge_link_reports(await self._rows("links"))

    async def requests(self, count: int, order: RecordSelection) -> Rows:
        """See `Feed.requests`.

        Raises:
            NotRunning: no ingress answers.
        """
        return merge_request_reports(await self._rows("requests", count, str(order)), count, order)

    async def request(self, request_id: str) -> Rows:
        """See `Feed.request`.

        Raises:
            NotRunning: no ingress answers.
        """
        return [report for rows in await self._rows("explain", request_id) for report in rows]

    async def ticks(self, count: int) -> Rows:
        """See `Feed.ticks`."""
        return cast("Rows", self._ticks(count)["ticks"])

    async def config(self) -> str:
        """See `Feed.config`."""
        return render_redacted(self._config())

    async def _rows(self, method: str, *arguments: object) -> list[Rows]:
        answers = await self._call(method, *arguments)
        if not answers.values:
            why = "; ".join(answers.failures) or "there is none"
            raise NotRunning(f"no ingress answers: {why}", "look at 'baton status'")
        return [cast("Rows", unpack(value)) for value in answers.values]
