"""Options and report lines that `apply`, `rollback` and `upgrade` share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from baton.cli.backend import Report
from baton.cli.options import parse_seconds
from baton.domain.names.words import count_text

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
    """The options of a rollout.

    Raises:
        BadParameter: a duration is invalid.
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
    """The replaced processes, and the results of new replicas."""
    lines = [f"{name}: replicas replaced one by one" for name in result.get("replaced", [])]
    return [*lines, *result.get("reason", [])]


def apply_lines(report: Report) -> list[str]:
    """The report of a new configuration: each change under its reload, then the result."""
    result = cast("dict[str, Any]", report)
    lines: list[str] = []
    changes = _without_duplicates(result["changes"])
    for reload in dict.fromkeys(change["reload"] for change in changes):
        lines.append(f"{reload}:")
        lines += [f"  {change['change']}" for change in changes if change["reload"] == reload]
    if histograms := result.get("histograms"):
        lines.append("histograms with other edges, which begin new series (label edges):")
        lines += [f"  {changed}" for changed in histograms]
    for pool, (previous_replicas, replicas) in result.get("resized", {}).items():
        lines.append(f"{pool}: {previous_replicas} -> {count_text(replicas, 'replica')}")
    return [*lines, *rollout_lines(result), _outcome(result)]


def _without_duplicates(changes: list[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Changes without a model's engine's changes that its pools repeat."""
    of_pools = {_engine_key(change, "pools") for change in changes} - {None}
    return [change for change in changes if _engine_key(change, "models") not in of_pools]


def _engine_key(change: Mapping[str, str], section: str) -> str | None:
    """`block_size: 16 -> 32` of `models.tiny.engine.block_size: 16 -> 32`; None for other keys."""
    root, _, path = change["change"].partition(".")
    _, is_engine, key = path.partition(".engine.")
    return key if root == section and is_engine else None


def _outcome(result: Mapping[str, Any]) -> str:
    generation = result["generation"]
    if not result["changes"]:
        return f"nothing differs from generation {generation}"
    match result["outcome"]:
        case "shown":
            return f"nothing has changed, generation {generation} holds"
        case "dry run":
            return (
                f"every process could apply it; nothing has changed, generation {generation} holds"
            )
        case "ordered":
            return f"generation {generation} holds; its rollout is not watched: 'baton status'"
        case "restarted":
            return f"started again at {result['endpoint']}"
        case _:
            return f"applied as generation {generation} in {result['took_s']:.2f} s"
