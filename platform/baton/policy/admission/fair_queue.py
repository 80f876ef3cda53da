"""Who is next among tenants that want more than there is: start-time fair queueing.

*Theory of operation.* Each tenant is a flow with a weight. What is served carries a *start tag* in
virtual time: the later one of the present virtual time and the tag at which the flow's last one
ended; it ends its work over the weight later. The flow with the smallest tag is next, and virtual
time is the tag of what was served last. So flows that all wait get work in proportion to their
weights, within one request of each; one that was idle begins at the present and has saved up
nothing; and one alone has everything. Source: Goyal, Vin, Cheng, Start-Time Fair Queueing, IEEE/ACM
Transactions on Networking 5(5), 1997.

Inside a flow the one that must begin first comes first (earliest deadline first): whoever waits
longest for its turn is then the one that can.

Work is in predicted device-seconds, so a tenant of long prompts has fewer turns.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

_KEPT_FLOWS = 1024
"""Flows that are remembered though nobody of them waits; more, and those that owe nothing go."""


_SAFE = 2.0
"""Nobody overtakes one who is left less than twice the time that its turn is predicted to take.
Found by trying: at 1, an eighth of all refusals came late, to those who had been overtaken."""


class Waiting(NamedTuple):
    """Somebody in the queue."""

    request_id: str
    flow: str
    weight: float
    work: float
    begin_by_s: float
    """When it must begin at the latest; or who it stands behind, see `fitted`."""


@dataclass(slots=True)
class _Flow:
    """One tenant's own line."""

    weight: float
    tag: float
    """Start tag of its next one."""
    line: list[tuple[float, int, str]] = field(default_factory=list)
    """By when each must begin; its number; its id."""
    work: float = 0.0


class FairQueue:
    """Tenants' requests of one priority, in the order in which they are to be served."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}
        self._waiting: dict[str, tuple[Waiting, int]] = {}
        """By id, in the order in which they came; with their numbers."""
        self._backlogged: dict[str, _Flow] = {}
        self._now = 0.0
        """Virtual time."""
        self._came = 0
        self._keeps = _KEPT_FLOWS
        self.work = 0.0
        """Of all who wait."""

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, one: Waiting) -> None:
        """Somebody waits from now on."""
        self._came += 1
        self._waiting[one.request_id] = (one, self._came)
        flow = self._flow(one)
        if not flow.line:
            flow.tag = max(flow.tag, self._now)
            self._backlogged[one.flow] = flow
        insort(flow.line, (one.begin_by_s, self._came, one.request_id))
        flow.work += one.work
        self.work += one.work

    def head(self) -> Waiting | None:
        """Who is next; None when nobody waits."""
        if not self._backlogged:
            return None
        flow = min(self._backlogged.values(), key=_turn)
        return self._waiting[flow.line[0][2]][0]

    def serve(self, request_id: str) -> None:
        """Somebody who waits has its turn, and its flow is charged for it."""
        one = self._waiting[request_id][0]
        flow = self._flows[one.flow]
        self._charge(flow, one)
        self.remove(request_id)

    def serve_at_once(self, one: Waiting) -> None:
        """Somebody had no need to wait; its flow is charged all the same."""
        flow = self._flow(one)
        flow.tag = max(flow.tag, self._now)
        self._charge(flow, one)
        self._forget_idle()

    def remove(self, request_id: str) -> Waiting | None:
        """Somebody waits no more, and had no turn; None when it did not wait."""
        found = self._waiting.pop(request_id, None)
        if found is None:
            return None
        one, number = found
        flow = self._flows[one.flow]
        del flow.line[bisect_left(flow.line, (one.begin_by_s, number, request_id))]
        flow.work = flow.work - one.work if flow.line else 0.0
        self.work = self.work - one.work if self._waiting else 0.0
        if not flow.line:
            del self._backlogged[one.flow]
            self._forget_idle()
        return one

    def newest(self) -> str | None:
        """Who came last of those who wait."""
        return next(reversed(self._waiting), None)

    def work_ahead(self, flow_name: str, *, weight: float, begin_by_s: float) -> float:
        """How much is served before somebody who would come now.

        As if flows were served side by side, each at its share: what is ahead in its own line, and
        of each other line as much as is due by the tag that it would have.
        """
        flow, own, tag = self._flows.get(flow_name), 0.0, self._now
        if flow is not None:
            tag = max(flow.tag, self._now)
            if flow.line:
                tag = flow.tag
                place = bisect_left(flow.line, (begin_by_s, self._came + 1, ""))
                own = sum([self._waiting[one][0].work for _, _, one in flow.line[:place]])
        tag += own / weight
        others = 0.0
        for other in self._backlogged.values():
            if other is not flow and other.tag < tag:
                others += min(other.work, other.weight * (tag - other.tag))
        return own + others

    def fitted(self, one: Waiting, *, now_s: float, rate: float) -> Waiting:
        """Where in its line somebody who comes now shall stand: by its own time, or at the end.

        At the end when somebody behind it would be late because of it, at so much work per second
        for all lines. Earliest deadline first is the best order as long as all can be in time, and
        a bad one when not: each newcomer in a hurry would then ruin one who has waited for long.
        Where more is asked for than can be done lines are as long as they may be, hence everyone
        stands in the order in which they came.
        """
        flow = self._flows.get(one.flow)
        if flow is None or not flow.line:
            return one
        place = bisect_left(flow.line, (one.begin_by_s, self._came + 1, ""))
        weights = sum(other.weight for other in self._backlogged.values())
        own_rate = rate * one.weight / weights
        ahead = one.work + sum(self._waiting[who][0].work for _, _, who in flow.line[:place])
        for begin_by_s, _, who in flow.line[place:]:
            if now_s + _SAFE * ahead / own_rate > begin_by_s:
                return one._replace(begin_by_s=flow.line[-1][0])
            ahead += self._waiting[who][0].work
        return one

    def check_integrity(self) -> None:
        """Raise AssertionError when lines, sums and those who wait disagree."""
        lined = sorted(one for flow in self._flows.values() for _, _, one in flow.line)
        assert lined == sorted(self._waiting), "lines hold others than those who wait"
        for name, flow in self._flows.items():
            works = [self._waiting[one][0].work for _, _, one in flow.line]
            assert abs(flow.work - sum(works)) <= 1e-6 * (1 + sum(works)), f"{name}: work"
            assert bool(flow.line) == (name in self._backlogged), f"{name}: backlogged or not"
            assert flow.line == sorted(flow.line), f"{name} is out of order"

    def _flow(self, one: Waiting) -> _Flow:
        """Its flow, by whatever weight it has now."""
        flow = self._flows.get(one.flow)
        if flow is None:
            flow = self._flows[one.flow] = _Flow(one.weight, self._now)
        flow.weight = one.weight
        return flow

    def _charge(self, flow: _Flow, one: Waiting) -> None:
        self._now = max(self._now, flow.tag)
        flow.tag += one.work / one.weight

    def _forget_idle(self) -> None:
        """Forget flows that nobody waits in and whose tag is past: new ones begin alike."""
        if len(self._flows) > self._keeps:
            self._flows = {
                name: flow
                for name, flow in self._flows.items()
                if flow.line or flow.tag > self._now
            }
            self._keeps = max(_KEPT_FLOWS, 2 * len(self._flows))


def _turn(flow: _Flow) -> tuple[float, int]:
    """Whose turn it is: the smallest tag's; among equals, of the one that came first."""
    return flow.tag, flow.line[0][1]
