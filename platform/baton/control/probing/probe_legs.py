"""The legs and leases of probes: begun, ended, given up, and freed without a pull."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.leg_table import LegTable
from baton.control.probing.schedule import Pair
from baton.control.state.limits import CoordinatorLimits
from baton.domain.commands import AbortLegs, Command, ReleaseLease, SubmitLeg
from baton.domain.handoff import KvHandle, Lease, Leg, LegKind
from baton.policy.placement.port import choose_releaser


class ProbeStep(StrEnum):
    """Where a probe is."""

    CHECK = "side channel"
    PREFILL = "prefill"
    PULL = "pull"


@dataclass(slots=True)
class Probe:
    """One probe under way. PREFILL and PULL have a leg, PULL a lease too."""

    probe_id: str
    pair: Pair
    with_transfer: bool
    prompt: tuple[int, ...] = ()
    step: ProbeStep = ProbeStep.CHECK
    leg_id: str | None = None
    lease: Lease | None = None
    step_started_at_s: float = 0.0
    """When its present step began."""
    cached_tokens: int | None = None


class ProbeLegs:
    """The legs of probes in the book of all legs; `commands` collects what must be done."""

    def __init__(self, *, limits: CoordinatorLimits, fleet: FleetTable, legs: LegTable) -> None:
        self.commands: list[Command] = []
        self.limits = limits
        self._fleet = fleet
        self._legs = legs
        self._by_leg: dict[str, Probe] = {}

    def __contains__(self, leg_id: str) -> bool:
        return leg_id in self._by_leg

    def probe_of(self, leg_id: str) -> Probe:
        """The probe whose leg this is.

        Raises:
            KeyError: it is no running leg of a probe.
        """
        return self._by_leg[leg_id]

    def submit(self, probe: Probe, replica_id: str, kind: LegKind, *, tokens: int) -> None:
        """Begin a leg with the probe's prompt and, once there is one, its ticket."""
        leg = Leg(
            leg_id=f"{probe.probe_id}~{kind}",
            request_id=probe.probe_id,
            kind=kind,
            prompt_token_ids=probe.prompt,
            max_tokens=1,
            kv_handle=None if probe.lease is None else probe.lease.kv_handle,
            source_id=None if probe.lease is None else probe.lease.replica_id,
        )
        probe.leg_id = leg.leg_id
        self._by_leg[leg.leg_id] = probe
        self._legs.begin(leg, replica_id, tokens)
        self.commands.append(SubmitLeg(replica_id=replica_id, leg=leg))

    def record_lease(self, probe: Probe, leg_id: str, kv_handle: KvHandle, now_s: float) -> None:
        """The source keeps blocks for the probe from now on."""
        probe.lease = Lease(
            leg_id=leg_id,
            request_id=probe.probe_id,
            replica_id=probe.pair.source.replica_id,
            kv_handle=kv_handle,
            granted_at_s=now_s,
            expires_at_s=now_s + self.limits.lease_s,
        )

    def end_leg(self, probe: Probe) -> None:
        """Take a leg that is over out of the books."""
        if probe.leg_id is not None:
            self._legs.end(probe.leg_id)
            del self._by_leg[probe.leg_id]
            probe.leg_id = None

    def abort(self, probe: Probe, now_s: float) -> None:
        """Abort the leg, if there is one; its lease goes with it. A lost replica has none left."""
        if probe.leg_id is None:
            return
        leg_id = probe.leg_id
        dispatched = self._legs.get_running(leg_id)
        assert dispatched is not None, f"leg {leg_id} is not in the book"
        if dispatched.replica_id not in self._fleet:
            self.end_leg(probe)
            self.release_lease(probe, now_s)
            return
        confirm_by_s = now_s + self.limits.abort_s
        self._legs.begin_close(leg_id, lease=probe.lease, confirm_by_s=confirm_by_s)
        del self._by_leg[leg_id]
        probe.leg_id = None
        self.commands.append(AbortLegs(replica_id=dispatched.replica_id, leg_ids=(leg_id,)))

    def release_lease(self, probe: Probe, now_s: float) -> None:
        """Have the blocks freed that no replica pulls any more."""
        if probe.lease is None:
            return
        fleet = self._fleet.view(now_s)
        source = fleet.replicas.get(probe.lease.replica_id)
        via = None if source is None else choose_releaser(source, fleet)
        if via is not None:
            self.commands.append(ReleaseLease(lease=probe.lease, via_replica_id=via))

    def check_integrity(self, probes: list[Probe]) -> None:
        """Raise AssertionError when the legs are not those of the probes, or do not run."""
        with_leg = {probe.leg_id for probe in probes if probe.leg_id is not None}
        assert with_leg == self._by_leg.keys(), "legs of ended probes"
        for probe in probes:
            assert (probe.leg_id is None) == (probe.step is ProbeStep.CHECK), f"{probe}: leg"
            assert (probe.lease is None) == (probe.step is not ProbeStep.PULL), f"{probe}: lease"
            if probe.leg_id is not None:
                assert self._legs.get_running(probe.leg_id) is not None, (
                    f"{probe.leg_id} does not run"
                )
