"""The pages of the reference are what the code says today, and leave nothing out."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from baton.cli.main import VERBS
from baton.config.language.fields import NamedSections, NestedSection, fields_of
from baton.config.schema.deployment import DeploymentConfig, OnFailure
from baton.engine.vllm.gate.gate import ROUTES
from baton.telemetry.catalogue import CATALOGUE
from tests.reference.commands import command_words
from tests.reference.docstrings import attribute_docs, class_doc
from tests.reference.pages import PAGES, ROOT


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_makes_of_it(name: str) -> None:
    assert (ROOT / name).read_text() == PAGES[name](), "run: scripts/render-reference"


def keys(schema: type, at: str = "") -> Mapping[str, tuple[type, str]]:
    """Every key of the schema with its section, and the attribute that it is there."""
    found = {}
    for key, field in fields_of(schema).items():
        found[f"{at}{key}"] = (schema, field.attribute)
        match field.kind:
            case NestedSection(schema=inner):
                found |= keys(inner, f"{at}{key}.")
            case NamedSections(schema=inner):
                found |= keys(inner, f"{at}{key}.NAME.")
    return found


def test_every_key_of_a_configuration_has_a_row_that_says_something() -> None:
    page = (ROOT / "docs/reference/configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|(?:[^|]*\|){2} ([^|]*) \|", page, re.MULTILINE)

    assert {name for name, _ in rows} == {key.rpartition(".")[2] for key in keys(DeploymentConfig)}
    assert not [name for name, text in rows if not text.strip()], "say it in the schema"


def test_every_verb_and_every_route_has_a_place() -> None:
    verbs = (ROOT / "docs/reference/cli.md").read_text()
    routes = (ROOT / "docs/reference/api.md").read_text()

    for under_heading in VERBS.values():
        for name, verb in under_heading.items():
            for words in command_words(name, verb):
                assert f"### baton {' '.join(words)}\n" in verbs
    for paths in ROUTES.values():
        assert all(re.search(rf"(GET|POST) {path}`", routes) for path in paths)


def test_every_metric_has_exactly_one_row() -> None:
    page = (ROOT / "docs/operations/metrics.md").read_text()
    rows = re.findall(r"^\| `(baton_\w+)", page, re.MULTILINE)

    assert sorted(rows) == sorted(name for metric in CATALOGUE for name in metric.names)


def test_a_string_below_an_attribute_is_found() -> None:
    assert attribute_docs(OnFailure)["RECOMPUTE"] == "Prefill the prompt itself."
    assert class_doc(OnFailure).startswith("Action of a decode replica")
