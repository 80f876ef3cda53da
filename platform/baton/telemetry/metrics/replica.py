"""Metrics of a replica: load and steps of its engine, pulls, and its fleet link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import Metric as Family

from baton.domain.fleet import AdapterStatus, LinkTotals, Load, ReplicaFacts, TransferTotals
from baton.runtime.link.options import LinkCounters
from baton.runtime.replica_host import ReplicaHost
from baton.telemetry import catalogue as c
from baton.telemetry.catalogue import EnginePhase, EngineRequestState, FrameOutcome
from baton.telemetry.families import Families


def replica_families(host: ReplicaHost) -> Iterator[Family]:
    """Every metric of a replica; empty before its engine has started."""
    families = Families()
    facts = host.facts
    if facts is None:
        return families.collect()
    load, _ = host.load_status()
    _add_facts(families, facts)
    _add_load(families, load)
    _add_links(families, host.links(), load.transfers)
    _add_frames(families, host.link_counters)
    families.add(c.LIVE_LEGS, host.live_legs)
    families.add(c.REPLICA_KV_LEASES, host.leases)
    families.add(c.COORDINATORS, host.coordinators)
    return families.collect()


def _add_facts(families: Families, facts: ReplicaFacts) -> None:
    families.add(c.REPLICA_INFO, 1, facts.role, facts.model, facts.engine, facts.engine_version)


def _add_load(families: Families, load: Load) -> None:
    steps = load.steps
    families.add(c.STEPS, steps.prefill_steps, EnginePhase.PREFILL)
    families.add(c.STEPS, steps.decode_steps, EnginePhase.DECODE)
    families.add(c.COMPUTED_TOKENS, steps.prefill_tokens, EnginePhase.PREFILL)
    families.add(c.COMPUTED_TOKENS, steps.decode_tokens, EnginePhase.DECODE)
    families.add(c.ENGINE_BUSY, steps.busy_s)
    families.add(c.ENGINE_REQUESTS, load.running_requests, EngineRequestState.RUNNING)
    families.add(c.ENGINE_REQUESTS, load.queued_requests, EngineRequestState.QUEUED)
    families.add(c.ENGINE_REQUESTS, load.pulling_requests, EngineRequestState.PULLING)
    families.add(c.QUEUED_TOKENS, load.queued_tokens)
    families.add(c.KV_USED, load.kv_used_fraction)
    families.add(c.STEP_TIME, load.step_s)
    families.add(c.EXPIRED_LEASES, load.transfers.expired_leases)
    families.add(c.VOID_PULLS, load.transfers.invalidated_pulls)
    _add_adapters(families, load.adapters)


def _add_adapters(families: Families, adapters: AdapterStatus) -> None:
    families.add(c.ADAPTERS, len(adapters.loaded))
    families.add(c.ADAPTER_HITS, adapters.hits)
    families.add(c.ADAPTER_LOADS, adapters.loads)
    families.add(c.ADAPTER_TIME, adapters.loading_s)


def _add_links(families: Families, links: Sequence[LinkTotals], transfers: TransferTotals) -> None:
    """Pulls by source, of the latest sources.

    Older sources are not added up as `other`: that total could go down. Failures of an unknown
    source are `other`.
    """
    for link in links[-c.MAX_LABEL_VALUES + 1 :]:
        families.add(c.PULLS, link.pulls, link.source_id, link.transport)
        families.add(c.PULLED_BYTES, link.moved_bytes, link.source_id, link.transport)
        families.add(c.PULL_TIME, link.busy_s, link.source_id, link.transport)
        families.add(c.PULL_FAILURES, link.failures, link.source_id)
    unknown = transfers.failures - sum(link.failures for link in links)
    families.add(c.PULL_FAILURES, max(0, unknown), c.OTHER)


def _add_frames(families: Families, link: LinkCounters) -> None:
    families.add(c.LINK_FRAMES, link.frames_in, FrameOutcome.RECEIVED)
    families.add(c.LINK_FRAMES, link.frames_out, FrameOutcome.SENT)
    families.add(c.LINK_FRAMES, link.bad_frames, FrameOutcome.BAD)
    families.add(c.LINK_FRAMES, link.dropped_frames, FrameOutcome.DROPPED)
    families.add(c.LINK_AUTH_FAILURES, link.rejected_connections)
