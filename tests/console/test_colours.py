"""Text can be read in both themes: contrast of every pair that is used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

STYLE = Path(__file__).parents[2] / "platform/baton/console/static/colours.css"
LEAST = 4.5
"""Source: WCAG 2.2, success criterion 1.4.3 (AA)."""
LEAST_OF_MARKS = 3.0
"""Source: WCAG 2.2, success criterion 1.4.11."""


def theme(opening: str) -> dict[str, str]:
    text = STYLE.read_text()
    block = text[text.index(opening) :].partition("}")[0]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", block))


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


THEMES = {"light": theme(":root {"), "dark": theme(':root[data-theme="dark"] {')}


@pytest.mark.parametrize("name", THEMES)
@pytest.mark.parametrize("ink", ["text", "soft", "faint", "good", "bad", "warn", "accent"])
@pytest.mark.parametrize("paper", ["ground", "raised"])
def test_words_stand_out(name: str, ink: str, paper: str) -> None:
    colours = THEMES[name]
    assert contrast(colours[ink], colours[paper]) >= LEAST


@pytest.mark.parametrize("name", THEMES)
@pytest.mark.parametrize("ink", ["lost", "prefill", "transfer", "decode", "ink-1", "ink-2"])
def test_marks_stand_out(name: str, ink: str) -> None:
    colours = THEMES[name]
    assert contrast(colours[ink], colours["raised"]) >= LEAST_OF_MARKS


def test_the_dark_theme_is_the_same_whoever_chose_it() -> None:
    by_system = theme(':root:not([data-theme="light"]) {')
    assert by_system == THEMES["dark"]
