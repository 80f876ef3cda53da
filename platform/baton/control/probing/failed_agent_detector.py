"""Targets whose transfer agents are taken for broken, by results of probes of their pairs.

Theory of operation. `PairProber` says how each whole probe's pull ended. A target is judged anew
after each failed pull. It is a suspect from when `agent_failure_reason` says so until a pull of it
goes well or it leaves. A suspect that `choose_replacement` names is told so, again with each
failure, for the message may be lost. A replica that leaves as a suspect counts as replaced,
whichever coordinator told it. If the target does not listen, it stays a suspect, and its pairs
quarantined.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from baton.control.probing.notices import PairNotices
from baton.control.probing.schedule import Pair, PairSchedule
from baton.domain.commands import Command, ReportFailedAgent
from baton.policy.links.estimates import LinkTable
from baton.policy.resilience.failed_agents import (
    AgentRules,
    PullHistory,
    agent_failure_reason,
    choose_replacement,
)


class FailedAgentDetector:
    """See the module."""

    def __init__(
        self, schedule: PairSchedule, links: LinkTable, notices: PairNotices, rules: AgentRules
    ) -> None:
        self._schedule = schedule
        self._links = links
        self._notices = notices
        self._rules = rules
        self._suspects: dict[str, str] = {}
        self._replacing_id: str | None = None
        self._replaced_at_s: float | None = None

    @property
    def suspects(self) -> Mapping[str, str]:
        """Targets whose agents are taken for broken, and why."""
        return MappingProxyType(self._suspects)

    def on_pull_done(self, pair: Pair, now_s: float) -> None:
        """A probe's pull over this pair went well."""
        pair.failed_pulls_in_row = 0
        self._clear(pair.target.replica_id, now_s)

    def on_pull_failed(self, pair: Pair, now_s: float) -> list[Command]:
        """The commands after a failed pull whose source's side channel had answered."""
        if not pair.failed_pulls_in_row:
            pair.pulls_fail_since_s = now_s
        pair.failed_pulls_in_row += 1
        target_id = pair.target.replica_id
        why = self._diagnose(target_id, now_s)
        if why is None:
            self._clear(target_id, now_s)
            return []
        if target_id not in self._suspects:
            self._notices.note_agent(target_id, why, now_s)
        self._suspects[target_id] = why
        return self._request_replacement(now_s)

    def remove_replica(self, replica_id: str, now_s: float) -> None:
        """A replica is gone, or drains."""
        if self._suspects.pop(replica_id, None) is not None:
            self._replaced_at_s = now_s
        if replica_id == self._replacing_id:
            self._replacing_id = None

    def _diagnose(self, target_id: str, now_s: float) -> str | None:
        pairs = [
            PullHistory(
                pair.source.replica_id,
                pair.failed_pulls_in_row,
                pair.pulls_fail_since_s,
                self._links.last_success_at_s(pair.source.replica_id, target_id),
            )
            for pair in self._schedule.pairs_to(target_id)
        ]
        failing = [
            pair.source_id for pair in pairs if pair.consecutive_failures >= self._rules.failures
        ]
        last_pull_at_s = {
            source_id: self._last_pull_at_s(source_id, target_id) for source_id in failing
        }
        return agent_failure_reason(pairs, last_pull_at_s, now_s, self._rules)

    def _last_pull_at_s(self, source_id: str, target_id: str) -> float:
        times = (
            self._links.last_success_at_s(source_id, pair.target.replica_id)
            for pair in self._schedule.pairs_from(source_id)
            if pair.target.replica_id != target_id and pair.target.replica_id not in self._suspects
        )
        return max((at_s for at_s in times if at_s is not None), default=float("-inf"))

    def _request_replacement(self, now_s: float) -> list[Command]:
        target_id = choose_replacement(
            self._suspects,
            self._schedule.target_count(),
            last_notified=self._replacing_id,
            since_last_s=None if self._replaced_at_s is None else now_s - self._replaced_at_s,
            rules=self._rules,
        )
        if target_id is None:
            return []
        if target_id != self._replacing_id:
            self._replacing_id, self._replaced_at_s = target_id, now_s
        return [ReportFailedAgent(replica_id=target_id, why=self._suspects[target_id])]

    def _clear(self, target_id: str, now_s: float) -> None:
        if self._suspects.pop(target_id, None) is not None:
            self._notices.note_agent(target_id, "", now_s)
