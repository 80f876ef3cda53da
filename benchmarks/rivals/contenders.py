"""Who is compared, with the settings that each one's own documents recommend."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks._systems import API, Bare, Baton, System, free_port, scenario
from benchmarks.rivals import routers
from benchmarks.rivals.contender import (
    LOCAL_SCENARIO,
    MOCK,
    OWN,
    PD_SCENARIO,
    REAL,
    SIMULATED,
    Contender,
    Site,
    mock_program,
)
from benchmarks.rivals.dynamo import dynamo
from benchmarks.rivals.load import MODEL
from benchmarks.rivals.programs import NotAvailableError
from benchmarks.rivals.ray_llm import ray_llm_pd
from benchmarks.rivals.stacks import Program, Stack


def _mock(site: Site) -> System:
    def programs(*, folder: Path, port: int) -> Sequence[Program]:
        return [mock_program(site, port)]

    return Stack("mock", programs)


def _vllm(site: Site) -> System:
    return Bare(scenario(LOCAL_SCENARIO, sets=site.config_sets()))


def _vllm_rs(site: Site) -> System:
    program = str(_rust_frontend())

    def programs(*, folder: Path, port: int) -> Sequence[Program]:
        handshake = free_port()
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

    return Stack("vllm_rs", programs)


def _baton(
    name: str, scenario_name: str, frontend: str, *, front: str = "serve"
) -> Callable[[Site], System]:
    def make(site: Site) -> System:
        if frontend == "rust":
            _rust_frontend()
        sets = site.config_sets(f"server.frontend={frontend}", f"server.front={front}")
        return Baton(name, scenario_name, sets=sets)

    return make


def _rust_frontend() -> Path:
    from baton.domain.errors import BatonError
    from baton.engine.vllm.frontend.rust_binary import find_rust_frontend

    try:
        return find_rust_frontend(os.environ)
    except BatonError as error:
        raise NotAvailableError(str(error)) from error


def _one(
    name: str, what: str, engine: str, make: Callable[[Site], System], *, quickack: bool = True
) -> Contender:
    return Contender(name=name, what=what, engine=engine, make=make, quickack=quickack)


_FAST = "fastokens"

CONTENDERS = (
    _one("mock", "the mock alone: what load and engine take", MOCK, _mock),
    _one("vllm", "vLLM's API server in Python", SIMULATED, _vllm),
    _one("vllm_rs", "vLLM's API server in Rust", SIMULATED, _vllm_rs),
    _one(
        "baton_python",
        "baton, one replica",
        SIMULATED,
        _baton("baton_python", LOCAL_SCENARIO, "python"),
    ),
    _one(
        "baton_rust",
        "baton with `frontend: rust`, one replica",
        SIMULATED,
        _baton("baton_rust", LOCAL_SCENARIO, "rust"),
    ),
    _one(
        "baton_rust_gate",
        "the same with `front: gate`",
        SIMULATED,
        _baton("baton_rust_gate", LOCAL_SCENARIO, "rust", front="gate"),
    ),
    _one(
        "baton_python_pd",
        "baton, prefill and decode apart",
        SIMULATED,
        _baton("baton_python_pd", PD_SCENARIO, "python"),
    ),
    _one(
        "baton_rust_pd",
        "baton with `frontend: rust`, prefill and decode apart",
        SIMULATED,
        _baton("baton_rust_pd", PD_SCENARIO, "rust"),
    ),
    _one("dynamo", "Dynamo 1.6.1, KV router", OWN, dynamo("dynamo", tokenizer="default")),
    _one("dynamo_fast", "with its fast tokenizer", OWN, dynamo("dynamo_fast", tokenizer=_FAST)),
    _one(
        "dynamo_fast_ordinary",
        "the same, clients that do not acknowledge at once",
        OWN,
        dynamo("dynamo_fast_ordinary", tokenizer=_FAST),
        quickack=False,
    ),
    _one(
        "dynamo_fast_pd",
        "with its fast tokenizer, prefill and decode apart",
        OWN,
        dynamo("dynamo_fast_pd", tokenizer=_FAST, disaggregated=True),
    ),
    _one(
        "smg_zmq",
        "smg 1.13.0 in place of vLLM's API server",
        SIMULATED,
        routers.smg_zmq("smg_zmq"),
    ),
    _one(
        "smg_vllm",
        "smg before vLLM's API server",
        SIMULATED,
        routers.before_vllm("smg_vllm", routers.smg),
    ),
    _one("smg_mock", "smg alone", MOCK, routers.before_mock("smg_mock", routers.smg)),
    _one("smg_mock_pd", "smg alone, prefill and decode apart", MOCK, routers.smg_pd("smg_mock_pd")),
    _one(
        "vllm_router_vllm",
        "vllm-router 0.1.17 before vLLM's API server",
        SIMULATED,
        routers.before_vllm("vllm_router_vllm", routers.vllm_router),
    ),
    _one(
        "vllm_router_mock",
        "vllm-router alone",
        MOCK,
        routers.before_mock("vllm_router_mock", routers.vllm_router),
    ),
    _one(
        "vllm_router_mock_pd",
        "vllm-router alone, prefill and decode apart",
        MOCK,
        routers.vllm_router_pd("vllm_router_mock_pd"),
    ),
    _one("ray_llm_pd", "Ray Serve LLM 2.60, prefill and decode apart", REAL, ray_llm_pd),
    _one("production_stack", "production-stack's router", MOCK, routers.production_stack),
)
