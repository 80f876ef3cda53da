"""What one engine knows of the others, and where it keeps that."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from baton.domain.errors import RdmaMissing, TransferFailed
from baton.transfer.peers import Peers
from baton.transfer.transport import transport_environment
from tests.fakes.side_channel import HOST, answer, listening, say
from tests.fakes.ucx_lines import choice, logged, zero_copy

SOON_S = 5.0
OWN = f"{HOST}:1"
"""Nobody listens there, so that nothing is compared."""
CMA = choice(zero_copy("cma/memory"))
TCP = choice(zero_copy("tcp/lo"))
TCP_BETWEEN = choice(zero_copy("tcp/eth0"), reach="inter-node")


def folder(peers: Peers) -> Path:
    return Path(peers.environment()["UCX_LOG_FILE"]).parent


@pytest.mark.filterwarnings("error")
def test_the_folder_of_ucx_logs_goes_away_with_its_owner_and_without_a_warning() -> None:
    peers = Peers("d0", "127.0.0.1:1")
    logs = folder(peers)
    assert logs.is_dir()
    logged(logs, CMA)
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


async def test_a_transport_is_known_after_a_check_and_not_before() -> None:
    peers = Peers("d-1", OWN)
    logged(folder(peers), CMA)
    async with listening(answer()) as source:
        assert peers.transport("p-1") == ""
        await peers.check("p-1", source.address, SOON_S)
        assert peers.transport("p-1") == "cma"
    assert peers.transport("p-2") == "", "it was never checked"


async def test_a_transport_that_was_chosen_since_is_known_after_the_next_check() -> None:
    peers = Peers("d-1", OWN)
    async with listening(answer()) as source:
        await peers.check("p-1", source.address, SOON_S)
        assert peers.transport("p-1") == ""
        logged(folder(peers), CMA)
        await peers.check("p-1", source.address, SOON_S)
    assert peers.transport("p-1") == "cma"


async def test_sources_on_this_node_and_on_others_are_told_apart_by_their_address() -> None:
    peers = Peers("d-1", OWN)
    logged(folder(peers), CMA + TCP_BETWEEN)
    async with listening(answer()) as near, listening(answer(), "::1") as far:
        await peers.check("near", near.address, SOON_S)
        await peers.check("far", far.address, SOON_S)
    assert (peers.transport("near"), peers.transport("far")) == ("cma", "tcp")


async def test_tcp_is_refused_where_rdma_is_required_and_still_told() -> None:
    peers = Peers("d-1", OWN, require_rdma=True)
    logged(folder(peers), TCP)
    async with listening(answer()) as source:
        with pytest.raises(RdmaMissing, match="carried by tcp") as caught:
            await peers.check("p-1", source.address, SOON_S)
    assert caught.value.replica_id == "p-1"
    assert peers.transport("p-1") == "tcp"


async def test_tcp_will_do_where_rdma_is_not_required() -> None:
    peers = Peers("d-1", OWN)
    logged(folder(peers), TCP)
    async with listening(answer()) as source:
        await peers.check("p-1", source.address, SOON_S)
    assert peers.transport("p-1") == "tcp"


async def test_a_pair_over_which_nothing_was_pulled_yet_passes_where_rdma_is_required() -> None:
    peers = Peers("d-1", OWN, require_rdma=True)
    async with listening(answer()) as source:
        await peers.check("p-1", source.address, SOON_S)


async def test_a_source_that_does_not_answer_rightly_is_no_less_refused() -> None:
    peers = Peers("d-1", OWN)
    async with listening(say(b"nonsense")) as source:
        with pytest.raises(TransferFailed, match="answered what no engine can read"):
            await peers.check("p-1", source.address, SOON_S)


async def test_an_engine_compares_others_with_itself() -> None:
    async with listening(answer("a1")) as own, listening(answer("b2")) as source:
        with pytest.raises(TransferFailed, match="got hash b2, wanted a1"):
            await Peers("d-1", own.address).check("p-1", source.address, SOON_S)
