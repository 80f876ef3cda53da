"""Transports as UCX tells them: recorded lines, and two NIXL agents in two processes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.domain.errors import RdmaMissing
from baton.domain.names.process_names import OWNER_ENV_VAR, process_name
from baton.engine.vllm.core import settings
from baton.engine.vllm.patches import plugin
from baton.runtime.rank_transports import (
    Locality,
    RankTransports,
    Transports,
    read_own_transports,
    read_transports,
)
from baton.transfer import nixl_progress, ucx_log
from baton.transfer.nixl_progress import PROGRESS_DELAY_VARIABLE
from baton.transfer.peers import (
    UCX_SETTINGS,
    check_rdma,
    transport_environment,
    transport_to,
)
from baton.transfer.ucx_log import FLUSH_VARIABLE
from benchmarks._transfer_pair import AgentOptions, Pull, TransferPair
from tests.fakes.ucx_lines import transport_choice, write_log, zero_copy

SAME, OTHER = Locality.SAME_NODE, Locality.OTHER_NODE
RAIL = "rc_mlx5"


def ranks(*found: Transports | None) -> list[RankTransports]:
    """Workers of an engine, each on a node of its own."""
    return [
        RankTransports(rank=n, node=f"node-{n}", transports=entry) for n, entry in enumerate(found)
    ]


def towards(*found: Transports | None, same_host: bool, workers: int | None = None) -> str:
    return transport_to(ranks(*found), workers=workers or max(1, len(found)), same_host=same_host)


def check(transport: str) -> None:
    found = {OTHER: frozenset({transport})} if transport else {}
    check_rdma("p-1", ranks(found), same_host=False)


PULL = Pull(pieces=16, piece_bytes=65536, scattered=True, hot_polling=False)


@pytest.mark.parametrize(
    ("row", "transport"),
    [
        (zero_copy("cma/memory"), "cma"),
        ("| 0..inf | software emulation | tcp/lo                             |", "tcp"),
        (zero_copy("52% on tcp/lo and 48% on tcp/eth0"), "tcp"),
        (zero_copy("cuda_ipc/cuda"), "cuda_ipc"),
        (zero_copy("rc_mlx5/mlx5_0:1/path0"), "rc_mlx5"),
        (zero_copy("50% on rc_mlx5/mlx5_bond_0:1 and 50% on rc_mlx5/mlx5_1:1"), "rc_mlx5"),
        (zero_copy("70% on rc_mlx5/mlx5_0:1 and 30% on tcp/eth0"), "rc_mlx5+tcp"),
    ],
)
def test_the_transport_is_what_ucx_says_it_chose(tmp_path: Path, row: str, transport: str) -> None:
    assert read_transports(write_log(tmp_path, transport_choice(row))) == {SAME: {transport}}


def test_the_transport_of_large_reads_counts(tmp_path: Path) -> None:
    text = transport_choice(zero_copy("tcp/lo", "0..4095"), zero_copy("cma/memory", "4K..inf"))
    assert read_transports(write_log(tmp_path, text)) == {SAME: {"cma"}}


def test_peers_on_this_node_and_on_others_are_distinguished(tmp_path: Path) -> None:
    here, there = zero_copy("cuda_ipc/cuda"), zero_copy("rc_mlx5/mlx5_0:1")
    text = transport_choice(here) + transport_choice(there, reach="inter-node")
    assert read_transports(write_log(tmp_path, text)) == {SAME: {"cuda_ipc"}, OTHER: {"rc_mlx5"}}


def test_operations_other_than_reads_from_peers_do_not_count(tmp_path: Path) -> None:
    row = zero_copy("tcp/lo")
    text = transport_choice(row, reach="self") + transport_choice(
        row, operation="active message by ucp_am_send*(egr)"
    )
    assert read_transports(write_log(tmp_path, text)) == {}


def test_all_processes_of_an_engine_are_read(tmp_path: Path) -> None:
    write_log(tmp_path, transport_choice(zero_copy("cma/memory")), "ucx.host.1")
    write_log(tmp_path, transport_choice(zero_copy("tcp/lo")), "ucx.host.2")
    write_log(tmp_path, transport_choice(zero_copy("sysv/memory")), "other.log")
    assert read_transports(tmp_path) == {SAME: {"cma", "tcp"}}


def test_warnings_and_broken_bytes_in_between_are_skipped(tmp_path: Path) -> None:
    text = "[1.0] [vm:1:0] select.c:722  UCX  ERROR   no transport | cfg#1\n"
    text += transport_choice(zero_copy("cma/memory"))
    (tmp_path / "ucx.h.1").write_bytes(b"\xff\xfe\n" + text.encode() + b"| 0..in")
    assert read_transports(tmp_path) == {SAME: {"cma"}}


def test_nothing_is_known_before_the_first_pull(tmp_path: Path) -> None:
    assert read_transports(tmp_path) == {}
    assert read_transports(tmp_path / "gone") == {}
    assert towards({}, same_host=True) == towards({}, same_host=False) == ""
    assert towards(same_host=True) == ""


def test_a_peer_has_the_transport_of_its_reach() -> None:
    found = {SAME: frozenset({"cuda_ipc"}), OTHER: frozenset({RAIL})}
    assert towards(found, same_host=True) == "cuda_ipc"
    assert towards(found, same_host=False) == RAIL


def test_a_peer_in_another_container_is_on_this_node_when_no_other_was_reached() -> None:
    assert towards({SAME: frozenset({"cma"})}, same_host=False) == "cma"


def test_a_peer_on_this_host_is_not_given_the_transport_of_others() -> None:
    assert towards({OTHER: frozenset({RAIL})}, same_host=True) == ""


def test_where_peers_differ_the_transport_of_one_is_not_known() -> None:
    found = {OTHER: frozenset({RAIL, "tcp"})}
    assert towards(found, same_host=False) == ""


def test_an_engines_transport_is_that_of_all_of_its_workers() -> None:
    rail, tcp = {OTHER: frozenset({RAIL})}, {OTHER: frozenset({"tcp"})}
    assert towards(rail, rail, same_host=False) == RAIL
    assert towards(rail, tcp, same_host=False) == "rc_mlx5+tcp"


@pytest.mark.parametrize("other", [None, {}, {OTHER: frozenset({RAIL, "tcp"})}])
def test_a_worker_that_cannot_tell_makes_the_transport_unknown(other: Transports | None) -> None:
    assert towards({OTHER: frozenset({RAIL})}, other, same_host=False) == ""


def test_a_worker_that_says_nothing_makes_the_transport_unknown() -> None:
    assert towards({OTHER: frozenset({RAIL})}, same_host=False, workers=2) == ""


def test_a_worker_without_rdma_is_named_with_its_node() -> None:
    found = ranks({OTHER: frozenset({RAIL})}, {OTHER: frozenset({"tcp"})})
    with pytest.raises(RdmaMissing, match=r"carried by tcp.*: rank 1 on node-1;"):
        check_rdma("p-1", found, same_host=False)


def test_a_worker_whose_log_cannot_be_read_has_no_rdma() -> None:
    with pytest.raises(RdmaMissing, match=r"rank 1 on node-1 cannot be read"):
        check_rdma("p-1", ranks({}, None), same_host=False)


def test_a_process_reads_its_own_log_and_no_other(tmp_path: Path) -> None:
    write_log(tmp_path, transport_choice(zero_copy("cma/memory")), "ucx.host.1")
    write_log(tmp_path, transport_choice(zero_copy("tcp/lo")), "ucx.host.11")
    environment = transport_environment(tmp_path)
    assert read_own_transports(environment, 1) == {SAME: frozenset({"cma"})}
    assert read_own_transports(environment, 2) == {}


@pytest.mark.parametrize(
    "changed", [{"UCX_LOG_FILE": "/var/log/mine"}, {"UCX_LOG_FILE": ""}, {"UCX_PROTO_INFO": None}]
)
def test_a_process_whose_log_goes_elsewhere_knows_nothing(
    tmp_path: Path, changed: dict[str, str | None]
) -> None:
    given = transport_environment(tmp_path) | changed
    environment = {name: value for name, value in given.items() if value is not None}
    assert read_own_transports(environment, 1) is None


@pytest.mark.parametrize("transport", ["rc_mlx5", "dc_mlx5", "rc_verbs", "srd", "dc_mlx5+rc_mlx5"])
def test_network_cards_that_move_data_themselves_are_rdma(transport: str) -> None:
    check(transport)


@pytest.mark.parametrize("transport", ["cuda_ipc", "cma", "", "cuda_ipc+rc_mlx5", "sysv"])
def test_a_deployment_that_requires_rdma_lets_nodes_use_their_own_memory(transport: str) -> None:
    check(transport)


@pytest.mark.parametrize("transport", ["tcp", "rc_mlx5+tcp", "something_new"])
def test_a_deployment_that_requires_rdma_refuses_everything_else(transport: str) -> None:
    with pytest.raises(RdmaMissing, match=f"carried by {transport}".replace("+", r"\+")) as caught:
        check(transport)
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own bytes
    assert (again.replica_id, str(again)) == ("p-1", str(caught.value))


@pytest.mark.parametrize(("tls", "transport"), [("tcp", "tcp"), ("tcp,cma", "cma")])
def test_transports_read_from_two_agents_are_those_they_were_forced_to_use(
    tmp_path: Path, tls: str, transport: str
) -> None:
    pytest.importorskip("nixl")
    variables = {
        **UCX_SETTINGS,
        "UCX_TLS": tls,
        FLUSH_VARIABLE: "0.05",
        PROGRESS_DELAY_VARIABLE: "1000",
    }
    environment = transport_environment(tmp_path) | variables
    with TransferPair(AgentOptions(environment=environment, threads=4), PULL.size_bytes) as pair:
        pair.run(PULL)
        assert what_comes(tmp_path) == {SAME: {transport}}


def what_comes(folder: Path) -> Transports:
    """What is read as soon as there is something, while the agents live."""
    give_up_s = time.monotonic() + 10
    while not (found := read_transports(folder)) and time.monotonic() < give_up_s:
        time.sleep(0.02)
    return found


def test_ucx_knows_every_variable_that_engines_are_given(tmp_path: Path) -> None:
    pytest.importorskip("nixl")
    program = "import nixl._api as api; api.nixl_agent('a', api.nixl_agent_config())"
    variables = {**UCX_SETTINGS, **transport_environment(tmp_path)}
    given = {name: value for name, value in variables.items() if name.startswith("UCX_")}
    plain = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=plain | given | {"UCX_LOG_FILE": "stdout", "UCX_NONSENSE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    unused = [line for line in done.stdout.splitlines() if "unused environment" in line]
    assert ["UCX_NONSENSE" in line and "," not in line for line in unused] == [True], unused


# ---------- nIXL's progress threads: slowed down where we say so, and only there
IDLE_PAIR = """
import time
from baton.transfer.nixl_progress import install
install()
import nixl._api as api
agents = [api.nixl_agent(name, api.nixl_agent_config()) for name in ("a", "b")]
cpu, wall = time.process_time(), time.monotonic()
time.sleep(1.5)
print((time.process_time() - cpu) / (time.monotonic() - wall))
"""
"""Two agents that do nothing; prints the cores they use for it."""


def binding() -> SimpleNamespace:
    return SimpleNamespace(nixlAgent=lambda name, config: (name, config.pthrDelay))


def config() -> SimpleNamespace:
    return SimpleNamespace(pthrDelay=0)


def idle_cores(**variables: str) -> float:
    return float(printed(IDLE_PAIR, **variables)[-1])


def flushing_threads() -> int:
    return sum(thread.name == "ucx-log" for thread in threading.enumerate())


def printed(program: str, **variables: str) -> list[str]:
    pytest.importorskip("nixl")
    environment = {name: value for name, value in os.environ.items() if "BATON_" not in name}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | variables,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()


def test_two_idle_agents_use_next_to_nothing_where_a_delay_is_set() -> None:
    assert idle_cores(**{nixl_progress.PROGRESS_DELAY_VARIABLE: "1000"}) < 0.2


def test_two_idle_agents_burn_a_core_where_none_is_set() -> None:
    # The day this fails, NIXL no longer polls without pause, and all this can go.
    assert idle_cores() > 0.3


def test_agents_get_the_delay_that_was_set_last() -> None:
    fake = binding()
    assert nixl_progress.current_delay_us(fake) is None
    nixl_progress.set_progress_delay(fake, 1000)
    nixl_progress.set_progress_delay(fake, 5000)
    assert nixl_progress.current_delay_us(fake) == 5000
    assert fake.nixlAgent("agent", config()) == ("agent", 5000)


@pytest.mark.parametrize("value", ["0", "-5", "soon", ""])
def test_a_delay_that_is_no_time_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nixl_progress.PROGRESS_DELAY_VARIABLE, value)
    with pytest.raises(ValueError, match="expected microseconds"):
        nixl_progress.install()


@pytest.mark.parametrize("value", ["0", "0.0", "-1", "soon", "", "1.", "1e3"])
def test_an_interval_that_is_no_time_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ucx_log.FLUSH_VARIABLE, value)
    with pytest.raises(ValueError, match="expected seconds above 0"):
        nixl_progress.install()


def test_the_log_is_flushed_from_the_first_agent_on_by_one_thread() -> None:
    fake = binding()
    nixl_progress.set_progress_delay(fake, 1000)
    slowed = fake.nixlAgent
    before = flushing_threads()
    ucx_log.flush_from_first_agent(fake, 3600.0)
    assert nixl_progress.current_delay_us(fake) == 1000
    assert flushing_threads() == before
    assert [fake.nixlAgent("agent", config()) for _ in range(2)] == [("agent", 1000)] * 2
    assert flushing_threads() == before + 1
    assert fake.nixlAgent is slowed


def test_ucxs_library_is_looked_for_only_where_it_is() -> None:
    program = """
import nixl._api as api
from baton.transfer.ucx_log import loaded_library
agent = api.nixl_agent("a", api.nixl_agent_config())
print(loaded_library())
"""
    assert Path(printed(program)[-1]).name.startswith("libucs")


def test_the_process_that_asks_for_an_engine_does_not_load_nixl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(nixl_progress.PROGRESS_DELAY_VARIABLE, "no number, so it would be refused")
    monkeypatch.setenv(OWNER_ENV_VAR, process_name())
    nixl_progress.install()


def test_the_engine_adapter_uses_the_same_variable() -> None:
    assert settings.NIXL_DELAY_VARIABLE == nixl_progress.PROGRESS_DELAY_VARIABLE


def test_vllm_finds_both_of_our_plugins() -> None:
    found = {entry.load() for entry in entry_points(group="vllm.general_plugins")}
    assert {plugin.install, nixl_progress.install} <= found
