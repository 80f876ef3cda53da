"""What was used is known to the next controller as well."""

from __future__ import annotations

import pytest

from baton.control.accounting.cluster_totals import ClusterTotals, PoolCapacity
from baton.domain.demand import CoordinatorReport, GpuUsage, Tally
from baton.domain.fleet import Role
from baton.policy.scaling.observation import PoolObservation
from baton.serving.controller.usage_store import UsageStore, UsageTotals
from baton.serving.scaling.ports import TickInputs
from tests.serving.scaled_fleet import Clock

LOOKS = TickInputs()
DECODE = PoolObservation(name="decode", role=Role.DECODE, decode=2)


class Store:
    """Of the cluster: it outlives controllers."""

    def __init__(self) -> None:
        self.notes: dict[str, bytes] = {}
        self.away = False

    def load(self, name: str) -> bytes | None:
        self._check()
        return self.notes.get(name)

    def save(self, name: str, data: bytes) -> None:
        self._check()
        self.notes[name] = data

    def _check(self) -> None:
        if self.away:
            raise ConnectionError("the head is away")


class Controller:
    """As far as usage goes. Its ingress has been there for long and reports totals."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.clock = clock
        self.ledgers = ClusterTotals()
        self.memory = UsageStore(self.ledgers, store, clock=clock)

    async def ingest_after_2_s(self, requests: int, gpu_s: float) -> None:
        """Two seconds later."""
        self.clock.at_s += 2.0
        now_s = self.clock.at_s
        row = Tally("chat", "acme", "tiny", "decode", evaluated=requests)
        self.ledgers.ingest(
            CoordinatorReport(
                coordinator_id="ingress",
                at_s=now_s,
                tallies=(row,),
                gpu_usage=(GpuUsage("acme", "decode", gpu_s),),
            ),
            now_s,
        )
        self.ledgers.record_capacity([DECODE], {"decode": 1.0}, now_s)
        await self.memory.on_tick(LOOKS)

    def told(self) -> tuple[int, float, PoolCapacity]:
        used = self.memory.usage()
        (row,), (spent,) = used.tallies, used.spent
        return row.evaluated, spent.gpu_s, used.pools["decode"]


async def test_the_next_controller_goes_on_where_the_last_one_ended() -> None:
    store, clock = Store(), Clock()
    first = Controller(store, clock)
    await first.ingest_after_2_s(100, 50.0)  # from before this controller
    await first.ingest_after_2_s(110, 55.0)
    await first.memory.save()
    second = Controller(store, clock)
    await second.ingest_after_2_s(115, 56.0)  # nobody counted these five
    await second.ingest_after_2_s(118, 58.0)
    assert second.told() == (13, 7.0, PoolCapacity(device_s=8.0, busy_s=4.0))
    assert second.memory.usage().duration_s == pytest.approx(8.0)


async def test_a_controller_that_is_killed_loses_half_a_minute() -> None:
    store, clock = Store(), Clock()
    first = Controller(store, clock)
    for requests in range(20):  # the note is written with the fifteenth report
        await first.ingest_after_2_s(requests, 0.0)
    second = Controller(store, clock)
    await second.ingest_after_2_s(20, 0.0)
    assert second.told()[0] == 14


async def test_a_store_that_is_away_is_asked_again_and_nothing_is_overwritten() -> None:
    store, clock = Store(), Clock()
    first = Controller(store, clock)
    await first.ingest_after_2_s(0, 0.0)
    await first.ingest_after_2_s(7, 0.0)
    await first.memory.save()
    second = Controller(store, clock)
    store.away = True
    with pytest.raises(ConnectionError):
        await second.ingest_after_2_s(8, 0.0)
    await second.memory.save()  # as when it is stopped: it must not write what it knows alone
    store.away = False
    await second.ingest_after_2_s(9, 0.0)
    assert second.told()[0] == 8


@pytest.mark.parametrize("note", [b"garbage", b"", b"x\x9cK\x04\x00\x00b\x00b"])
async def test_an_unreadable_note_is_given_up(
    note: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store, clock = Store(), Clock()
    store.notes["usage"] = note
    controller = Controller(store, clock)
    await controller.ingest_after_2_s(0, 0.0)
    await controller.ingest_after_2_s(3, 0.0)
    assert controller.told()[0] == 3
    assert "usage_lost" in caplog.text


def test_usage_adds_up_by_tenant_and_pool() -> None:
    def rows(*spent: GpuUsage) -> UsageTotals:
        return UsageTotals(spent=spent, pools={spent[0].pool: PoolCapacity(device_s=1.0)})

    both = rows(GpuUsage("a", "p", 1.0), GpuUsage("b", "p", 2.0)) + rows(GpuUsage("a", "d", 4.0))
    assert set(both.spent) == {
        GpuUsage("a", "p", 1.0),
        GpuUsage("b", "p", 2.0),
        GpuUsage("a", "d", 4.0),
    }
    assert (both + both).pools == {"p": PoolCapacity(device_s=2.0), "d": PoolCapacity(device_s=2.0)}
