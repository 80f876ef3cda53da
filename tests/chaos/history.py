"""What clients saw, and whether it may have been so.

An `Exchange` is one request as its client saw it. A `History` is a run: its exchanges, and where it
can be had what coordinators wrote down of them, what is still held when all is quiet, and which
replicas were to get nothing when. `find_violations` compares it with the rules; nothing of baton's
own books is believed but the records, and those must agree with the clients. Times are monotonic
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

_REJECTED_STATUSES = (429, 503)
_MAX_SHOWN = 3
"""Violations of a rule that a note tells."""


class Ending(StrEnum):
    """How a client saw a request end."""

    FINISHED = "finished"
    REJECTED = "refused"
    """Before anything was computed: it may come again."""
    FAILED = "failed"
    """An error after admission, or one that is no rejection."""
    CUT = "cut"
    """The connection or the stream ended without saying so."""
    CANCELLED = "left"
    """The client went away, as ordered."""


class Invariant(StrEnum):
    """What must hold of every history."""

    ENDS_ONCE = "requests that did not end exactly once"
    FINISHES = "admitted requests that failed"
    TOKENS = "streams that differ from the run without faults"
    REJECTIONS = "refusals without 429 or 503 and Retry-After"
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
    reason: str = ""
    """The error at its end."""

    def add_tokens(self, token_ids: Sequence[int], now_s: float) -> None:
        """Tokens have come."""
        if self.endings:
            self.late_tokens += len(token_ids)
            return
        self.status = 200
        self.tokens.extend(token_ids)
        self.times_s.append(now_s)

    def end(self, ending: Ending, now_s: float, reason: str = "") -> None:
        """It is over; called twice it is a violation, not an error."""
        self.endings.append(ending)
        if self.ended_at_s is None:
            self.ended_at_s, self.reason = now_s, reason

    @property
    def ending(self) -> Ending | None:
        """How it ended first; None while it has not."""
        return self.endings[0] if self.endings else None

    def gaps(self) -> Iterator[tuple[float, float]]:
        """From when to when it waited between tokens."""
        yield from pairwise(self.times_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedReplica:
    """A replica that was to get nothing for a while."""

    replica_id: str
    from_s: float
    """When coordinators knew."""
    to_s: float = math.inf
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that was broken, by which request or counter, and how."""

    invariant: Invariant
    subject: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A run. What is None or empty is not known, and its rule is not asked about."""

    exchanges: Sequence[Exchange]
    expected_tokens: Callable[[Exchange], Sequence[int]] | None = None
    """The tokens of a run without faults."""
    records: Sequence[RequestRecord] | None = None
    """Of every coordinator that took part and lived."""
    counters: Mapping[str, float] | None = None
    """What is held when nothing is under way."""
    excluded_replicas: Sequence[ExcludedReplica] = ()
    context_figures: Mapping[str, Figure] = field(default_factory=dict)
    """What a reader should know of the circumstances; no rule asks for it."""


def find_violations(history: History) -> list[Violation]:
    """Every rule that was broken, by which request, and how."""
    violations: list[Violation] = []
    for exchange in history.exchanges:
        violations += _ending_violations(exchange)
        if history.expected_tokens is not None:
            violations += _token_violations(exchange, history.expected_tokens(exchange))
    if history.records is not None:
        violations += _record_violations(history.exchanges, history.records)
        violations += _route_violations(history.records, history.excluded_replicas)
    violations += [
        Violation(invariant=Invariant.COUNTERS, subject=name, description=f"{name} is {value:g}")
        for name, value in (history.counters or {}).items()
        if value
    ]
    return violations


def check_invariants(history: History) -> tuple[tuple[Bound, ...], str]:
    """A bound for each rule that can be asked about, and a note of what broke them."""
    violations = find_violations(history)
    count = Counter(violation.invariant for violation in violations)
    checked = {Invariant.ENDS_ONCE, Invariant.FINISHES, Invariant.REJECTIONS}
    checked |= {Invariant.TOKENS} if history.expected_tokens is not None else set()
    checked |= {Invariant.RECORDS} if history.records is not None else set()
    checked |= (
        {Invariant.ROUTES} if history.records is not None and history.excluded_replicas else set()
    )
    checked |= {Invariant.COUNTERS} if history.counters is not None else set()
    bounds = tuple(exactly(rule.value, count[rule], 0) for rule in Invariant if rule in checked)
    return bounds, "; ".join(_notes(violations))


def _notes(violations: Sequence[Violation]) -> Iterator[str]:
    for rule in Invariant:
        matching = [violation for violation in violations if violation.invariant is rule]
        for violation in matching[:_MAX_SHOWN]:
            yield f"{violation.subject}: {violation.description}"
        if len(matching) > _MAX_SHOWN:
            yield f"and {len(matching) - _MAX_SHOWN} more {rule.value}"


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
        Stall(request_id=exchange.request_id, from_s=a, took_s=b - a)
        for exchange in exchanges
        for a, b in exchange.gaps()
        if over_s is None or a <= over_s <= b
    )
    return max(stalls, key=lambda stall: stall.took_s, default=None)


def longest_first_token_s(exchanges: Iterable[Exchange]) -> float:
    """The longest wait for a first token; 0 where none came."""
    waits = (exchange.times_s[0] - exchange.sent_at_s for exchange in exchanges if exchange.times_s)
    return max(waits, default=0.0)


def endings(exchanges: Iterable[Exchange]) -> dict[str, int]:
    """How many ended how; `never` for those that did not."""
    return dict(
        Counter(
            "never" if exchange.ending is None else str(exchange.ending) for exchange in exchanges
        )
    )


# -------------------------------------------------------------------- rules


def _ending_violations(exchange: Exchange) -> Iterator[Violation]:
    def violation(rule: Invariant, description: str) -> Violation:
        return Violation(invariant=rule, subject=exchange.request_id, description=description)

    if len(exchange.endings) != 1:
        endings = ", ".join(exchange.endings) or "not at all"
        yield violation(
            Invariant.ENDS_ONCE, f"ended {len(exchange.endings)} times: {endings} {exchange.reason}"
        )
    elif exchange.late_tokens:
        yield violation(Invariant.ENDS_ONCE, f"{exchange.late_tokens} tokens came after its end")
    match exchange.ending:
        case Ending.FAILED | Ending.CUT:
            yield violation(
                Invariant.FINISHES, f"{exchange.ending} with {exchange.status}: {exchange.reason}"
            )
        case Ending.REJECTED:
            retry_after_s = exchange.retry_after_s
            if (
                exchange.status not in _REJECTED_STATUSES
                or retry_after_s is None
                or retry_after_s <= 0
            ):
                answer = f"status {exchange.status}, Retry-After {retry_after_s}"
                yield violation(Invariant.REJECTIONS, f"refused with {answer}: {exchange.reason}")
            if exchange.tokens:
                yield violation(
                    Invariant.REJECTIONS, f"refused after {len(exchange.tokens)} tokens"
                )


def _token_violations(exchange: Exchange, expected: Sequence[int]) -> Iterator[Violation]:
    is_whole = exchange.ending is Ending.FINISHED
    difference = describe_difference(exchange.tokens, expected, is_whole=is_whole)
    if difference:
        yield Violation(
            invariant=Invariant.TOKENS, subject=exchange.request_id, description=difference
        )


def describe_difference(actual: Sequence[int], expected: Sequence[int], *, is_whole: bool) -> str:
    """How tokens differ from those that were wanted, in words; empty when they do not.

    Where the stream is not `is_whole`, it may stop early.
    """
    actual, expected = list(actual), list(expected)
    if actual == expected or (not is_whole and expected[: len(actual)] == actual):
        return ""
    differing = (n for n, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b)
    index = next(differing, min(len(actual), len(expected)))
    return f"{_difference_kind(actual, expected, index)}, after {index} of {len(expected)} tokens"


def _difference_kind(actual: list[int], expected: list[int], index: int) -> str:
    """In which way a stream leaves the one that was wanted, from a place on."""
    if index == len(actual):
        return "lost: it ends there"
    if index == len(expected):
        return f"{len(actual) - index} tokens too many"
    if _continues_elsewhere(actual[index:], expected, range(index + 1, len(expected))):
        return "lost: tokens are missing there"
    if _continues_elsewhere(actual[index:], expected, range(index)):
        return "repeated: tokens come again"
    if Counter(actual) == Counter(expected):
        return "out of order"
    return f"wrong: got {actual[index : index + 4]}, expected {expected[index : index + 4]}"


def _continues_elsewhere(tail: list[int], expected: list[int], offsets: Iterable[int]) -> bool:
    """Whether the rest is that of the wanted stream, but from another place."""
    return any(tail == expected[place : place + len(tail)] for place in offsets)


def _record_violations(
    exchanges: Sequence[Exchange], records: Sequence[RequestRecord]
) -> Iterator[Violation]:
    record_counts = Counter(record.request_id for record in records)
    by_id = {record.request_id: record for record in records}
    for exchange in exchanges:
        request_id = exchange.request_id
        if record_counts[request_id] != 1:
            description = f"{record_counts[request_id]} records were kept"
            yield Violation(
                invariant=Invariant.RECORDS, subject=request_id, description=description
            )
            continue
        record = by_id[request_id]
        finished = exchange.ending is Ending.FINISHED
        if finished != (record.outcome is Phase.FINISHED):
            description = f"{exchange.ending} for its client, {record.outcome} in its record"
            yield Violation(
                invariant=Invariant.RECORDS, subject=request_id, description=description
            )
        elif finished and record.output_tokens != len(exchange.tokens):
            description = f"{len(exchange.tokens)} tokens came, {record.output_tokens} are recorded"
            yield Violation(
                invariant=Invariant.RECORDS, subject=request_id, description=description
            )


def _route_violations(
    records: Iterable[RequestRecord], excluded_replicas: Sequence[ExcludedReplica]
) -> Iterator[Violation]:
    for record in records:
        for leg in record.legs:
            for excluded in excluded_replicas:
                if (
                    leg.replica_id == excluded.replica_id
                    and excluded.from_s < leg.started_at_s < excluded.to_s
                ):
                    after_s = leg.started_at_s - excluded.from_s
                    description = (
                        f"{leg.leg_id} went to {excluded.replica_id} {after_s:.3f} s"
                        f" after {excluded.reason}"
                    )
                    yield Violation(
                        invariant=Invariant.ROUTES,
                        subject=record.request_id,
                        description=description,
                    )
