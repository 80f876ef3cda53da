"""Arrival times: their units, endless ordered streams, and users, who wait for answers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, count, pairwise, takewhile


class TimeUnit(StrEnum):
    """Units of arrival times."""

    SECONDS = "s"
    MILLISECONDS = "ms"
    MICROSECONDS = "us"
    NANOSECONDS = "ns"

    @property
    def ns(self) -> int:
        """Nanoseconds of one."""
        return int(1000 ** (3 - list(TimeUnit).index(self)))

    @property
    def words(self) -> str:
        """The unit, spelled out."""
        return self.name.lower()


def constant(rate_per_s: float) -> Iterator[float]:
    """Evenly spaced, the first at 0."""
    gap_s = 1 / _check_positive(rate_per_s, "rate_per_s")
    return (number * gap_s for number in count())


def poisson(rate_per_s: float, rng: random.Random) -> Iterator[float]:
    """Poisson arrivals."""
    return gamma(rate_per_s, 1.0, rng)


def gamma(rate_per_s: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Gamma-distributed gaps of shape `burstiness`: 1 is Poisson, below bursty, above more even.

    The gaps' coefficient of variation is 1 / sqrt(burstiness). Source: vLLM, `vllm bench serve
    --burstiness`: Gamma(shape=b, scale=1/(rate b)).
    """
    scale_s = 1 / (
        _check_positive(rate_per_s, "rate_per_s") * _check_positive(burstiness, "burstiness")
    )
    return accumulate(rng.gammavariate(burstiness, scale_s) for _ in count())


@dataclass(frozen=True, slots=True, kw_only=True)
class RateStep:
    """A rate from `from_s` until the next step."""

    from_s: float
    rate_per_s: float


def piecewise_poisson(
    steps: Iterable[RateStep], until_s: float, rng: random.Random
) -> Iterator[float]:
    """Poisson arrivals at a rate that changes in steps, up to `until_s`.

    Each step starts afresh, which is exact: Poisson arrivals are memoryless.
    """
    bounded_steps = [*steps, RateStep(from_s=until_s, rate_per_s=0.0)]
    for step, following in pairwise(bounded_steps):
        end_s = min(following.from_s, until_s)
        if step.rate_per_s > 0 and step.from_s < end_s:
            times_s = (step.from_s + at_s for at_s in poisson(step.rate_per_s, rng))
            yield from take_until(end_s, times_s)


def take_until(end_s: float, times_s: Iterable[float]) -> Iterator[float]:
    """The times before `end_s`."""
    return takewhile(lambda at_s: at_s < end_s, times_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLoad:
    """Users in a closed loop: each waits for its answer, thinks, and sends the next request.

    Users send `users / (think_s + answer_s)` requests per second, by any distributions.
    Source: the interactive response time law, Lazowska et al., Quantitative System Performance,
    section 3.5.
    """

    users: int
    think_s: float
    """Mean time from an answer to the user's next request."""

    def __post_init__(self) -> None:
        if self.users < 1 or not 0 <= self.think_s < float("inf"):
            raise ValueError(
                f"got {self.users} users with a think time of {self.think_s} s, expected at least"
                " 1 and at least 0"
            )

    def rate_per_s(self, answer_s: float) -> float:
        """Requests per second of all users, where an answer takes this time in the mean."""
        return self.users / (self.think_s + answer_s)

    def draw_think_s(self, rng: random.Random) -> float:
        """A think time, exponentially distributed: users do not keep step."""
        return rng.expovariate(1 / self.think_s) if self.think_s else 0.0

    def users_at(self, rate_per_s: float, answer_s: float) -> float:
        """Users that send this many requests per second."""
        return rate_per_s * (self.think_s + answer_s)


def _check_positive(value: float, name: str) -> float:
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value}, expected a number above 0")
    return value
