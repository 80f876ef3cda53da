"""Commands that texts name, against the verbs and options that there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import typer

from baton.cli.main import build_app


@cache
def options() -> Mapping[str, set[str]]:
    """Every command, as it is called, and its options."""
    return dict(options_of(typer.main.get_command(build_app())))


def options_of(command: object, called: str = "") -> Iterator[tuple[str, set[str]]]:
    for name, value in getattr(command, "commands", {}).items():
        yield from options_of(value, f"{called} {name}".strip())
    if not hasattr(command, "commands"):
        yield called, {name for option in vars(command)["params"] for name in option.opts}


def misused(command: str) -> str:
    """What a command line calls that there is not; empty when all of it is there."""
    words = command.split()
    for called in (" ".join(words[:2]), words[0]):
        if called in options():
            given = [word for word in words if word.startswith("-")]
            return " ".join(word for word in given if word not in options()[called])
    return called
