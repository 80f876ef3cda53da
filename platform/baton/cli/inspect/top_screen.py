"""The screen of `baton top`: one report drawn for a terminal of a given size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.cli.bars import gauge, sparkline
from baton.cli.explain.trace import route_text
from baton.cli.inspect.status import class_row, roles_text
from baton.cli.output import (
    TextStyle,
    attainment_style,
    bytes_text,
    duration_text,
    one_line,
    share_text,
)
from baton.domain.names.words import count_text

JsonDict = dict[str, Any]
Cell = str | Text
_SPARKLINE_WIDTH = 24
_GAUGE_WIDTH = 8
_MAX_SAMPLES = 240
_KILO = 1000.0
_MIN_NAME_WIDTH = 12
_MIN_LAST_WIDTH = 12
"""Of a table's first and last column, however long the others are."""
_FIXED_LINES = 10
"""Head, foot, titles and gaps between the parts."""
_STATE_STYLES = {"ok": "green", "unknown": "yellow", "quarantined": "red"}


@dataclass(slots=True)
class History:
    """Values that a screen keeps from refresh to refresh."""

    goodput_per_s: list[float] = field(default_factory=list)
    moved_bytes: int | None = None
    at_s: float | None = None
    bytes_per_s: float | None = None
    """Moved between the last two refreshes; None before there were two."""

    def add(self, report: JsonDict, now_s: float) -> None:
        """Add a report that came at `now_s`."""
        self.goodput_per_s = [*self.goodput_per_s, report["service"]["goodput_per_s"]][
            -_MAX_SAMPLES:
        ]
        moved_bytes = report["links"]["moved_bytes"]
        if self.moved_bytes is not None and self.at_s is not None and now_s > self.at_s:
            # Engines that were replaced count from nothing again.
            self.bytes_per_s = max(0, moved_bytes - self.moved_bytes) / (now_s - self.at_s)
        self.moved_bytes, self.at_s = moved_bytes, now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Where a report is drawn."""

    width: int
    height: int | None
    """None: as many lines as it takes."""
    blocks: bool
    footer: str = ""
    alarm: str = ""
    """Shown instead of `footer`, when the numbers are old."""


def render(report: JsonDict, history: History, frame: Frame) -> RenderableType:
    """The whole screen; rows that do not fit are counted."""
    classes, pools = report["classes"], report["pools"]
    slowest, links = report["slowest"], _notable_links(report["links"])
    warnings = [_one_line(f"! {line}", "yellow") for line in report["troubles"]]
    row_limits = _allot_rows(
        frame, (len(classes), len(pools), len(links), len(slowest)), len(warnings)
    )  # fmt: skip
    parts: list[RenderableType] = [
        _header_line(report),
        _goodput_line(report["service"], history, frame),
        _load_line(report["service"]),
        *warnings[: max(1, len(warnings) if frame.height is None else 2)],
    ]
    width = frame.width
    parts += _table_section(
        _class_table(), [_class_row(row) for row in classes], row_limits[0], width
    )
    parts += _table_section(
        _pool_table(), [_pool_row(row, frame) for row in pools], row_limits[1], width
    )
    parts += [Text(""), _links_line(report["links"], history)]
    parts += _table_section(
        _link_table(), [_link_row(row) for row in links], row_limits[2], width, has_gap=False
    )
    parts += _table_section(
        _slowest_table(), [_slowest_row(row) for row in slowest], row_limits[3], width
    )
    if frame.alarm:
        parts.append(_one_line(frame.alarm, "red"))
    elif frame.footer:
        parts.append(_one_line(frame.footer, "dim"))
    return Group(*parts)


def _allot_rows(frame: Frame, row_counts: Sequence[int], warning_count: int) -> tuple[int, ...]:
    """Rows of each part: all, or of too few at least one, the first parts most."""
    if frame.height is None:
        return tuple(row_counts)
    titles = sum(1 for rows in row_counts if rows)
    free_lines = frame.height - _FIXED_LINES - titles - min(warning_count, 2)
    allotted = [min(rows, 1) for rows in row_counts]
    free_lines -= sum(allotted)
    for target_rows in range(2, max([*row_counts, 2]) + 1):
        for index, rows in enumerate(row_counts):
            if free_lines > 0 and rows >= target_rows:
                allotted[index] += 1
                free_lines -= 1
    return tuple(allotted)


def _table_section(
    table: Table, rows: Sequence[Sequence[Cell]], max_rows: int, width: int, *, has_gap: bool = True
) -> list[RenderableType]:
    """A table of at most `max_rows` rows, with the number of hidden rows in its head."""
    if not rows:
        return []
    cells = [[_cell(cell) for cell in row] for row in rows[:max_rows]]
    for row in cells:
        table.add_row(*row)
    hidden = len(rows) - max_rows
    if hidden > 0:
        table.columns[0].header = f"{table.columns[0].header} (+{hidden})"
    _fit(table, cells, width)
    return [Text(""), table] if has_gap else [table]


def _cell(cell: Cell) -> Text:
    """`Text`, since a table would read markup in a `str`: a client's request id may be `[/a]`."""
    return cell if isinstance(cell, Text) else Text(one_line(cell))


def _fit(table: Table, cells: Sequence[Sequence[Text]], width: int) -> None:
    """Fit a narrow screen: cut the last column, then names in the first, and no number."""
    headers = [cell_len(str(column.header)) for column in table.columns]
    widths = [
        max([header, *(row[column_index].cell_len for row in cells)])
        for column_index, header in enumerate(headers)
    ]
    other_widths = sum(widths[1:-1]) + min(widths[-1], _MIN_LAST_WIDTH) + len(widths)
    widths[0] = min(widths[0], max(width - other_widths, headers[0], _MIN_NAME_WIDTH))
    for column, min_width in zip(table.columns[:-1], widths[:-1], strict=True):
        column.min_width = min_width
    table.columns[0].max_width = widths[0]


def _table(*columns: tuple[str, bool]) -> Table:
    """A table of columns by name and whether they are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold dim")
    for name, is_number in columns:
        table.add_column(
            name, justify="right" if is_number else "left", no_wrap=True, overflow="ellipsis"
        )
    return table


def _one_line(text: str, style: str = "") -> Text:
    """Cut where the screen ends: a line that wraps would push others off it."""
    return Text(one_line(text), style=style, no_wrap=True, overflow="ellipsis")


def _header_line(report: JsonDict) -> Text:
    parts = [f"baton top  {report['model']}"]
    if report["endpoint"]:
        parts.append(str(report["endpoint"]))
    if report["up_s"] is not None:
        parts.append(f"up {duration_text(report['up_s'])}")
    parts.append(count_text(report["ingresses"], "ingress", "ingresses"))
    if report["generation"] is not None:
        parts.append(f"generation {report['generation']}")
    return _one_line("  ".join(parts), "bold")


def _goodput_line(service: JsonDict, history: History, frame: Frame) -> Text:
    share = service["good_fraction"]
    line = _one_line("goodput ")
    line.append(f"{service['goodput_per_s']:g}/s", style="bold")
    line.append(f" of {service['ended_per_s']:g}/s ended ")
    line.append(f"({share_text(share)})", style=_share_style(share, None))
    line.append(" ")
    line.append(
        sparkline(history.goodput_per_s, _SPARKLINE_WIDTH, blocks=frame.blocks), style="green"
    )
    return line


def _load_line(service: JsonDict) -> Text:
    parts = [
        f"offered {_number(service['offered_per_s'])}/s",
        f"rejected {_number(service['rejected_per_s'])}/s",
        f"in flight {_number(service['in_flight'])}",
        f"queued {_number(service['queued'])}",
    ]
    slack_s = service["slack_s"]
    if slack_s is not None:
        slack_label = "late by" if slack_s < 0 else "slack"
        parts.append(f"{slack_label} {duration_text(abs(slack_s))}")
    parts.append(
        f"tokens {_short_number(service['prompt_tokens_per_s'])} in,"
        f" {_short_number(service['output_tokens_per_s'])} out/s"
    )
    return _one_line("  ".join(parts))


def _class_table() -> Table:
    return _table(
        ("class", False), ("ttft", True), ("tpot", True), ("target", True), ("now", True),
        ("window", True), ("goodput", True),
    )  # fmt: skip


def _class_row(row: JsonDict) -> list[Cell]:
    target = row["target"]
    styles = {
        "now": _share_style(row["attainment"], target),
        "window": _share_style(row["window_attainment"], target),
    }
    return [Text(text, style=styles.get(name, "")) for name, text in class_row(row).items()]


def _share_style(share: float | None, target: float | None) -> str:
    if share is None:
        return TextStyle.DIM
    return attainment_style(share, target) or ""


def _pool_table() -> Table:
    return _table(
        ("pool", False), ("desired", True), ("ready", True), ("start", True), ("drain", True),
        ("roles", False), ("busy", False), ("kv", False), ("run", True), ("queue", True),
    )  # fmt: skip


def _pool_row(row: JsonDict, frame: Frame) -> list[Cell]:
    is_short = row["ready"] < row["desired"]
    return [
        str(row["pool"]),
        str(row["desired"]),
        Text(str(row["ready"]), style="yellow" if is_short else ""),
        str(row["starting"]),
        str(row["draining"]),
        roles_text(row),
        _gauge(row.get("busy"), frame),
        _gauge(row["kv_used_fraction"], frame),
        str(row["running_requests"]),
        str(row["queued_requests"]),
    ]


def _gauge(fraction: float | None, frame: Frame) -> Text:
    label = "   -" if fraction is None else f"{fraction:4.0%}"
    is_nearly_full = fraction is not None and fraction > 0.9  # noqa: PLR2004 - where queues begin to grow
    drawing = gauge(fraction, _GAUGE_WIDTH, blocks=frame.blocks)
    return Text(f"{drawing} {label}", style="yellow" if is_nearly_full else "")


def _notable_links(links: JsonDict) -> list[JsonDict]:
    """Links that do not work, or have moved something."""
    worst = cast("list[JsonDict]", links["worst"])
    return [row for row in worst if row["state"] != "ok" or row["pulls"]]


def _links_line(links: JsonDict, history: History) -> Text:
    if not links["pairs"]:
        return _one_line("links: none, nothing hands blocks over here", "dim")
    line = _one_line(f"links  {count_text(links['pairs'], 'pair')}:")
    for state, count in sorted(links["states"].items()):
        line.append(f" {count} {state}", style=_STATE_STYLES.get(state, ""))
    line.append(f"  {count_text(links['pulls'], 'pull')}, {bytes_text(links['moved_bytes'])} moved")
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


def _link_row(row: JsonDict) -> list[Cell]:
    state = str(row["state"])
    return [
        str(row["source_id"]),
        str(row["target_id"]),
        Text(state, style=_STATE_STYLES.get(state, "")),
        f"{row['bytes_per_s'] / 1e9:.3g}",
        duration_text(row["p99_s"]),
        str(row["pulls"]),
        str(row["failures"]),
        str(row["reason"] or row["transport"] or "unknown"),
    ]


def _slowest_table() -> Table:
    return _table(
        ("slowest request", False), ("ended", True), ("ttft", True), ("total", True),
        ("class", False), ("verdict", False), ("ran on", False),
    )  # fmt: skip


def _slowest_row(row: JsonDict) -> list[Cell]:
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


def _short_number(value: float | None) -> str:
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
