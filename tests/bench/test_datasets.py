"""Prompts out of files as others write them."""

from __future__ import annotations

import json

import pytest

from baton.bench.prompts.datasets import DatasetRow, read_rows, shuffled
from baton.domain.errors import TraceInvalid

SHAREGPT = [
    {
        "id": "x",
        "conversations": [
            {"from": "human", "value": "What is KV?"},
            {"from": "gpt", "value": "A cache."},
            {"from": "human", "value": "Of what?"},
        ],
    },
    {"id": "y", "conversations": [{"from": "human", "value": "Alone"}]},
]


def user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def test_of_a_conversation_the_first_prompt_and_its_answer_are_taken() -> None:
    rows, skipped = read_rows(json.dumps(SHAREGPT), "s.json")
    assert skipped == 0
    assert [(row.messages, row.answer) for row in rows] == [
        (user("What is KV?"), "A cache."),
        (user("Alone"), None),
    ]
    assert rows[0].text == "What is KV?"


def test_lines_with_prompts_say_how_long_their_answers_shall_be() -> None:
    text = '\ufeff{"prompt": "a b", "output_tokens": 7}\n\n{"prompt": "c", "max_tokens": 2}\n'
    rows, _ = read_rows(text, "p.jsonl")
    assert [(row.text, row.output_tokens) for row in rows] == [("a b", 7), ("c", 2)]


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85"])
def test_only_newlines_end_a_line(inside: str) -> None:
    prompts = [f"two{inside}lines", "one"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    rows, skipped = read_rows("\r\n".join(lines), "p.jsonl")
    assert ([row.text for row in rows], skipped) == (prompts, 0)


def test_messages_keep_what_stands_before_the_first_prompt() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
    ]
    rows, _ = read_rows(json.dumps({"messages": messages}), "m.jsonl")
    assert [message["role"] for message in rows[0].messages] == ["system", "user"]
    assert rows[0].answer == "So."
    assert rows[0].text == "Be brief.\nWhy?"


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("{nonsense", "not JSON"),
        ("3", "got int, expected an object"),
        ('{"prompt": ""}', "no prompt, messages or conversations"),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens is 0"),
        ('{"conversations": [{"from": "gpt", "value": "hi"}]}', "it has no question"),
        ('{"messages": [{"role": "user", "content": 4}]}', "a message of 'user' without text"),
        ('{"messages": ["hi"]}', "not as expected"),
    ],
)
def test_a_bad_entry_is_named_or_left_out(entry: str, why: str) -> None:
    text = f'{{"prompt": "good"}}\n{entry}\n'
    with pytest.raises(TraceInvalid, match=why) as raised:
        read_rows(text, "d.jsonl")
    assert raised.value.line == 2
    rows, skipped = read_rows(text, "d.jsonl", ignore_invalid=True)
    assert ([row.text for row in rows], skipped) == (["good"], 1)


@pytest.mark.parametrize("text", ["", "[]", "\n\n"])
def test_a_file_without_prompts_is_refused(text: str) -> None:
    with pytest.raises(TraceInvalid, match="holds no prompts"):
        read_rows(text, "d.jsonl")


def test_a_broken_array_is_refused_also_where_bad_entries_are_left_out() -> None:
    with pytest.raises(TraceInvalid, match="not JSON"):
        read_rows('[{"prompt": "a"},', "d.json", ignore_invalid=True)


def test_an_order_depends_on_the_seed_alone() -> None:
    rows = [DatasetRow(user(str(number)), 1) for number in range(30)]  # type: ignore[arg-type]  # messages
    assert shuffled(rows, "1") == shuffled(rows, "1")
    assert shuffled(rows, "1") != shuffled(rows, "2")
    assert sorted(row.text for row in shuffled(rows, "1")) == sorted(row.text for row in rows)
