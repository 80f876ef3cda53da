"""Whether a scaling loop that took over from another has seen enough to judge by itself."""

from __future__ import annotations


class LeaderHandover:
    """Makes a loop hold still until it has watched for a whole window.

    Theory of operation. Policies look back: at rates over a window, at what was needed lately, at
    when a pool was changed last. A loop that begins together with its deployment has missed
    nothing. One that takes over in the middle has, and would start or stop replicas by what its
    first two seconds show. Its window begins when everybody was heard for the first time.
    """

    def __init__(self) -> None:
        self._pending = False
        self._window_started_at_s: float | None = None

    def begin(self, *, had_other_leader: bool) -> None:
        """A loop begins to act; it takes over where another one acted before."""
        self._pending = self._pending or had_other_leader

    def unmet_preconditions(
        self, now_s: float, *, window_s: float, all_reported: bool
    ) -> list[str]:
        """Why it cannot judge yet.

        Empty when it can. `all_reported`: everybody has answered by now.
        """
        if not self._pending:
            return []
        if self._window_started_at_s is None and all_reported:
            self._window_started_at_s = now_s
        if self._window_started_at_s is not None and now_s - self._window_started_at_s >= window_s:
            self._pending = False
            return []
        return [f"another controller acted until now: a whole window of {window_s:g} s is awaited"]
