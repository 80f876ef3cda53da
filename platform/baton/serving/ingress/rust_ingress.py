"""An ingress in Rust mode: vLLM's Rust frontend, the gate in front of it, and its updates.

Theory of operation: the frontend starts with the ingress. The gate starts when Ray Serve gives the
replica's port (`ray.asgi_port`) and listens there. With `server.listener: ingress` it listens there
only for Serve's probes, and for clients on the public port, together with the other gates of the
deployment (`front.public_port`).

Ten times a second the gate gets the tenants and classes that the coordinator would reject, and
whether the fleet can serve. Once a second it gets the keys and their classes. Between updates a
request can pass that the Python gate would reject. The coordinator then rejects it, and its client
gets status 500 instead of 429, or a stream that ends with an error. After a failed update the next
update is complete.
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
from baton.control.queue.admission_controller import SheddingClass
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
    """The frontend and the gate of a coordinator in Rust mode."""

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
        """Nothing starts before `start`.

        Args:
        frontend: not started.
        auth: started.
        config: returns the configuration in force.
        refusal: why one more request of a tenant would be rejected now; counts nothing.
        shedding: the classes whose next request would be rejected by prediction now.
        deployment: the deployment whose gates share the public port; None if Ray Serve's
            HAProxy listens.
        """
        self._frontend = frontend
        self._auth = auth
        self._config = config
        self._refusal = refusal
        self._shedding = shedding
        self._deployment = deployment
        self._tenant_names: set[str] = set()
        self._frontend_socket: Path | None = None
        self._gate: GateProcess | None = None
        self._certificates: CertificateWatch | None = None
        self._update_task: asyncio.Task[None] | None = None

    @property
    def broken(self) -> bool:
        """Whether the frontend or the gate has died, or updates have stopped."""
        gate, update_task = self._gate, self._update_task
        updates_stopped = update_task is not None and update_task.done()
        return updates_stopped or self._frontend.has_failed or (gate is not None and gate.broken)

    async def start(self) -> None:
        """Start the frontend.

        Raises:
            EngineStartFailed: the frontend or HAProxy is not available.
        """
        await asyncio.to_thread(find_real_haproxy, os.environ)
        self._frontend_socket = await self._frontend.start()

    async def open(self, listener: socket.socket) -> None:
        """Accept clients on this socket, or on the public port, through the gate.

        Raises:
            EngineStartFailed: the gate does not start, or cannot get the public port.
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
        config, haproxy = self._config(), find_real_haproxy(os.environ)
        folder = self._frontend_socket.parent
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
        # Before it listens, because the kernel gives it connections from then on.
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
        """Accept no more connections; returns when the responses in flight have ended."""
        if self._gate is not None:
            await self._gate.drain()

    async def close(self) -> None:
        """Stop the gate and the frontend. Idempotent."""
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
                    log_event(_LOGGER, logging.WARNING, "gate_not_told", {"reason": str(error)})
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
    """Whether it is allowed for any prompt length, which the gate does not know."""
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
    """The settings of a gate; its folder is that of the frontend's socket."""
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
    """The configured route groups that the Rust frontend supports."""
    from baton.engine.vllm.frontend.rust_arguments import SUPPORTED_ROUTES

    return tuple(str(route) for route in config.server.routes if str(route) in SUPPORTED_ROUTES)


def find_real_haproxy(environ: Mapping[str, str]) -> str:
    """HAProxy itself, not the wrapper that Ray Serve starts (`front.haproxy_hardening`).

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
