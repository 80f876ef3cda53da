"""Options and lines that the verbs share which roll something out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.options import parse_seconds

if TYPE_CHECKING:  # imported where it is used: keeps --help fast
    from baton.serving.rollout.ports import ApplyOptions

WaitOption = Annotated[
    bool,
    typer.Option(
        "--wait/--no-wait",
        help="Watch it to its end; else start it, without a rollback.",
    ),
]
RollbackOption = Annotated[
    bool,
    typer.Option(
        "--rollback/--no-rollback", help="Roll back after a failure; else leave it as it is."
    ),
]
BakeOption = Annotated[
    str,
    typer.Option(
        "--bake", metavar="DURATION", help="Time to watch new replicas before the next stage."
    ),
]


def rollout_options(
    *, timeout: str, bake: str, wait: bool, rollback: bool, address: str | None
) -> ApplyOptions:
    """The chosen options.

    Raises:
        BadParameter: a duration is none.
    """
    from baton.serving.rollout.ports import ApplyOptions  # here: keeps --help fast

    return ApplyOptions(
        timeout_s=parse_seconds(timeout),
        address=address,
        wait=wait,
        rollback=rollback,
        bake_s=parse_seconds(bake, "--bake"),
    )


def rollout_lines(result: Mapping[str, Any]) -> list[str]:
    """The replaced processes, and the evidence for the new replicas."""
    lines = [f"{name}: replicas replaced one by one" for name in result.get("replaced", [])]
    return [*lines, *result.get("why", [])]
