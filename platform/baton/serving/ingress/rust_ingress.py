"""The front of an ingress in Rust mode: the program, the gate before it, what the gate is told.

Theory of operation: the frontend is started with the ingress, the gate when Ray Serve says where
its replica is to be reached (`replica_port`), since that is where the gate listens; where it is
the front itself, it listens there only for Serve, and for clients at the public port, beside the
other gates of the deployment (`public_port`). From then on
the gate is told ten times a second whom the coordinator would refuse now, by tenant and class, and
whether the fleet can serve; once a second, which keys are good and who may ask for which class.
Between two of these a request may slip through that the Python gate would have refused: the
coordinator refuses it then, and its client gets a 500 instead of a 429, or a stream that ends with
an error. A gate that does not listen is told again, all of it, the next time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from baton.config.derive.options import slo_book, tenants
from baton.config.schema.deployment import DeploymentConfig
from baton.control.queue.recent_estimates import Shedding
from baton.domain.errors import EngineStartFailed, LinkFailed, Rejected
from baton.domain.tenant import DEFAULT_TENANT, Tenant
from baton.engine.vllm.frontend.rust_frontend import RustFrontend
from baton.engine.vllm.gate.model_list import ModelRow
from baton.policy.admission.slo_classes import NoSuchClass, SloBook
from baton.runtime.keys.api_keys import Known
from baton.serving.front.certificates import CertificateWatch
from baton.serving.front.data_path import find_haproxy
from baton.serving.front.gate_config import AtFront, GateSettings
from baton.serving.front.gate_maps import (
    class_entries,
    key_entries,
    shed_entries,
    state_entries,
)
from baton.serving.front.gate_process import RustGate
from baton.serving.front.haproxy_hardening import certificate, gate_guard, unguard_front
from baton.serving.front.public_port import MARK, gate_socket
from baton.serving.ingress.auth import FrontDoor
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_TELL_S = 0.1
_KEYS_EVERY = 10
_HAPROXY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"


class RustIngress:
    """What stands before a coordinator in Rust mode."""

    def __init__(
        self,
        frontend: RustFrontend,
        door: FrontDoor,
        *,
        config: Callable[[], DeploymentConfig],
        refusal: Callable[[str], Rejected | None],
        shedding: Callable[[], Iterable[Shedding]],
        deployment: str | None = None,
    ) -> None:
        """Take what is asked while it runs.

        Args:
            frontend: Not started.
            door: Who is let in; started.
            config: As it is now.
            refusal: Why one more request of a tenant would be refused now; counts nothing.
            shedding: The classes of which one more would be refused by prediction now.
            deployment: With whose gates alone it shares the public port; None: clients come by Ray
                Serve's HAProxy.
        """
        self._frontend = frontend
        self._door = door
        self._config = config
        self._refusal = refusal
        self._shedding = shedding
        self._deployment = deployment
        self._names: set[str] = set()
        """Tenants who may ask."""
        self._http: Path | None = None
        self._gate: RustGate | None = None
        self._certificates: CertificateWatch | None = None
        self._feed: asyncio.Task[None] | None = None

    @property
    def broken(self) -> bool:
        """Whether its program or its gate has died, or the gate is told nothing any more."""
        gate, feed = self._gate, self._feed
        deaf = feed is not None and feed.done()
        return deaf or self._frontend.broken or (gate is not None and gate.broken)

    async def start(self) -> None:
        """Start the program.

        Raises:
            EngineStartFailed: it or the gate's cannot be had here.
        """
        await asyncio.to_thread(real_haproxy, os.environ)
        self._http = await self._frontend.start()

    async def open(self, listener: socket.socket) -> None:
        """Let clients in who come to this socket, by the gate; or to the public port.

        Raises:
            EngineStartFailed: the gate does not start, or cannot have the public port.
        """
        if self._deployment is None:
            await self._open(listener)
            return
        server = self._config().server
        with await asyncio.to_thread(
            gate_socket, server.host, server.port, self._deployment
        ) as public:
            settings = await self._open(
                public, asked=listener, environment={MARK: self._deployment}
            )
        self._certificates = CertificateWatch(
            self._config().security.tls, certificate(settings.folder), lambda: [settings.socket]
        )
        self._certificates.start()

    async def _open(
        self,
        listener: socket.socket,
        *,
        asked: socket.socket | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> GateSettings:
        assert self._http is not None, "it is opened once it has started"
        config, folder, haproxy = self._config(), self._http.parent, real_haproxy(os.environ)
        front = None
        if asked is not None:
            tls, host = config.security.tls, config.server.host
            guard = await asyncio.to_thread(gate_guard, folder, haproxy, host=host, tls=tls)
            front = AtFront(asked=f"fd@{asked.fileno()}", guard=guard)
        listen, models = f"fd@{listener.fileno()}", self._frontend.models
        settings = gate_settings(
            config, listen=listen, frontend=self._http, models=models, at_front=front
        )
        self._gate = RustGate(haproxy, settings)
        # Before it listens: the kernel deals clients to it from that moment on.
        await self._tell(self._gate, keys=True)
        listeners = [one.fileno() for one in (listener, asked) if one is not None]
        await self._gate.start(listeners=listeners, environment=environment)
        self._feed = asyncio.create_task(self._follow(self._gate), name="baton-gate")
        return settings

    async def drain(self) -> None:
        """Take no more connections; returns when the answers under way have ended."""
        if self._gate is not None:
            await self._gate.drain()

    async def close(self) -> None:
        """Stop the gate and the program. Idempotent."""
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.cancel()
            await asyncio.wait([feed])
        watch, self._certificates = self._certificates, None
        if watch is not None:
            await asyncio.to_thread(watch.stop)
        gate, self._gate = self._gate, None
        if gate is not None:
            await gate.close()
        await self._frontend.close()

    async def _follow(self, gate: RustGate) -> None:
        round_number, heard = 0, True
        while True:
            await asyncio.sleep(_TELL_S)
            round_number += 1
            try:
                await self._tell(gate, keys=not heard or round_number % _KEYS_EVERY == 0)
            except LinkFailed as error:
                if heard:
                    log_event(_LOGGER, logging.WARNING, "gate_not_told", {"why": str(error)})
                heard = False
            else:
                heard = True

    async def _tell(self, gate: RustGate, *, keys: bool) -> None:
        config = self._config()
        access = self._door.access(config)
        handle = self._frontend.handle
        if keys:
            found = self._door.keys()
            names = {one.tenant for one in found.values() if isinstance(one, Known)}
            self._names = {DEFAULT_TENANT, *tenants(config), *names}
            await gate.tell_keys(key_entries(found, {name: handle(name) for name in names}))
            await gate.tell_classes(class_entries(self._allowed(config)))
        await gate.tell_shed(shed_entries(self._refused(config)))
        await gate.tell_state(
            state_entries(
                healthy=self._frontend.healthy(),
                anonymous=handle(DEFAULT_TENANT) if access.anonymous else None,
                keys=access.look_up is not None,
            )
        )

    def _refused(self, config: DeploymentConfig) -> dict[tuple[str, str | None], float]:
        handle, configured = self._frontend.handle, tenants(config)
        refused: dict[tuple[str, str | None], float] = {}
        known: dict[str, list[str]] = {}
        for name in self._names:
            error = self._refusal(name)
            if error is not None:
                refused[handle(name), None] = error.retry_after_s
            served_as = name if name in configured else DEFAULT_TENANT
            known.setdefault(served_as, []).append(handle(name))
        for tenant, slo_class, own, retry_after_s in self._shedding():
            for word in known.get(tenant, ()):
                refused[word, slo_class] = retry_after_s
                if own:
                    refused[word, ""] = retry_after_s
        return refused

    def _allowed(self, config: DeploymentConfig) -> Iterator[tuple[str, str]]:
        book, known = slo_book(config), tenants(config)
        for name in self._names:
            tenant = known.get(name) or known.get(DEFAULT_TENANT) or Tenant()
            for slo_class in book.classes:
                if _may_ask(book, slo_class, tenant):
                    yield self._frontend.handle(name), slo_class


def _may_ask(book: SloBook, slo_class: str, tenant: Tenant) -> bool:
    """Whether it may, with a prompt of any length: how long it is, the gate does not know."""
    return any(
        not isinstance(book.resolve(slo_class, tenant, tokens), NoSuchClass)
        for tokens in (0, sys.maxsize)
    )


def gate_settings(
    config: DeploymentConfig,
    *,
    listen: str,
    frontend: Path,
    models: Sequence[ModelRow] = (),
    at_front: AtFront | None = None,
) -> GateSettings:
    """What a gate is started with; its folder is that of the frontend's socket."""
    return GateSettings(
        listen=listen,
        frontend=frontend,
        folder=frontend.parent,
        routes=open_routes(config),
        max_body_bytes=config.admission.max_body_bytes,
        longest_stream_s=config.admission.timeouts.total_s,
        models=models,
        at_front=at_front,
    )


def open_routes(config: DeploymentConfig) -> tuple[str, ...]:
    """The groups that are open, of those that the Rust frontend has."""
    from baton.engine.vllm.frontend.rust_arguments import SERVED

    return tuple(str(route) for route in config.server.routes if str(route) in SERVED)


def real_haproxy(environ: Mapping[str, str]) -> str:
    """HAProxy itself, not what `front_guard` has Ray Serve start in its place.

    Raises:
        EngineStartFailed: there is none.
    """
    said = environ.get(_HAPROXY_VARIABLE)
    if said is not None:
        environ = {**environ, **unguard_front(Path(said).parent)}
    haproxy = find_haproxy(environ)
    if haproxy is None:
        raise EngineStartFailed(
            "server.frontend 'rust': no executable haproxy was found for the gate before it",
            "install ray[serve] on Linux, or use server.frontend 'python'",
        )
    return haproxy
