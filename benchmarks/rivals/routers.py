"""Routers that stand before vLLM's API servers: vLLM's own, smg, production-stack's.

Each before mocks of that API, which shows what the router costs; before vLLM's API server over the
simulated engine, which is what a token costs in all; and in smg's case in that server's place.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import httpx

from benchmarks._systems import API, ENGINE, Bare, NotStartedError, System, free_port, scenario
from benchmarks.rivals.contender import LOCAL_SCENARIO, Site, mock_program
from benchmarks.rivals.load import MODEL
from benchmarks.rivals.programs import NotAvailableError, Package, environment
from benchmarks.rivals.stacks import Before, MakePrograms, Program, Stack

SMG = Package(name="smg", requirements=("smg==1.13.0",))
VLLM_ROUTER = Package(name="vllm-router", requirements=("vllm-router==0.1.17",))
_REGISTER_S = 30.0
_POLL_S = 0.1

Router = Callable[[int, Sequence[str]], Program]
"""The router at a port, told of workers in its own words."""


def smg(port: int, workers: Sequence[str]) -> Program:
    """Shepherd Model Gateway, which was SGLang's router."""
    program = environment(SMG) / "smg"
    return _router((str(program), "launch"), port, ("--log-level", "warn", *workers))


def vllm_router(port: int, workers: Sequence[str]) -> Program:
    """VLLM's router."""
    program = environment(VLLM_ROUTER) / "vllm-router"
    return _router((str(program),), port, ("--log-level", "warning", *workers))


def _router(command: Sequence[str], port: int, arguments: Sequence[str]) -> Program:
    places = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()))
    return Program(group=API, command=(*command, *places, *arguments))


# ------------------------------------------------------------------ what they stand before


def before_mock(name: str, router: Router) -> Callable[[Site], System]:
    """A router and one mock."""

    def make(site: Site) -> System:
        def programs(*, folder: Path, port: int) -> Sequence[Program]:
            worker = free_port()
            urls = ("--worker-urls", _url(worker))
            return [mock_program(site, worker), router(port, urls)]

        return Stack(name, programs)

    return make


def before_vllm(name: str, router: Router) -> Callable[[Site], System]:
    """A router, vLLM's API server and the simulated engine."""

    def before(url: str) -> MakePrograms:
        def programs(*, folder: Path, port: int) -> Sequence[Program]:
            return [router(port, ("--worker-urls", url))]

        return programs

    def make(site: Site) -> System:
        return Before(name, Bare(scenario(LOCAL_SCENARIO, sets=site.config_sets())), before)

    return make


def vllm_router_pd(name: str) -> Callable[[Site], System]:
    """VLLM's router before a mock that prefills and one that decodes."""

    def make(site: Site) -> System:
        def programs(*, folder: Path, port: int) -> Sequence[Program]:
            prefill, decode = free_port(), free_port()
            workers = ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
            workers += ["--prefill", _url(prefill), "--decode", _url(decode)]
            mocks = [mock_program(site, worker) for worker in (prefill, decode)]
            return [*mocks, vllm_router(port, workers)]

        return Stack(name, programs)

    return make


def smg_pd(name: str) -> Callable[[Site], System]:
    """Smg before a mock that prefills and one that decodes, with their connector made known.

    Workers that are named on its command line carry no connector, and every prompt is prefilled
    twice then.
    """

    def make(site: Site) -> System:
        ports = {"prefill": free_port(), "decode": free_port()}

        def programs(*, folder: Path, port: int) -> Sequence[Program]:
            mocks = [mock_program(site, worker) for worker in ports.values()]
            return [*mocks, smg(port, ("--pd-disaggregation",))]

        def register(url: str) -> None:
            for role, port in ports.items():
                worker = {"url": _url(port), "worker_type": role, "kv_connector": "NixlConnector"}
                _post(f"{url}/workers", worker)

        return Stack(name, programs, answers="/liveness", settle=register)

    return make


def smg_zmq(name: str) -> Callable[[Site], System]:
    """Smg in place of vLLM's API server: it tokenizes, and speaks to the engine core itself."""

    def make(site: Site) -> System:
        def programs(*, folder: Path, port: int) -> Sequence[Program]:
            sockets = folder / "sockets"
            sockets.mkdir(mode=0o700)
            path = str(sockets / "engine")
            workers = ["--worker-urls", f"ipc://{path}", "--backend", "vllm"]
            workers += ["--model-path", str(site.model), "--model-alias", f"{MODEL}={site.model}"]
            return [
                smg(port, workers),
                headless_engine(site, f"tcp://127.0.0.1:{handshake_port(path)}"),
            ]

        return Stack(name, programs, answers="/liveness")

    return make


def headless_engine(site: Site, address: str) -> Program:
    """The simulated engine, which dials whoever serves HTTP."""
    settings = json.dumps(asdict(site.engine()))
    command = (sys.executable, "-m", "benchmarks.rivals.engine", settings, address)
    return Program(group=ENGINE, command=command)


def handshake_port(path: str) -> int:
    """Where smg waits for the engine of `ipc://PATH`: FNV-1a, 64 bits, of the path.

    Source: smg's documents, "ZMQ Direct Workers", Handshake Address.
    """
    value = 0xCBF29CE484222325
    for byte in path.encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return 20_000 + value % 10_000


def production_stack(_site: Site) -> System:
    """The router of vLLM's production-stack.

    Raises:
        NotAvailableError: always; the package of its name, `vllm-router`, is another program.
    """
    raise NotAvailableError(
        "no package of production-stack's router was found: what is called vllm-router is vLLM's"
        " own router"
    )


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _post(url: str, body: dict[str, str]) -> None:
    until_s = time.monotonic() + _REGISTER_S
    said = ""
    while time.monotonic() < until_s:
        answer = httpx.post(url, json=body, timeout=10.0)
        if answer.is_success:
            return
        said = f"{answer.status_code}: {answer.text[:300]}"
        time.sleep(_POLL_S)
    raise NotStartedError(f"{url}: {said}")
