"""The linter of prose finds what breaks a rule, on its line, and nothing else."""

from __future__ import annotations

import pytest

from tests.prose.rules import MAX_WORDS, findings, passages, sentences


def rules(markdown: str) -> list[str]:
    return [found.rule for found in findings(markdown)]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (" ".join(["word"] * (MAX_WORDS + 1)) + ".", "long-sentence"),
        ("What it used counts.", "headless"),
        ("The time is taken from what it used.", "headless"),
        ("A replica stops; who rests speaks later.", "headless"),
        ("It took 1 s, 2 s, 3 s and 4 s.", "figures"),
        ("The promise is kept.", "own-word"),
        ("# Who rests speaks every four seconds", "sentence-heading"),
        ("# A replica is ejected", "sentence-heading"),
        ("# one two three four five six seven eight", "long-heading"),
        ("| key | Requests are turned away |", "own-word"),
    ],
)
def test_a_rule_that_is_broken_is_found(text: str, rule: str) -> None:
    assert rules(text) == [rule]


@pytest.mark.parametrize(
    "text",
    [
        " ".join(["word"] * MAX_WORDS) + ".",
        "The operator sees what an engine took.",
        "A client who disconnects frees its blocks.",
        "What does a replica hold?",
        "| 1 | 2 | 3 | 4 |",
        "# Retries",
        "# What happens when a replica dies?",
        "```\nWhat it promises, in vain, to whoever\n```",
        "The key `promise` and [a page](door.md#who-rests).",
        "![whoever](doors.svg)",
        "<!-- whoever -->",
    ],
)
def test_text_that_keeps_the_rules_has_no_findings(text: str) -> None:
    assert rules(text) == []


def test_a_finding_names_the_line_on_which_its_passage_begins() -> None:
    text = "# Retries\n\n```\n1\n2\n```\n\nA replica\nstops in vain.\n\n- one item\n- patience\n"
    assert [(found.line, found.rule) for found in findings(text)] == [
        (8, "own-word"),
        (12, "own-word"),
    ]


def test_a_list_a_table_and_a_heading_end_a_passage() -> None:
    text = "Some text\n- an item\n  goes on\n| a | b |\n|---|---|\n# Heading\n> a quotation"
    assert [passage.text for passage in passages(text)] == [
        "Some text",
        "an item goes on",
        "a",
        "b",
        "Heading",
        "a quotation",
    ]


def test_an_abbreviation_and_a_number_end_no_sentence() -> None:
    assert len(sentences("It holds, e.g. Blocks, for 1.5 s. Then it is freed.")) == 2
