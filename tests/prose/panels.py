"""The words of dashboards and alerts: titles, legends, descriptions, annotations.

Theory of operation: titles and legends keep the rules of headings, descriptions and annotations
those of documents. A label or a template between double braces counts as one word. All keep more of
the field's words than documents do, because these texts are short. A title or description of a
panel begins with the quantity that it shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ruamel.yaml import YAML

from tests.prose import rules
from tests.prose.code import STARTS
from tests.prose.rules import OWN_IN_NAMES, Finding
from tests.repo.project import ROOT

_OWN_WORDS: Final = OWN_IN_NAMES | {
    r"refus(?:e[sd]?|ing)": "reject",
    r"want(?:s|ed)?": "desired",
    r"asks?|asked": "request, demand",
    r"tells?|told": "report",
    r"plays?|played": "have a role",
    r"knock(?:s|ed)?": "arrive",
    r"lets? in": "admit",
    r"in force": "active, in use",
    r"go(?:es)? by|gone by": "use",
    r"go(?:es)? on|went on": "continue, resume",
    r"silent": "unresponsive",
    r"mend": "repair, reduce",
    r"counted on|trusted": "health, circuit breaker",
}
"""The same as `OWN_WORDS`, in texts of dashboards and alerts; documents may use them."""
_OWN: Final = [
    (re.compile(rf"\b(?:{old})\b", re.IGNORECASE), new) for old, new in _OWN_WORDS.items()
]
_TEMPLATE: Final = re.compile(r"\{\{ ?with .*?\{\{ ?end ?\}\}|\{\{.*?\}\}", re.DOTALL)
_BACKTICKS: Final = re.compile(r"`[^`]*`")


def found_in_panels() -> Mapping[str, list[Finding]]:
    """Every finding of the committed dashboards and rules, by file."""
    folder = ROOT / "dashboards"
    paths = sorted((*folder.glob("*.json"), *folder.glob("rules/*.yaml")))
    return {str(path.relative_to(ROOT)): findings(path.name, path.read_text()) for path in paths}


def findings(name: str, text: str) -> list[Finding]:
    """Every place of a dashboard (`.json`) or a file of rules (`.yaml`) that breaks a rule."""
    places = _of_dashboard(text) if name.endswith(".json") else _of_rules(text)
    return sorted(places, key=lambda finding: finding.line)


def _of_dashboard(text: str) -> Iterator[Finding]:
    board = json.loads(text)

    def line_of(value: str) -> int:
        return text.count("\n", 0, text.find(json.dumps(value, ensure_ascii=False))) + 1

    for title in _titles(board):
        yield from _title_findings(line_of(title), title)
    for description in _descriptions(board):
        yield from _first_word(line_of(description), description)
        yield from _text_findings(line_of(description), description)
    for legend in _legends(board):
        yield from _text_findings(line_of(legend), legend, heading=True)


def _panels(board: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())


def _titles(board: Mapping[str, Any]) -> Iterator[str]:
    for panel in (board, *_panels(board)):
        yield panel["title"]
        yield from (link["title"] for link in panel.get("links", ()))


def _descriptions(board: Mapping[str, Any]) -> Iterator[str]:
    for described in (board, *_panels(board), *board["templating"]["list"]):
        if text := described.get("description"):
            yield text


def _legends(board: Mapping[str, Any]) -> Iterator[str]:
    """Names of series and of columns."""
    for panel in _panels(board):
        for target in panel.get("targets", ()):
            yield target.get("legendFormat") or ""
        for change in panel.get("transformations", ()):
            yield from change["options"].get("renameByName", {}).values()


def _of_rules(text: str) -> Iterator[Finding]:
    for group in YAML(typ="safe").load(text)["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                line = text.count("\n", 0, text.find(f"alert: {rule['alert']}\n")) + 1
                for key in ("summary", "description"):
                    yield from _text_findings(line, rule["annotations"][key])


def _title_findings(line: int, title: str) -> Iterator[Finding]:
    yield from _first_word(line, title)
    if title.endswith("?"):
        yield Finding(line=line, rule="question", message=f"got {title!r}, expected a noun phrase")
    yield from _text_findings(line, title.rstrip("?"), heading=True)


def _first_word(line: int, text: str) -> Iterator[Finding]:
    first = (re.findall(r"[\w'-]+", text) or [""])[0]
    if STARTS.match(first):
        message = f"got {first!r} first, expected a noun: {text[:90]!r}"
        yield Finding(line=line, rule="first-word", message=message)


def _text_findings(line: int, text: str, *, heading: bool = False) -> Iterator[Finding]:
    plain = _TEMPLATE.sub("`code`", text)
    for found in rules.findings(f"# {plain}" if heading else plain):
        yield Finding(line=line, rule=found.rule, message=found.message)
    for pattern, instead in _OWN:
        for own in pattern.finditer(_BACKTICKS.sub("`code`", plain)):
            message = f"got {own[0]!r}, expected the field's word: {instead}: {plain[:90]!r}"
            yield Finding(line=line, rule="own-word", message=message)
