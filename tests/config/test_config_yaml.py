"""YAML text to a tree with positions."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.language.read import (
    MAX_DEPTH,
    MAX_FILE_BYTES,
    Unreadable,
    read_file,
    read_text,
    resolve,
)
from baton.config.language.tree import FileOrigin, Finding, ListNode, Node, Scalar, Section
from baton.config.language.units import Unit, format_quantity, parse_quantity

START = FileOrigin("x.yaml", 1, 1)


def read(text: str) -> Node:
    findings: list[Finding] = []
    node = read_text(text, START, findings)
    assert not findings
    return node


def error_of(text: str) -> str:
    with pytest.raises(Unreadable) as error:
        read_text(text, START, [])
    return str(error.value.finding)


def findings_of(text: str) -> list[str]:
    findings: list[Finding] = []
    read_text(text, START, findings)
    return [str(finding) for finding in findings]


def plain(node: Node) -> object:
    match node:
        case Scalar(value=value):
            return value
        case ListNode(items=items):
            return [plain(item) for item in items]
        case Section(entries=entries):
            return {key: plain(entry.node) for key, entry in entries.items()}


def test_keys_and_values_know_their_places() -> None:
    node = read("a:\n  - 1\n  - b:  two\n")
    assert isinstance(node, Section)
    entry = node.entries["a"]
    assert entry.origin == FileOrigin("x.yaml", 1, 1)
    assert isinstance(entry.node, ListNode)
    assert entry.node.items[0].origin == FileOrigin("x.yaml", 2, 5)
    inner = entry.node.items[1]
    assert isinstance(inner, Section)
    assert inner.entries["b"].origin == FileOrigin("x.yaml", 3, 5)
    assert inner.entries["b"].node.origin == FileOrigin("x.yaml", 3, 9)


def test_an_absent_value_stands_where_its_key_does() -> None:
    node = read("a:\n\n\nb: 1\n")
    assert isinstance(node, Section)
    assert node.entries["a"].node == Scalar(None, FileOrigin("x.yaml", 1, 1), "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("on", "on"),
        ("7", 7),
        ("-7", -7),
        ("010", 10),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("2026-01-01", "2026-01-01"),
        ("1:30", "1:30"),
        ("9" * 5000, float("inf")),
    ],
)
def test_plain_scalars_have_core_types_only(text: str, value: object) -> None:
    assert resolve(text) == value


def test_quoted_scalars_are_text() -> None:
    assert plain(read("{a: '1', b: \"true\", c: 'null'}")) == {"a": "1", "b": "true", "c": "null"}


def test_an_alias_repeats_what_its_anchor_stands_at() -> None:
    assert plain(read("a: &x {n: 1}\nb: *x\n")) == {"a": {"n": 1}, "b": {"n": 1}}


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(b"\xef\xbb\xbfversion: 1\n")
    assert plain(read_file(file, [])) == {"version": 1}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a:\n\tb: 1\n", "x.yaml:2:1: not YAML: a tab where only spaces are allowed"),
        ("a: 1\nb: [1, 2\nc: 3\n", "x.yaml:3:2: not YAML"),
        ("a: 'x", "x.yaml:1:6: not YAML"),
        ("a: 1: 2", "x.yaml:1:5: not YAML: mapping values are not allowed here"),
        ("a: 1\n---\nb: 1\n", "x.yaml:2:1: a second document, expected only one"),
        ("ok: 1\nbad: \x00", "x.yaml:2:6: character U+0000 is not allowed in YAML"),
        ("? [a]\n: 1", "x.yaml:1:3: a key that is no plain text"),
        ("a: *nowhere", "x.yaml:1:4: a: alias *nowhere has no anchor before it"),
        ("a: &a [*a]", "x.yaml:1:8: a.0: alias *a contains itself"),
    ],
)
def test_an_unreadable_text_is_reported_with_its_place(text: str, what: str) -> None:
    assert error_of(text).startswith(what)


def test_every_repeated_key_is_reported_with_both_places() -> None:
    assert findings_of("a: 1\nb: {c: 1, c: 2}\na: 3\n") == [
        "x.yaml:2:11: b.c: given twice, first at x.yaml:2:5, keep one",
        "x.yaml:3:1: a: given twice, first at x.yaml:1:1, keep one",
    ]


def test_tags_and_merge_keys_are_refused() -> None:
    assert findings_of("a: &x {b: 1}\nc:\n  <<: *x\nd: !!python/name:os.system x\n") == [
        "x.yaml:3:3: c: merge keys are not supported, repeat the keys or use an overlay "
        "(-c a -c b)",
        "x.yaml:4:4: d: tag !!python/name:os.system is not allowed, remove it",
    ]


def test_a_bomb_of_aliases_is_stopped() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 12):
        aliases = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} [{aliases}]")
    assert "more than 10000 values" in error_of("\n".join(lines))


def test_deep_nesting_is_stopped_before_the_stack_is() -> None:
    assert f"nested more than {MAX_DEPTH} deep" in error_of("[" * 100_000)


def test_a_huge_file_is_not_parsed(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(Unreadable, match="too large"):
        read_file(file, [])


def test_files_that_are_no_text_say_so(tmp_path: Path) -> None:
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"a: \xff\xfe")
    for file, what in [
        (binary, "not UTF-8 text"),
        (tmp_path, "cannot be read: is a directory"),
        (tmp_path / "none.yaml", "cannot be read: no such file"),
    ]:
        with pytest.raises(Unreadable, match=what):
            read_file(file, [])


@settings(deadline=None)
@given(text=st.text(alphabet=st.sampled_from("ab:-[]{}&*!|>'\"%@`#,? \n\t0.~<\\\u2028\x07é")))
def test_no_text_breaks_the_reader(text: str) -> None:
    with suppress(Unreadable):
        assert read_text(text, START, []).origin == START or text.strip()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\x7f\ufeff", min_codepoint=32)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc", min_size=1), inner),
    max_leaves=20,
)


@settings(deadline=None)
@given(value=st.dictionaries(st.text("abc", min_size=1), JSON))
def test_json_is_read_as_json_reads_it(value: dict[str, object]) -> None:
    assert plain(read(json.dumps(value))) == json.loads(json.dumps(value))


# -------------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [
        ("500ms", Unit.SECONDS, 0.5),
        ("2s", Unit.SECONDS, 2.0),
        ("50us", Unit.SECONDS, 50e-6),
        ("1.5m", Unit.SECONDS, 90.0),
        ("30d", Unit.SECONDS, 2_592_000.0),
        ("0s", Unit.SECONDS, 0.0),
        ("4MiB", Unit.BYTES, 4 * 1024**2),
        ("1.5GiB", Unit.BYTES, 1.5 * 1024**3),
        ("10MB", Unit.BYTES, 10_000_000),
        ("10/s", Unit.PER_SECOND, 10.0),
        ("60k/min", Unit.PER_SECOND, 1000.0),
        ("25GB/s", Unit.BYTES_PER_SECOND, 25e9),
    ],
)
def test_a_quantity_is_read_in_base_units(text: str, unit: Unit, number: float) -> None:
    assert parse_quantity(text, unit) == number


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("2", Unit.SECONDS),
        ("-2s", Unit.SECONDS),
        ("2S", Unit.SECONDS),
        ("2  s", Unit.SECONDS),
        ("2s\n", Unit.SECONDS),
        ("inf s", Unit.SECONDS),
        ("1e3s", Unit.SECONDS),
        ("٣s", Unit.SECONDS),
        ("4MiB", Unit.SECONDS),
        ("4Mib", Unit.BYTES),
        ("10", Unit.PER_SECOND),
        ("10/y", Unit.PER_SECOND),
        ("", Unit.BYTES),
    ],
)
def test_an_invalid_quantity_is_not_guessed(text: str, unit: Unit) -> None:
    assert parse_quantity(text, unit) is None


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (0.5, Unit.SECONDS, "500ms"),
        (600.0, Unit.SECONDS, "600s"),
        (0, Unit.BYTES, "0B"),
        (4 * 1024**2, Unit.BYTES, "4MiB"),
        (20_000.0, Unit.PER_SECOND, "20k/s"),
        (25e9, Unit.BYTES_PER_SECOND, "25GB/s"),
    ],
)
def test_a_quantity_is_written_in_the_largest_unit_without_a_fraction(
    number: float, unit: Unit, text: str
) -> None:
    assert format_quantity(number, unit) == text


@settings(deadline=None)
@given(
    number=st.floats(min_value=0, max_value=1e18, allow_nan=False),
    unit=st.sampled_from([Unit.SECONDS, Unit.PER_SECOND, Unit.BYTES_PER_SECOND]),
)
def test_a_written_quantity_reads_back_as_the_same_float(number: float, unit: Unit) -> None:
    assert parse_quantity(format_quantity(number, unit), unit) == number


@settings(deadline=None)
@given(number=st.integers(min_value=0, max_value=2**53))
def test_written_bytes_read_back_as_the_same_number(number: int) -> None:
    assert parse_quantity(format_quantity(number, Unit.BYTES), Unit.BYTES) == number
