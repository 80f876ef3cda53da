"""What a simulated engine says of itself."""

from __future__ import annotations

import baton
from baton.domain.fleet import ReplicaFacts, Role
from baton.simulator.engine.settings import SimSettings


def replica_facts(
    settings: SimSettings, *, replica_id: str, pool: str, role: Role, model: str, side_channel: str
) -> ReplicaFacts:
    """The facts of a replica with this engine."""
    return ReplicaFacts(
        replica_id=replica_id,
        pool=pool,
        role=role,
        model=model,
        engine="sim",
        engine_version=baton.__version__,
        block_size_tokens=settings.block_size_tokens,
        kv_blocks=settings.kv_blocks,
        kv_block_bytes=settings.kv_block_bytes,
        max_len_tokens=settings.max_len_tokens,
        max_running_requests=settings.max_running_requests,
        max_batched_tokens=settings.max_batched_tokens,
        max_batched_tokens_while_decoding=settings.decode_step_tokens,
        layout=settings.layout(model),
        side_channel=side_channel,
        cache_events=True,
        supports_prefix_fetch=True,
        host_blocks=settings.host_blocks,
        adapter_slots=settings.adapter_slots,
        adapters_per_batch=settings.adapters_per_batch,
    )
