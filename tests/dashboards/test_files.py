from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from baton.telemetry import dashboards
from baton.telemetry.catalogue import CATALOGUE
from baton.telemetry.dashboards.boards import boards
from tests.dashboards.pages import FOLDER, REPOSITORY, page


def test_the_files_are_what_the_code_makes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="install the extra dev")
    from baton.telemetry.dashboards.grafana import to_json

    for board in boards():
        committed = (FOLDER / f"{board.name}.json").read_bytes()
        assert to_json(board) == committed, (
            f"{board.name}.json: run python -m baton.telemetry.dashboards --write dashboards"
        )


def test_no_file_is_left_of_a_dashboard_that_is_gone() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {board.name for board in boards()}


def test_dashboards_and_what_provisions_them_are_handed_out() -> None:
    found = dashboards.files()

    assert found["goodput.json"] == (FOLDER / "goodput.json").read_bytes()
    assert {"prometheus.yml", "provisioning/dashboards/baton.yaml"} <= found.keys()
    assert not [name for name in found if name.startswith("rules")]


def test_an_installed_package_hands_out_what_it_was_shipped_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "goodput.json").write_bytes(b"{}")
    monkeypatch.setattr(dashboards, "_SHIPPED", tmp_path)

    assert dashboards.files() == {"goodput.json": b"{}"}


def test_the_wheel_carries_the_folder_to_where_it_is_looked_for() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    carried = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]

    shipped = dashboards._SHIPPED.relative_to(REPOSITORY / "platform").as_posix()
    assert carried == {FOLDER.name: shipped}


def test_a_panel_keeps_its_number_while_others_come_and_go() -> None:
    board = boards()[0]
    numbers = {panel.title: board.id_of(panel.title) for panel in board.panels()}
    panels = [one for one in page("goodput")["panels"] if one["type"] != "row"]

    assert {panel["title"]: panel["id"] for panel in panels} == numbers


def test_every_metric_is_on_a_dashboard() -> None:
    text = "".join(json.dumps(page(board.name)) for board in boards())

    assert [metric.name for metric in CATALOGUE if metric.name not in text] == []


def test_one_scrape_job_asks_the_controller_who_there_is() -> None:
    (job,) = YAML(typ="safe").load(FOLDER / "prometheus.yml")["scrape_configs"]

    assert job["http_sd_configs"][0]["url"].endswith("/sd")
