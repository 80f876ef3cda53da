"""A side channel as a prefill engine has it, without the engine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.engine.vllm.patches.lease_checks import KeptLeases, listen

METADATA = {(0, 0): b"metadata of rank 0", (0, 1): b"metadata of rank 1"}
_DEADLINE_S = 30.0


@dataclass
class LeaseSource:
    address: str
    leases: KeptLeases = field(default_factory=KeptLeases)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def serve_leases(address: str | None = None) -> Iterator[LeaseSource]:
    source = LeaseSource(address or free_address())
    ready, stop = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=listen,
        args=(source.address,),
        kwargs={"metadata": METADATA, "leases": source.leases, "ready": ready, "stop": stop},
    )
    thread.start()
    try:
        assert ready.wait(_DEADLINE_S)
        yield source
    finally:
        stop.set()
        thread.join(_DEADLINE_S)
        assert not thread.is_alive()
