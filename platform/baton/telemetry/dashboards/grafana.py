"""Dashboards as Grafana reads them, by its own foundation SDK; nothing else here knows Grafana."""

from __future__ import annotations

import json
import string
from typing import Any, Final, TypeAlias, assert_never

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from baton.telemetry.dashboards.model import COLUMNS, Board, Choice, Panel, Query, Row, Shape
from baton.telemetry.dashboards.promql import LE

DATASOURCE: Final = kinds.DataSourceRef(type_val="prometheus", uid="${datasource}")
RUNBOOKS: Final = "docs/operations/runbooks"
_TAG: Final = "baton"
_ROW_HEIGHT: Final = 1
_NARROWEST_BAR: Final = "1m"
"""At least four scrapes, at the usual interval of 15 s."""

_Chart: TypeAlias = timeseries.Panel | stat.Panel | bargauge.Panel | table.Panel | heatmap.Panel


def to_json(board: Board) -> bytes:
    """A dashboard's file: the same board makes the same bytes."""
    page: dict[str, Any] = json.loads(json.dumps(_built(board), cls=JSONEncoder))
    _drop_strangers(page)
    text = json.dumps(page, indent=1, sort_keys=True, ensure_ascii=False)
    return f"{text}\n".encode()


def _drop_strangers(page: dict[str, Any]) -> None:
    """Take out what the SDK writes and Grafana's schema does not have."""
    for variable in page["templating"]["list"]:
        for key in ("auto", "auto_min", "auto_count"):
            variable.pop(key, None)
    for panel in page["panels"]:
        if panel["type"] == "table":
            panel["options"].pop("footer", None)


def _built(board: Board) -> model.Dashboard:
    page = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.about)
        .tags([_TAG])
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .readonly()
        .link(_to_other_boards())
        .link(_to_runbooks())
        .with_variable(_datasource())
        .with_variable(_runbooks_address())
    )
    for choice in board.choices:
        page.with_variable(_variable(choice))
    at_y = 0
    for row in board.rows:
        at_y = _add_row(page, board, row, at_y)
    return page.build()


def _add_row(page: dashboard.Dashboard, board: Board, row: Row, at_y: int) -> int:
    """Where the next row begins."""
    strip = dashboard.Row(row.title).id(board.id_of(row.title)).collapsed(not row.open)
    strip.grid_pos(model.GridPos(x=0, y=at_y, w=COLUMNS, h=_ROW_HEIGHT))
    at_y += _ROW_HEIGHT
    placed: list[_Chart] = []
    x, tallest = 0, 0
    for panel in row.panels:
        if x + panel.width > COLUMNS:
            x, at_y, tallest = 0, at_y + tallest, 0
        chart = _chart(panel).id(board.id_of(panel.title))
        placed.append(chart.grid_pos(model.GridPos(x=x, y=at_y, w=panel.width, h=panel.height)))
        x, tallest = x + panel.width, max(tallest, panel.height)
    if row.open:
        page.with_row(strip)
    for chart in placed:
        (page if row.open else strip).with_panel(chart)
    if not row.open:
        page.with_row(strip)
    return at_y + tallest


def _chart(panel: Panel) -> _Chart:
    chart = _shaped(panel)
    chart.title(panel.title).description(_described(panel)).datasource(DATASOURCE)
    chart.unit(panel.unit).no_value(panel.when_empty)
    if panel.lowest is not None and not panel.magnitudes:
        chart.min(panel.lowest)
    if panel.highest is not None:
        chart.max(panel.highest)
    steps = [model.Threshold(value=step.above, color=step.colour) for step in panel.steps]
    chart.thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
    for ref, query in _lettered(panel):
        chart.with_target(_target(ref, query, panel.shape))
        if query.promise:
            chart.override_by_query(ref, _PROMISED)
    if panel.runbook is not None:
        chart.links([_runbook(panel.runbook)])
    return chart


def _described(panel: Panel) -> str:
    if panel.runbook is None:
        return panel.about
    return f"{panel.about}\n\nRunbook: {RUNBOOKS}/{panel.runbook}.md"


def _shaped(panel: Panel) -> _Chart:
    match panel.shape:
        case Shape.LINES | Shape.STACK | Shape.BARS:
            return _over_time(panel)
        case Shape.NUMBERS:
            return _numbers()
        case Shape.LEVELS:
            return (
                bargauge.Panel().reduce_options(_LAST).orientation(kinds.VizOrientation.HORIZONTAL)
            )
        case Shape.TABLE | Shape.MATRIX:
            return _tabled(panel)
        case Shape.HEAT:
            return _heat(panel)
        case _:
            assert_never(panel.shape)


def _over_time(panel: Panel) -> timeseries.Panel:
    chart = (
        timeseries.Panel()
        .legend(_LEGEND)
        .tooltip(_TOOLTIP)
        .line_width(1)
        .show_points(kinds.VisibilityMode.AUTO)
        .span_nulls(False)  # noqa: FBT003  # the SDK's builders take no keywords
    )
    if panel.shape is Shape.BARS:
        chart.interval(_NARROWEST_BAR)
        chart.draw_style(kinds.GraphDrawStyle.BARS).fill_opacity(80).bar_width_factor(0.9)
    if panel.magnitudes:
        logarithmic = common.ScaleDistributionConfig().type(kinds.ScaleDistribution.LOG).log(10)
        chart.scale_distribution(logarithmic)
    if panel.shape is Shape.STACK:
        chart.fill_opacity(40)
    if panel.shape is not Shape.LINES:
        chart.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL).group("A"))
    return chart


def _numbers() -> stat.Panel:
    return (
        stat.Panel()
        .reduce_options(_LAST)
        .color_mode(kinds.BigValueColorMode.BACKGROUND)
        .graph_mode(kinds.BigValueGraphMode.NONE)
        .text_mode(kinds.BigValueTextMode.VALUE_AND_NAME)
    )


def _tabled(panel: Panel) -> table.Panel:
    chart = table.Panel().show_header(True)  # noqa: FBT003
    hidden = {"Time": True, "__name__": True}
    if panel.matrix is not None:
        row, column = panel.matrix
        options: dict[str, object] = {"rowField": row, "columnField": column, "valueField": "Value"}
        return chart.with_transformation(_transformation("groupingToMatrix", options))
    if len(panel.queries) > 1:
        chart.with_transformation(_transformation("merge", {}))
    renamed = {f"Value #{ref}": query.legend for ref, query in _lettered(panel)}
    renamed["Value"] = panel.queries[0].legend
    options = {"excludeByName": hidden, "indexByName": {}, "renameByName": renamed}
    return chart.with_transformation(_transformation("organize", options))


def _heat(panel: Panel) -> heatmap.Panel:
    colours = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues").steps(32)
    return (
        heatmap.Panel()
        .calculate(False)  # noqa: FBT003  # the metric has buckets already
        .color(colours)
        .cell_gap(1)
        .y_axis(heatmap.YAxisConfig().unit(panel.unit))
        .rows_frame(heatmap.RowsHeatmapOptions().layout(kinds.HeatmapCellLayout.AUTO))
    )


def _transformation(name: str, options: dict[str, object]) -> model.DataTransformerConfig:
    return model.DataTransformerConfig(id_val=name, options=options)


def _lettered(panel: Panel) -> list[tuple[str, Query]]:
    return list(zip(string.ascii_uppercase, panel.queries, strict=False))


def _target(ref: str, query: Query, shape: Shape) -> prometheus.Dataquery:
    asked = prometheus.Dataquery().ref_id(ref).expr(query.expr.text).datasource(DATASOURCE)
    if shape in {Shape.TABLE, Shape.MATRIX}:
        return asked.instant().format(PromQueryFormat.TABLE)
    if shape in {Shape.NUMBERS, Shape.LEVELS}:
        asked.instant()
    else:
        asked.range()
    if shape is Shape.HEAT:
        return asked.format(PromQueryFormat.HEATMAP).legend_format("{{" + LE + "}}")
    return asked.format(PromQueryFormat.TIME_SERIES).legend_format(query.legend or "__auto")


def _variable(choice: Choice) -> dashboard.QueryVariable:
    everything = model.VariableOption(selected=True, text=["All"], value=["$__all"])
    return (
        dashboard.QueryVariable(choice.name)
        .label(choice.label)
        .datasource(DATASOURCE)
        .query(choice.query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)  # noqa: FBT003
        .include_all(True)  # noqa: FBT003
        .all_value(".*")
        .current(everything)
    )


def _datasource() -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def _runbooks_address() -> dashboard.TextBoxVariable:
    return (
        dashboard.TextBoxVariable("runbooks")
        .label("Runbooks")
        .description(
            "Where your copy of baton's runbooks can be read: an address without the last /"
        )
        .default_value(RUNBOOKS)
    )


def _to_other_boards() -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink("baton")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags([_TAG])
        .as_dropdown(False)  # noqa: FBT003
        .include_vars(True)  # noqa: FBT003
        .keep_time(True)  # noqa: FBT003
    )


def _to_runbooks() -> dashboard.DashboardLink:
    return _link("Runbooks", "${runbooks}")


def _runbook(name: str) -> dashboard.DashboardLink:
    return _link("What to do", "${runbooks}/" + f"{name}.md")


def _link(title: str, url: str) -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink(title)
        .type(model.DashboardLinkType.LINK)
        .url(url)
        .target_blank(True)  # noqa: FBT003
    )


_LAST: Final = common.ReduceDataOptions().calcs(["lastNotNull"])
_LEGEND: Final = (
    common.VizLegendOptions()
    .display_mode(kinds.LegendDisplayMode.LIST)
    .placement(kinds.LegendPlacement.BOTTOM)
    .show_legend(True)  # noqa: FBT003
)
_TOOLTIP: Final = (
    common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING)
)
_PROMISED: Final = [
    model.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [8, 6]}),
    model.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
    model.DynamicConfigValue(id_val="custom.lineWidth", value=2),
    model.DynamicConfigValue(id_val="custom.stacking", value={"mode": "none", "group": "promises"}),
]
