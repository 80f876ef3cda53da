"""Every coupling of baton to private names of NIXL and UCX."""

from __future__ import annotations

from typing import Final

from baton.runtime.patch import Patch, Target
from baton.runtime.patch_guards import has
from baton.transfer.nixl_progress import set_progress_delay
from baton.transfer.ucx_log import flush_from_first_agent

_BINDING = "nixl._api:nixlBind"

PROGRESS_THREAD: Final = Patch(
    name="pause of the progress thread",
    target=Target(
        package="nixl", names=("nixl._api.nixlBind.nixlAgent", "pthrDelay"), tested=("1.5",)
    ),
    guard=has(f"{_BINDING}.nixlAgent", f"{_BINDING}.nixlAgentConfig.pthrDelay"),
    apply=set_progress_delay,
    fallback="each agent polls without a pause and uses most of a core",
)
UCX_LOG: Final = Patch(
    name="flushed log of UCX",
    target=Target(package="nixl", names=("nixl._api.nixlBind.nixlAgent",), tested=("1.5",)),
    guard=has(f"{_BINDING}.nixlAgent"),
    apply=flush_from_first_agent,
    fallback="nothing says which transports the workers use",
)

PATCHES: Final = (PROGRESS_THREAD, UCX_LOG)
