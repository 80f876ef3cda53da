from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from baton.telemetry import dashboards
from baton.telemetry.catalogue import CATALOGUE
from tests.dashboards.pages import FOLDER, page, pages, queries_of
from tests.dashboards.queries import asked

FILES = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_written_so_that_a_change_to_it_is_a_small_one(path: Path) -> None:
    text = path.read_text()
    sorted_text = json.dumps(json.loads(text), indent=1, sort_keys=True, ensure_ascii=False)

    assert text == f"{sorted_text}\n", f"{path.name}: see `Changes` in dashboards/README.md"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_called_as_its_dashboard_and_has_nothing_of_one_grafana(path: Path) -> None:
    dashboard = page(path.stem)

    assert dashboard["uid"] == f"baton-{path.stem}"
    assert dashboard["tags"] == ["baton"]
    assert not dashboard["editable"]
    assert not {"id", "version", "iteration", "__inputs"} & dashboard.keys()


def test_dashboards_and_their_provisioning_are_written() -> None:
    found = dashboards.files()

    assert found["goodput.json"] == (FOLDER / "goodput.json").read_bytes()
    assert {"prometheus.yml", "provisioning/dashboards/baton.yaml"} <= found.keys()
    assert not [name for name in found if name.startswith("rules")]


def test_every_metric_is_on_a_dashboard() -> None:
    asked_for = {
        re.sub("_(bucket|sum|count)$", "", selector.name)
        for dashboard in pages()
        for _, _, expr in queries_of(dashboard)
        for selector in asked(expr).selectors
    }
    choices = [choice for dashboard in pages() for choice in dashboard["templating"]["list"]]
    chosen_by = {re.split(r"[({]", f"{choice['query']}(")[1] for choice in choices}

    assert {metric.name for metric in CATALOGUE} - asked_for - chosen_by == set()


def test_one_scrape_job_asks_the_controller_for_its_targets() -> None:
    (job,) = YAML(typ="safe").load(FOLDER / "prometheus.yml")["scrape_configs"]

    assert job["http_sd_configs"][0]["url"].endswith("/sd")
