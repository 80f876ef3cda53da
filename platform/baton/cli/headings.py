"""`baton --help`: the verbs under headings, in the order in which somebody needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Protocol

from typer.core import TyperGroup

HEADINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Run a deployment": ("demo", "up", "apply", "scale", "down"),
        "Look at it": ("status", "top", "links", "usage", "logs"),
        "Ask why": ("trace", "explain", "doctor"),
        "Measure and plan": ("bench", "plan", "simulate", "replay", "fit"),
        "Set it up": ("config", "keys", "dashboards", "rules", "version"),
    }
)
_OTHERS = "Others"


class Formatter(Protocol):
    """What help is written to."""

    width: int

    def section(self, name: str) -> AbstractContextManager[None]:
        """A part with a heading."""
        ...

    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None:
        """Names and what they mean, in two columns."""
        ...


class GroupedVerbs(TyperGroup):
    """A command whose help has its verbs under `HEADINGS`; those of no heading come last."""

    def format_commands(self, ctx: object, formatter: Formatter) -> None:
        """Write them, aligned over all headings."""
        # Indentation, the gap between columns, and the names themselves.
        longest = max(len(name) for name in self.commands)
        limit = formatter.width - 6 - longest
        for title, names in self._sections():
            rows = [
                (name.ljust(longest), self.commands[name].get_short_help_str(limit))
                for name in names
            ]
            with formatter.section(title):
                formatter.write_dl(rows)

    def _sections(self) -> Iterator[tuple[str, list[str]]]:
        left = [name for name, command in self.commands.items() if not command.hidden]
        for title, wanted in HEADINGS.items():
            if found := [name for name in wanted if name in left]:
                left = [name for name in left if name not in found]
                yield title, found
        if left:
            yield _OTHERS, left
