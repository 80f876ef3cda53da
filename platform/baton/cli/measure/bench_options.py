"""The options of `baton bench`, from text to values; BadParameter for invalid texts."""

from __future__ import annotations

import math
import shlex
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

import typer

from baton.cli.endpoint import parse_header
from baton.cli.options import command_line, parse_seconds, positive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.bench.load import MeasuredLength, TokenRange, WarmUp
    from baton.simulator.outcome import Objectives

Kind = TypeVar("Kind", bound=StrEnum)


def parse_numbers(text: str | None, option: str) -> tuple[float, ...]:
    """Numbers above 0, each once, in order."""
    parsed: set[float] = set()
    for part in (text or "").split(",") if text else ():
        try:
            parsed.add(positive(float(part), option))
        except ValueError:
            raise typer.BadParameter(
                f"got {part!r}, expected numbers such as 1,2,4", param_hint=option
            ) from None
        if option == "--concurrency" and not float(part).is_integer():
            raise typer.BadParameter(f"got {part!r}, expected a whole number", param_hint=option)
    return tuple(sorted(parsed))


def require_one_of(text: str, known: tuple[str, ...], option: str) -> str:
    """The text, if it is one of those."""
    if text not in known:
        raise typer.BadParameter(
            f"got {text!r}, expected one of {', '.join(known)}", param_hint=option
        )
    return text


def parse_choice(kind: type[Kind], text: str, option: str) -> Kind:
    """One of a kind, by its name."""
    return kind(require_one_of(text, tuple(kind), option))


def parse_span(text: str, option: str) -> TokenRange:
    """A number of tokens, or from one to another: `512`, `256:1024`."""
    from baton.bench.load import TokenRange

    low, _, high = text.partition(":")
    try:
        span = TokenRange(int(low), int(high or low))
    except ValueError:
        span = TokenRange(0, 0)
    if not 1 <= span.low <= span.high:
        raise typer.BadParameter(
            f"got {text!r}, expected a number of tokens such as 512, or 256:1024", param_hint=option
        )
    return span


def parse_prefix(text: str | None) -> tuple[int, int]:
    """Tokens of a shared prefix, and how many there are."""
    tokens, _, count = (text or "0").partition("x")
    try:
        prefix = int(tokens), int(count or 1)
    except ValueError:
        prefix = -1, 0
    if min(prefix) < (1 if text else 0):
        raise typer.BadParameter(
            f"got {text!r}, expected tokens and a count such as 1024x4",
            param_hint="--shared-prefix",
        )
    return prefix


def parse_class_share(text: str) -> tuple[str, float]:
    """A class and how often it is asked for: `batch=0.2`."""
    name, _, weight_text = text.partition("=")
    try:
        weight = float(weight_text or 1)
    except ValueError:
        weight = 0.0
    if not name or not 0 < weight < math.inf:
        raise typer.BadParameter(
            f"got {text!r}, expected a name and a weight such as batch=0.2", param_hint="--class"
        )
    return name, weight


def parse_length(requests: int | None, duration: str | None) -> MeasuredLength:
    """How much is measured; nothing in it when neither is given."""
    from baton.bench.load import MeasuredLength

    if requests is not None and duration is not None:
        raise typer.BadParameter("give one of --requests and --duration", param_hint="--duration")
    return MeasuredLength(
        requests=requests,
        duration_s=None if duration is None else parse_seconds(duration, "--duration"),
    )


def parse_warm_up(text: str) -> WarmUp:
    """A number of requests (`8`) or a time (`5s`)."""
    from baton.bench.load import WarmUp

    if text.isdigit():
        return WarmUp(requests=int(text))
    return WarmUp(duration_s=parse_seconds(text, "--warm-up"))


def parse_objectives(texts: list[str]) -> Mapping[str, Objectives]:
    """Objectives by class."""
    from baton.policy.admission.slo_classes import DEFAULT_CLASS
    from baton.simulator.outcome import Objectives

    objectives: dict[str, Objectives] = {}
    for text in texts:
        name, colon, limits_text = text.rpartition(":")
        limits: dict[str, float] = {}
        for part in limits_text.split(","):
            metric, _, limit = part.strip().partition("=")
            require_one_of(metric, ("ttft", "tpot", "e2e"), "--slo")
            limits[f"{metric}_s"] = parse_seconds(limit, "--slo")
        objectives[name if colon else DEFAULT_CLASS] = Objectives(**limits)
    return objectives


def redacted_command_line(context: typer.Context, headers: list[str]) -> str:
    """The command line, without what headers may keep secret."""
    redacted = {header: f"{parse_header(header)[0]}: ..." for header in headers}
    # By whole words: a value that holds a quote is spelt otherwise in the line.
    return shlex.join(redacted.get(word, word) for word in shlex.split(command_line(context)))
