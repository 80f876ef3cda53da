"""The ingress' frontend in Rust: `vllm-rs frontend` as a process, with the fleet as its engine.

Theory of operation: this process listens on three Unix sockets in a private folder, and passes them
to the program. One is HTTP for the gate in front of it, and two are EngineCore's wire for the
engine server. So clients never connect before a socket listens, and other users cannot connect.
Python handles a message per engine step; bytes of HTTP never come here.

The program dies with this process. If it dies alone, all open requests are aborted to stop their
engines, and the frontend has failed. The ingress is then replaced, as after a failure of the Python
frontend.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from baton.domain.errors import EngineStartFailed, LinkFailed
from baton.engine.gpus import use_cpu_without_gpus
from baton.engine.log_handlers import preserve_log_handlers
from baton.engine.vllm.frontend.fleet_frontend import FleetFrontend
from baton.engine.vllm.frontend.rust_arguments import build_rust_arguments
from baton.engine.vllm.frontend.settings import FleetFacts, FrontendHooks, FrontendSettings
from baton.engine.vllm.gate.model_list import ModelRow
from baton.runtime.ports import Clock
from baton.runtime.process.owned_process import OwnedProcess, Program

if TYPE_CHECKING:
    from baton.engine.vllm.frontend.rust_requests import RustCallers

_BACKLOG = 4096
_POLL_S = 0.05
_STOP_GRACE_S = 2.0
_MAX_BODY_VARIABLE = "VLLM_HTTP_MAX_REQUEST_BODY_SIZE"
_LOG_FILE = "vllm-rs.log"
PATH_VARIABLE = "VLLM_RUST_FRONTEND_PATH"
PROGRAM = "vllm-rs"
_TESTED_VERSIONS = ("0.33.",)
"""Versions whose wire was tested with the installed engines."""
_VERSION_TIMEOUT_S = 10.0
_AUTO_VALUES = frozenset({"", "auto", "1", "true"})
_INSTALL_HINT = (
    "install a wheel of vllm 0.33 that holds it (the one for GPUs does), or set"
    f" {PATH_VARIABLE} to the program; or use 'python'"
)


class RustFrontend(FleetFrontend):
    """VLLM's API server in Rust, as a process."""

    def __init__(
        self, settings: FrontendSettings, facts: FleetFacts, *, hooks: FrontendHooks, clock: Clock
    ) -> None:
        super().__init__(settings, facts, hooks=hooks, clock=clock)
        self._callers: RustCallers | None = None
        self._process: OwnedProcess | None = None

    async def start(self) -> Path:
        """Start the frontend and return the Unix socket that serves HTTP.

        Only a gate may send requests there: the frontend trusts every request's id.

        Raises:
            EngineStartFailed: with the cause and a remedy.
        """
        arguments = build_rust_arguments(self._settings, max_len_tokens=self._facts.max_len_tokens)
        program = await asyncio.to_thread(preload_rust_frontend)
        async with self._starting() as folder:
            await self._start(program, arguments, folder)
            await self._wait_until_healthy(folder / "http")
        return folder / "http"

    async def _stop_api_server(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop(grace_s=_STOP_GRACE_S)

    def _apply(self) -> None:
        if self._callers is not None:
            self._callers.limits = self._settings.limits
            self._callers.isolated = self._settings.access.isolated

    def _has_api_server_failed(self) -> bool | None:
        return None if self._process is None else not self._process.is_running

    def tenant_handle(self, tenant: str) -> str:
        """The handle by which the gate names this tenant.

        Raises:
            LinkFailed: the frontend is not running.
        """
        if self._callers is None:
            raise LinkFailed("frontend", "the frontend is not running")
        return self._callers.tenant_handle(tenant)

    @property
    def models(self) -> Sequence[ModelRow]:
        """The model first, then its adapters."""
        settings, adapters = self._settings, self._settings.adapters
        max_len_tokens = self._facts.max_len_tokens
        model = ModelRow(
            name=settings.served_model_name, root=settings.model, max_len_tokens=max_len_tokens
        )
        return (
            model,
            *(ModelRow(name=name, root=root, parent=model.name) for name, root in adapters.items()),
        )

    @property
    def pid(self) -> int | None:
        """The id of the program's process, if it runs."""
        return None if self._process is None else self._process.pid

    async def _start(self, program: Path, arguments: str, folder: Path) -> None:
        from baton.engine.vllm.frontend.engine_server import FleetEngineServer
        from baton.engine.vllm.frontend.rust_requests import RustCallers, RustGrammars

        settings = self._settings
        callers = RustCallers(
            limits=settings.limits,
            max_len_tokens=self._facts.max_len_tokens,
            isolated=settings.access.isolated,
        )
        self._callers = callers
        self._engine_server = FleetEngineServer(
            self._facts,
            self._hooks,
            self._clock,
            identify=callers.identify,
            prepare=RustGrammars(settings).prepare,
        )
        listeners = {name: _listen(folder / name) for name in ("http", "input", "output")}
        try:
            fds = {name: listener.fileno() for name, listener in listeners.items()}
            spec = Program(
                name="vllm-rs",
                argv=_argv(program, arguments, fds),
                log=folder / _LOG_FILE,
                pass_fds=tuple(fds.values()),
                environment={
                    "NO_COLOR": "1",
                    # Otherwise it logs each client that disconnects.
                    "VLLM_LOGGING_LEVEL": "WARNING",
                    "VLLM_NO_USAGE_STATS": "1",
                    _MAX_BODY_VARIABLE: str(settings.limits.max_body_bytes),
                },
            )
            self._process = OwnedProcess(spec, on_exit=self._on_exit)
            self._process.start()
        finally:
            for listener in listeners.values():
                listener.close()
        await self._engine_server.start(f"ipc://{folder / 'input'}", f"ipc://{folder / 'output'}")

    async def _wait_until_healthy(self, path: Path) -> None:
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", trust_env=False
        ) as client:
            while True:
                if self._process is None or not self._process.is_running:
                    raise EngineStartFailed(
                        f"vLLM's Rust frontend ended while it started: {self._log_tail()}",
                        "check the model's path and models.*.api",
                    )
                try:
                    response = await client.get("/health", timeout=_POLL_S * 10)
                except httpx.TransportError:
                    response = None
                if response is not None and response.is_success:
                    return
                await asyncio.sleep(_POLL_S)

    def _log_tail(self) -> str:
        lines = "" if self._process is None else self._process.tail()
        return " | ".join(line.strip() for line in lines.splitlines()[-4:]) or "no output"

    def _on_exit(self, _code: int) -> None:
        if self._engine_server is not None:
            self._engine_server.abort_all()


def _argv(program: Path, arguments: str, fds: dict[str, int]) -> list[str]:
    argv = [str(program), "frontend", "--engine-count", "1", "--args-json", arguments]
    argv += ["--listen-fd", str(fds["http"])]
    argv += ["--input-listener-fd", str(fds["input"])]
    return [*argv, "--output-listener-fd", str(fds["output"])]


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def preload_rust_frontend() -> Path:
    """Find the program, and import all heavy modules, as for the Python frontend.

    Raises:
        EngineStartFailed: there is no such program, or it has another version.
    """
    program = find_rust_frontend(os.environ)
    check_version(program)
    use_cpu_without_gpus(os.environ)
    with preserve_log_handlers():
        from baton.engine.vllm.frontend import rust_requests as rust_callers  # noqa: F401 - to have it imported
    return program


def find_rust_frontend(environ: Mapping[str, str], *, package: Path | None = None) -> Path:
    """The program to start, found as `vllm serve` finds it.

    The PATH comes last: builds of vLLM for CPUs are without the program, which itself runs on any
    machine of its architecture. Source: vLLM 0.33, envs.py, `_resolve_rust_cli_path`.

    Args:
        environ: May have the program's path and the PATH.
        package: The folder of the package `vllm`; None: the installed package.

    Raises:
        EngineStartFailed: it is nowhere, or not where the variable says.
    """
    configured = environ.get(PATH_VARIABLE, "").strip()
    if configured.lower() not in _AUTO_VALUES:
        if _is_executable(Path(configured)):
            return Path(configured)
        raise EngineStartFailed(
            f"vLLM's Rust frontend: {PATH_VARIABLE} is {configured!r}, expected the path of an"
            " executable"
            f" {PROGRAM}",
            "correct the variable, or unset it to have the program looked for",
        )
    folder = package or _package_folder()
    if folder is not None and _is_executable(folder / PROGRAM):
        return folder / PROGRAM
    if on_path := shutil.which(PROGRAM, path=environ.get("PATH")):
        return Path(on_path)
    searched = "no package vllm is installed" if folder is None else f"there is none in {folder}"
    raise EngineStartFailed(
        f"vLLM's Rust frontend: expected an executable {PROGRAM}, {searched} nor on the PATH",
        _INSTALL_HINT,
    )


def check_version(program: Path) -> str:
    """The program's version, if it was tested; blocks for a moment.

    Raises:
        EngineStartFailed: it does not run here, or its version was not tested.
    """
    try:
        completed = subprocess.run(  # noqa: S603 - the program that is about to be started
            [program, "--version"],
            check=True,
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineStartFailed(f"{program} does not run: {error}", _INSTALL_HINT) from error
    words = completed.stdout.split()
    if words[:1] == [PROGRAM] and len(words) > 1 and words[1].startswith(_TESTED_VERSIONS):
        return words[1]
    raise EngineStartFailed(
        f"{program}: got {completed.stdout.strip()[:80]!r}, expected {PROGRAM} of a version"
        f" {' or '.join(_TESTED_VERSIONS)}*",
        "use a version that was tried: another may use another engine protocol",
    )


def _package_folder() -> Path | None:
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
