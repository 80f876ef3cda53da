"""Where Ray's own messages go in a process that joined a cluster: to standard error.

Ray tells every driver of nodes that died, whatever `log_to_driver` says, and prints it on standard
output, from a thread of its own: into the middle of `baton status -o json`, for one. What reads
that is told nothing it could use. The function is Ray's own: row `MESSAGES` of `couplings`.
"""

from __future__ import annotations

from typing import Any

from baton.serving.ray import couplings

_PATCHED_ATTRIBUTE = "_baton_stderr"


def redirect_ray_messages() -> None:
    """Have messages of Ray printed on standard error from now on. Idempotent."""
    from ray._private import worker

    print_message = getattr(worker, "print_to_stdstream", None)
    if hasattr(print_message, _PATCHED_ATTRIBUTE):
        return

    def on_stderr(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - Ray's
        assert print_message is not None, "it is there where the row fits"
        print_message({**data, "is_err": True}, *args, **kwargs)

    setattr(on_stderr, _PATCHED_ATTRIBUTE, True)
    couplings.MESSAGES.install(worker, print_to_stdstream=on_stderr)
