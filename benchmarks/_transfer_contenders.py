"""The contenders of the transfer benchmark, and which settings are tried against the chosen."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baton.domain.fleet import Role
from baton.engine.vllm.core.settings import NixlSettings, VllmEngineSettings, engine_environment
from baton.transfer.nixl_progress import PROGRESS_DELAY_VARIABLE
from baton.transfer.peers import UCX_SETTINGS
from benchmarks._transfer_pair import AgentOptions, Copy, Pull

MIB = 1 << 20
SIZES_MIB = (1, 4, 16, 64, 256)
PIECE_BYTES = 256 << 10
"""Keys, or values, of one block in one layer of an 8B model (8 KV heads of 128, 2 bytes each) at
vLLM's block size on CPUs, 128 tokens."""
_VLLM_THREADS = 4
"""Source: vllm 0.32, kv_connector/v1/nixl/base_worker.py, `num_threads`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way of moving bytes."""

    name: str
    agents: AgentOptions
    make_operation: Callable[[int], Pull | Copy]
    """What to carry out for a number of bytes."""
    max_mib: int = SIZES_MIB[-1]
    """It does not take part in larger sizes: they would tell nothing new, and take seconds."""


def contenders(log_environment: Mapping[str, str]) -> list[Contender]:
    """Those of the benchmark, in the order in which they take turns.

    `log_environment` are the variables by which transports are read.
    """
    bare = AgentOptions()
    delayed_agents = AgentOptions(
        environment={
            PROGRESS_DELAY_VARIABLE: engine_environment_variables()[PROGRESS_DELAY_VARIABLE]
        }
    )
    baton = engine_agents(log_environment)
    return [
        Contender(name="memcpy", agents=delayed_agents, make_operation=make_copy),
        Contender(name="bare", agents=bare, make_operation=make_contiguous_pull),
        Contender(name="baton", agents=baton, make_operation=make_block_pull),
        Contender(name="calm", agents=delayed_agents, make_operation=make_contiguous_pull),
        Contender(
            name="bare_blocks",
            agents=bare,
            make_operation=partial(make_block_pull, hot_polling=True),
        ),
        Contender(
            name="bare_tcp",
            agents=AgentOptions(environment=TCP_ENVIRONMENT),
            make_operation=make_contiguous_pull,
            max_mib=TCP_MAX_MIB,
        ),
        Contender(
            name="baton_tcp",
            agents=engine_agents(TCP_ENVIRONMENT),
            make_operation=make_block_pull,
            max_mib=TCP_MAX_MIB,
        ),
    ]


def make_copy(size_bytes: int) -> Copy:
    """No transfer at all."""
    return Copy(size_bytes=size_bytes)


def make_contiguous_pull(size_bytes: int) -> Pull:
    """All in one descriptor."""
    return Pull(pieces=1, piece_bytes=size_bytes, scattered=False, hot_polling=True)


def make_block_pull(
    size_bytes: int, *, piece_bytes: int = PIECE_BYTES, hot_polling: bool = False
) -> Pull:
    """As KV blocks that lie anywhere."""
    return Pull(
        pieces=size_bytes // piece_bytes,
        piece_bytes=piece_bytes,
        scattered=True,
        hot_polling=hot_polling,
    )


def engine_environment_variables() -> dict[str, str]:
    """What baton sets in the environment of an engine that it starts."""
    settings = VllmEngineSettings(
        replica_id="d-0",
        pool="decode",
        model_source="",
        model_name="",
        role=Role.DECODE,
        nixl=NixlSettings(host="127.0.0.1", port=1),
    )
    return engine_environment(settings, Path(tempfile.gettempdir()))


def engine_agents(extra_environment: Mapping[str, str]) -> AgentOptions:
    """Agents as an engine's: made as vLLM makes them, in the environment that baton gives it."""
    environment = engine_environment_variables() | dict(UCX_SETTINGS) | dict(extra_environment)
    return AgentOptions(environment=environment, threads=_VLLM_THREADS, telemetry=True)


TCP_ENVIRONMENT = {"UCX_TLS": "tcp"}
TCP_MAX_MIB = 64
_DELAYS_US = (100, 10_000)
_UCX_TCP = {
    "segments_8k": {"UCX_TCP_TX_SEG_SIZE": "8k", "UCX_TCP_RX_SEG_SIZE": "8k"},
    "segments_64k": {"UCX_TCP_TX_SEG_SIZE": "64k", "UCX_TCP_RX_SEG_SIZE": "64k"},
    "buffers_4m": {"UCX_TCP_SNDBUF": "4m", "UCX_TCP_RCVBUF": "4m"},
    "one_rail": {"UCX_MAX_RMA_RAILS": "1", "UCX_MAX_EAGER_RAILS": "1"},
    "rndv_8k": {"UCX_RNDV_THRESH": "8k"},
}


def sweep(name: str) -> list[Contender]:
    """The contenders of a sweep; the first is what is chosen today."""
    return SWEEPS[name]()


def _delay_contenders(base: Mapping[str, str]) -> list[Contender]:
    environment = engine_environment_variables() | dict(UCX_SETTINGS) | dict(base)
    del environment[PROGRESS_DELAY_VARIABLE]
    undelayed_agents = AgentOptions(environment=environment, threads=_VLLM_THREADS, telemetry=True)
    return [
        Contender(name="chosen", agents=engine_agents(base), make_operation=make_block_pull),
        Contender(name="delay_0", agents=undelayed_agents, make_operation=make_block_pull),
        *(
            Contender(
                name=f"delay_{delay_us}",
                agents=engine_agents({**base, PROGRESS_DELAY_VARIABLE: str(delay_us)}),
                make_operation=make_block_pull,
            )
            for delay_us in _DELAYS_US
        ),
    ]


def _tcp_contenders() -> list[Contender]:
    return [
        Contender(
            name="chosen", agents=engine_agents(TCP_ENVIRONMENT), make_operation=make_block_pull
        ),
        *(
            Contender(
                name=name,
                agents=engine_agents(TCP_ENVIRONMENT | variables),
                make_operation=make_block_pull,
            )
            for name, variables in _UCX_TCP.items()
        ),
    ]


def _piece_contenders() -> list[Contender]:
    agents = engine_agents({})
    return [
        Contender(name="chosen", agents=agents, make_operation=make_block_pull),
        *(
            Contender(
                name=f"pieces_{kib}k",
                agents=agents,
                make_operation=partial(make_block_pull, piece_bytes=kib << 10),
            )
            for kib in (16, 64, 1024, 4096)
        ),
    ]


SWEEPS: dict[str, Callable[[], list[Contender]]] = {
    "delays": partial(_delay_contenders, {}),
    "delays_tcp": partial(_delay_contenders, TCP_ENVIRONMENT),
    "tcp": _tcp_contenders,
    "pieces": _piece_contenders,
}
