"""A replica in a process of its own, to be killed: prints its link address, then serves."""

from __future__ import annotations

import asyncio
import sys

from baton.runtime.replica_host import ReplicaHost
from tests.fakes.link_rig import FAST_LINK
from tests.fakes.scripted_engine import ScriptedEngine, make_facts


async def main(replica_id: str, bind: str) -> None:
    engine = ScriptedEngine(make_facts(replica_id), step_s=0.005)
    host = ReplicaHost(engine, bind=bind, link=FAST_LINK)
    await host.start()
    sys.stdout.write(host.address + "\n")
    sys.stdout.flush()
    await host.failed


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
