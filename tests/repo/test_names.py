"""Names are the field's: the glossary names code that is there, and retired names are gone."""

from __future__ import annotations

import ast
import functools
import io
import itertools
import re
import tokenize
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from tests.prose.rules import former_words
from tests.recorded.names import OLD_NAMES
from tests.repo.project import ROOT, documents

FOLDERS = ("platform", "tests", "benchmarks")
MAX_TERMS = 60
OF_OTHERS = {"Option"}
"""Names of libraries: `typer.Option`."""
TELL_OF_OLD_NAMES = {
    "CHANGELOG.md",
    "docs/decisions/0054-terms-of-the-field-and-ordered-rooms.md",
}
HOLDS_OLD_NAMES = ROOT / "tests/recorded"
_ROW = re.compile(r"^\| (?!-)([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


@functools.cache
def python_files() -> list[Path]:
    files = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    return sorted(file for file in files if HOLDS_OLD_NAMES not in file.parents)


def glossary() -> list[tuple[str, str, str, str]]:
    """Term, meaning, source and where it is in code."""
    _, *rows = _ROW.findall(documents()["docs/glossary.md"])
    return rows


def names_in(file: Path) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def strings_in(file: Path) -> str:
    """Its strings and comments."""
    kinds = {tokenize.STRING, tokenize.COMMENT}
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
    return "\n".join(token.string for token in tokens if token.type in kinds)


@functools.cache
def words_of_the_platform() -> set[str]:
    """Every word of the platform and of its configurations."""
    files = (*(ROOT / "platform").rglob("*.py"), *(ROOT / "configs").rglob("*.yaml"))
    return {word for file in files for word in re.findall(r"[\w-]+", file.read_text())}


@functools.cache
def retired() -> set[str]:
    """Former names of classes, but for those that another class has now."""
    old = {old for new, old in OLD_NAMES.items() if "." not in new}
    defined = {
        node.name
        for file in python_files()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    return old - defined - OF_OTHERS


def loop_variables(tree: ast.AST) -> Iterator[str]:
    targets = (
        node.target
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension)
    )
    for target in targets:
        yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def test_the_glossary_is_short_and_each_term_has_a_source() -> None:
    assert 20 < len(glossary()) <= MAX_TERMS
    assert [term for term, _, source, _ in glossary() if not source.strip()] == []


@pytest.mark.parametrize("row", glossary(), ids=lambda row: str(row[0]).strip())
def test_a_term_of_the_glossary_is_in_code(row: tuple[str, str, str, str]) -> None:
    *_, where = row
    code = re.findall(r"`([^`]+)`", where)
    assert code, "no name of code is given"
    for name in code:
        path = ROOT / "platform/baton" / name
        last = name.rpartition(".")[2]
        assert path.exists() if "/" in name else last in words_of_the_platform(), name


def test_no_retired_name_is_left_in_code() -> None:
    assert len(retired()) > 40
    gone = retired()
    left = {str(file.relative_to(ROOT)): names_in(file) & gone for file in python_files()}
    assert {file: names for file, names in left.items() if names} == {}


def test_no_document_and_no_message_names_what_is_gone() -> None:
    gone = retired()
    texts = {file: text for file, text in documents().items() if file not in TELL_OF_OLD_NAMES}
    texts |= {str(file.relative_to(ROOT)): strings_in(file) for file in python_files()}
    left = {
        file: set(chain.from_iterable(re.findall(r"`(\w+)[`.(]|wanted (?:a )?(\w+)", text))) & gone
        for file, text in texts.items()
    }
    assert {file: names for file, names in left.items() if names} == {}


def test_a_loop_names_what_it_holds() -> None:
    vague = {
        str(file.relative_to(ROOT))
        for file in python_files()
        if "one" in set(loop_variables(ast.parse(file.read_text())))
    }
    assert vague == set()
    assert list(loop_variables(ast.parse("[one for one in ()]"))) == ["one"]


def names_of_tests(file: Path) -> Iterator[str]:
    """Those of its tests, and its own if it begins as theirs do."""
    functions = (
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return (name for name in (file.stem, *functions) if name.startswith("test_"))


def test_no_name_of_a_test_has_a_former_word() -> None:
    former = {
        f"{file.relative_to(ROOT)}::{name}": words
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for name in names_of_tests(file)
        if (words := former_words(name))
    }
    assert former == {}
    assert former_words("test_who_rests_is_silent") == ["silent", "who", "rests", "who"]
    assert former_words("test_an_idle_replica_sends_fewer_heartbeats") == []


_NAMES_A_FIELD = re.compile(r"\b(?:([a-z_]+) is|and ([a-z_]+)) $")


def misnamed_fields(source: str) -> Iterator[str]:
    """Fields of `self` that a message shows under another name: `pause_s is {self.open_s}`."""
    for text in ast.walk(ast.parse(source)):
        if not isinstance(text, ast.JoinedStr):
            continue
        for part, value in itertools.pairwise(text.values):
            match part, value:
                case (
                    ast.Constant(value=str(before)),
                    ast.FormattedValue(value=ast.Attribute(ast.Name("self"), field)),
                ):
                    said = _NAMES_A_FIELD.search(before)
                    if said is not None and field not in said.groups():
                        yield f"{value.lineno}: '{said[0].strip()}' shows self.{field}"


def test_messages_call_a_field_by_its_name() -> None:
    platform = (file for file in python_files() if "platform" in file.parts)
    found = {str(file): list(misnamed_fields(file.read_text())) for file in platform}
    assert {file: lines for file, lines in found.items() if lines} == {}
    assert list(misnamed_fields('f"link: pause_s is {self.open_s}, expected more"'))
    assert not list(misnamed_fields('f"link: open_s is {self.open_s}, expected more"'))


SAYS_SOMETHING_ELSE = {
    "TextStyle", "Unit", "Comparison", "Constraint",  # what a terminal, a reader or a rule is given
    "Deadline",  # paths of configuration keys
    "Direction", "PairNoticeKind", "Treatment",  # words of a report
    "CheckStatus", "DataPath", "Locality",
    "TimeUnit",  # symbols of units
}  # fmt: skip
"""Enumerations whose values are not their members' names."""


def other_values(source: str) -> Iterator[str]:
    """Values of public enumerations that are not their member's name in lower case."""
    for kind in ast.walk(ast.parse(source)):
        if not isinstance(kind, ast.ClassDef) or kind.name.startswith("_"):
            continue
        if "StrEnum" not in map(ast.unparse, kind.bases) or kind.name in SAYS_SOMETHING_ELSE:
            continue
        for member in kind.body:
            match member:
                case ast.Assign(targets=[ast.Name(name)], value=ast.Constant(value=str(value))):
                    if re.sub(r"[ .-]", "_", value) != name.lower():
                        yield f"{kind.name}.{name} is {value!r}"


def test_values_of_enumerations_are_their_members_names() -> None:
    platform = [file.read_text() for file in python_files() if "platform" in file.parts]
    assert [line for source in platform for line in other_values(source)] == []
    source = 'class Health(StrEnum):\n    EJECTED = "out"\n    IN_SYNC = "in sync"\n'
    assert list(other_values(source)) == ["Health.EJECTED is 'out'"]


PACKAGE = ROOT / "platform/baton"
_MODULE_PATH = re.compile(r"`(?:baton\.)?([a-z_]+(?:\.[a-z_0-9]+)+)(?:\.[A-Z]\w*)?`")
NOT_MODULES = re.compile(r"engine\.(extra|sim|offload)\b|transfer\.env|.*\.(json|html|csv|yaml)$")
"""Keys of configurations, and files."""


def unknown_modules(text: str) -> Iterator[str]:
    """Paths in backticks that begin with a package of baton and lead to no module."""
    for path in _MODULE_PATH.findall(text):
        first, *_ = parts = path.split(".")
        if not (PACKAGE / first).is_dir() or NOT_MODULES.match(path):
            continue
        prefixes = (PACKAGE.joinpath(*parts[:end]) for end in range(2, len(parts) + 1))
        is_room = PACKAGE.joinpath(*parts).is_dir()
        if not is_room and not any(prefix.with_suffix(".py").exists() for prefix in prefixes):
            yield path


def test_a_text_that_names_a_module_names_one_that_is_there() -> None:
    platform = (file for file in python_files() if PACKAGE in file.parents)
    found = {file.name: list(unknown_modules(file.read_text())) for file in platform}
    assert {name: paths for name, paths in found.items() if paths} == {}
    text = "See `control.transitions`, `control.coordinator.Coordinator` and `policy.scaling`."
    assert list(unknown_modules(text)) == ["control.transitions"]
