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
TIMEOUT_S = 20.0
_MAX_KEPT_FAILURES = 20


class Hangs(BaseException):
    """A judge that does not come to an end; no `except Exception` swallows it."""


@dataclass(slots=True)
class FuzzResult:
    """What came of a run. `seed` and the number of an input make it again."""

    inputs: int = 0
    failures: int = 0
    longest_s: float = 0.0
    longest_cpu_s: float = 0.0
    """Of this thread's processor: what it takes however busy the machine is."""
    first_failures: list[str] = field(default_factory=list)
    """The first few complaints, each with the number of its input."""
    outcomes: dict[str, int] = field(default_factory=dict)
    """How often each outcome came; a run in which one never comes has tested little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Generic[_T]):
    """What is fuzzed."""

    make: Callable[[Random], _T]
    check: Callable[[_T], str]
    """A word for a good outcome; raises for any other."""
    timeout_s: float = TIMEOUT_S


def fuzz(target: Target[_T], *, seconds: float, seed: int, inputs: int | None = None) -> FuzzResult:
    """Judge inputs until the time, or their number, is over."""
    result, until_s = FuzzResult(), time.monotonic() + seconds
    while time.monotonic() < until_s and (inputs is None or result.inputs < inputs):
        number, result.inputs = result.inputs, result.inputs + 1
        fuzz_input = target.make(Random(f"{seed} {number}"))
        started_s, started_cpu_s = time.monotonic(), time.thread_time()
        try:
            with _alarm(target.timeout_s):
                outcome = target.check(fuzz_input)
            result.outcomes[outcome] = result.outcomes.get(outcome, 0) + 1
        except (Exception, Hangs) as error:  # noqa: BLE001 - whatever it is, it is a finding
            result.failures += 1
            if len(result.first_failures) < _MAX_KEPT_FAILURES:
                result.first_failures.append(
                    f"input {number} of seed {seed}: {_error_text(error)}: {fuzz_input!r:.300}"
                )
        result.longest_s = max(result.longest_s, time.monotonic() - started_s)
        result.longest_cpu_s = max(result.longest_cpu_s, time.thread_time() - started_cpu_s)
    return result


def _error_text(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:200]} ({frame.filename}:{frame.lineno})"


@contextmanager
def _alarm(timeout_s: float) -> Iterator[None]:
    """Ends what takes too long, where that can be done: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_alarm(_signal: int, _frame: FrameType | None) -> None:
        raise Hangs(f"took longer than {timeout_s} s")

    previous_handler = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)


def mutate(data: bytes, rng: Random, others: tuple[bytes, ...] = (b"",)) -> bytes:
    """Bytes with a few things wrong."""
    buffer = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        offset = rng.randint(0, len(buffer))
        match rng.randrange(7):
            case 0 if buffer:
                buffer[offset - 1] ^= 1 << rng.randrange(8)
            case 1 if buffer:
                buffer[offset - 1] = rng.choice((0, 1, 0x7F, 0x80, 0xC1, 0xFF, rng.randrange(256)))
            case 2:
                del buffer[offset:]
            case 3:
                del buffer[offset : offset + rng.choice((1, 2, 4, 16))]
            case 4:
                buffer[offset:offset] = rng.randbytes(rng.choice((1, 2, 4, 8, 64)))
            case 5:
                part = buffer[offset : offset + rng.choice((1, 4, 16, 64))]
                buffer[offset:offset] = part * rng.choice((1, 2, 64))
            case _:
                buffer[offset:] = rng.choice(others)[offset:]
    return bytes(buffer)
