"""The options of `baton bench`, from text to values; BadParameter for what means nothing."""

from __future__ import annotations

import math
import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from baton.cli.options import command_line, positive, seam_of, seconds
from baton.cli.output import reported_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.bench.load import Length, Span, WarmUp
    from baton.simulator.outcome import Objectives

Kind = TypeVar("Kind", bound=StrEnum)


def numbers(text: str | None, option: str) -> tuple[float, ...]:
    """Numbers above 0, each once, in order."""
    found: set[float] = set()
    for one in (text or "").split(",") if text else ():
        try:
            found.add(positive(float(one), option))
        except ValueError:
            raise typer.BadParameter(
                f"got {one!r}, wanted numbers such as 1,2,4", param_hint=option
            ) from None
        if option == "--concurrency" and not float(one).is_integer():
            raise typer.BadParameter(f"got {one!r}, wanted a whole number", param_hint=option)
    return tuple(sorted(found))


def one_of(text: str, known: tuple[str, ...], option: str) -> str:
    """The text, if it is one of those."""
    if text not in known:
        raise typer.BadParameter(
            f"got {text!r}, wanted one of {', '.join(known)}", param_hint=option
        )
    return text


def choice(kind: type[Kind], text: str, option: str) -> Kind:
    """One of a kind, by its name."""
    return kind(one_of(text, tuple(kind), option))


def span_of(text: str, option: str) -> Span:
    """A number of tokens, or from one to another: `512`, `256:1024`."""
    from baton.bench.load import Span

    low, _, high = text.partition(":")
    try:
        span = Span(int(low), int(high or low))
    except ValueError:
        span = Span(0, 0)
    if not 1 <= span.low <= span.high:
        raise typer.BadParameter(
            f"got {text!r}, wanted a number of tokens such as 512, or 256:1024", param_hint=option
        )
    return span


def prefix_of(text: str | None) -> tuple[int, int]:
    """Tokens of a shared prefix, and how many there are."""
    tokens, _, count = (text or "0").partition("x")
    try:
        found = int(tokens), int(count or 1)
    except ValueError:
        found = -1, 0
    if min(found) < (1 if text else 0):
        raise typer.BadParameter(
            f"got {text!r}, wanted tokens and a count such as 1024x4", param_hint="--shared-prefix"
        )
    return found


def share_of(text: str) -> tuple[str, float]:
    """A class and how often it is asked for: `batch=0.2`."""
    name, _, weight = text.partition("=")
    try:
        much = float(weight or 1)
    except ValueError:
        much = 0.0
    if not name or not 0 < much < math.inf:
        raise typer.BadParameter(
            f"got {text!r}, wanted a name and a weight such as batch=0.2", param_hint="--class"
        )
    return name, much


def length_of(requests: int | None, duration: str | None) -> Length:
    """How much is measured; nothing in it when neither is given."""
    from baton.bench.load import Length

    if requests is not None and duration is not None:
        raise typer.BadParameter("give one of --requests and --duration", param_hint="--duration")
    return Length(
        requests=requests,
        duration_s=None if duration is None else seconds(duration, "--duration"),
    )


def warm_up_of(text: str) -> WarmUp:
    """So many requests (`8`) or so long (`5s`)."""
    from baton.bench.load import WarmUp

    if text.isdigit():
        return WarmUp(requests=int(text))
    return WarmUp(duration_s=seconds(text, "--warm-up"))


def objectives_of(texts: list[str]) -> Mapping[str, Objectives]:
    """Objectives by class."""
    from baton.policy.admission.slo_classes import DEFAULT_CLASS
    from baton.simulator.outcome import Objectives

    found: dict[str, Objectives] = {}
    for text in texts:
        name, colon, rest = text.rpartition(":")
        limits: dict[str, float] = {}
        for one in rest.split(","):
            what, _, limit = one.strip().partition("=")
            one_of(what, ("ttft", "tpot", "e2e"), "--slo")
            limits[f"{what}_s"] = seconds(limit, "--slo")
        found[name if colon else DEFAULT_CLASS] = Objectives(**limits)
    return found


def headers_of(context: typer.Context, given: list[str], key_file: Path | None) -> dict[str, str]:
    """Headers, with the key where there is one."""
    found = dict(header_of(one) for one in given)
    key = seam_of(context).environ.get("OPENAI_API_KEY")
    if key_file is not None:
        with reported_errors():
            key = key_file.read_text(encoding="utf-8").strip()
    if key and not any(name.lower() == "authorization" for name in found):
        found["Authorization"] = f"Bearer {key}"
    return found


def header_of(text: str) -> tuple[str, str]:
    """A header's name and value."""
    name, found, value = text.partition(":")
    if not found or not name.strip():
        raise typer.BadParameter(
            f"got {text!r}, wanted NAME:VALUE such as X-Team:search", param_hint="--header"
        )
    return name.strip(), value.strip()


def command_of(context: typer.Context, headers: list[str]) -> str:
    """The command line, without what headers may keep secret."""
    shown = {one: f"{header_of(one)[0]}: ..." for one in headers}
    # By whole words: a value that holds a quote is spelt otherwise in the line.
    return shlex.join(shown.get(word, word) for word in shlex.split(command_line(context)))
