"""The gate before vLLM's Rust frontend as a process of this ingress: HAProxy and its maps.

Theory of operation: HAProxy starts with map files, so that they hold from its first connection on;
empty maps reject all callers and report unhealthy. One task then writes differences through
HAProxy's admin socket in the gate's private folder. After a failed write the content of its map is
unknown, and the next write clears it first. That closes the gate for a moment rather than keeping a
revoked key valid. HAProxy dies with this process. If it dies alone, the gate is broken and the
ingress must be replaced.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from baton.domain.errors import EngineStartFailed, LinkFailed
from baton.runtime.process.owned_process import OwnedProcess, Program
from baton.serving.front.gate_config import GateSettings, render_gate_config
from baton.serving.front.gate_maps import map_commands
from baton.serving.front.haproxy_admin import stat_rows

_START_TIMEOUT_S = 10.0
_QUERY_TIMEOUT_S = 2.0
_START_POLL_S = 0.02
_DRAIN_POLL_S = 0.1
_STOP_GRACE_S = 2.0
_CONFIG_FILE = "gate.cfg"
_LOG_FILE = "gate.log"


class GateProcess:
    """One HAProxy and its maps; `set_*` raise LinkFailed if HAProxy did not confirm the change."""

    def __init__(self, haproxy: str, settings: GateSettings) -> None:
        self._haproxy = haproxy
        self._settings = settings
        self._process: OwnedProcess | None = None
        self._written_entries: dict[Path, Mapping[str, str] | None] = {
            path: {} for path in self._map_paths
        }

    @property
    def _map_paths(self) -> tuple[Path, ...]:
        settings = self._settings
        return settings.key_map, settings.shed_map, settings.class_map, settings.state_map

    @property
    def broken(self) -> bool:
        """Whether HAProxy has ended after its start."""
        return self._process is not None and not self._process.is_running

    async def start(
        self, *, listeners: Sequence[int] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        """Start HAProxy; it listens when this returns.

        Args:
            listeners: Descriptors to pass on.
            environment: Variables beyond those of this process.

        Raises:
            EngineStartFailed: it did not start, with its output.
        """
        settings = self._settings
        await asyncio.to_thread(self._write_files)
        self._process = OwnedProcess(
            Program(
                name="gate",
                argv=(self._haproxy, "-db", "-f", str(settings.folder / _CONFIG_FILE)),
                log=settings.folder / _LOG_FILE,
                pass_fds=tuple(listeners),
                environment=environment or {},
            ),
            on_exit=lambda _code: None,
        )
        self._process.start()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while not await self._is_responding():
                    if self.broken:
                        break
                    await asyncio.sleep(_START_POLL_S)
        except TimeoutError:
            pass
        if not await self._is_responding():
            output = self._process.tail()[-500:] or "no output"
            await self.close()
            raise EngineStartFailed(
                f"the gate before the frontend did not start: {output}",
                "see whether its port is taken; a gate needs the HAProxy of ray[serve]",
            )

    async def drain(self) -> None:
        """Accept no more connections; returns when the answers in flight have ended.

        HAProxy's own soft stop would wait for idle connections. A query that fails is repeated
        while HAProxy lives.
        """
        is_closed = False
        while not self.broken:
            with suppress(LinkFailed):
                if not is_closed:
                    await self._query("shutdown frontend gate")
                    is_closed = True
                if not await self._in_flight_requests():
                    return
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _in_flight_requests(self) -> int:
        return sum(
            int(row["scur"])
            for row in stat_rows(await self._query("show stat"))
            if (row["pxname"], row["svname"]) == ("rust", "BACKEND")
        )

    async def close(self) -> None:
        """Stop it at once; call `drain` before to let streams end. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            await process.stop(grace_s=_STOP_GRACE_S)

    async def set_keys(self, entries: Mapping[str, str]) -> None:
        """Replace the keys."""
        await self._update_map(self._settings.key_map, entries)

    async def set_classes(self, entries: Mapping[str, str]) -> None:
        """Replace the classes that tenants may request."""
        await self._update_map(self._settings.class_map, entries)

    async def set_shed(self, entries: Mapping[str, str]) -> None:
        """Replace the rejected callers."""
        await self._update_map(self._settings.shed_map, entries)

    async def set_state(self, entries: Mapping[str, str]) -> None:
        """Replace health and the anonymous caller."""
        await self._update_map(self._settings.state_map, entries)

    async def _update_map(self, path: Path, entries: Mapping[str, str]) -> None:
        written = self._written_entries[path]
        if written == entries:
            return
        if self._process is None:
            self._written_entries[path] = dict(entries)  # it starts with them
            return
        self._written_entries[path] = None
        if written is None:
            await self._run_command(f"clear map {path}")
        for command in map_commands(path, written or {}, entries):
            await self._run_command(command)
        self._written_entries[path] = dict(entries)

    async def _run_command(self, command: str) -> None:
        """Run a command on a map: HAProxy answers success with an empty line."""
        answer = await self._query(command)
        if answer.strip():
            # Never the command: it may hold a digest.
            raise LinkFailed("gate", f"HAProxy rejected a command: {answer.strip()[:200]}")

    async def _is_responding(self) -> bool:
        try:
            return (await self._query("show info")).startswith("Name: HAProxy")
        except LinkFailed:
            return False

    async def _query(self, command: str) -> str:
        path = self._settings.admin_socket
        try:
            async with asyncio.timeout(_QUERY_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(str(path))
                try:
                    writer.write(f"{command}\n".encode())
                    await writer.drain()
                    return (await reader.read()).decode()
                finally:
                    writer.close()
        except (OSError, TimeoutError) as error:
            raise LinkFailed("gate", f"HAProxy did not answer at {path}: {error}") from error

    def _write_files(self) -> None:
        for path, entries in self._written_entries.items():
            _write(path, "".join(f"{key} {value}\n" for key, value in (entries or {}).items()))
        _write(self._settings.folder / _CONFIG_FILE, render_gate_config(self._settings))


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
