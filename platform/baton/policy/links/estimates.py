"""Estimates of links: seconds of a transfer, failures, and permission to use a link.

Theory of operation. A *link* is a pair of replicas, source and target. Its estimate is

    seconds = (setup_s + (bytes + bytes of others) * s_per_byte) * penalty

The two coefficients are fitted to the counts of the targets' engines (`LinkTotals`: differences, so
lost reports do no harm). A link without counts uses those of all links together, or the measurement
of a probe. The bytes of others are those of the flows that share a NIC with this link, see
this one, see `transfers`. Only flows that this coordinator began are known; those of others show
measurements. The penalty is paid for failures and fades.

    UNKNOWN ──probe or pull went well──▶ OK ◀──a whole probe went well──┐
       └──────────────┴──probe failed, or n handoffs in a row──▶ QUARANTINED

An unknown link may be used, a quarantined link may not. Only a probe that moved blocks ends a
quarantine; a probe of the side channel alone does not. Links are remembered while both replicas are
members, and late news of others is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from baton.domain.fleet import LinkTotals
from baton.policy.links.meter import LinkMeter, link_fit
from baton.policy.links.transfers import LinkTransfers, Transfer


class LinkState(StrEnum):
    """Whether a link may be used."""

    UNKNOWN = "unknown"
    OK = "ok"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Assumptions about links before any measurement, and the weight of failures."""

    setup_s: float = 0.002
    """Descriptors, notification, and the steps of both engines that notice."""
    bytes_per_s: float = 10e9
    """The usable part of the 12.5 GB/s of a NIC of 100 Gbit/s, to be on the safe side."""
    failure_penalty: float = 4.0
    """The estimate is multiplied by this after each failure ..."""
    max_penalty: float = 64.0
    """... up to this, ..."""
    penalty_half_life_s: float = 30.0
    """... and its excess over 1 is halved within this time."""
    failures_to_quarantine: int = 3
    """Handoffs over one link that fail in a row."""


class LinkRow(NamedTuple):
    """One link as operators see it."""

    source_id: str
    target_id: str
    state: LinkState
    why: str
    """Why it is quarantined, or the failure of its last probe; empty when all is well."""
    transport: str
    """The transport that the target's engine reports; empty when it does not know."""
    bytes_per_s: float
    setup_s: float
    p50_s: float | None
    """Of the last pulls' seconds (of the mean, where one report covers several); None before any.
    """
    p99_s: float | None
    pulls: int
    """Since the target started, counted by its engine, as are the next two."""
    moved_bytes: int
    failures: int
    handoff_failures: int
    """This coordinator's own handoffs that failed on it."""
    active_transfers: int
    """This coordinator's own transfers on it now."""
    penalty: float
    probe_age_s: float | None
    """Since the last probe ended, however it did; None before the first."""


class LinkCounts(NamedTuple):
    """Counts of one link."""

    source_id: str
    target_id: str
    state: LinkState
    moved_bytes: int
    handoff_failures: int
    """As in `LinkRow`, both."""


class _Link:
    """The state of one pair."""

    __slots__ = (
        "consecutive_failures",
        "handoff_failures",
        "last_success_at_s",
        "meter",
        "penalty",
        "penalty_at_s",
        "probe_transfers",
        "probed_at_s",
        "state",
        "why",
    )

    def __init__(self, meter: LinkMeter) -> None:
        self.meter = meter
        self.state = LinkState.UNKNOWN
        self.why = ""
        self.penalty = 1.0
        self.penalty_at_s = 0.0
        self.consecutive_failures = 0
        self.handoff_failures = 0
        self.probe_transfers = 0
        self.probed_at_s: float | None = None
        self.last_success_at_s: float | None = None

    def current_penalty(self, now_s: float, half_life_s: float) -> float:
        if self.penalty == 1.0:
            return 1.0
        decay: float = 0.5 ** (max(0.0, now_s - self.penalty_at_s) / half_life_s)
        return 1.0 + (self.penalty - 1.0) * decay


class LinkTable:
    """Every link this coordinator has to do with; `LinkEstimates` of placement."""

    def __init__(self, settings: LinkSettings | None = None) -> None:
        self._settings = settings or LinkSettings()
        self._common_fit = link_fit(
            setup_s=self._settings.setup_s, s_per_byte=1.0 / self._settings.bytes_per_s
        )
        self._by_target: dict[str, dict[str, _Link]] = {}
        self._members: set[str] = set()
        self._transfers = LinkTransfers()
        self._transfer_links: dict[str, _Link] = {}
        self._now_s = 0.0
        """The latest time that anyone has mentioned: the estimate is asked for without one."""

    # ---------------------------------------------------------------- asked by placement

    def transfer_s(self, source_id: str, target_id: str, moved_bytes: int) -> float | None:
        """Until these bytes are moved, beside the flows in flight; None: do not use this pair."""
        link = self._get(source_id, target_id)
        setup_s, s_per_byte = (
            self._common_fit.coefficients if link is None else link.meter.coefficients(self._now_s)
        )
        moved_bytes += self._transfers.concurrent_bytes(source_id, target_id, moved_bytes)
        estimate_s = setup_s + moved_bytes * s_per_byte
        if link is None:
            return estimate_s
        if link.state is LinkState.QUARANTINED:
            return None
        return estimate_s * link.current_penalty(self._now_s, self._settings.penalty_half_life_s)

    def state(self, source_id: str, target_id: str) -> LinkState:
        """Whether the link may be used."""
        link = self._get(source_id, target_id)
        return LinkState.UNKNOWN if link is None else link.state

    def why(self, source_id: str, target_id: str) -> str:
        """Why the link is quarantined, or the failure of its last probe; else empty."""
        link = self._get(source_id, target_id)
        return "" if link is None else link.why

    def is_slow(self, source_id: str, target_id: str) -> bool:
        """Whether its last pulls took much longer than those before them."""
        link = self._get(source_id, target_id)
        return link is not None and link.meter.is_slow(self._now_s)

    def last_success_at_s(self, source_id: str, target_id: str) -> float | None:
        """When blocks were last known to have come over this link; None when never."""
        link = self._get(source_id, target_id)
        return None if link is None else link.last_success_at_s

    # ---------------------------------------------------------------- our own handoffs

    def begin_transfer(
        self, transfer_id: str, *, source_id: str, target_id: str, moved_bytes: int, now_s: float
    ) -> None:
        """A handoff of ours begins to move blocks; `end` it once, under the same id."""
        self._advance_clock(now_s)
        link = self._get_or_create(source_id, target_id)
        if moved_bytes > 0:
            concurrent_bytes = self._transfers.concurrent_bytes(source_id, target_id, moved_bytes)
            link.meter.record_contention(1.0 + concurrent_bytes / moved_bytes)
        self._transfers.begin(transfer_id, Transfer(source_id, target_id, max(0, moved_bytes)))
        self._transfer_links[transfer_id] = link

    def end_transfer(self, transfer_id: str, now_s: float, *, is_complete: bool = False) -> None:
        """The transfer is over; `is_complete`: its blocks are known to have come. Unknown: ignored.

        The caller reports a failed handoff to `record_failure` as well, but not a handoff that
        ended for other reasons.
        """
        self._advance_clock(now_s)
        self._transfers.end(transfer_id)
        # The link that it began on: its replicas may be gone, or be others of the same name by now.
        link = self._transfer_links.pop(transfer_id, None)
        if link is not None and is_complete:
            self._record_success(link, now_s)

    def record_failure(
        self, source_id: str, target_id: str, now_s: float, why: str = ""
    ) -> LinkState:
        """A handoff failed on this link: its estimate pays. Returns the state it is in now."""
        self._advance_clock(now_s)
        settings, link = self._settings, self._get_or_create(source_id, target_id)
        penalty = (
            link.current_penalty(now_s, settings.penalty_half_life_s) * settings.failure_penalty
        )
        link.penalty, link.penalty_at_s = min(penalty, settings.max_penalty), now_s
        link.handoff_failures += 1
        link.consecutive_failures += 1
        if link.consecutive_failures >= settings.failures_to_quarantine:
            link.state = LinkState.QUARANTINED
            link.why = f"{link.consecutive_failures} handoffs failed in a row: {why or 'no reason'}"
        return link.state

    @property
    def active_transfers(self) -> int:
        """Transfers of ours that are under way."""
        return len(self._transfers)

    # ---------------------------------------------------------------- what engines count

    def observe(self, target_id: str, totals: LinkTotals, now_s: float) -> None:
        """Learn from a replica's pulls from one source so far."""
        self._advance_clock(now_s)
        link = self._get_or_create(totals.source_id, target_id)
        if link.meter.ingest(totals, now_s):
            self._record_success(link, now_s)

    # ---------------------------------------------------------------- probes

    def record_probe_success(
        self,
        source_id: str,
        target_id: str,
        now_s: float,
        *,
        elapsed_s: float | None = None,
        moved_bytes: int = 0,
    ) -> None:
        """A probe went well; `elapsed_s` when it moved blocks, None when it only asked.

        The first one between two engines includes their handshake, so its time does not count.
        """
        self._advance_clock(now_s)
        link = self._get_or_create(source_id, target_id)
        link.probed_at_s = now_s
        if elapsed_s is None:
            if link.state is not LinkState.QUARANTINED:
                link.state, link.why = LinkState.OK, ""
            return
        link.state, link.why = LinkState.OK, ""
        self._record_success(link, now_s)
        link.probe_transfers += 1
        if link.probe_transfers > 1:
            link.meter.seed_from_probe(elapsed_s, moved_bytes)

    def record_probe_failure(self, source_id: str, target_id: str, now_s: float, why: str) -> None:
        """A probe failed: the link is not used until one has gone well."""
        self._advance_clock(now_s)
        link = self._get_or_create(source_id, target_id)
        link.probed_at_s = now_s
        link.state, link.why = LinkState.QUARANTINED, why

    def record_probe_inconclusive(
        self, source_id: str, target_id: str, now_s: float, why: str
    ) -> None:
        """A probe ended without telling anything of the link; its state stays."""
        self._advance_clock(now_s)
        link = self._get_or_create(source_id, target_id)
        link.probed_at_s = now_s
        if link.state is not LinkState.QUARANTINED:
            link.why = why

    # ---------------------------------------------------------------- membership, operators

    def add_replica(self, replica_id: str) -> None:
        """Remember links of this replica from now on."""
        self._members.add(replica_id)

    def remove_replica(self, replica_id: str) -> None:
        """Forget every link of a replica; its flows are for those to end who began them."""
        self._members.discard(replica_id)
        self._by_target.pop(replica_id, None)
        for target_id, sources in tuple(self._by_target.items()):
            sources.pop(replica_id, None)
            if not sources:
                del self._by_target[target_id]

    def counts(self) -> Iterator[LinkCounts]:
        """Every known link, in no particular order; ten times as fast as `rows`."""
        for target_id, sources in self._by_target.items():
            for source_id, link in sources.items():
                moved_bytes = link.meter.totals.moved_bytes
                yield LinkCounts(
                    source_id, target_id, link.state, moved_bytes, link.handoff_failures
                )

    def rows(
        self, now_s: float, pair_filter: Collection[tuple[str, str]] | None = None
    ) -> Iterator[LinkRow]:
        """Every known link, or those of certain pairs only, by source and target."""
        pairs = (
            (source_id, target_id, link)
            for target_id, sources in self._by_target.items()
            for source_id, link in sources.items()
            if pair_filter is None or (source_id, target_id) in pair_filter
        )
        transfers_by_link = self._transfers.count_by_link()
        for source_id, target_id, link in sorted(pairs, key=lambda pair: pair[:2]):
            pair = (source_id, target_id)
            yield self._row(pair, link, active_transfers=transfers_by_link[pair], now_s=now_s)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books disagree."""
        self._transfers.check_integrity()
        assert len(self._transfer_links) == len(self._transfers), "flows and their links differ"
        replica_ids = set(self._by_target)
        replica_ids |= {source_id for sources in self._by_target.values() for source_id in sources}
        assert replica_ids <= self._members, (
            f"remembered of strangers: {sorted(replica_ids - self._members)}"
        )

    # ---------------------------------------------------------------- inside

    def _advance_clock(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)

    def _get(self, source_id: str, target_id: str) -> _Link | None:
        sources = self._by_target.get(target_id)
        return None if sources is None else sources.get(source_id)

    def _get_or_create(self, source_id: str, target_id: str) -> _Link:
        """The link to write to; a link that is not remembered when a replica is not a member."""
        link = self._get(source_id, target_id)
        if link is None:
            link = _Link(LinkMeter(self._common_fit, source_id))
            if source_id in self._members and target_id in self._members:
                self._by_target.setdefault(target_id, {})[source_id] = link
        return link

    def _record_success(self, link: _Link, now_s: float) -> None:
        link.last_success_at_s = now_s
        link.consecutive_failures = 0
        if link.state is LinkState.UNKNOWN:
            link.state, link.why = LinkState.OK, ""

    def _row(
        self, pair: tuple[str, str], link: _Link, *, active_transfers: int, now_s: float
    ) -> LinkRow:
        meter = link.meter
        setup_s, s_per_byte = meter.coefficients(now_s)
        return LinkRow(
            source_id=pair[0],
            target_id=pair[1],
            state=link.state,
            why=link.why,
            transport=meter.totals.transport,
            bytes_per_s=1.0 / s_per_byte,
            setup_s=setup_s,
            p50_s=meter.pull_quantile_s(0.5),
            p99_s=meter.pull_quantile_s(0.99),
            pulls=meter.totals.pulls,
            moved_bytes=meter.totals.moved_bytes,
            failures=meter.totals.failures,
            handoff_failures=link.handoff_failures,
            active_transfers=active_transfers,
            penalty=link.current_penalty(now_s, self._settings.penalty_half_life_s),
            probe_age_s=None if link.probed_at_s is None else now_s - link.probed_at_s,
        )
