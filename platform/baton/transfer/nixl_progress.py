"""How eagerly a NIXL agent's progress thread polls.

Theory of operation: NIXL's Python API sets `pthrDelay`, the pause of the agent's progress thread in
microseconds, to 0. So the thread uses most of a core for as long as the agent lives. Neither NIXL
nor vLLM has an option for it. vLLM calls `install` in each engine process (entry point group
`vllm.general_plugins`) before any agent exists. It wraps NIXL's binding to set the pause and, if
configured, flushes UCX's log from the first agent on.

On RDMA the network card moves data without the thread, and the smallest delay is best: there the
variable is not set and nothing is changed.
"""

from __future__ import annotations

import functools
import importlib
import os
import re

from baton.domain.names.process_names import OWNER_ENV_VAR, process_name
from baton.runtime.patch import replace_attributes
from baton.transfer.ucx_log import FLUSH_VARIABLE, AgentConfig, Binding, use_local_log_folder

PROGRESS_DELAY_VARIABLE = "BATON_NIXL_PROGRESS_DELAY_US"
"""The pause in microseconds; unset leaves NIXL unchanged."""

_POSITIVE = re.compile(r"(?=.*[1-9])\d+(\.\d+)?")
_DELAY_ATTRIBUTE = "_baton_progress_delay_us"


def install() -> None:
    """Apply the environment's variables to agents made in this process; usually nothing.

    Raises:
        ValueError: a variable does not hold a positive number.
        ImportError: NIXL is not installed, though a variable is set.
    """
    delay_us = os.environ.get(PROGRESS_DELAY_VARIABLE)
    flush_s = os.environ.get(FLUSH_VARIABLE)
    if delay_us is flush_s is None:
        return
    if os.environ.get(OWNER_ENV_VAR) == process_name():  # it has no agent, and need not load NIXL
        return
    if delay_us is not None and (not delay_us.isdecimal() or int(delay_us) < 1):
        raise ValueError(
            f"{PROGRESS_DELAY_VARIABLE}: got {delay_us!r}, expected microseconds, 1 up"
        )
    if flush_s is not None and not _POSITIVE.fullmatch(flush_s):
        raise ValueError(f"{FLUSH_VARIABLE}: got {flush_s!r}, expected seconds above 0")
    if flush_s is not None:
        use_local_log_folder(os.environ)  # before UCX is loaded
    from baton.transfer import couplings  # it has the functions of this module

    binding: Binding | None = getattr(importlib.import_module("nixl._api"), "nixlBind", None)
    if delay_us is not None:
        couplings.PROGRESS_THREAD.install(binding, int(delay_us))
    if flush_s is not None:
        couplings.UCX_LOG.install(binding, float(flush_s))


def set_progress_delay(binding: Binding, delay_us: int) -> None:
    """Make every agent that `binding` creates from now on pause `delay_us` between polls.

    Calling it again changes the pause.
    """
    create = getattr(binding.nixlAgent, "__wrapped__", binding.nixlAgent)

    @functools.wraps(create, updated=())
    def create_with_delay(name: str, config: AgentConfig) -> object:
        config.pthrDelay = delay_us
        return create(name, config)

    setattr(create_with_delay, _DELAY_ATTRIBUTE, delay_us)
    replace_attributes(binding, nixlAgent=create_with_delay)


def current_delay_us(binding: Binding) -> int | None:
    """The pause that new agents get; None when NIXL is unchanged."""
    delay_us: int | None = getattr(binding.nixlAgent, _DELAY_ATTRIBUTE, None)
    return delay_us
