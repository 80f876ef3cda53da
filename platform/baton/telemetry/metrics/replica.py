"""What a replica measures: its engine's load and steps, what it pulled, and its fleet link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import Metric as Family

from baton.domain.fleet import AdapterLoad, LinkTotals, Load, ReplicaFacts, TransferTotals
from baton.runtime.link.options import LinkCounters
from baton.runtime.replica_host import ReplicaHost
from baton.telemetry import catalogue as c
from baton.telemetry.families import Families
from baton.telemetry.label_values import EnginePhase, EngineRequest, Frame


def replica_families(host: ReplicaHost) -> Iterator[Family]:
    """Every metric of a replica; nothing before its engine has started."""
    found = Families()
    facts = host.facts
    if facts is None:
        return found.collect()
    load, _ = host.beat()
    _add_facts(found, facts)
    _add_load(found, load)
    _add_links(found, host.links(), load.transfers)
    _add_frames(found, host.link_counters)
    found.add(c.LIVE_LEGS, host.live_legs)
    found.add(c.HELD_LEASES, host.leases)
    found.add(c.COORDINATORS, host.coordinators)
    return found.collect()


def _add_facts(found: Families, facts: ReplicaFacts) -> None:
    found.add(c.REPLICA_INFO, 1, facts.role, facts.model, facts.engine, facts.engine_version)


def _add_load(found: Families, load: Load) -> None:
    steps = load.steps
    found.add(c.STEPS, steps.prefill_steps, EnginePhase.PREFILL)
    found.add(c.STEPS, steps.decode_steps, EnginePhase.DECODE)
    found.add(c.COMPUTED, steps.prefill_tokens, EnginePhase.PREFILL)
    found.add(c.COMPUTED, steps.decode_tokens, EnginePhase.DECODE)
    found.add(c.BUSY, steps.busy_s)
    found.add(c.RUNNING, load.running_requests, EngineRequest.RUNNING)
    found.add(c.RUNNING, load.queued_requests, EngineRequest.QUEUED)
    found.add(c.RUNNING, load.pulling_requests, EngineRequest.PULLING)
    found.add(c.QUEUED_TOKENS, load.queued_tokens)
    found.add(c.KV_USED, load.kv_used_fraction)
    found.add(c.STEP_TIME, load.step_s)
    found.add(c.EXPIRED_LEASES, load.transfers.expired_leases)
    found.add(c.VOID_PULLS, load.transfers.void_pulls)
    _add_adapters(found, load.adapters)


def _add_adapters(found: Families, adapters: AdapterLoad) -> None:
    found.add(c.ADAPTERS, len(adapters.loaded))
    found.add(c.ADAPTER_HITS, adapters.hits)
    found.add(c.ADAPTER_LOADS, adapters.loads)
    found.add(c.ADAPTER_TIME, adapters.busy_s)


def _add_links(found: Families, links: Sequence[LinkTotals], transfers: TransferTotals) -> None:
    """Pulls by their source: the sources that were pulled from last, for those before are gone.

    What is beyond that is not added up as `other`: as sources come and go that would go down.
    Failures whose source is not known are `other`.
    """
    for link in links[-c.MOST_VALUES + 1 :]:
        found.add(c.PULLS, link.pulls, link.source_id, link.transport)
        found.add(c.PULLED, link.moved_bytes, link.source_id, link.transport)
        found.add(c.PULL_TIME, link.busy_s, link.source_id, link.transport)
        found.add(c.PULL_FAILURES, link.failures, link.source_id)
    unknown = transfers.failures - sum(link.failures for link in links)
    found.add(c.PULL_FAILURES, max(0, unknown), c.OTHER)


def _add_frames(found: Families, link: LinkCounters) -> None:
    found.add(c.LINK_FRAMES, link.frames_in, Frame.RECEIVED)
    found.add(c.LINK_FRAMES, link.frames_out, Frame.SENT)
    found.add(c.LINK_FRAMES, link.bad_frames, Frame.BAD)
    found.add(c.LINK_FRAMES, link.dropped_frames, Frame.DROPPED)
    found.add(c.LINK_STRANGERS, link.strangers)
