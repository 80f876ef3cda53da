"""The contenders, with the settings that each one's own documents recommend."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks._systems import (
    API,
    BareVllm,
    BatonDeployment,
    System,
    load_scenario,
    pick_free_port,
)
from benchmarks.rivals import routers
from benchmarks.rivals.contender import (
    CPU_VLLM,
    LOCAL_SCENARIO,
    MOCK,
    OWN_MOCK,
    PD_SCENARIO,
    SIMULATED,
    Contender,
    LaunchSite,
    mock_program,
)
from benchmarks.rivals.dynamo import dynamo
from benchmarks.rivals.load import MODEL
from benchmarks.rivals.programs import NotAvailableError
from benchmarks.rivals.ray_llm import ray_llm_pd
from benchmarks.rivals.stacks import Program, ProgramStack


def _mock(site: LaunchSite) -> System:
    def programs(*, folder: Path, port: int) -> Sequence[Program]:
        return [mock_program(site, port)]

    return ProgramStack("mock", programs)


def _vllm(site: LaunchSite) -> System:
    return BareVllm(load_scenario(LOCAL_SCENARIO, overrides=site.config_overrides()))


def _vllm_rs(site: LaunchSite) -> System:
    program = str(_rust_frontend())

    def programs(*, folder: Path, port: int) -> Sequence[Program]:
        handshake = pick_free_port()
        flags = {
            "served-model-name": MODEL,
            "port": port,
            # No engine of its own: it waits for one that dials in.
            "data-parallel-size": 1,
            "data-parallel-size-local": 0,
            "data-parallel-address": "127.0.0.1",
            "data-parallel-rpc-port": handshake,
        }
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        command = [program, "serve", str(site.model), "--disable-log-stats", *words]
        front = Program(group=API, command=command, environment={"VLLM_LOGGING_LEVEL": "WARNING"})
        return [front, routers.headless_engine(site, f"tcp://127.0.0.1:{handshake}")]

    return ProgramStack("vllm_rs", programs)


def _baton(
    name: str, scenario_name: str, api_server: str, *, listener: str = "ray-serve"
) -> Callable[[LaunchSite], System]:
    def make(site: LaunchSite) -> System:
        if api_server == "rust":
            _rust_frontend()
        sets = site.config_overrides(
            f"server.api_server={api_server}", f"server.listener={listener}"
        )
        return BatonDeployment(name, scenario_name, sets=sets)

    return make


def _rust_frontend() -> Path:
    from baton.domain.errors import BatonError
    from baton.engine.vllm.frontend.rust_frontend import find_rust_frontend

    try:
        return find_rust_frontend(os.environ)
    except BatonError as error:
        raise NotAvailableError(str(error)) from error


def _contender(
    name: str,
    description: str,
    engine: str,
    make: Callable[[LaunchSite], System],
    *,
    quickack: bool = True,
) -> Contender:
    return Contender(
        name=name, description=description, engine=engine, make=make, quickack=quickack
    )


_FAST_TOKENIZER = "fastokens"

CONTENDERS = (
    _contender("mock", "the mock alone: what load and engine take", MOCK, _mock),
    _contender("vllm", "vLLM's API server in Python", SIMULATED, _vllm),
    _contender("vllm_rs", "vLLM's API server in Rust", SIMULATED, _vllm_rs),
    _contender(
        "baton_python",
        "baton, one replica",
        SIMULATED,
        _baton("baton_python", LOCAL_SCENARIO, "python"),
    ),
    _contender(
        "baton_rust",
        "baton with `api_server: rust`, one replica",
        SIMULATED,
        _baton("baton_rust", LOCAL_SCENARIO, "rust"),
    ),
    _contender(
        "baton_rust_gate",
        "the same with `listener: ingress`",
        SIMULATED,
        _baton("baton_rust_gate", LOCAL_SCENARIO, "rust", listener="ingress"),
    ),
    _contender(
        "baton_python_pd",
        "baton, prefill and decode apart",
        SIMULATED,
        _baton("baton_python_pd", PD_SCENARIO, "python"),
    ),
    _contender(
        "baton_rust_pd",
        "baton with `api_server: rust`, prefill and decode apart",
        SIMULATED,
        _baton("baton_rust_pd", PD_SCENARIO, "rust"),
    ),
    _contender(
        "dynamo", "Dynamo 1.6.1, KV router", OWN_MOCK, dynamo("dynamo", tokenizer="default")
    ),
    _contender(
        "dynamo_fast",
        "with its fast tokenizer",
        OWN_MOCK,
        dynamo("dynamo_fast", tokenizer=_FAST_TOKENIZER),
    ),
    _contender(
        "dynamo_fast_ordinary",
        "the same, clients that do not acknowledge at once",
        OWN_MOCK,
        dynamo("dynamo_fast_ordinary", tokenizer=_FAST_TOKENIZER),
        quickack=False,
    ),
    _contender(
        "dynamo_fast_pd",
        "with its fast tokenizer, prefill and decode apart",
        OWN_MOCK,
        dynamo("dynamo_fast_pd", tokenizer=_FAST_TOKENIZER, disaggregated=True),
    ),
    _contender(
        "smg_zmq",
        "smg 1.13.0 in place of vLLM's API server",
        SIMULATED,
        routers.smg_zmq("smg_zmq"),
    ),
    _contender(
        "smg_vllm",
        "smg before vLLM's API server",
        SIMULATED,
        routers.router_with_vllm("smg_vllm", routers.make_smg),
    ),
    _contender(
        "smg_mock", "smg alone", MOCK, routers.router_with_mock("smg_mock", routers.make_smg)
    ),
    _contender(
        "smg_mock_pd", "smg alone, prefill and decode apart", MOCK, routers.smg_pd("smg_mock_pd")
    ),
    _contender(
        "vllm_router_vllm",
        "vllm-router 0.1.17 before vLLM's API server",
        SIMULATED,
        routers.router_with_vllm("vllm_router_vllm", routers.make_vllm_router),
    ),
    _contender(
        "vllm_router_mock",
        "vllm-router alone",
        MOCK,
        routers.router_with_mock("vllm_router_mock", routers.make_vllm_router),
    ),
    _contender(
        "vllm_router_mock_pd",
        "vllm-router alone, prefill and decode apart",
        MOCK,
        routers.vllm_router_pd("vllm_router_mock_pd"),
    ),
    _contender("ray_llm_pd", "Ray Serve LLM 2.60, prefill and decode apart", CPU_VLLM, ray_llm_pd),
    _contender("production_stack", "production-stack's router", MOCK, routers.production_stack),
)
