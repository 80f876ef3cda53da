"""What one engine knows of the others, and where it keeps that."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from baton.domain.errors import RdmaMissing, TransferFailed
from baton.runtime.rank_transports import RankTransports, read_own_transports
from baton.transfer import peers as peers_module
from baton.transfer.peers import Peers, loopback_devices, transport_environment
from baton.transfer.side_channel import (
    SideChannelChecker,
    SideChannelFacts,
    check_side_channel,
)
from tests.fakes.side_channel import HOST, Reply, reply_metadata, reply_with, running_listener
from tests.fakes.ucx_lines import transport_choice, write_log, zero_copy

SOON_S = 5.0
OWN = f"{HOST}:1"
"""Nobody listens there, so that nothing is compared."""
CMA = transport_choice(zero_copy("cma/memory"))
TCP = transport_choice(zero_copy("tcp/lo"))
TCP_BETWEEN = transport_choice(zero_copy("tcp/eth0"), reach="inter-node")


def folder(peers: Peers) -> Path:
    return Path(peers.environment()["UCX_LOG_FILE"]).parent


class Workers:
    """The workers of an engine, asked as through vLLM."""

    def __init__(self, peers: Peers, count: int = 1) -> None:
        self._folder = folder(peers)
        self._environment = peers.environment()
        self.said: dict[int, RankTransports] = {}
        self.silent: set[int] = set()
        self.asked = 0
        peers.query_ranks = self
        for rank in range(count):
            self.say(rank, "")

    def say(self, rank: int, log: str) -> None:
        """What UCX has logged in a worker, on a node of its own."""
        write_log(self._folder, log, f"ucx.host.{17 + rank}")
        found = read_own_transports(self._environment, 17 + rank)
        self.said[rank] = RankTransports(rank=rank, node=f"node-{rank}", transports=found)

    async def __call__(self) -> tuple[RankTransports, ...]:
        self.asked += 1
        return tuple(said for rank, said in self.said.items() if rank not in self.silent)


@pytest.fixture(autouse=True)
def _asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_UNKNOWN_INTERVAL_S", 0.0)
    monkeypatch.setattr(peers_module, "_KNOWN_INTERVAL_S", 0.0)


@pytest.mark.filterwarnings("error")
def test_the_folder_of_ucx_logs_goes_away_with_its_owner_and_without_a_warning() -> None:
    peers = Peers("d0", "127.0.0.1:1")
    logs = folder(peers)
    assert logs.is_dir()
    write_log(logs, CMA)
    gone = weakref.ref(peers)
    del peers
    gc.collect()
    assert gone() is None
    assert not logs.exists()


def test_the_transport_of_a_replica_that_was_never_checked_is_not_known() -> None:
    assert Peers("d0", "127.0.0.1:1").transport("p0") == ""


def test_two_engines_on_one_host_keep_their_logs_apart() -> None:
    one, two = Peers("d0", "127.0.0.1:1"), Peers("d1", "127.0.0.1:2")
    assert folder(one) != folder(two)


def test_an_engines_environment_has_ucx_tell_its_choices_there() -> None:
    peers = Peers("d-1", OWN)
    assert peers.environment().items() >= transport_environment(folder(peers)).items()


def test_engines_of_one_machine_listen_on_loopback_and_rdma_cards_alone(tmp_path: Path) -> None:
    assert loopback_devices(tmp_path) == {"UCX_NET_DEVICES": "lo"}
    for port in ("mlx5_1/ports/1", "mlx5_0/ports/1", "mlx5_0/ports/2"):
        (tmp_path / port).mkdir(parents=True)
    assert loopback_devices(tmp_path) == {"UCX_NET_DEVICES": "lo,mlx5_0:1,mlx5_0:2,mlx5_1:1"}
    assert Peers("d0", "127.0.0.1:1").environment()["UCX_NET_DEVICES"].split(",")[0] == "lo"
    assert "UCX_NET_DEVICES" not in Peers("d0", "10.0.0.7:1").environment()


async def test_a_transport_is_known_after_a_check_and_not_before() -> None:
    peers = Peers("d-1", OWN)
    Workers(peers).say(0, CMA)
    async with running_listener(reply_metadata()) as source:
        assert peers.transport("p-1") == ""
        await peers.check("p-1", source.address, SOON_S)
        assert peers.transport("p-1") == "cma"
    assert peers.transport("p-2") == "", "it was never checked"


async def test_a_transport_that_was_chosen_since_is_known_after_the_next_check() -> None:
    peers = Peers("d-1", OWN)
    workers = Workers(peers)
    async with running_listener(reply_metadata()) as source:
        await peers.check("p-1", source.address, SOON_S)
        assert peers.transport("p-1") == ""
        workers.say(0, CMA)
        await peers.check("p-1", source.address, SOON_S)
    assert peers.transport("p-1") == "cma"


async def test_sources_on_this_node_and_on_others_are_distinguished_by_their_address() -> None:
    peers = Peers("d-1", OWN)
    Workers(peers).say(0, CMA + TCP_BETWEEN)
    async with (
        running_listener(reply_metadata()) as near,
        running_listener(reply_metadata(), "::1") as far,
    ):
        await peers.check("near", near.address, SOON_S)
        await peers.check("far", far.address, SOON_S)
    assert (peers.transport("near"), peers.transport("far")) == ("cma", "tcp")


async def test_tcp_is_refused_where_rdma_is_required_and_still_told() -> None:
    peers = Peers("d-1", OWN, require_rdma=True)
    Workers(peers).say(0, TCP)
    async with running_listener(reply_metadata()) as source:
        with pytest.raises(RdmaMissing, match="carried by tcp") as caught:
            await peers.check("p-1", source.address, SOON_S)
    assert caught.value.replica_id == "p-1"
    assert peers.transport("p-1") == "tcp"


async def test_tcp_will_do_where_rdma_is_not_required() -> None:
    peers = Peers("d-1", OWN)
    Workers(peers).say(0, TCP)
    async with running_listener(reply_metadata()) as source:
        await peers.check("p-1", source.address, SOON_S)
    assert peers.transport("p-1") == "tcp"


async def test_a_pair_over_which_nothing_was_pulled_yet_passes_where_rdma_is_required() -> None:
    peers = Peers("d-1", OWN, require_rdma=True)
    Workers(peers)
    async with running_listener(reply_metadata()) as source:
        for _ in range(5):
            await peers.check("p-1", source.address, SOON_S)


async def test_every_worker_counts_and_the_one_without_rdma_is_named_with_its_node() -> None:
    peers = Peers("d-1", OWN, workers=2, require_rdma=True)
    workers = Workers(peers, 2)
    workers.say(0, CMA)
    async with running_listener(reply_metadata()) as source:
        await peers.check("p-1", source.address, SOON_S)
        assert peers.transport("p-1") == "", "one of them has not pulled yet"
        workers.say(1, TCP)
        with pytest.raises(RdmaMissing, match=r"carried by tcp.*rank 1 on node-1"):
            await peers.check("p-1", source.address, SOON_S)
    assert peers.transport("p-1") == "cma+tcp"
    assert [rank.rank for rank in peers.ranks()] == [0, 1]


async def test_a_worker_that_never_answers_is_not_taken_for_one_that_has_rdma() -> None:
    peers = Peers("d-1", OWN, workers=3, require_rdma=True)
    workers = Workers(peers, 3)
    workers.say(0, CMA)
    workers.silent = {1, 2}
    async with running_listener(reply_metadata()) as source:
        for _ in range(2):
            await peers.check("p-1", source.address, SOON_S)
        with pytest.raises(RdmaMissing, match="ranks 1, 2 of 3 do not say"):
            await peers.check("p-1", source.address, SOON_S)
        assert peers.transport("p-1") == ""
        workers.silent = set()
        await peers.check("p-1", source.address, SOON_S)


async def test_a_workers_last_report_holds_while_it_is_too_busy_to_answer() -> None:
    peers = Peers("d-1", OWN, require_rdma=True)
    workers = Workers(peers)
    workers.say(0, CMA)
    async with running_listener(reply_metadata()) as source:
        await peers.check("p-1", source.address, SOON_S)
        workers.silent = {0}
        for _ in range(5):
            await peers.check("p-1", source.address, SOON_S)
    assert peers.transport("p-1") == "cma"


async def test_workers_are_asked_seldom_once_they_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "_KNOWN_INTERVAL_S", 3600.0)
    peers = Peers("d-1", OWN)
    workers = Workers(peers)
    async with running_listener(reply_metadata()) as source:
        for _ in range(3):
            await peers.check("p-1", source.address, SOON_S)
        workers.say(0, CMA)
        for _ in range(5):
            await peers.check("p-1", source.address, SOON_S)
    assert workers.asked == 4


async def test_an_engine_that_asks_its_own_side_channel_leaves_its_workers_alone() -> None:
    async with running_listener(reply_metadata("a1")) as own:
        peers = Peers("d-1", own.address)
        workers = Workers(peers)
        await peers.check("d-1", own.address, SOON_S)
    assert workers.asked == 0


async def test_a_source_that_does_not_answer_rightly_is_no_less_refused() -> None:
    peers = Peers("d-1", OWN)
    async with running_listener(reply_with(b"nonsense")) as source:
        with pytest.raises(TransferFailed, match="answered what no engine can read"):
            await peers.check("p-1", source.address, SOON_S)


async def test_an_engine_compares_others_with_itself() -> None:
    async with (
        running_listener(reply_metadata("a1")) as own,
        running_listener(reply_metadata("b2")) as source,
    ):
        with pytest.raises(TransferFailed, match="got hash b2, expected a1"):
            await Peers("d-1", own.address).check("p-1", source.address, SOON_S)


# ---------- the check of an engine's side channel, against listeners that are well, ill and wrong
BRIEF_S = 0.3
"""The deadline of a check that is meant to run into it."""


@asynccontextmanager
async def mute() -> AsyncIterator[str]:
    """A process that is stopped: the kernel still takes connections for it, and nobody reads."""
    with socket.create_server((HOST, 0)) as server:
        yield f"{HOST}:{server.getsockname()[1]}"


async def check(
    address: str, wanted: str | None = None, deadline_s: float = SOON_S
) -> SideChannelFacts:
    return await check_side_channel(
        "p-1", address, expected_compatibility=wanted, deadline_s=deadline_s
    )


async def reason(address: str, wanted: str | None = None, deadline_s: float = SOON_S) -> str:
    with pytest.raises(TransferFailed) as caught:
        await check(address, wanted, deadline_s)
    assert caught.value.replica_id == "p-1"
    return caught.value.reason


def descriptors() -> int:
    return psutil.Process().num_fds()


@pytest.mark.parametrize("host", [HOST, "::1"])
async def test_a_listener_that_is_well_says_what_it_is(host: str) -> None:
    async with running_listener(reply_metadata("a1", b"x" * 700), host) as listener:
        facts = await check(listener.address, "a1")
    assert (facts.compatibility, facts.metadata_bytes) == ("a1", 700)
    assert 0 < facts.elapsed_s < SOON_S


async def test_the_question_names_the_first_rank_which_every_engine_has() -> None:
    async with running_listener(reply_metadata()) as listener:
        await check(listener.address)
    assert [msgspec.msgpack.decode(request) for request in listener.requests] == [
        [b"get_meta_msg", 0, 0]
    ]


async def test_a_port_without_a_listener_is_named() -> None:
    async with running_listener(reply_metadata()) as listener:
        address = listener.address
    assert "no process listens" in await reason(address)


async def test_a_listener_that_never_answers_is_given_up_at_the_deadline() -> None:
    async with mute() as address:
        text = await reason(address, deadline_s=BRIEF_S)
    assert "no answer within 0.3 s" in text


async def test_a_listener_that_hangs_after_the_handshake_is_given_up_at_the_deadline() -> None:
    async with running_listener(lambda _: None) as listener:
        assert "no answer" in await reason(listener.address, deadline_s=BRIEF_S)
    assert listener.requests


async def test_an_engine_that_is_not_compatible_is_refused_with_both_hashes() -> None:
    async with running_listener(reply_metadata("b2")) as listener:
        text = await reason(listener.address, "a1")
    assert "got hash b2, expected a1" in text


async def test_any_hash_will_do_where_none_is_wanted() -> None:
    async with running_listener(reply_metadata("b2")) as listener:
        assert (await check(listener.address)).compatibility == "b2"


@pytest.mark.parametrize(
    "reply",
    [
        reply_with(b"hello"),
        reply_with(b"\x93", b"\x00"),
        reply_with(b"\xff" * 200, b"\x00"),
        reply_with(msgspec.msgpack.encode([1, 2]), b"\x00"),
        reply_with(msgspec.msgpack.encode({"compatibility_hash": "a1"}), b"\x00"),
        reply_with(*reply_metadata()(b""), b"more"),  # type: ignore[misc]  # this one does answer
        reply_metadata(""),
        reply_metadata(metadata=b""),
    ],
)
async def test_an_answer_that_no_engine_can_read_is_refused(reply: Reply) -> None:
    async with running_listener(reply) as listener:
        assert "no engine can read" in await reason(listener.address)


async def test_an_endless_answer_is_not_taken_in() -> None:
    async with running_listener(reply_metadata(metadata=bytes(9 << 20))) as listener:
        assert "no answer" in await reason(listener.address, deadline_s=BRIEF_S)


@pytest.mark.parametrize(
    "address", ["", "host", ":5600", "host:", "host:port", "host:-1", "::1:5600"]
)
async def test_an_address_that_is_none_is_refused(address: str) -> None:
    assert "expected HOST:PORT" in await reason(address)


async def test_no_outcome_leaves_a_socket_behind() -> None:
    async with running_listener(reply_metadata()) as listener, mute() as silent:
        await check(listener.address)
        before = descriptors()
        for _ in range(5):
            await check(listener.address)
            await reason(listener.address, "other")
            await reason(silent, deadline_s=0.02)
            await reason(f"{HOST}:1")
        await asyncio.sleep(0)
        assert descriptors() <= before + 2


async def test_a_check_that_is_cancelled_leaves_no_socket_behind() -> None:
    asked = asyncio.Event()

    def note(_: bytes) -> None:
        asked.set()

    async with running_listener(note) as listener:
        await reason(listener.address, deadline_s=BRIEF_S)
        before = descriptors()
        for _ in range(3):
            asked.clear()
            running = asyncio.create_task(check(listener.address))
            await asked.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert descriptors() <= before + 2


async def test_an_engine_asks_for_its_own_hash_once_and_compares_others_with_it() -> None:
    async with (
        running_listener(reply_metadata("a1")) as own,
        running_listener(reply_metadata("b2")) as other,
    ):
        checks = SideChannelChecker("d-1", own.address)
        await checks.check("p-1", own.address, SOON_S)
        with pytest.raises(TransferFailed, match="got hash b2, expected a1"):
            await checks.check("p-1", other.address, SOON_S)
        assert len(own.requests) == 2, "its own hash is asked for once"


async def test_an_engine_whose_own_listener_is_dead_still_checks_others() -> None:
    async with running_listener(reply_metadata("b2")) as other, mute() as own:
        checks = SideChannelChecker("d-1", own)
        await checks.check("p-1", other.address, BRIEF_S)
        assert len(other.requests) == 1


async def test_asking_oneself_does_not_stretch_the_deadline() -> None:
    async with mute() as own, mute() as other:
        with pytest.raises(TransferFailed, match=r"p-1: .* within 0\.[0-2] s"):
            await SideChannelChecker("d-1", own).check("p-1", other, 0.5)
