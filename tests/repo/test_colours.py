"""Prefill and decode have one pair of colours: console, dashboards, diagrams."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "platform/baton/console/static"
DIAGRAMS = sorted((ROOT / "docs/images").glob("*.svg"))
BOARDS = sorted((ROOT / "dashboards").glob("*.json"))
PHASES = ("prefill", "decode")
WHITE = "#fff"
"""Of words on a mark."""


def colours_of(phase: str) -> set[str]:
    """In all themes of the console, whose style sheet names the pair."""
    return set(re.findall(rf"--{phase}: (#[0-9a-f]{{6}});", (STATIC / "colours.css").read_text()))


PAIR = {phase: min(colours_of(phase)) for phase in PHASES}


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())


def shows_phases(panel: dict[str, Any]) -> bool:
    legends = [target.get("legendFormat") or "" for target in panel.get("targets", ())]
    return any(legend.endswith(("{{part}}", "{{phase}}", "{{role}}")) for legend in legends)


def colours_in(panel: dict[str, Any]) -> dict[str, str]:
    """By matcher."""
    return {
        override["matcher"]["options"]: item["value"]["fixedColor"]
        for override in panel["fieldConfig"]["overrides"]
        for item in override["properties"]
        if item["id"] == "color" and "fixedColor" in item["value"]
    }


@pytest.mark.parametrize("phase", PHASES)
def test_both_themes_of_the_console_have_the_same_colour_for_a_phase(phase: str) -> None:
    assert len(colours_of(phase)) == 1


def test_dashboards_draw_phases_in_the_consoles_colours() -> None:
    expected = {f"/(^| ){phase}$/": PAIR[phase] for phase in PHASES}
    found = {
        f"{path.name}: {panel['title']}": colours_in(panel)
        for path in BOARDS
        for panel in panels(json.loads(path.read_text()))
        if shows_phases(panel)
    }
    assert len(found) >= 6
    assert {name: colours for name, colours in found.items() if colours != expected} == {}


@pytest.mark.parametrize("path", DIAGRAMS, ids=lambda path: path.name)
def test_diagrams_draw_phases_in_the_consoles_colours(path: Path) -> None:
    text = path.read_text()
    words = re.findall(r'<text [^>]*fill="(#\w+)"[^>]*>(prefill|decode)\b', text)
    assert all(colour in {PAIR[phase], WHITE} for colour, phase in words)
    assert {f'fill="{colour}"' in text for colour in PAIR.values()} == {True}


def test_the_logo_has_the_pair() -> None:
    assert all(colour in (STATIC / "icon.svg").read_text() for colour in PAIR.values())


def test_scripts_take_colours_from_the_style_sheet() -> None:
    found = [
        f"{path.name}: {colour}"
        for path in STATIC.glob("*.js")
        for colour in re.findall(r"#[0-9a-fA-F]{6}\b", path.read_text())
    ]
    assert found == []
