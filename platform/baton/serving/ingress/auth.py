"""API keys, limits and expiries of an ingress, from the configuration and the files it names.

Theory of operation: a thread checks the key files for changes once a second. A new key works, and a
revoked key stops working, a second after its file was written. A slow disk delays only that, and is
logged. After a failed read the last good keys stay, and the failure is logged once. Logs contain
ids of keys, never keys.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from datetime import UTC, datetime

from baton.config.derive.options import allows_anonymous, key_files, tenants
from baton.config.schema.deployment import DeploymentConfig, EngineKind
from baton.domain.tenant import CacheSharing
from baton.engine.vllm.frontend.settings import RequestCapabilities
from baton.engine.vllm.gate.access import Access, Unauthorized
from baton.engine.vllm.gate.limits import FrontendLimits
from baton.runtime.keys.api_keys import InvalidKey, ValidKey
from baton.runtime.keys.key_files import KeyFiles, KeyNotice, load_ring
from baton.runtime.process.background_task import BackgroundTask
from baton.serving.front.certificates import CertificateExpiry
from baton.telemetry.logs import log_event
from baton.telemetry.metrics.ingress import AccessFacts

_LOGGER = logging.getLogger(__name__)
_POLL_S = 1.0
# The largest allowed file takes less; a disk that hangs is logged.
_READ_DEADLINE_S = 10.0


def frontend_limits(config: DeploymentConfig) -> FrontendLimits:
    """The limits of one request."""
    admission = config.admission
    return FrontendLimits(
        max_body_bytes=admission.max_body_bytes,
        max_n=admission.max_n,
        max_tokens=admission.max_tokens,
        default_max_tokens=admission.default_max_tokens,
        max_messages=admission.max_messages,
        logprobs=all(pool.engine.kind is not EngineKind.SIM for pool in config.pools.values()),
    )


def request_capabilities(config: DeploymentConfig) -> RequestCapabilities:
    """The optional features that requests may use."""
    allow = config.server.allow
    return RequestCapabilities(
        chat_templates=allow.chat_templates,
        media_domains=allow.media_domains or (),
        prompt_embeds=allow.prompt_embeds,
    )


class IngressAuth:
    """The keys of one ingress."""

    def __init__(self, config: DeploymentConfig) -> None:
        self._files = KeyFiles(key_files(config))
        self._tls = config.security.tls
        self._certificate = CertificateExpiry()
        self._unauthorized: Counter[Unauthorized] = Counter()
        self._task = BackgroundTask("baton-keys", self._poll_loop)
        self._pending_read: asyncio.Future[tuple[KeyNotice, ...]] | None = None

    async def start(self) -> None:
        """Read the key files and follow them."""
        await self._poll()
        self._task.start()

    async def close(self) -> None:
        """Stop following. Idempotent."""
        await self._task.stop()

    def check(self, config: DeploymentConfig) -> None:
        """Check that the key files of a configuration can be read. Blocks on the disk.

        Raises:
            ConfigInvalid: a file is unreadable or has bad lines; names all of them.
        """
        load_ring(key_files(config))

    async def reconfigure(self, config: DeploymentConfig) -> None:
        """Use the key files of this configuration; they have been read on return."""
        self._files.watch(key_files(config))
        self._tls = config.security.tls
        earlier_read = self._pending_read
        await self._poll()
        if earlier_read is not None and earlier_read.done():
            await self._poll()  # the earlier read did not have these files

    def access(self, config: DeploymentConfig) -> Access:
        """Access by this configuration and the current keys."""
        isolated = {
            name
            for name, tenant in tenants(config).items()
            if tenant.cache is CacheSharing.ISOLATED
        }
        tracing = config.observability.tracing
        return Access(
            look_up=self._look_up if key_files(config) else None,
            anonymous=allows_anonymous(config),
            isolated=frozenset(isolated),
            trace_sample_fraction=None if tracing.otlp is None else tracing.sample,
            count_unauthorized=self._count_unauthorized,
        )

    def facts(self) -> AccessFacts:
        """Valid keys, expiries and rejected requests, now."""
        now = datetime.now(UTC)
        expires_at_s = self._certificate.expires_at_s
        return AccessFacts(
            keys=self._files.ring.by_tenant(now),
            tls_expires_s=None if expires_at_s is None else expires_at_s - now.timestamp(),
            unauthorized={str(cause): count for cause, count in self._unauthorized.items()},
        )

    def _count_unauthorized(self, cause: Unauthorized) -> None:
        self._unauthorized[cause] += 1

    def _look_up(self, token: str) -> ValidKey | InvalidKey:
        return self._files.ring.look_up(token, datetime.now(UTC))

    def keys_by_digest(self) -> dict[str, ValidKey | InvalidKey]:
        """The result of each key now, by its digest."""
        return self._files.ring.by_digest(datetime.now(UTC))

    async def _poll_loop(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await self._poll()
            except Exception:
                # If following stopped, no key could be revoked.
                _LOGGER.exception("key files could not be looked at")

    def _read_files(self) -> tuple[KeyNotice, ...]:
        self._certificate.poll(self._tls)
        return self._files.poll()

    async def _poll(self) -> None:
        # One read at a time: on a disk that hangs, each would occupy a thread.
        if self._pending_read is None:
            self._pending_read = asyncio.ensure_future(asyncio.to_thread(self._read_files))
        pending = self._pending_read
        await asyncio.wait([pending], timeout=_READ_DEADLINE_S)
        if not pending.done():
            log_event(_LOGGER, logging.WARNING, "key_files_slow", {"after_s": _READ_DEADLINE_S})
            return
        if self._pending_read is not pending:
            return  # another waiter has logged it
        self._pending_read = None
        for notice in pending.result():
            fields = {"path": notice.path, "keys": notice.keys}
            if notice.reason is None:
                log_event(_LOGGER, logging.INFO, "keys_read", fields)
            else:
                log_event(
                    _LOGGER, logging.WARNING, "keys_not_read", fields | {"reason": notice.reason}
                )
