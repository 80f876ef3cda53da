"""What one engine knows of the engines it pulls from: do they answer, and what carries the blocks.

Side channels are checked when somebody asks; on the way the transports that UCX has chosen by then
are read, so that they are known a check later at the latest and nothing has to watch files.
"""

from __future__ import annotations

import asyncio
import shutil
import weakref
from collections.abc import Mapping

from baton.domain.addresses import parse_address, same_host
from baton.runtime.scratch import scratch_folder
from baton.transfer.side_channel import SideChannelChecks
from baton.transfer.transport import (
    Reach,
    check_rdma,
    read_transports,
    transport_environment,
    transport_towards,
)
from baton.transfer.ucx_settings import UCX_SETTINGS


class Peers:
    """The other engines, as seen from one. Its folder goes away with it."""

    def __init__(self, own_id: str, own_address: str, *, require_rdma: bool = False) -> None:
        self._checks = SideChannelChecks(own_id, own_address)
        self._own_host = _host(own_address)
        self._require_rdma = require_rdma
        self._folder = scratch_folder("baton-ucx-")
        # Nobody closes this; a TemporaryDirectory would warn of that.
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._hosts: dict[str, str] = {}
        self._transports: Mapping[Reach, frozenset[str]] = {}

    def environment(self) -> dict[str, str]:
        """Variables for the engine's processes: UCX as it suits pulls, and its transports told."""
        return {**UCX_SETTINGS, **transport_environment(self._folder)}

    async def check(self, source_id: str, address: str, deadline_s: float) -> None:
        """Return when blocks could be pulled from `source_id`.

        Raises:
            TransferFailed: its side channel is not in order.
            RdmaMissing: RDMA is required, and UCX has chosen something else.
        """
        self._hosts[source_id] = _host(address)
        await self._checks.check(source_id, address, deadline_s)
        self._transports = await asyncio.to_thread(read_transports, self._folder)
        if self._require_rdma:
            check_rdma(source_id, self.transport(source_id))

    def transport(self, source_id: str) -> str:
        """What carries blocks from a replica; empty while it is not known."""
        host = self._hosts.get(source_id)
        if host is None:
            return ""
        return transport_towards(self._transports, same_host=same_host(host, self._own_host))


def _host(address: str) -> str:
    try:
        return parse_address(address).host
    except ValueError:  # whoever asks there is told
        return ""
