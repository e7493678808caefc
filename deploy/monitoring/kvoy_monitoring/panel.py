"""What a panel shows, and the Grafana JSON that it becomes."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableRefresh,
    VariableSort,
)

from kvoy_monitoring.query import Query

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_COLUMNS = 24


class Unit(enum.StrEnum):
    """Grafana's names."""

    PER_SECOND = "reqps"
    TOKENS_PER_SECOND = "short"
    SECONDS = "s"
    BYTES = "bytes"
    RATIO = "percentunit"
    COUNT = "short"


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    description: str
    unit: Unit
    queries: tuple[Query, ...]
    is_stat: bool = False
    """One big number instead of a graph."""
    is_stacked: bool = False
    width: int = 8
    """Of 24 columns."""


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of a dashboard: the values of `label` on `metric`."""

    name: str
    title: str
    metric: str
    label: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]
    tags: tuple[str, ...] = field(default=("kvoy",))

    @property
    def panels(self) -> Sequence[Panel]:
        return [panel for row in self.rows for panel in row.panels]


def build(spec: Dashboard) -> dashboard.Dashboard:
    """The builder whose `build()` is the dashboard's model."""
    builder = (
        dashboard.Dashboard(spec.title)
        .uid(spec.uid)
        .description(spec.description)
        .tags(list(spec.tags))
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
    )
    for variable in spec.variables:
        builder.with_variable(_variable(variable))
    ids = itertools.count(1)
    for row in spec.rows:
        builder.with_row(dashboard.Row(row.title).id(next(ids)))
        for panel in row.panels:
            made = _stat(panel) if panel.is_stat else _graph(panel)
            builder.with_panel(made.id(next(ids)))
    return builder


def _variable(variable: Variable) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(variable.name)
        .label(variable.title)
        .datasource(DATASOURCE)
        .query(f"label_values({variable.metric}, {variable.label})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .include_all(True)
        .all_value(".*")
        .multi(True)
    )


def _target(query: Query, index: int) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .datasource(DATASOURCE)
        .expr(query.expr)
        .legend_format(query.legend or "__auto")
        .ref_id(chr(ord("A") + index))
    )


def _graph(panel: Panel) -> timeseries.Panel:
    builder = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(DATASOURCE)
        .unit(panel.unit.value)
        .min(0)
        .span(panel.width)
        .height(8)
        .fill_opacity(30 if panel.is_stacked else 8)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs([])
        )
    )
    if panel.is_stacked:
        builder.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    if panel.unit is Unit.RATIO:
        builder.max(1)
    for index, query in enumerate(panel.queries):
        builder.with_target(_target(query, index))
    return builder


def _stat(panel: Panel) -> stat.Panel:
    builder = (
        stat.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(DATASOURCE)
        .unit(panel.unit.value)
        .span(panel.width)
        .height(4)
        .graph_mode(BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    for index, query in enumerate(panel.queries):
        builder.with_target(_target(query, index))
    return builder
