"""A frontend with keys and default limits over a stand-in for the fleet; nothing is before it."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import httpx

from baton.config import load_config
from baton.engine.tiny_model import write_tiny_model
from baton.engine.vllm.frontend.settings import FrontendSettings
from baton.engine.vllm.gate.access import Access
from baton.runtime.keys.api_keys import KeyRing, mint
from baton.serving.ingress.auth import frontend_limits
from tests.abuse.raw import Address
from tests.compat.echo_fleet import EchoFleet
from tests.compat.endpoint import MODEL, serve

ROOT = Path(__file__).parents[2]
_START_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningFrontend:
    """The endpoint, and what opens it."""

    url: str
    keys: Mapping[str, str]
    fleet: EchoFleet

    @property
    def address(self) -> Address:
        """The same, for a socket."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def client(self, tenant: str) -> httpx.Client:
        """A client of a tenant's."""
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30)


@contextmanager
def running_frontend() -> Iterator[RunningFrontend]:
    """Start it in a thread of this process."""
    now = datetime.now(UTC)
    minted_keys = {tenant: mint(tenant, now=now) for tenant in ("acme", "beta")}
    key_ring = KeyRing(key for key, _ in minted_keys.values())
    access = Access(
        look_up=lambda token: key_ring.look_up(token, now),
        anonymous=False,
        isolated=frozenset(minted_keys),
    )
    limits = frontend_limits(load_config([ROOT / "configs" / "sim.yaml"]).config)
    fleet = EchoFleet()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_tiny_model(Path(folder))
        settings = FrontendSettings(
            model=folder,
            served_model_name=MODEL,
            limits=replace(limits),
            access=access,
            start_timeout_s=_START_S,
        )
        with serve(settings, fleet) as thread:
            keys = {tenant: token for tenant, (_, token) in minted_keys.items()}
            yield RunningFrontend(url=thread.base_url, keys=keys, fleet=fleet)
