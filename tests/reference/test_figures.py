"""Figures of documents are those of the result files, and none is without one."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from tests.reference.figures import (
    BINDINGS,
    FigureUnbound,
    Rows,
    Sentence,
    render,
    rows_span,
    sentence_match,
)
from tests.repo.project import ROOT, documents

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE_OR_LINK = re.compile(r"`[^`]*`|\]\([^)]*\)")
_MARKED = re.compile(r"\((?:M|S)\b|\[M\]|\*\*Measured")
_GENERATED = ("docs/reference/", "docs/decisions/", "docs/reliability.md")
SETTINGS: Mapping[str, str] = {
    "README.md": "H100",
    "docs/glossary.md": "(0 to 1)|0 to 1|TPOT / 1|- 1|− 1",  # noqa: RUF001
    "docs/operations/simulate.md": "H100|A100|H200",
    "docs/rivals.md": "64 streams|512 prompt tokens|64 output tokens|256 streams|2 ms a step"
    "|32 output tokens|64 tokens come with|1,500|p50|p90|p99|target 1.0|target 1.3",
    "docs/scale.md": "250|10,000|1,000|80 ms|3,000 tokens|500 own tokens|p50, p99",
    "docs/sizing.md": "70B|FP8|36 pairs|90 %|H100|10 Gb/s|500 replicas",
    "docs/tuning.md": "H100",
}
"""Numbers beside marked figures that are of the load, a name or a target: nothing is measured."""


@pytest.mark.parametrize("binding", BINDINGS, ids=str)
def test_a_figure_is_that_of_its_result_file(binding: Sentence | Rows) -> None:
    text = (ROOT / binding.document).read_text()
    assert render(text, binding) == text, "run: scripts/render-reference"


def test_a_figure_that_differs_from_its_result_is_rewritten() -> None:
    cost = Sentence(document="x", template="it costs {} us, or {} %", figures=lambda: ["97", "3.5"])
    table = Rows(document="x", header="| what | ms |", rows=lambda: ["| a | 1 |", "| b | 2 |"])

    assert render("So it costs\n1,000 us, or 4 %.", cost) == "So it costs\n97 us, or 3.5 %."
    assert render("| what | ms |\n|---|---|\n| a | 9 |\n\nEnd", table) == (
        "| what | ms |\n|---|---|\n| a | 1 |\n| b | 2 |\n\nEnd"
    )


@pytest.mark.parametrize("text", ["it costs much", "it costs 1 us, it costs 2 us"])
def test_a_sentence_that_has_changed_needs_another_template(text: str) -> None:
    with pytest.raises(FigureUnbound, match="expected one"):
        render(text, Sentence(document="x", template="costs {} us", figures=lambda: ["1"]))


def without_bound(name: str, text: str) -> str:
    """A document without the digits of code blocks, bound figures and what is only set."""
    spans = [match.span() for match in _FENCE.finditer(text)]
    for binding in BINDINGS:
        if binding.document == name:
            if isinstance(binding, Rows):
                spans.append(rows_span(text, binding))
            else:
                spans.append(sentence_match(text, binding).span())
    for start, end in spans:
        text = text[:start] + re.sub(r"\d", "x", text[start:end]) + text[end:]
    return text


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in documents()
        if name == "README.md" or (name.startswith("docs/") and not name.startswith(_GENERATED))
    ],
)
def test_every_figure_that_is_marked_measured_or_simulated_has_a_result(name: str) -> None:
    blocks = re.split(r"\n\s*\n", without_bound(name, documents()[name]))
    settings = SETTINGS.get(name)
    unbound = []
    for block in blocks:
        if not _MARKED.search(block):
            continue
        rest = _CODE_OR_LINK.sub("", " ".join(block.split()))
        if settings is not None:
            rest = re.sub("|".join(map(re.escape, settings.split("|"))), "", rest)
        unbound += [f"{found.group()}: {block[:80]}" for found in re.finditer(r"\d[\d,.]*", rest)]
    assert not unbound, "bind it in tests/reference/figures.py"
