"""A fuzzer: makes inputs from a seed, gives each to a judge, keeps what the judge complains of."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import FrameType
from typing import Generic, TypeVar

_T = TypeVar("_T")
HANGS_AFTER_S = 20.0
_KEPT = 20


class Hangs(BaseException):
    """A judge that does not come to an end; no `except Exception` swallows it."""


@dataclass(slots=True)
class Found:
    """What came of a run. `seed` and the number of an input make it again."""

    inputs: int = 0
    complaints: int = 0
    longest_s: float = 0.0
    longest_cpu_s: float = 0.0
    """Of this thread's processor: what it takes however busy the machine is."""
    first: list[str] = field(default_factory=list)
    """The first few complaints, each with the number of its input."""
    seen: dict[str, int] = field(default_factory=dict)
    """How often each outcome came; a run in which one never comes has tested little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Generic[_T]):
    """What is fuzzed."""

    make: Callable[[Random], _T]
    judge: Callable[[_T], str]
    """A word for a good outcome; raises for any other."""
    hangs_after_s: float = HANGS_AFTER_S


def fuzz(target: Target[_T], *, seconds: float, seed: int, inputs: int | None = None) -> Found:
    """Judge inputs until the time, or their number, is over."""
    found, until_s = Found(), time.monotonic() + seconds
    while time.monotonic() < until_s and (inputs is None or found.inputs < inputs):
        number, found.inputs = found.inputs, found.inputs + 1
        made = target.make(Random(f"{seed} {number}"))
        began_s, began_cpu_s = time.monotonic(), time.thread_time()
        try:
            with _alarm(target.hangs_after_s):
                outcome = target.judge(made)
            found.seen[outcome] = found.seen.get(outcome, 0) + 1
        except (Exception, Hangs) as error:  # noqa: BLE001 - whatever it is, it is a finding
            found.complaints += 1
            if len(found.first) < _KEPT:
                found.first.append(f"input {number} of seed {seed}: {_short(error)}: {made!r:.300}")
        found.longest_s = max(found.longest_s, time.monotonic() - began_s)
        found.longest_cpu_s = max(found.longest_cpu_s, time.thread_time() - began_cpu_s)
    return found


def _short(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:200]} ({where.filename}:{where.lineno})"


@contextmanager
def _alarm(hangs_after_s: float) -> Iterator[None]:
    """Ends what takes too long, where that can be done: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise Hangs(f"took longer than {hangs_after_s} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, hangs_after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def mutated(data: bytes, rng: Random, others: tuple[bytes, ...] = (b"",)) -> bytes:
    """Bytes with a few things wrong."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randint(0, len(made))
        match rng.randrange(7):
            case 0 if made:
                made[at - 1] ^= 1 << rng.randrange(8)
            case 1 if made:
                made[at - 1] = rng.choice((0, 1, 0x7F, 0x80, 0xC1, 0xFF, rng.randrange(256)))
            case 2:
                del made[at:]
            case 3:
                del made[at : at + rng.choice((1, 2, 4, 16))]
            case 4:
                made[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8, 64)))
            case 5:
                part = made[at : at + rng.choice((1, 4, 16, 64))]
                made[at:at] = part * rng.choice((1, 2, 64))
            case _:
                made[at:] = rng.choice(others)[at:]
    return bytes(made)
