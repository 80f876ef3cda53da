"""The front of an ingress in Rust mode: the program, the gate before it, what the gate is told.

Theory of operation: the frontend is started with the ingress, the gate when Ray Serve says where
its replica is to be reached (`asgi_port`), since that is where the gate listens; where it is
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

from baton.config.derive.options import slo_classes, tenants
from baton.config.schema.deployment import DeploymentConfig
from baton.control.queue.recent_estimates import SheddingClass
from baton.domain.errors import EngineStartFailed, LinkFailed, Rejected
from baton.domain.tenant import DEFAULT_TENANT, Tenant
from baton.engine.vllm.frontend.rust_frontend import RustFrontend
from baton.engine.vllm.gate.model_list import ModelRow
from baton.policy.admission.slo_classes import ClassNotAllowed, SloClasses
from baton.runtime.keys.api_keys import ValidKey
from baton.serving.front.certificates import CertificateWatch
from baton.serving.front.data_path import find_haproxy
from baton.serving.front.gate_config import GateSettings, PublicListener
from baton.serving.front.gate_maps import (
    class_entries,
    key_entries,
    shed_entries,
    state_entries,
)
from baton.serving.front.gate_process import GateProcess
from baton.serving.front.haproxy_hardening import (
    certificate_path,
    gate_guard_fields,
    real_haproxy_environment,
)
from baton.serving.front.public_port import DEPLOYMENT_VARIABLE, open_gate_socket
from baton.serving.ingress.auth import IngressAuth
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_UPDATE_PERIOD_S = 0.1
_UPDATES_PER_KEY_UPDATE = 10
_HAPROXY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"


class RustIngress:
    """What stands before a coordinator in Rust mode."""

    def __init__(
        self,
        frontend: RustFrontend,
        auth: IngressAuth,
        *,
        config: Callable[[], DeploymentConfig],
        refusal: Callable[[str], Rejected | None],
        shedding: Callable[[], Iterable[SheddingClass]],
        deployment: str | None = None,
    ) -> None:
        """Take what is asked while it runs.

        Args:
            frontend: Not started.
            auth: Who is let in; started.
            config: As it is now.
            refusal: Why one more request of a tenant would be refused now; counts nothing.
            shedding: The classes of which one more would be refused by prediction now.
            deployment: With whose gates alone it shares the public port; None: clients come by Ray
                Serve's HAProxy.
        """
        self._frontend = frontend
        self._auth = auth
        self._config = config
        self._refusal = refusal
        self._shedding = shedding
        self._deployment = deployment
        self._tenant_names: set[str] = set()
        """Tenants who may ask."""
        self._frontend_socket: Path | None = None
        self._gate: GateProcess | None = None
        self._certificates: CertificateWatch | None = None
        self._update_task: asyncio.Task[None] | None = None

    @property
    def broken(self) -> bool:
        """Whether its program or its gate has died, or the gate is told nothing any more."""
        gate, update_task = self._gate, self._update_task
        updates_stopped = update_task is not None and update_task.done()
        return updates_stopped or self._frontend.has_failed or (gate is not None and gate.broken)

    async def start(self) -> None:
        """Start the program.

        Raises:
            EngineStartFailed: it or the gate's cannot be had here.
        """
        await asyncio.to_thread(find_real_haproxy, os.environ)
        self._frontend_socket = await self._frontend.start()

    async def open(self, listener: socket.socket) -> None:
        """Let clients in who come to this socket, by the gate; or to the public port.

        Raises:
            EngineStartFailed: the gate does not start, or cannot have the public port.
        """
        if self._deployment is None:
            await self._start_gate(listener)
            return
        server = self._config().server
        with await asyncio.to_thread(
            open_gate_socket, server.host, server.port, self._deployment
        ) as public_socket:
            settings = await self._start_gate(
                public_socket,
                probe_listener=listener,
                environment={DEPLOYMENT_VARIABLE: self._deployment},
            )
        self._certificates = CertificateWatch(
            self._config().security.tls,
            certificate_path(settings.folder),
            lambda: [settings.admin_socket],
        )
        self._certificates.start()

    async def _start_gate(
        self,
        listener: socket.socket,
        *,
        probe_listener: socket.socket | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> GateSettings:
        assert self._frontend_socket is not None, "it is opened once it has started"
        config, folder, haproxy = (
            self._config(),
            self._frontend_socket.parent,
            find_real_haproxy(os.environ),
        )
        public_listener = None
        if probe_listener is not None:
            tls, host = config.security.tls, config.server.host
            guard = await asyncio.to_thread(gate_guard_fields, folder, haproxy, host=host, tls=tls)
            public_listener = PublicListener(
                probe_bind=f"fd@{probe_listener.fileno()}", guard=guard
            )
        bind, models = f"fd@{listener.fileno()}", self._frontend.models
        settings = gate_settings(
            config,
            bind=bind,
            frontend_socket=self._frontend_socket,
            models=models,
            public_listener=public_listener,
        )
        self._gate = GateProcess(haproxy, settings)
        # Before it listens: the kernel deals clients to it from that moment on.
        await self._update_gate(self._gate, with_keys=True)
        listeners = [
            listening_socket.fileno()
            for listening_socket in (listener, probe_listener)
            if listening_socket is not None
        ]
        await self._gate.start(listeners=listeners, environment=environment)
        self._update_task = asyncio.create_task(self._update_loop(self._gate), name="baton-gate")
        return settings

    async def drain(self) -> None:
        """Take no more connections; returns when the answers under way have ended."""
        if self._gate is not None:
            await self._gate.drain()

    async def close(self) -> None:
        """Stop the gate and the program. Idempotent."""
        update_task, self._update_task = self._update_task, None
        if update_task is not None:
            update_task.cancel()
            await asyncio.wait([update_task])
        watch, self._certificates = self._certificates, None
        if watch is not None:
            await asyncio.to_thread(watch.stop)
        gate, self._gate = self._gate, None
        if gate is not None:
            await gate.close()
        await self._frontend.close()

    async def _update_loop(self, gate: GateProcess) -> None:
        round_number, gate_reachable = 0, True
        while True:
            await asyncio.sleep(_UPDATE_PERIOD_S)
            round_number += 1
            try:
                await self._update_gate(
                    gate,
                    with_keys=not gate_reachable or round_number % _UPDATES_PER_KEY_UPDATE == 0,
                )
            except LinkFailed as error:
                if gate_reachable:
                    log_event(_LOGGER, logging.WARNING, "gate_not_told", {"why": str(error)})
                gate_reachable = False
            else:
                gate_reachable = True

    async def _update_gate(self, gate: GateProcess, *, with_keys: bool) -> None:
        config = self._config()
        access = self._auth.access(config)
        handle = self._frontend.tenant_handle
        if with_keys:
            keys_by_digest = self._auth.keys_by_digest()
            names = {key.tenant for key in keys_by_digest.values() if isinstance(key, ValidKey)}
            self._tenant_names = {DEFAULT_TENANT, *tenants(config), *names}
            await gate.set_keys(key_entries(keys_by_digest, {name: handle(name) for name in names}))
            await gate.set_classes(class_entries(self._allowed_classes(config)))
        await gate.set_shed(shed_entries(self._refused_tenants(config)))
        await gate.set_state(
            state_entries(
                healthy=self._frontend.healthy(),
                anonymous=handle(DEFAULT_TENANT) if access.anonymous else None,
                keys=access.look_up is not None,
            )
        )

    def _refused_tenants(self, config: DeploymentConfig) -> dict[tuple[str, str | None], float]:
        handle, configured = self._frontend.tenant_handle, tenants(config)
        refused: dict[tuple[str, str | None], float] = {}
        handles_by_tenant: dict[str, list[str]] = {}
        for name in self._tenant_names:
            error = self._refusal(name)
            if error is not None:
                refused[handle(name), None] = error.retry_after_s
            served_as = name if name in configured else DEFAULT_TENANT
            handles_by_tenant.setdefault(served_as, []).append(handle(name))
        for tenant, slo_class, is_default, retry_after_s in self._shedding():
            for tenant_handle in handles_by_tenant.get(tenant, ()):
                refused[tenant_handle, slo_class] = retry_after_s
                if is_default:
                    refused[tenant_handle, ""] = retry_after_s
        return refused

    def _allowed_classes(self, config: DeploymentConfig) -> Iterator[tuple[str, str]]:
        classes, configured = slo_classes(config), tenants(config)
        for name in self._tenant_names:
            tenant = configured.get(name) or configured.get(DEFAULT_TENANT) or Tenant()
            for slo_class in classes.classes:
                if _is_class_allowed(classes, slo_class, tenant):
                    yield self._frontend.tenant_handle(name), slo_class


def _is_class_allowed(classes: SloClasses, slo_class: str, tenant: Tenant) -> bool:
    """Whether it may, with a prompt of any length: how long it is, the gate does not know."""
    return any(
        not isinstance(classes.resolve(slo_class, tenant, tokens), ClassNotAllowed)
        for tokens in (0, sys.maxsize)
    )


def gate_settings(
    config: DeploymentConfig,
    *,
    bind: str,
    frontend_socket: Path,
    models: Sequence[ModelRow] = (),
    public_listener: PublicListener | None = None,
) -> GateSettings:
    """What a gate is started with; its folder is that of the frontend's socket."""
    return GateSettings(
        bind=bind,
        frontend_socket=frontend_socket,
        folder=frontend_socket.parent,
        routes=open_routes(config),
        max_body_bytes=config.admission.max_body_bytes,
        max_stream_s=config.admission.timeouts.total_s,
        models=models,
        public_listener=public_listener,
    )


def open_routes(config: DeploymentConfig) -> tuple[str, ...]:
    """The groups that are open, of those that the Rust frontend has."""
    from baton.engine.vllm.frontend.rust_arguments import SUPPORTED_ROUTES

    return tuple(str(route) for route in config.server.routes if str(route) in SUPPORTED_ROUTES)


def find_real_haproxy(environ: Mapping[str, str]) -> str:
    """HAProxy itself, not what `haproxy_hardening` has Ray Serve start in its place.

    Raises:
        EngineStartFailed: there is none.
    """
    configured_path = environ.get(_HAPROXY_VARIABLE)
    if configured_path is not None:
        environ = {**environ, **real_haproxy_environment(Path(configured_path).parent)}
    haproxy = find_haproxy(environ)
    if haproxy is None:
        raise EngineStartFailed(
            "server.api_server 'rust': no executable haproxy was found for the gate before it",
            "install ray[serve] on Linux, or use server.api_server 'python'",
        )
    return haproxy
