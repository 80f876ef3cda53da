"""The parts that baton uses of the extension module beneath NIXL's Python API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class AgentConfig(Protocol):
    """NIXL's `nixlAgentConfig`, as far as it matters here."""

    pthrDelay: int  # noqa: N815 - NIXL's name


class Binding(Protocol):
    """NIXL's extension module `nixl._bindings`, as far as it matters here."""

    nixlAgent: Callable[[str, AgentConfig], object]  # noqa: N815 - NIXL's name
