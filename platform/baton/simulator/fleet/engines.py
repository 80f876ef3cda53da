"""Which engine a virtual replica has, and what it costs to bring blocks to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from baton.simulator.engine.port import VirtualEngine
from baton.simulator.engine.settings import SimSettings
from baton.simulator.fleet.exact_engine import ExactEngine
from baton.simulator.v1.core import V1Core
from baton.simulator.v1.settings import V1Settings

EngineSettings = SimSettings | V1Settings
"""Of the token-exact engine, and of the counted one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How blocks come to an engine."""

    bytes_per_s: float
    """What its network interfaces carry, in and out each."""
    setup_s: float
    """Before the first byte of a pull."""
    host_block_s: float
    """To bring one block from the host's memory."""
    lease_s: float
    """How long blocks are kept for it, unless it says that it still wants them."""


def link_settings(settings: EngineSettings) -> LinkSettings:
    """What an engine's settings say of it."""
    match settings:
        case SimSettings():
            return LinkSettings(
                bytes_per_s=settings.wire_bytes_per_s,
                setup_s=settings.transfer_setup_s / settings.speed,
                host_block_s=settings.host_load_s(1),
                lease_s=settings.lease_s,
            )
        case V1Settings():
            return LinkSettings(
                bytes_per_s=settings.transfer_bytes_per_s,
                setup_s=settings.transfer_setup_s,
                host_block_s=0.0,
                lease_s=settings.lease_s,
            )
        case _:
            assert_never(settings)


def create_engine(
    settings: EngineSettings, *, engine_id: str, model: str, address: str
) -> VirtualEngine:
    """A new engine; `address` is where others pull from it."""
    match settings:
        case SimSettings():
            return ExactEngine(settings, engine_id=engine_id, model=model, address=address)
        case V1Settings():
            return V1Core(settings, engine_id=engine_id, model=model, address=address)
        case _:
            assert_never(settings)
