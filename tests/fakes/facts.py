"""The facts of a replica, for tests that care about one or two of them."""

from __future__ import annotations

from dataclasses import replace

from baton.domain.fleet import ReplicaFacts, Role

_FACTS = ReplicaFacts(
    replica_id="r",
    pool="pool",
    role=Role.MIXED,
    model="tiny",
    engine="none",
    engine_version="0",
    block_size_tokens=16,
    kv_blocks=1000,
    kv_block_bytes=1024,
    max_len_tokens=4096,
    max_running_requests=64,
    max_batched_tokens=2048,
    layout="same",
)


def replica_facts(
    replica_id: str, role: Role = Role.MIXED, *, layout: str = "same", **changes: object
) -> ReplicaFacts:
    """Facts of a replica of some role and layout; `changes` are any others."""
    facts = replace(_FACTS, replica_id=replica_id, role=role, layout=layout, pool=str(role))
    return replace(facts, **changes)  # type: ignore[arg-type]
