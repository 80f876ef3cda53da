"""What clients saw, and whether it may have been so.

An `Exchange` is one request as its client saw it. A `History` is a run: its exchanges, and where it
can be had what coordinators wrote down of them, what is still held when all is quiet, and which
replicas were to get nothing when. `violations` compares it with the rules; nothing of baton's own
books is believed but the records, and those must agree with the clients. Times are monotonic
seconds, of one machine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from baton.domain.commands import RequestRecord
from baton.domain.request import Phase
from tests.chaos.case import Bound, Figure, exactly

_REFUSED = (429, 503)
_SHOWN = 3
"""Violations of a rule that a note tells."""


class Ending(StrEnum):
    """How a client saw a request end."""

    FINISHED = "finished"
    REFUSED = "refused"
    """Before anything was computed: it may come again."""
    FAILED = "failed"
    """An error after it was let in, or one that is no refusal."""
    CUT = "cut"
    """The connection or the stream ended without saying so."""
    LEFT = "left"
    """The client went away, as it was told to."""


class Rule(StrEnum):
    """What must hold of every history."""

    ENDS_ONCE = "requests that did not end exactly once"
    FINISHES = "admitted requests that failed"
    TOKENS = "streams that differ from the run without faults"
    REFUSALS = "refusals without 429 or 503 and Retry-After"
    RECORDS = "requests whose record disagrees with their client"
    COUNTERS = "counters that did not return to zero"
    ROUTES = "legs sent to a replica that was to get none"


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request, and what its client saw of it."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    planned_at_s: float = 0.0
    """From the start of its load."""
    sent_at_s: float = 0.0
    status: int | None = None
    """Of HTTP, or what it would be there; None while nothing was heard."""
    retry_after_s: float | None = None
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """When tokens came; several may come at once."""
    endings: list[Ending] = field(default_factory=list)
    """One, if all is well."""
    ended_at_s: float | None = None
    late_tokens: int = 0
    """Those that came after its end."""
    why: str = ""
    """What was said of its end."""

    def take(self, token_ids: Sequence[int], now_s: float) -> None:
        """Tokens have come."""
        if self.endings:
            self.late_tokens += len(token_ids)
            return
        self.status = 200
        self.tokens.extend(token_ids)
        self.times_s.append(now_s)

    def end(self, ending: Ending, now_s: float, why: str = "") -> None:
        """It is over; called twice it is a violation, not an error."""
        self.endings.append(ending)
        if self.ended_at_s is None:
            self.ended_at_s, self.why = now_s, why

    @property
    def ending(self) -> Ending | None:
        """How it ended first; None while it has not."""
        return self.endings[0] if self.endings else None

    def gaps(self) -> Iterator[tuple[float, float]]:
        """From when to when it waited between tokens."""
        yield from pairwise(self.times_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Barred:
    """A replica that was to get nothing for a while."""

    replica_id: str
    from_s: float
    """When coordinators knew."""
    to_s: float = math.inf
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that was broken, by which request or counter, and how."""

    rule: Rule
    of: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A run. What is None or empty is not known, and its rule is not asked about."""

    exchanges: Sequence[Exchange]
    wanted: Callable[[Exchange], Sequence[int]] | None = None
    """The tokens of a run without faults."""
    records: Sequence[RequestRecord] | None = None
    """Of every coordinator that took part and lived."""
    counters: Mapping[str, float] | None = None
    """What is held when nothing is under way."""
    barred: Sequence[Barred] = ()
    aside: Mapping[str, Figure] = field(default_factory=dict)
    """What a reader should know of the circumstances; no rule asks for it."""


def violations(history: History) -> list[Violation]:
    """Every rule that was broken, by whom, and how."""
    found: list[Violation] = []
    for exchange in history.exchanges:
        found += _of_ending(exchange)
        if history.wanted is not None:
            found += _of_tokens(exchange, history.wanted(exchange))
    if history.records is not None:
        found += _of_records(history.exchanges, history.records)
        found += _of_routes(history.records, history.barred)
    found += [
        Violation(rule=Rule.COUNTERS, of=name, what=f"{name} is {value:g}")
        for name, value in (history.counters or {}).items()
        if value
    ]
    return found


def judged(history: History) -> tuple[tuple[Bound, ...], str]:
    """A bound for each rule that can be asked about, and a note of what broke them."""
    broken = violations(history)
    count = Counter(one.rule for one in broken)
    asked = {Rule.ENDS_ONCE, Rule.FINISHES, Rule.REFUSALS}
    asked |= {Rule.TOKENS} if history.wanted is not None else set()
    asked |= {Rule.RECORDS} if history.records is not None else set()
    asked |= {Rule.ROUTES} if history.records is not None and history.barred else set()
    asked |= {Rule.COUNTERS} if history.counters is not None else set()
    bounds = tuple(exactly(rule.value, count[rule], 0) for rule in Rule if rule in asked)
    return bounds, "; ".join(_notes(broken))


def _notes(broken: Sequence[Violation]) -> Iterator[str]:
    for rule in Rule:
        of_it = [one for one in broken if one.rule is rule]
        for one in of_it[:_SHOWN]:
            yield f"{one.of}: {one.what}"
        if len(of_it) > _SHOWN:
            yield f"and {len(of_it) - _SHOWN} more {rule.value}"


# -------------------------------------------------------------------- figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A stream that waited for a token."""

    request_id: str
    from_s: float
    took_s: float


def longest_stall(exchanges: Iterable[Exchange], *, over_s: float | None = None) -> Stall | None:
    """The longest time between two tokens of any stream; `over_s`: of those in which that lay."""
    stalls = (
        Stall(request_id=one.request_id, from_s=a, took_s=b - a)
        for one in exchanges
        for a, b in one.gaps()
        if over_s is None or a <= over_s <= b
    )
    return max(stalls, key=lambda stall: stall.took_s, default=None)


def longest_first_token_s(exchanges: Iterable[Exchange]) -> float:
    """The longest wait for a first token; 0 where none came."""
    waits = (one.times_s[0] - one.sent_at_s for one in exchanges if one.times_s)
    return max(waits, default=0.0)


def endings(exchanges: Iterable[Exchange]) -> dict[str, int]:
    """How many ended how; `never` for those that did not."""
    return dict(Counter("never" if one.ending is None else str(one.ending) for one in exchanges))


# -------------------------------------------------------------------- rules


def _of_ending(exchange: Exchange) -> Iterator[Violation]:
    def broke(rule: Rule, what: str) -> Violation:
        return Violation(rule=rule, of=exchange.request_id, what=what)

    if len(exchange.endings) != 1:
        how = ", ".join(exchange.endings) or "not at all"
        yield broke(Rule.ENDS_ONCE, f"ended {len(exchange.endings)} times: {how} {exchange.why}")
    elif exchange.late_tokens:
        yield broke(Rule.ENDS_ONCE, f"{exchange.late_tokens} tokens came after its end")
    match exchange.ending:
        case Ending.FAILED | Ending.CUT:
            yield broke(Rule.FINISHES, f"{exchange.ending} with {exchange.status}: {exchange.why}")
        case Ending.REFUSED:
            again_s = exchange.retry_after_s
            if exchange.status not in _REFUSED or again_s is None or again_s <= 0:
                said = f"status {exchange.status}, Retry-After {again_s}"
                yield broke(Rule.REFUSALS, f"refused with {said}: {exchange.why}")
            if exchange.tokens:
                yield broke(Rule.REFUSALS, f"refused after {len(exchange.tokens)} tokens")


def _of_tokens(exchange: Exchange, wanted: Sequence[int]) -> Iterator[Violation]:
    whole = exchange.ending is Ending.FINISHED
    difference = differs(exchange.tokens, wanted, whole=whole)
    if difference:
        yield Violation(rule=Rule.TOKENS, of=exchange.request_id, what=difference)


def differs(got: Sequence[int], wanted: Sequence[int], *, whole: bool) -> str:
    """How tokens differ from those that were wanted, in words; empty when they do not.

    Where the stream is not `whole`, it may stop early.
    """
    got, wanted = list(got), list(wanted)
    if got == wanted or (not whole and wanted[: len(got)] == got):
        return ""
    unlike = (n for n, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b)
    at = next(unlike, min(len(got), len(wanted)))
    return f"{_how(got, wanted, at)}, after {at} of {len(wanted)} tokens"


def _how(got: list[int], wanted: list[int], at: int) -> str:
    """In which way a stream leaves the one that was wanted, from a place on."""
    if at == len(got):
        return "lost: it ends there"
    if at == len(wanted):
        return f"{len(got) - at} tokens too many"
    if _goes_on(got[at:], wanted, range(at + 1, len(wanted))):
        return "lost: tokens are missing there"
    if _goes_on(got[at:], wanted, range(at)):
        return "repeated: tokens come again"
    if Counter(got) == Counter(wanted):
        return "out of order"
    return f"wrong: got {got[at : at + 4]}, wanted {wanted[at : at + 4]}"


def _goes_on(rest: list[int], wanted: list[int], places: Iterable[int]) -> bool:
    """Whether the rest is that of the wanted stream, but from another place."""
    return any(rest == wanted[place : place + len(rest)] for place in places)


def _of_records(
    exchanges: Sequence[Exchange], records: Sequence[RequestRecord]
) -> Iterator[Violation]:
    kept = Counter(record.request_id for record in records)
    by_id = {record.request_id: record for record in records}
    for exchange in exchanges:
        request_id = exchange.request_id
        if kept[request_id] != 1:
            what = f"{kept[request_id]} records were kept"
            yield Violation(rule=Rule.RECORDS, of=request_id, what=what)
            continue
        record = by_id[request_id]
        finished = exchange.ending is Ending.FINISHED
        if finished != (record.outcome is Phase.FINISHED):
            what = f"{exchange.ending} for its client, {record.outcome} in its record"
            yield Violation(rule=Rule.RECORDS, of=request_id, what=what)
        elif finished and record.output_tokens != len(exchange.tokens):
            what = f"{len(exchange.tokens)} tokens came, {record.output_tokens} are recorded"
            yield Violation(rule=Rule.RECORDS, of=request_id, what=what)


def _of_routes(records: Iterable[RequestRecord], barred: Sequence[Barred]) -> Iterator[Violation]:
    for record in records:
        for leg in record.legs:
            for bar in barred:
                if leg.replica_id == bar.replica_id and bar.from_s < leg.began_at_s < bar.to_s:
                    after_s = leg.began_at_s - bar.from_s
                    what = f"{leg.leg_id} went to {bar.replica_id} {after_s:.3f} s after {bar.why}"
                    yield Violation(rule=Rule.ROUTES, of=record.request_id, what=what)
