"""Keeps the log handlers of a process while a library configures logging.

vLLM does so when it is imported and when an engine is made, and Python's `logging.config` closes
all handlers. Without them Ray Serve's replica cannot name its log file, and a restarted Serve
controller (2.60) ends such a replica as broken.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from baton.engine.vllm.patches import table


@contextmanager
def preserve_log_handlers() -> Iterator[None]:
    """Inside, configuring logging closes no handler that existed before.

    Python closes the handlers of a private list; they are removed from it, and put back.
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
