"""How eagerly a NIXL agent's progress thread looks for work.

Theory of operation: NIXL's Python API sets `pthrDelay`, the pause of the agent's progress thread
in microseconds, to 0: it polls without pause and burns most of a core for as long as the agent
lives, idle or not. Neither NIXL nor vLLM has an option for it. So `install`, which vLLM calls in
each engine process (entry point group `vllm.general_plugins`) before any agent exists, puts
itself between NIXL's Python API and its binding and sets the pause on the way.

On RDMA the network card moves data without the thread's help and the smallest delay is wanted:
there the variable is not set and nothing is changed.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Protocol

PROGRESS_DELAY_VARIABLE = "BATON_NIXL_PROGRESS_DELAY_US"
"""The pause in microseconds; unset leaves NIXL as it is."""
ADAPTER_PID_VARIABLE = "BATON_ENGINE_PARENT_PID"
"""The process that asked for the engine; it has no agent and need not load NIXL."""

_MARK = "_baton_progress_delay_us"


class AgentConfig(Protocol):
    """NIXL's `nixlAgentConfig`, as far as it matters here."""

    pthrDelay: int  # noqa: N815 - NIXL's name


class Binding(Protocol):
    """NIXL's extension module `nixl._bindings`, as far as it matters here."""

    nixlAgent: Callable[[str, AgentConfig], object]  # noqa: N815 - NIXL's name


def install() -> None:
    """Slow down the progress threads of agents made in this process, if the environment says so.

    Raises:
        ValueError: the variable holds no positive whole number.
        ImportError: NIXL is not installed, though the environment asks to slow it down.
        AttributeError: this version of NIXL makes its agents in another way.
    """
    wanted = os.environ.get(PROGRESS_DELAY_VARIABLE)
    if wanted is None or os.environ.get(ADAPTER_PID_VARIABLE) == str(os.getpid()):
        return
    if not wanted.isdecimal() or int(wanted) < 1:
        raise ValueError(f"{PROGRESS_DELAY_VARIABLE}: got {wanted!r}, wanted microseconds, 1 or up")
    slow_down(importlib.import_module("nixl._api").nixlBind, int(wanted))


def slow_down(binding: Binding, delay_us: int) -> None:
    """Make every agent that `binding` creates from now on pause `delay_us` between polls.

    Calling it again changes the pause.
    """
    create = getattr(binding.nixlAgent, "__wrapped__", binding.nixlAgent)

    @functools.wraps(create, updated=())
    def create_slowed(name: str, config: AgentConfig) -> object:
        config.pthrDelay = delay_us
        return create(name, config)

    setattr(create_slowed, _MARK, delay_us)
    binding.nixlAgent = create_slowed


def delay_in_force_us(binding: Binding) -> int | None:
    """The pause that agents created now would get; None when NIXL is as it came."""
    delay_us: int | None = getattr(binding.nixlAgent, _MARK, None)
    return delay_us
