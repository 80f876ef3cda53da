"""The words of code keep the rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton.domain import errors
from tests.prose.code import MAX_WORDS, Text, findings, is_error, script_findings, snippets
from tests.prose.in_code import found_in_code


def rules(source: str) -> list[str]:
    return [found.rule for found in findings(source)]


def test_no_text_of_code_breaks_a_rule() -> None:
    found = [
        f"{name}:{finding.line}: {finding.rule}: {finding.message}"
        for name, every in found_in_code().items()
        for finding in every
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        (f'"""{" ".join(["word"] * (MAX_WORDS + 1))}."""', "docstring/long-sentence"),
        ('"""A replica stops for whoever asks."""', "docstring/own-word"),
        ('"""Who rests stops later."""', "docstring/headless"),
        ('"""The replica whom it asks."""', "docstring/headless"),
        ('"""A replica, and one that prefills."""', "docstring/headless"),
        ("x = 1  # nobody asks", "comment/own-word"),
        ('typer.Option(help="Of one replica.")', "help/help"),
        ('Verb("How many.", "run:run")', "help/help"),
        ('raise ValueError(f"got {n}, wanted 1")', "message/message"),
        ('raise ValueError("got 2, which is one")', "message/message"),
        ('raise ConfigInvalid("the file is missing.")', "message/message"),
        ('yield context.finding(path, "nobody listens")', "message/own-word"),
        ('message = f"got {n}, " + "wanted 1"', "message/message"),
        ('Topic("metrics", "no alert fires on a promise")', "string/own-word"),
        ('line = f"{pool} at {count} " + "until taken back"', "string/own-word"),
        ('"""Requests that were let in."""', "docstring/own-word"),
    ],
)
def test_a_rule_that_is_broken_is_found(source: str, rule: str) -> None:
    assert rules(source) == [rule]


@pytest.mark.parametrize(
    "source",
    [
        f'"""{" ".join(["word"] * MAX_WORDS)}."""',
        '"""A client who disconnects frees its blocks: `whoever`."""',
        '"""Sum.\n\n    whoever ──▶ nobody\n\nIt ends.\n"""',
        '"""Sum.\n\nRaises:\n    ValueError: it is negative.\n    KeyError: it is unknown.\n"""',
        "x = 1  # noqa: E501 - nobody splits it",
        'typer.Option(help="Show logs of one replica.")',
        'raise ValueError(f"port: got {n}, expected 1 to 65535")',
        'wanted = got("nobody", reason="whoever")',
    ],
)
def test_a_text_that_keeps_the_rules_is_left_alone(source: str) -> None:
    assert rules(source) == []


def test_only_the_words_of_a_benchmark_are_checked() -> None:
    source = f'"""{" ".join(["word"] * (MAX_WORDS + 1))} of what was promised."""'
    assert [found.rule for found in findings(source, only_words=True)] == ["docstring/own-word"]


@pytest.mark.parametrize(
    "line",
    [
        'h("p", {}, "until taken back")',
        "const promisedText = seconds(value);",
        ".marker.promised { color: red; }",
        "<p>Nobody is told.</p>",
        "// What was said.",
    ],
)
def test_a_script_has_the_words_of_the_field(line: str) -> None:
    assert {found.rule for found in script_findings(f"\n{line}\n")} == {"script/own-word"}
    assert {found.line for found in script_findings(f"\n{line}\n")} == {2}


def test_a_builtin_of_a_script_is_no_former_word() -> None:
    assert script_findings("await new Promise((done) => setTimeout(done, 5));") == []


def test_a_finding_names_its_line() -> None:
    source = '"""Sum."""\n\n\ndef add() -> int:\n    """Add.\n\n    For whoever asks.\n    """\n'
    assert [found.line for found in findings(source)] == [7]


def test_comments_that_follow_each_other_are_one_text() -> None:
    source = "# A sentence that\n# goes on.\nx = 1\n# Another.\n"
    assert [(snippet.line, snippet.kind) for snippet in snippets(source)] == [
        (1, Text.COMMENT),
        (4, Text.COMMENT),
    ]


def test_texts_of_every_error_are_messages() -> None:
    tree = Path(errors.__file__).read_text(encoding="utf-8")
    names = re.findall(r"^class (\w+)\((?!StrEnum)", tree, re.MULTILINE)
    assert len(names) > 20
    assert [name for name in names if not is_error(name) and not name.startswith("_")] == []
