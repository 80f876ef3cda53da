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

from benchmarks._systems import (
    API,
    ENGINE,
    BareVllm,
    NotStartedError,
    System,
    load_scenario,
    pick_free_port,
)
from benchmarks.rivals.contender import LOCAL_SCENARIO, LaunchSite, mock_program
from benchmarks.rivals.load import MODEL
from benchmarks.rivals.programs import NotAvailableError, Package, create_environment
from benchmarks.rivals.stacks import MakePrograms, Program, ProgramStack, RouterStack

SMG = Package(name="smg", requirements=("smg==1.13.0",))
VLLM_ROUTER = Package(name="vllm-router", requirements=("vllm-router==0.1.17",))
_REGISTER_TIMEOUT_S = 30.0
_POLL_INTERVAL_S = 0.1

MakeRouter = Callable[[int, Sequence[str]], Program]
"""The router at a port, with workers added by its own API."""


def make_smg(port: int, workers: Sequence[str]) -> Program:
    """Shepherd Model Gateway, which was SGLang's router."""
    program = create_environment(SMG) / "smg"
    return _router((str(program), "launch"), port, ("--log-level", "warn", *workers))


def make_vllm_router(port: int, workers: Sequence[str]) -> Program:
    """VLLM's router."""
    program = create_environment(VLLM_ROUTER) / "vllm-router"
    return _router((str(program),), port, ("--log-level", "warning", *workers))


def _router(command: Sequence[str], port: int, arguments: Sequence[str]) -> Program:
    address_arguments = (
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--prometheus-port",
        str(pick_free_port()),
    )
    return Program(group=API, command=(*command, *address_arguments, *arguments))


# ------------------------------------------------------------------ what they stand before


def router_with_mock(name: str, router: MakeRouter) -> Callable[[LaunchSite], System]:
    """A router and one mock."""

    def make(site: LaunchSite) -> System:
        def programs(*, folder: Path, port: int) -> Sequence[Program]:
            worker = pick_free_port()
            urls = ("--worker-urls", _url(worker))
            return [mock_program(site, worker), router(port, urls)]

        return ProgramStack(name, programs)

    return make


def router_with_vllm(name: str, router: MakeRouter) -> Callable[[LaunchSite], System]:
    """A router, vLLM's API server and the simulated engine."""

    def make_programs(url: str) -> MakePrograms:
        def programs(*, folder: Path, port: int) -> Sequence[Program]:
            return [router(port, ("--worker-urls", url))]

        return programs

    def make(site: LaunchSite) -> System:
        return RouterStack(
            name,
            BareVllm(load_scenario(LOCAL_SCENARIO, overrides=site.config_overrides())),
            make_programs,
        )

    return make


def vllm_router_pd(name: str) -> Callable[[LaunchSite], System]:
    """VLLM's router before a mock that prefills and one that decodes."""

    def make(site: LaunchSite) -> System:
        def programs(*, folder: Path, port: int) -> Sequence[Program]:
            prefill, decode = pick_free_port(), pick_free_port()
            workers = ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
            workers += ["--prefill", _url(prefill), "--decode", _url(decode)]
            mocks = [mock_program(site, worker) for worker in (prefill, decode)]
            return [*mocks, make_vllm_router(port, workers)]

        return ProgramStack(name, programs)

    return make


def smg_pd(name: str) -> Callable[[LaunchSite], System]:
    """Smg before a mock that prefills and one that decodes, with their connector made known.

    Workers that are named on its command line carry no connector, and every prompt is prefilled
    twice then.
    """

    def make(site: LaunchSite) -> System:
        ports = {"prefill": pick_free_port(), "decode": pick_free_port()}

        def programs(*, folder: Path, port: int) -> Sequence[Program]:
            mocks = [mock_program(site, worker) for worker in ports.values()]
            return [*mocks, make_smg(port, ("--pd-disaggregation",))]

        def register(url: str) -> None:
            for role, port in ports.items():
                worker = {"url": _url(port), "worker_type": role, "kv_connector": "NixlConnector"}
                _post(f"{url}/workers", worker)

        return ProgramStack(name, programs, health_route="/liveness", on_started=register)

    return make


def smg_zmq(name: str) -> Callable[[LaunchSite], System]:
    """Smg in place of vLLM's API server: it tokenizes, and connects to the engine core itself."""

    def make(site: LaunchSite) -> System:
        def programs(*, folder: Path, port: int) -> Sequence[Program]:
            sockets = folder / "sockets"
            sockets.mkdir(mode=0o700)
            path = str(sockets / "engine")
            workers = ["--worker-urls", f"ipc://{path}", "--backend", "vllm"]
            workers += ["--model-path", str(site.model), "--model-alias", f"{MODEL}={site.model}"]
            return [
                make_smg(port, workers),
                headless_engine(site, f"tcp://127.0.0.1:{handshake_port(path)}"),
            ]

        return ProgramStack(name, programs, health_route="/liveness")

    return make


def headless_engine(site: LaunchSite, address: str) -> Program:
    """The simulated engine, which dials the HTTP server."""
    settings = json.dumps(asdict(site.engine_settings()))
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


def production_stack(_site: LaunchSite) -> System:
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
    deadline_s = time.monotonic() + _REGISTER_TIMEOUT_S
    last_error = ""
    while time.monotonic() < deadline_s:
        answer = httpx.post(url, json=body, timeout=10.0)
        if answer.is_success:
            return
        last_error = f"{answer.status_code}: {answer.text[:300]}"
        time.sleep(_POLL_INTERVAL_S)
    raise NotStartedError(f"{url}: {last_error}")
