"""A coordinator in a process of its own, to be killed: joins a replica and starts one leg there."""

from __future__ import annotations

import asyncio
import sys

from baton.runtime.link.client import LinkClient
from tests.fakes.link_rig import FAST_LINK, EventLog
from tests.fakes.scripted_engine import make_leg


async def main(replica_id: str, address: str, leg_id: str) -> None:
    log = EventLog()
    client = LinkClient(f"coordinator of {leg_id}", log, options=FAST_LINK)
    client.connect(replica_id, address)
    await log.wait_joined(timeout_s=10)
    failure = client.submit(replica_id, make_leg(leg_id, max_tokens=1_000_000))
    sys.stdout.write(f"{failure}\n")
    sys.stdout.flush()
    await log.wait_lost(timeout_s=60)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
