"""Where Ray's own messages go in a process that joined a cluster: to standard error.

Ray tells every driver of nodes that died, whatever `log_to_driver` says, and prints it on standard
output, from a thread of its own: into the middle of `baton status -o json`, for one. What reads
that is told nothing it could use. The function is Ray's own, in a module that may change: where it
is not as it was, nothing is done.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

_MARK = "_baton_stderr"


def ray_messages_to_stderr() -> None:
    """Have messages of Ray printed on standard error from now on. Idempotent."""
    from ray._private import worker

    tell = getattr(worker, "print_to_stdstream", None)
    if tell is None or hasattr(tell, _MARK):
        return

    @wraps(tell)
    def on_stderr(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - Ray's
        tell({**data, "is_err": True}, *args, **kwargs)

    setattr(on_stderr, _MARK, True)
    worker.print_to_stdstream = on_stderr
