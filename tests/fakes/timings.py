"""Timings and links that are what a test says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.domain.fleet import FleetView, Load, ReplicaView, Role
from baton.domain.handoff import HitSource
from baton.perf.timing import EngineTiming
from baton.policy.placement.port import PlacementContext
from baton.policy.prefix_cache.hits import NO_HIT, Hit
from tests.fakes.facts import replica_facts


@dataclass(frozen=True, kw_only=True)
class LinearTiming:
    """An engine without chunks: so much for a step, for a prompt token, for a stream."""

    per_step_s: float = 0.01
    per_token_s: float = 0.0001
    per_stream_s: float = 0.001

    def prefill_s(
        self, tokens: int, *, running: int = 0, context_tokens: int = 0, length_tokens: int = 0
    ) -> float:
        del context_tokens, length_tokens
        return (
            self.per_step_s + tokens * self.per_token_s + running * self.per_stream_s
            if tokens
            else 0.0
        )

    def step_s(self, *, running: int, context_tokens: int = 0) -> float:
        del context_tokens
        return self.per_step_s + running * self.per_stream_s

    def decode_request_s(self, *, context_tokens: int = 0) -> float:
        del context_tokens
        return self.per_stream_s

    def host_load_s(self, blocks: int) -> float:
        return blocks * 0.001


@dataclass(frozen=True, kw_only=True)
class FixedTimings:
    """One timing for all, or one by pool."""

    timing: LinearTiming = LinearTiming()
    by_pool: Mapping[str, LinearTiming] = field(default_factory=dict)
    output_tokens: float = 10.0
    shares: Mapping[str, float] = field(default_factory=dict)
    """By replica: what share of its time prompts take."""
    contexts: Mapping[str, float] = field(default_factory=dict)
    """By replica: how many tokens each of its streams attends to."""

    def of(self, view: ReplicaView) -> EngineTiming:
        return self.by_pool.get(view.facts.pool, self.timing)

    def prefill_time_fraction(self, view: ReplicaView, now_s: float) -> float:
        del now_s
        return self.shares.get(view.replica_id, 0.0)

    def stream_context(self, view: ReplicaView) -> float | None:
        return self.contexts.get(view.replica_id)

    def expected_output_tokens(self, max_tokens: int) -> float:
        return min(max_tokens, self.output_tokens)


@dataclass(frozen=True, kw_only=True)
class FixedLinks:
    """Every pair takes so long, but for those that must not be used."""

    setup_s: float = 0.002
    bytes_per_s: float = 1e9
    blocked_pairs: frozenset[tuple[str, str]] = frozenset()

    def transfer_s(self, source_id: str, target_id: str, moved_bytes: int) -> float | None:
        if (source_id, target_id) in self.blocked_pairs:
            return None
        return self.setup_s + moved_bytes / self.bytes_per_s


@dataclass(frozen=True)
class KnownHits:
    """Hits by replica, in blocks."""

    blocks: Mapping[str, int]
    host_blocks: Mapping[str, int] = field(default_factory=dict)

    def of(self, replica_id: str) -> Hit:
        if not (blocks := self.blocks.get(replica_id, 0)):
            return NO_HIT
        return Hit(blocks, self.host_blocks.get(replica_id, 0), HitSource.REPORTED, 0.5)

    def holders(self, limit: int) -> Sequence[str]:
        return sorted(self.blocks, key=lambda block: (-self.blocks[block], block))[:limit]

    def depths(self) -> Sequence[int]:
        return sorted({block for block in self.blocks.values() if block}, reverse=True)


def replica_view(
    replica_id: str, role: Role = Role.DECODE, load: Load = Load(), **changes: object
) -> ReplicaView:
    """A view; `changes` are those of `ReplicaView`, or of its facts."""
    view_fields = ReplicaView.__struct_fields__
    view_changes = {name: value for name, value in changes.items() if name in view_fields}
    facts_changes = {name: value for name, value in changes.items() if name not in view_fields}
    layout = str(facts_changes.pop("layout", "same"))
    facts = replica_facts(replica_id, role, layout=layout, **facts_changes)
    return ReplicaView(facts=facts, load=load, load_received_at_s=0.0, **view_changes)  # type: ignore[arg-type]


def placement_context(
    *views: ReplicaView,
    timings: FixedTimings = FixedTimings(),
    links: FixedLinks = FixedLinks(),
    at_s: float = 0.0,
) -> PlacementContext:
    """What placement sees of these replicas."""
    fleet = FleetView(at_s=at_s, replicas={view.replica_id: view for view in views})
    return PlacementContext(fleet=fleet, timings=timings, links=links, prefills_done_at_s={})
