"""Estimates of links: seconds of a transfer, failures, and permission to use a link.

Theory of operation. A *link* is a pair of replicas, source and target. Its estimate is

    seconds = (setup_s + (bytes + bytes of others) * s_per_byte) * penalty

The two coefficients are fitted to the counts of the targets' engines (`LinkTotals`: differences, so
lost reports do no harm). A link without counts uses those of all links together, or a probe's
measurement. The bytes of others are those of the flows that share a NIC with this link
(`LinkTransfers`). Only this coordinator's flows are known; measurements show the others. Failures
raise the penalty, which decays.

    UNKNOWN ──probe or pull went well──▶ OK ◀──a whole probe went well──┐
       └──────────────┴──probe failed, or n handoffs in a row──▶ QUARANTINED

An unknown link may be used, a quarantined link may not. Only a probe that moved blocks ends a
quarantine. Links are kept while both replicas are members; later reports about others are dropped.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from baton.domain.fleet import LinkTotals
from baton.domain.names.words import count_text
from baton.perf.fitting.least_squares import CoefficientPrior, FitSettings, LeastSquares

_SETUP_BOUNDS_S = (1e-6, 5.0)
_BYTE_BOUNDS_S = (1e-13, 1e-5)
"""From 10 TB/s to 100 kB/s."""
_FIT = FitSettings(memory_rows=64.0, memory_s=30.0)
_MAX_PULLS = 128
_SLOW_RATIO = 2.0
_SLOWNESS_ROWS = 5
_ROW_HALF_LIFE_S = 5.0
_SLOWNESS_HALF_LIFE_S = 30.0
_ROUNDING = 1e-9


class Transfer(NamedTuple):
    """One transfer."""

    source_id: str
    target_id: str
    moved_bytes: int


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
    reason: str
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


@dataclass(slots=True, eq=False)
class _Link:
    """The state of one pair."""

    meter: _LinkMeter
    state: LinkState = LinkState.UNKNOWN
    reason: str = ""
    penalty: float = 1.0
    penalty_at_s: float = 0.0
    consecutive_failures: int = 0
    handoff_failures: int = 0
    probe_transfers: int = 0
    probed_at_s: float | None = None
    last_success_at_s: float | None = None

    def current_penalty(self, now_s: float, half_life_s: float) -> float:
        if self.penalty == 1.0:
            return 1.0
        decay: float = 0.5 ** (max(0.0, now_s - self.penalty_at_s) / half_life_s)
        return 1.0 + (self.penalty - 1.0) * decay


class LinkTable:
    """Every link this coordinator has to do with; `LinkEstimates` of placement."""

    def __init__(self, settings: LinkSettings | None = None) -> None:
        self._settings = settings or LinkSettings()
        self._common_fit = _link_fit(
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

    def reason(self, source_id: str, target_id: str) -> str:
        """Why the link is quarantined, or the failure of its last probe; else empty."""
        link = self._get(source_id, target_id)
        return "" if link is None else link.reason

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
        self, source_id: str, target_id: str, now_s: float, reason: str = ""
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
            handoffs = count_text(link.consecutive_failures, "handoff")
            link.reason = f"{handoffs} failed in a row: {reason or 'no reason'}"
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
                link.state, link.reason = LinkState.OK, ""
            return
        link.state, link.reason = LinkState.OK, ""
        self._record_success(link, now_s)
        link.probe_transfers += 1
        if link.probe_transfers > 1:
            link.meter.seed_from_probe(elapsed_s, moved_bytes)

    def record_probe_failure(
        self, source_id: str, target_id: str, now_s: float, reason: str
    ) -> None:
        """A probe failed: the link is not used until one has gone well."""
        self._advance_clock(now_s)
        link = self._get_or_create(source_id, target_id)
        link.probed_at_s = now_s
        link.state, link.reason = LinkState.QUARANTINED, reason

    def record_probe_inconclusive(
        self, source_id: str, target_id: str, now_s: float, reason: str
    ) -> None:
        """A probe ended without telling anything of the link; its state stays."""
        self._advance_clock(now_s)
        link = self._get_or_create(source_id, target_id)
        link.probed_at_s = now_s
        if link.state is not LinkState.QUARANTINED:
            link.reason = reason

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
            f"estimates of replicas that are not members: {sorted(replica_ids - self._members)}"
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
            link = _Link(_LinkMeter(self._common_fit, source_id))
            if source_id in self._members and target_id in self._members:
                self._by_target.setdefault(target_id, {})[source_id] = link
        return link

    def _record_success(self, link: _Link, now_s: float) -> None:
        link.last_success_at_s = now_s
        link.consecutive_failures = 0
        if link.state is LinkState.UNKNOWN:
            link.state, link.reason = LinkState.OK, ""

    def _row(
        self, pair: tuple[str, str], link: _Link, *, active_transfers: int, now_s: float
    ) -> LinkRow:
        meter = link.meter
        setup_s, s_per_byte = meter.coefficients(now_s)
        return LinkRow(
            source_id=pair[0],
            target_id=pair[1],
            state=link.state,
            reason=link.reason,
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


@dataclass(slots=True)
class _Nic:
    """The flows at one end: how many, and how many bytes they carry."""

    transfers: int = 0
    moved_bytes: int = 0


class LinkTransfers:
    """This coordinator's flows by id, and their sums at each end.

    Flows share a NIC evenly. While one more flow moves its bytes, each other flow at the same end
    moves at most as many, and no more than it has. Of the two ends the busier one counts.
    """

    def __init__(self) -> None:
        self._transfers: dict[str, Transfer] = {}
        self._outgoing: dict[str, _Nic] = {}
        self._incoming: dict[str, _Nic] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def begin(self, transfer_id: str, transfer: Transfer) -> None:
        """Count a flow; an earlier flow with this id is over."""
        self.end(transfer_id)
        self._transfers[transfer_id] = transfer
        for nics, replica_id in (
            (self._outgoing, transfer.source_id),
            (self._incoming, transfer.target_id),
        ):
            nic = nics.setdefault(replica_id, _Nic())
            nic.transfers += 1
            nic.moved_bytes += transfer.moved_bytes

    def end(self, transfer_id: str) -> Transfer | None:
        """Discount a flow; None when there is none with this id."""
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is None:
            return None
        for nics, replica_id in (
            (self._outgoing, transfer.source_id),
            (self._incoming, transfer.target_id),
        ):
            nic = nics[replica_id]
            nic.transfers -= 1
            nic.moved_bytes -= transfer.moved_bytes
            if not nic.transfers:
                del nics[replica_id]
        return transfer

    def concurrent_bytes(self, source_id: str, target_id: str, moved_bytes: int) -> int:
        """The bytes that others move at the busier end while these bytes are moved."""
        if not self._transfers:
            return 0
        max_bytes = 0
        for nic in (self._outgoing.get(source_id), self._incoming.get(target_id)):
            if nic is not None:
                max_bytes = max(max_bytes, min(nic.transfers * moved_bytes, nic.moved_bytes))
        return max_bytes

    def count_by_link(self) -> Counter[tuple[str, str]]:
        """How many flows there are from one replica to another."""
        return Counter((flow.source_id, flow.target_id) for flow in self._transfers.values())

    def check_integrity(self) -> None:
        """Raise AssertionError when flows and sums disagree."""
        for nics, end in ((self._outgoing, 0), (self._incoming, 1)):
            bytes_by_replica: dict[object, list[int]] = {}
            for flow in self._transfers.values():
                bytes_by_replica.setdefault(flow[end], []).append(flow.moved_bytes)
            counted = {name: (nic.transfers, nic.moved_bytes) for name, nic in nics.items()}
            expected = {name: (len(moved), sum(moved)) for name, moved in bytes_by_replica.items()}
            assert counted == expected, f"flows counted as {counted}, there are {expected}"


def _link_fit(*, setup_s: float, s_per_byte: float) -> LeastSquares:
    """A model of pulls (how many, how many bytes) that starts from these coefficients."""
    return LeastSquares(
        (
            CoefficientPrior(setup_s, *_SETUP_BOUNDS_S),
            CoefficientPrior(s_per_byte, *_BYTE_BOUNDS_S),
        ),
        _FIT,
    )


class _LinkMeter:
    """One link's fit of setup and bandwidth; `common_fit`, of all links, until it has its own.

    Theory of operation. Least squares discount outliers, since one stalled pull must not move them.
    A link that has become a hundred times slower would then be used for dozens of pulls. So the fit
    is multiplied by a *slowness*: the median ratio of the last rows to the fit. Rows weigh by their
    predicted time, so that small pulls of probes do not outvote those of prompts. No row outweighs
    all others together. Rows weigh less as they age, since then only probes show that a slow link
    has recovered. Without probes, the slowness decays. As the fit follows, it returns to one.
    """

    __slots__ = (
        "_common_fit",
        "_contention_count",
        "_contention_sum",
        "_fit",
        "_probed_setup_s",
        "_pull_s",
        "_rows",
        "_slowness",
        "_slowness_at_s",
        "totals",
    )

    def __init__(self, common_fit: LeastSquares, source_id: str) -> None:
        self._common_fit = common_fit
        self._fit: LeastSquares | None = None
        self._probed_setup_s: float | None = None
        self._pull_s: deque[float] | None = None
        self._rows: deque[tuple[float, tuple[int, float], float]] | None = None
        self._slowness = 1.0
        self._slowness_at_s = 0.0
        self._contention_sum = 0.0
        self._contention_count = 0
        self.totals = LinkTotals(source_id)
        """The last report."""

    def coefficients(self, now_s: float) -> tuple[float, ...]:
        """`setup_s` and seconds per byte."""
        if self._fit is not None:
            slowness = self._current_slowness(now_s)
            return tuple([coefficient * slowness for coefficient in self._fit.coefficients])
        if self._probed_setup_s is not None:
            return self._probed_setup_s, self._common_fit.coefficients[1]
        return self._common_fit.coefficients

    def is_slow(self, now_s: float) -> bool:
        """Whether its last pulls took at least twice as long as pulls took before them."""
        return self._current_slowness(now_s) >= _SLOW_RATIO

    def record_contention(self, contention: float) -> None:
        """A flow begins whose bytes and those of others beside it are `contention` times its own.

        The engine's count for it took longer than alone; `ingest` corrects that.
        """
        self._contention_sum += contention
        self._contention_count += 1

    def seed_from_probe(self, elapsed_s: float, moved_bytes: int) -> None:
        """A probe moved blocks; the least that any has taken is believed until pulls are counted.

        The time of a probe includes a step of the target, so it can only be too long.
        """
        low, high = _SETUP_BOUNDS_S
        setup_s = min(max(elapsed_s - moved_bytes * self._common_fit.coefficients[1], low), high)
        self._probed_setup_s = (
            setup_s if self._probed_setup_s is None else min(setup_s, self._probed_setup_s)
        )

    def ingest(self, totals: LinkTotals, now_s: float) -> bool:
        """Learn from the target's next report; whether blocks came since and no pull failed.

        The first one is measured from the target's start. Totals that went back are those of an
        engine that started again: a new base.
        """
        base, self.totals = self.totals, totals
        pulls, busy_s = totals.pulls - base.pulls, totals.busy_s - base.busy_s
        moved_bytes = totals.moved_bytes - base.moved_bytes
        if pulls <= 0 or busy_s < 0:
            return False
        contention = (
            self._contention_sum / self._contention_count if self._contention_count else 1.0
        )
        self._contention_sum, self._contention_count = 0.0, 0
        if busy_s > 0:
            self._fit_row((pulls, moved_bytes * contention), busy_s, now_s)
        return totals.failures <= base.failures

    def pull_quantile_s(self, quantile: float) -> float | None:
        """A quantile, by nearest rank, of the last reports' mean pull; None before the first."""
        if self._pull_s is None:
            return None
        ordered = sorted(self._pull_s)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]

    def _fit_row(self, row: tuple[int, float], busy_s: float, now_s: float) -> None:
        if self._fit is None:
            setup_s, s_per_byte = self._common_fit.coefficients
            self._fit = _link_fit(setup_s=setup_s, s_per_byte=s_per_byte)
            self._pull_s, self._rows = deque(maxlen=_MAX_PULLS), deque(maxlen=_SLOWNESS_ROWS)
        if self._fit.observe(row, busy_s, now_s) and self._pull_s is not None:
            self._common_fit.observe(row, busy_s, now_s)
            self._pull_s.append(busy_s / row[0])
            self._update_slowness(row, busy_s, now_s)

    def _current_slowness(self, now_s: float) -> float:
        if self._slowness == 1.0:
            return 1.0
        decay: float = 0.5 ** (max(0.0, now_s - self._slowness_at_s) / _SLOWNESS_HALF_LIFE_S)
        return 1.0 + (self._slowness - 1.0) * decay

    def _update_slowness(self, row: tuple[int, float], busy_s: float, now_s: float) -> None:
        if self._fit is None or self._rows is None:
            return
        self._rows.append((now_s, row, busy_s))
        values, weights = [], []
        for at_s, features, measured_s in self._rows:
            predicted_s = self._fit.predict(features)
            values.append(measured_s / predicted_s)
            weights.append(predicted_s * 0.5 ** (max(0.0, now_s - at_s) / _ROW_HALF_LIFE_S))
        self._slowness, self._slowness_at_s = _capped_weighted_median(values, weights), now_s


def _capped_weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted median, where none outweighs all others together; 1.0 of a single one."""
    if len(values) == 1:
        return 1.0
    heaviest = max(weights)
    cap = min(heaviest, sum(weights) - heaviest)
    capped = [min(weight, cap) for weight in weights]
    remaining = sum(capped) / 2 * (1 - _ROUNDING)
    for value, weight in sorted(zip(values, capped, strict=True)):
        remaining -= weight
        if remaining <= 0:
            return value
    raise AssertionError("unreachable: all weights together are more than half of them")
