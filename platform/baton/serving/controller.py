"""The controller: a small actor that knows what was deployed; no request ever waits for it."""

from __future__ import annotations

import asyncio
import time

import baton
from baton.config.schema import DeploymentConfig
from baton.serving.membership import Member, Membership

_MEMBER_FIELDS = ("replica_id", "pool", "role", "link", "pid")


class Controller:
    """The class behind the controller deployment; `app` decorates it.

    It holds nothing that cannot be rebuilt: the configuration comes with the deployment, the
    members from Serve. When it dies, requests are served on, and Serve starts another.
    """

    def __init__(self, config: DeploymentConfig) -> None:
        self._config = config
        self._started_at_s = time.monotonic()
        self._membership: Membership | None = None
        self._starting = asyncio.Lock()

    async def status(self) -> dict[str, object]:
        """What was asked for, and which replicas there are."""
        membership = await self._following()
        return {
            "baton": baton.__version__,
            "model": self._config.model_name,
            "up_s": round(time.monotonic() - self._started_at_s, 1),
            "wanted": {
                name: {"role": str(pool.role), "replicas": pool.replicas.start}
                for name, pool in self._config.pools.items()
            },
            "members": [_row(member) for member in sorted(membership.members, key=_order)],
        }

    async def __del__(self) -> None:
        """Serve's shutdown hook."""
        if self._membership is not None:
            await self._membership.stop()

    async def _following(self) -> Membership:
        # Not begun in the constructor: it needs the replica's event loop.
        async with self._starting:
            if self._membership is None:
                from baton.serving.ray_context import app_name

                first = asyncio.Event()
                membership = Membership(
                    app=app_name(),
                    deployments=tuple(self._config.pools),
                    on_change=lambda _members: first.set(),
                )
                await membership.start()
                async with asyncio.timeout(10.0):
                    await first.wait()
                self._membership = membership
        return self._membership


def _order(member: Member) -> tuple[str, str]:
    return (member.deployment, member.replica_id)


def _row(member: Member) -> dict[str, object]:
    told = {name: member.metadata[name] for name in _MEMBER_FIELDS if name in member.metadata}
    return {"node": member.node_ip} | told
