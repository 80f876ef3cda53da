"""Whether engines take up resumed legs: by the vLLM that is installed, and by their own word."""

from __future__ import annotations

import logging
from typing import Protocol

from vllm.v1.engine.exceptions import EngineDeadError

from baton.engine.vllm.patches import table
from baton.engine.vllm.wire.resume_keys import RESUME_SUPPORT_CALL
from baton.runtime.process.log_events import log_event

logger = logging.getLogger(__name__)


class UtilityClient(Protocol):
    """What of vLLM's client this needs."""

    async def call_utility_async(self, method: str, *args: object) -> object:
        """Have the engine run one of its methods."""


def find_incompatibility() -> str | None:
    """Why engines of the vLLM that is installed here would not take up; None where they would."""
    return table.RESUME.find_incompatibility()


async def query_resume_support(core: UtilityClient) -> bool:
    """Ask a started engine; each of its processes has a say, and what is not said is a no.

    Raises:
        EngineDeadError: it has died.
    """
    try:
        return await core.call_utility_async(RESUME_SUPPORT_CALL) is True
    except EngineDeadError:
        raise
    except Exception as error:  # noqa: BLE001 - vLLM's client raises nothing narrower
        log_event(logger, logging.WARNING, "engine_does_not_take_up", {"why": str(error)})
        return False
