"""Which targets' transfer agents are taken for broken, by what probes of their pairs have seen.

Theory of operation. `PairProber` says how each whole probe's pull ended. A target is judged anew
after each that failed; it is a suspect from when `pulls_from_nobody` says so until a pull of it
goes well or it leaves. A suspect that `to_replace` names is told so, again with each failure, for
what is told may be lost; whoever leaves as a suspect counts as replaced, whichever coordinator told
it. What may fail: the target does not listen. Then it stays a suspect, and its pairs quarantined.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from baton.control.probing.notices import PairNotices
from baton.control.probing.schedule import Pair, PairSchedule
from baton.domain.commands import Command, ReportBrokenAgent
from baton.policy.links.estimates import LinkBook
from baton.policy.resilience.failed_agents import AgentRules, Pulls, pulls_from_nobody, to_replace


class AgentWatch:
    """See the module."""

    def __init__(
        self, schedule: PairSchedule, links: LinkBook, notices: PairNotices, rules: AgentRules
    ) -> None:
        self._schedule = schedule
        self._links = links
        self._notices = notices
        self._rules = rules
        self._suspects: dict[str, str] = {}
        self._told: str | None = None
        self._replaced_at_s: float | None = None

    @property
    def suspects(self) -> Mapping[str, str]:
        """Targets whose agents are taken for broken, and why."""
        return MappingProxyType(self._suspects)

    def pulled(self, pair: Pair, now_s: float) -> None:
        """A probe's pull over this pair went well."""
        pair.void_pulls = 0
        self._clear(pair.target.replica_id, now_s)

    def not_pulled(self, pair: Pair, now_s: float) -> list[Command]:
        """It failed, though the source's side channel had answered; what is to be said of it."""
        if not pair.void_pulls:
            pair.void_since_s = now_s
        pair.void_pulls += 1
        target_id = pair.target.replica_id
        why = self._judge(target_id, now_s)
        if why is None:
            self._clear(target_id, now_s)
            return []
        if target_id not in self._suspects:
            self._notices.note_agent(target_id, why, now_s)
        self._suspects[target_id] = why
        return self._tell(now_s)

    def leave(self, replica_id: str, now_s: float) -> None:
        """A replica is gone, or drains."""
        if self._suspects.pop(replica_id, None) is not None:
            self._replaced_at_s = now_s
        if replica_id == self._told:
            self._told = None

    def _judge(self, target_id: str, now_s: float) -> str | None:
        pairs = [
            Pulls(
                pair.source.replica_id,
                pair.void_pulls,
                pair.void_since_s,
                self._links.proven_at_s(pair.source.replica_id, target_id),
            )
            for pair in self._schedule.into_target(target_id)
        ]
        failing = [pair.source_id for pair in pairs if pair.failed >= self._rules.failures]
        served = {source_id: self._served_at_s(source_id, target_id) for source_id in failing}
        return pulls_from_nobody(pairs, served, now_s, self._rules)

    def _served_at_s(self, source_id: str, target_id: str) -> float:
        times = (
            self._links.proven_at_s(source_id, pair.target.replica_id)
            for pair in self._schedule.from_source(source_id)
            if pair.target.replica_id != target_id and pair.target.replica_id not in self._suspects
        )
        return max((at_s for at_s in times if at_s is not None), default=float("-inf"))

    def _tell(self, now_s: float) -> list[Command]:
        chosen = to_replace(
            self._suspects,
            self._schedule.targets(),
            told=self._told,
            since_last_s=None if self._replaced_at_s is None else now_s - self._replaced_at_s,
            rules=self._rules,
        )
        if chosen is None:
            return []
        if chosen != self._told:
            self._told, self._replaced_at_s = chosen, now_s
        return [ReportBrokenAgent(replica_id=chosen, why=self._suspects[chosen])]

    def _clear(self, target_id: str, now_s: float) -> None:
        if self._suspects.pop(target_id, None) is not None:
            self._notices.note_agent(target_id, "", now_s)
