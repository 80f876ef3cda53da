"""What one engine knows of the others, and where it keeps that."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from baton.transfer.peers import Peers


@pytest.mark.filterwarnings("error")
def test_the_folder_of_ucx_logs_goes_away_with_its_owner_and_without_a_warning() -> None:
    peers = Peers("d0", "127.0.0.1:1")
    folder = Path(peers.environment()["UCX_LOG_FILE"]).parent
    assert folder.is_dir()
    gone = weakref.ref(peers)
    del peers
    gc.collect()
    assert gone() is None
    assert not folder.exists()


def test_the_transport_of_a_replica_that_was_never_checked_is_not_known() -> None:
    assert Peers("d0", "127.0.0.1:1").transport("p0") == ""


def test_two_engines_on_one_host_keep_their_logs_apart() -> None:
    one, two = Peers("d0", "127.0.0.1:1"), Peers("d1", "127.0.0.1:2")
    assert one.environment()["UCX_LOG_FILE"] != two.environment()["UCX_LOG_FILE"]
