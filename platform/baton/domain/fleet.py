"""Replicas as the brain sees them: static facts, load snapshots, and the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from baton.domain.cache import CacheShape
from baton.domain.value import Value


class Role(StrEnum):
    """The kind of work that a replica is meant to run; a hint to placement."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Health(StrEnum):
    """Whether a replica is counted on for new work; the best first."""

    HEALTHY = "healthy"
    EJECTED = "ejected"
    """It has failed requests, or was away, and must show first that it is well."""
    UNRESPONSIVE = "unresponsive"
    """It should have been heard of by now."""


class LossReason(StrEnum):
    """Why a replica is no longer counted on."""

    LEFT = "left"
    """It is gone from the membership that Ray reports."""
    UNRESPONSIVE = "unresponsive"
    """No heartbeat within the liveness deadline."""
    DISCONNECTED = "disconnected"
    """The link's connection broke (a killed process looks like this)."""
    ENGINE_DEAD = "engine_dead"
    """Its engine process died."""
    OUT_OF_SYNC = "out_of_sync"
    """Frames were lost on the link, so its streams cannot be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """A replica's facts, sent when a coordinator connects; only its role may change later."""

    replica_id: str
    pool: str
    role: Role
    """The role: that of its pool, until a role change."""
    model: str
    engine: str
    """"vllm" or "sim"."""
    engine_version: str
    block_size_tokens: int
    kv_blocks: int
    kv_block_bytes: int
    max_len_tokens: int
    max_running_requests: int
    max_batched_tokens: int
    layout: str
    """Replicas hand KV blocks to each other only when their layouts are equal."""
    side_channel: str = ""
    """`host:port` where other engines get the data with which they pull from this replica; empty
    when it hands nothing off."""
    cache_events: bool = False
    """Whether the replica says what its prefix cache holds."""
    supports_prefix_fetch: bool = False
    """Whether it can hand out the leading blocks of a prompt, for another to compute the rest."""
    supports_resume: bool = True
    """Whether it goes on after tokens of another engine with all that sampling depends on."""
    host_blocks: int = 0
    """Room in the host's memory for blocks that its KV cache has evicted; 0: none, or not known."""
    devices: float = 1.0
    """GPUs that it takes; a replica on CPUs counts as one."""
    adapter_slots: int = 0
    """Adapters that it keeps loaded at most; 0: it serves none."""
    max_batched_tokens_while_decoding: int | None = None
    """As `max_batched_tokens`, of steps in which anybody decodes; None: as many."""
    adapters_per_batch: int = 0
    """Different adapters that it runs at the same time; 0: as many as it keeps loaded."""
    cache_shape: CacheShape | None = None
    """How its prefix cache finds what it can reuse; None: by plain full attention, so that of a
    reusable prefix every shorter one is reusable, too."""

    @property
    def supports_takeover(self) -> bool:
        """Whether it can fetch a prompt's blocks and go on after another engine's first token."""
        return self.supports_prefix_fetch and self.supports_resume


class TransferTotals(NamedTuple):
    """Pulls into a replica since it started (counted by its engine, not estimated)."""

    pulls: int = 0
    moved_bytes: int = 0
    busy_s: float = 0.0
    failures: int = 0
    expired_leases: int = 0
    """Leases on blocks of this replica that no replica fetched or released in time."""
    invalidated_pulls: int = 0
    """Of the pulls: the source no longer kept the blocks when they had been read. They were thrown
    away, and the prompt was computed or its leg ended in an error."""


class StepTotals(NamedTuple):
    """Totals of engine steps and computed tokens since a replica started.

    They are totals, not averages: two of them give the difference, even if reports between them
    were lost. Sums over steps obey the same linear model as one step does.
    """

    steps: int = 0
    busy_s: float = 0.0
    prefill_tokens: int = 0
    """Prompt tokens computed, without cached tokens."""
    decode_tokens: int = 0
    """Running requests, added up over the steps that decoded for them."""
    context_tokens: int = 0
    """Tokens that those requests attended to, added up likewise; 0 when the engine does not say."""
    prefill_steps: int = 0
    """Steps that computed any prompt tokens."""
    decode_steps: int = 0
    """Steps that decoded for anyone; a step may do both."""


class LinkTotals(NamedTuple):
    """Pulls from one source into a replica since it started."""

    source_id: str
    pulls: int = 0
    moved_bytes: int = 0
    busy_s: float = 0.0
    failures: int = 0
    transport: str = ""
    """The actual transport of the blocks ("tcp", "cma", "cuda_ipc", "rc_mlx5"); empty: not
    known."""


class AdapterStatus(NamedTuple):
    """The adapters that a replica holds, and the cost of loading them."""

    loaded: tuple[str, ...] = ()
    """Those that are there, or will be for legs that it has got; the longest unused first."""
    hits: int = 0
    """Legs with an adapter that was there, or on its way, when they came; since the start."""
    loads: int = 0
    """Adapters that were fetched for a leg, since the start."""
    loading_s: float = 0.0
    """Total time of loading."""


class Load(NamedTuple):
    """A replica's load at one moment; sent several times a second, as an array."""

    queued_requests: int = 0
    """Requests that wait for a place in the batch; those whose blocks are on the way not among
    them."""
    running_requests: int = 0
    queued_tokens: int = 0
    kv_used_fraction: float = 0.0
    step_s: float = 0.0
    """Moving average of the engine's step time."""
    transfers: TransferTotals = TransferTotals()
    pulling_requests: int = 0
    """Requests that wait for their blocks to arrive."""
    steps: StepTotals = StepTotals()
    cache_sequence: int = 0
    """Number of the last cache update that was sent; 0 before the first."""
    adapters: AdapterStatus = AdapterStatus()

    @property
    def total_requests(self) -> int:
        """All that wait, run, or wait for their blocks."""
        return self.queued_requests + self.running_requests + self.pulling_requests


class ReplicaView(Value, kw_only=True):
    """One replica in a snapshot, with this coordinator's own work in flight on it."""

    facts: ReplicaFacts
    load: Load = Load()
    load_received_at_s: float
    """When the snapshot arrived."""
    draining: bool = False
    health: Health = Health.HEALTHY
    inflight_legs: int = 0
    """Our own legs on it that have not ended."""
    inflight_tokens: int = 0
    """Prompt tokens that it must compute for them, without cached and fetched tokens."""
    inflight_streams: int = 0
    """Those of our own legs that decode, or will: a prefill leg is over with its first token."""
    unreported_legs: int = 0
    """Those of our own legs that had not reached the replica when it took the snapshot."""
    unreported_tokens: int = 0
    unreported_adapters: frozenset[str] = frozenset()
    """Adapters of those legs: the replica will have them."""
    inflight_adapters: frozenset[str] = frozenset()
    """Adapters of all our own legs on it: none of these is evicted for another, while they run."""

    @property
    def replica_id(self) -> str:
        """The replica's id."""
        return self.facts.replica_id

    def has_adapter(self, name: str) -> bool:
        """Whether a leg with this adapter would find it there, or on its way."""
        if name not in self.load.adapters.loaded and name not in self.unreported_adapters:
            return False
        return name in self.expected_adapters

    @property
    def expected_adapters(self) -> tuple[str, ...]:
        """The adapters that are loaded after all sent legs have arrived, in the order of eviction.

        With room for two, of which x and y are there, a leg that was sent for z costs x its place,
        or y where a leg needs x.
        """
        loaded = self.load.adapters.loaded
        pending = [name for name in sorted(self.unreported_adapters) if name not in loaded]
        names = [*loaded, *pending]
        while 0 < self.facts.adapter_slots < len(names):
            idle = (name for name in names if name not in self.inflight_adapters)
            names.remove(next(idle, names[0]))
        return tuple(names)

    @property
    def adapter_to_evict(self) -> str | None:
        """The adapter that the next load evicts; None while there is room."""
        names = self.expected_adapters
        if not names or len(names) < self.facts.adapter_slots:
            return None
        return next((name for name in names if name not in self.inflight_adapters), names[0])

    @property
    def is_eligible(self) -> bool:
        """Whether it gets new work like any other."""
        return not self.draining and self.health is Health.HEALTHY


class EligibleReplicas(NamedTuple):
    """Replicas that take new work, by role."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    """Replicas that decode; those of role mixed are here too, since they can do with one leg."""

    @staticmethod
    def of(replicas: Mapping[str, ReplicaView]) -> EligibleReplicas:
        """The roster of some replicas, ids in order.

        Those of the best standing that exists.
        """
        candidates = sorted(
            replica_id for replica_id, view in replicas.items() if not view.draining
        )
        for health in Health:
            if healthiest := [
                candidate for candidate in candidates if replicas[candidate].health is health
            ]:
                candidates = healthiest
                break
        is_prefill = {
            candidate: replicas[candidate].facts.role is Role.PREFILL for candidate in candidates
        }
        return EligibleReplicas(
            prefill=tuple(candidate for candidate in candidates if is_prefill[candidate]),
            decode=tuple(candidate for candidate in candidates if not is_prefill[candidate]),
        )


class FleetView(Value, kw_only=True):
    """The input of a decision: every known replica, at one moment."""

    at_s: float
    replicas: Mapping[str, ReplicaView]
    cached_eligible: EligibleReplicas | None = None
    """The roster, where it is known already; it changes far less often than loads do."""
    peer_load_factor: float = 1.0
    """How many legs the fleet gets for each of this coordinator's. It scales this coordinator's
    unreported work to that of all coordinators."""

    @property
    def eligible(self) -> EligibleReplicas:
        """The replicas that take new work."""
        return (
            EligibleReplicas.of(self.replicas)
            if self.cached_eligible is None
            else self.cached_eligible
        )
