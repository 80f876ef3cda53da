"""What the console shows, asked of the controller that serves it and of every ingress.

Viewers share one poll (`console.hub`); what is here asks anew each time it is called. An ingress
that does not answer costs nobody else's answer, and is named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, cast

from baton.config.schema.deployment import DeploymentConfig
from baton.config.write.render import render_for_all
from baton.console.feed import Row
from baton.domain.commands import RecordOrder
from baton.domain.errors import NotRunning, TimedOut
from baton.serving.ray import serve_control
from baton.serving.ray.packing import unpacked
from baton.serving.ray.serve_control import Answers
from baton.serving.shared.names import INGRESS
from baton.serving.shared.reports import merged_links, merged_stories

_ASK_S = 3.0
"""Answers take milliseconds; a viewer waits no longer than this to hear that there are none."""

Rows = Sequence[Row]


class AskIngresses(Protocol):
    """Calls a method of every ingress."""

    def __call__(self, method: str, *arguments: object) -> Awaitable[Answers]:
        """What they said, and who said nothing."""
        ...


def ask_ingresses(app: str) -> AskIngresses:
    """Asks the ingresses of an application on Ray Serve."""

    async def ask(method: str, *arguments: object) -> Answers:
        return await serve_control.call_all(app, INGRESS, method, *arguments, timeout_s=_ASK_S)

    return ask


class LiveFeed:
    """A `console.feed.Feed` of a deployment that runs."""

    def __init__(
        self,
        *,
        status: Callable[[], Awaitable[Row]],
        ticks: Callable[[int], Row],
        config: Callable[[], DeploymentConfig],
        ask: AskIngresses,
    ) -> None:
        """Take whom to ask; `status` and `ticks` are the controller's, see `ControllerBody`."""
        self._status = status
        self._ticks = ticks
        self._config = config
        self._ask = ask

    async def overview(self) -> Row:
        """See `Feed.overview`; ingresses that are silent are under `silent`.

        Raises:
            TimedOut: the controller has not seen the fleet yet.
        """
        try:
            async with asyncio.timeout(_ASK_S):
                told = await self._status()
        except TimeoutError as error:
            raise TimedOut("the controller has seen no replica yet", "wait") from error
        answers = await self._ask("status")
        ingresses = [unpacked(one) for one in answers.given]
        silent = {"silent": list(answers.missing)} if answers.missing else {}
        return {**told, "ingresses": ingresses, **silent}

    async def links(self) -> Rows:
        """See `Feed.links`.

        Raises:
            NotRunning: no ingress answers.
        """
        return merged_links(await self._rows("links"))

    async def requests(self, count: int, order: RecordOrder) -> Rows:
        """See `Feed.requests`.

        Raises:
            NotRunning: no ingress answers.
        """
        return merged_stories(await self._rows("requests", count, str(order)), count, order)

    async def request(self, request_id: str) -> Rows:
        """See `Feed.request`.

        Raises:
            NotRunning: no ingress answers.
        """
        return [story for rows in await self._rows("explain", request_id) for story in rows]

    async def ticks(self, count: int) -> Rows:
        """See `Feed.ticks`."""
        return cast("Rows", self._ticks(count)["ticks"])

    async def config(self) -> str:
        """See `Feed.config`."""
        return render_for_all(self._config())

    async def _rows(self, method: str, *arguments: object) -> list[Rows]:
        answers = await self._ask(method, *arguments)
        if not answers.given:
            why = "; ".join(answers.missing) or "there is none"
            raise NotRunning(f"no ingress answers: {why}", "look at 'baton status'")
        return [cast("Rows", unpacked(one)) for one in answers.given]
