"""The screen of `baton top`: one report drawn for a terminal of a given size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.cli.bars import gauge, spark
from baton.cli.explain.trace import route_text
from baton.cli.output import bytes_text, duration_text, one_line, share_text

Told = dict[str, Any]
Cell = str | Text
_SPARK = 24
_GAUGE = 8
_SAMPLES = 240
_KILO = 1000.0
_LEAST_NAME = 12
_LEAST_LAST = 12
"""Of a table's first and last column, however long the others are."""
_FIXED_LINES = 10
"""Head, foot, titles and gaps between the parts."""
_STATES = {"ok": "green", "unknown": "yellow", "quarantined": "red"}


@dataclass(slots=True)
class History:
    """What a screen remembers from refresh to refresh."""

    goodput_per_s: list[float] = field(default_factory=list)
    moved_bytes: int | None = None
    at_s: float | None = None
    bytes_per_s: float | None = None
    """Moved between the last two refreshes; None before there were two."""

    def note(self, report: Told, now_s: float) -> None:
        """Remember a report that came at `now_s`."""
        self.goodput_per_s = [*self.goodput_per_s, report["service"]["goodput_per_s"]][-_SAMPLES:]
        moved = report["links"]["moved_bytes"]
        if self.moved_bytes is not None and self.at_s is not None and now_s > self.at_s:
            # Engines that were replaced count from nothing again.
            self.bytes_per_s = max(0, moved - self.moved_bytes) / (now_s - self.at_s)
        self.moved_bytes, self.at_s = moved, now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Where a report is drawn."""

    width: int
    height: int | None
    """None: as many lines as it takes."""
    blocks: bool
    foot: str = ""
    alarm: str = ""
    """Said instead of the foot, when the numbers are old."""


def drawn(report: Told, history: History, frame: Frame) -> RenderableType:
    """The whole screen; rows that do not fit are counted."""
    classes, pools = report["classes"], report["pools"]
    slowest, worst = report["slowest"], _worth_showing(report["links"])
    troubles = [_one_line(f"! {line}", "yellow") for line in report["troubles"]]
    room = _share_out(
        frame, (len(classes), len(pools), len(worst), len(slowest)), len(troubles)
    )  # fmt: skip
    parts: list[RenderableType] = [
        _head(report),
        _goodput(report["service"], history, frame),
        _load(report["service"]),
        *troubles[: max(1, len(troubles) if frame.height is None else 2)],
    ]
    width = frame.width
    parts += _part(_class_table(), [_class_row(row) for row in classes], room[0], width)
    parts += _part(_pool_table(), [_pool_row(row, frame) for row in pools], room[1], width)
    parts += [Text(""), _links_line(report["links"], history)]
    parts += _part(_link_table(), [_link_row(row) for row in worst], room[2], width, gap=False)
    parts += _part(_slowest_table(), [_slowest_row(row) for row in slowest], room[3], width)
    if frame.alarm:
        parts.append(_one_line(frame.alarm, "red"))
    elif frame.foot:
        parts.append(_one_line(frame.foot, "dim"))
    return Group(*parts)


def _share_out(frame: Frame, wanted: Sequence[int], troubles: int) -> tuple[int, ...]:
    """How many rows each part gets: all, or of too few at least one, the first ones most."""
    if frame.height is None:
        return tuple(wanted)
    titles = sum(1 for rows in wanted if rows)
    left = frame.height - _FIXED_LINES - titles - min(troubles, 2)
    given = [min(rows, 1) for rows in wanted]
    left -= sum(given)
    for most in range(2, max([*wanted, 2]) + 1):
        for at, rows in enumerate(wanted):
            if left > 0 and rows >= most:
                given[at] += 1
                left -= 1
    return tuple(given)


def _part(
    table: Table, rows: Sequence[Sequence[Cell]], room: int, width: int, *, gap: bool = True
) -> list[RenderableType]:
    """A table with as many rows as there is room for, and how many more there are."""
    if not rows:
        return []
    cells = [[_cell(cell) for cell in row] for row in rows[:room]]
    for row in cells:
        table.add_row(*row)
    hidden = len(rows) - room
    if hidden > 0:
        table.columns[0].header = f"{table.columns[0].header} (+{hidden})"
    _fit(table, cells, width)
    return [Text(""), table] if gap else [table]


def _cell(cell: Cell) -> Text:
    """A table would read markup in a `str`: clients name their requests, and one may be `[/a]`."""
    return cell if isinstance(cell, Text) else Text(one_line(cell))


def _fit(table: Table, cells: Sequence[Sequence[Text]], width: int) -> None:
    """Where a screen is narrow, cut the last column, then names in the first, and no number."""
    headers = [cell_len(str(column.header)) for column in table.columns]
    widths = [
        max([header, *(row[at].cell_len for row in cells)]) for at, header in enumerate(headers)
    ]
    others = sum(widths[1:-1]) + min(widths[-1], _LEAST_LAST) + len(widths)
    widths[0] = min(widths[0], max(width - others, headers[0], _LEAST_NAME))
    for column, wanted in zip(table.columns[:-1], widths[:-1], strict=True):
        column.min_width = wanted
    table.columns[0].max_width = widths[0]


def _table(*columns: tuple[str, bool]) -> Table:
    """Columns by name and whether they are numbers; the last one is cut where it is too long."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold dim")
    for name, is_number in columns:
        table.add_column(
            name, justify="right" if is_number else "left", no_wrap=True, overflow="ellipsis"
        )
    return table


def _one_line(text: str, style: str = "") -> Text:
    """Cut where the screen ends: a line that wraps would push others off it."""
    return Text(one_line(text), style=style, no_wrap=True, overflow="ellipsis")


def _head(report: Told) -> Text:
    said = [f"baton top  {report['model']}"]
    if report["endpoint"]:
        said.append(str(report["endpoint"]))
    if report["up_s"] is not None:
        said.append(f"up {duration_text(report['up_s'])}")
    said.append(f"{report['ingresses']} ingress{'es' if report['ingresses'] != 1 else ''}")
    if report["generation"] is not None:
        said.append(f"generation {report['generation']}")
    return _one_line("  ".join(said), "bold")


def _goodput(service: Told, history: History, frame: Frame) -> Text:
    share = service["good_fraction"]
    line = _one_line("goodput ")
    line.append(f"{service['goodput_per_s']:g}/s", style="bold")
    line.append(f" of {service['ended_per_s']:g}/s ended ")
    line.append(f"({share_text(share)})", style=_share_style(share, None))
    line.append(" ")
    line.append(spark(history.goodput_per_s, _SPARK, blocks=frame.blocks), style="green")
    return line


def _load(service: Told) -> Text:
    said = [
        f"offered {_number(service['offered_per_s'])}/s",
        f"refused {_number(service['refused_per_s'])}/s",
        f"in flight {_number(service['in_flight'])}",
        f"held {_number(service['held'])}",
    ]
    slack_s = service["slack_s"]
    if slack_s is not None:
        late = "late by" if slack_s < 0 else "slack"
        said.append(f"{late} {duration_text(abs(slack_s))}")
    said.append(
        f"tokens {_short(service['prompt_tokens_per_s'])} in,"
        f" {_short(service['output_tokens_per_s'])} out/s"
    )
    return _one_line("  ".join(said))


def _class_table() -> Table:
    return _table(
        ("class", False), ("ttft", True), ("tpot", True), ("target", True), ("now", True),
        ("window", True), ("goodput", True),
    )  # fmt: skip


def _class_row(row: Told) -> list[Cell]:
    now, window, target = row["attainment"], row["window_attainment"], row["target"]
    return [
        str(row["class"]),
        duration_text(row["ttft_s"]),
        duration_text(row["tpot_s"]),
        share_text(target),
        Text(share_text(now), style=_share_style(now, target)),
        Text(share_text(window), style=_share_style(window, target)),
        f"{row['goodput_per_s']:g} of {row['requests_per_s']:g}/s",
    ]


def _share_style(share: float | None, target: float | None) -> str:
    if share is None:
        return "dim"
    if target is None:
        return ""
    return "green" if share >= target else "red"


def _pool_table() -> Table:
    return _table(
        ("pool", False), ("want", True), ("ready", True), ("start", True), ("drain", True),
        ("roles", False), ("busy", False), ("kv", False), ("run", True), ("queue", True),
    )  # fmt: skip


def _pool_row(row: Told, frame: Frame) -> list[Cell]:
    plays = {role: row.get(role) or 0 for role in ("prefill", "decode", "mixed")}
    roles = ", ".join(f"{count} {role}" for role, count in plays.items() if count) or "-"
    short = row["ready"] < row["want"]
    return [
        str(row["pool"]),
        str(row["want"]),
        Text(str(row["ready"]), style="yellow" if short else ""),
        str(row["starting"]),
        str(row["draining"]),
        roles,
        _gauge(row.get("busy"), frame),
        _gauge(row["kv_used_fraction"], frame),
        str(row["running_requests"]),
        str(row["queued_requests"]),
    ]


def _gauge(fraction: float | None, frame: Frame) -> Text:
    said = "   -" if fraction is None else f"{fraction:4.0%}"
    full = fraction is not None and fraction > 0.9  # noqa: PLR2004 - where queues begin to grow
    drawing = gauge(fraction, _GAUGE, blocks=frame.blocks)
    return Text(f"{drawing} {said}", style="yellow" if full else "")


def _worth_showing(links: Told) -> list[Told]:
    """Pairs beside the summary: those that do not work, or have moved something."""
    worst = cast("list[Told]", links["worst"])
    return [row for row in worst if row["state"] != "ok" or row["pulls"]]


def _links_line(links: Told, history: History) -> Text:
    if not links["pairs"]:
        return _one_line("links: none, nothing hands blocks over here", "dim")
    line = _one_line(f"links  {links['pairs']} pairs:")
    for state, count in sorted(links["states"].items()):
        line.append(f" {count} {state}", style=_STATES.get(state, ""))
    line.append(f"  {links['pulls']} pulls, {bytes_text(links['moved_bytes'])} moved")
    if history.bytes_per_s is not None:
        line.append(f", {bytes_text(history.bytes_per_s)}/s now")
    if links["failures"]:
        line.append(f"  {links['failures']} failed", style="red")
    return line


def _link_table() -> Table:
    return _table(
        ("from", False), ("to", False), ("state", False), ("GB/s", True), ("p99", True),
        ("pulls", True), ("failed", True), ("over, or why not", False),
    )  # fmt: skip


def _link_row(row: Told) -> list[Cell]:
    state = str(row["state"])
    return [
        str(row["source_id"]),
        str(row["target_id"]),
        Text(state, style=_STATES.get(state, "")),
        f"{row['bytes_per_s'] / 1e9:.3g}",
        duration_text(row["p99_s"]),
        str(row["pulls"]),
        str(row["failures"]),
        str(row["why"] or row["transport"] or "unknown"),
    ]


def _slowest_table() -> Table:
    return _table(
        ("slowest request", False), ("ended", True), ("ttft", True), ("total", True),
        ("class", False), ("verdict", False), ("ran on", False),
    )  # fmt: skip


def _slowest_row(row: Told) -> list[Cell]:
    missed = row["missed"]
    return [
        str(row["request_id"]),
        duration_text(row["age_s"]),
        duration_text(row["first_token_s"]),
        duration_text(row["ended_s"]),
        str(row["slo_class"]),
        Text(f"missed {missed}" if missed else str(row["verdict"]), style="red" if missed else ""),
        route_text(row),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _short(value: float | None) -> str:
    """`800`, `12k`, `1.2M`: three digits."""
    if value is None:
        return "-"
    # Rounded before a unit is chosen: 999,600 are 1M, not 1e+03k.
    rounded = float(f"{value:.3g}")
    for unit in ("", "k"):
        if rounded < _KILO:
            return f"{rounded:.3g}{unit}"
        rounded /= _KILO
    return f"{rounded:.0f}M" if rounded >= _KILO else f"{rounded:.3g}M"
