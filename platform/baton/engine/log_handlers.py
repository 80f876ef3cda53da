"""Keeps the log handlers of a process while something is done that configures logging.

vLLM does, as it is imported and again when an engine is made, and Python's `logging.config` then
closes every handler that there is. Ray Serve's own do not survive that: its replica can no longer
name its log file, and a Serve controller that starts again (2.60) takes a replica that cannot for
broken, and ends it. So each process that has vLLM, ingresses too, died with Serve's controller.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from baton.engine.vllm.patches import table


@contextmanager
def preserve_log_handlers() -> Iterator[None]:
    """Inside, configuring logging closes no handler that there was before.

    Python closes those that it has in a list of its own; they are taken off it, and put back.
    """
    if not table.LOG_HANDLERS.fits():
        yield
        return
    handler_list: list[object] = logging._handlerList  # type: ignore[attr-defined]  # noqa: SLF001
    handlers_by_name: dict[str, logging.Handler] = dict(logging._handlers)  # type: ignore[attr-defined]  # noqa: SLF001
    saved = handler_list[:]
    del handler_list[:]
    try:
        yield
    finally:
        handler_list[:0] = saved
        logging._handlers.update(handlers_by_name)  # type: ignore[attr-defined]  # noqa: SLF001
