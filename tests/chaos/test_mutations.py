"""The table of mutations fits the code, and its runner knows a catch from a survivor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chaos.mutation_rows import ROWS, Mutation, read_rows
from tests.chaos.mutations import MutationRunner, read_outcome
from tests.chaos.results import MutationOutcome

ROOT = Path(__file__).parents[2]
SUBJECT = "platform/baton/domain/subject.py"
TESTS = "tests/test_subject.py"
MODULE = """
def clipped(amount: int) -> int:
    return min(amount, 10)


def doubled(amount: int) -> int:
    return 2 * amount
"""
PROGRAM = """
from baton.domain.subject import clipped, doubled


def test_it_is_clipped() -> None:
    assert clipped(99) == 10
"""


def files_of(row: Mutation) -> tuple[str, ...]:
    """What is run, without how it is chosen from."""
    return row.tests[: row.tests.index("-k")] if "-k" in row.tests else row.tests


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_the_text_of_a_row_is_in_its_file_once(row: Mutation) -> None:
    text = (ROOT / row.file).read_text()
    assert text.count(row.old) == 1, f"{row.file}: {row.old!r} is there {text.count(row.old)} times"
    assert row.old != row.new
    compile(text.replace(row.old, row.new), row.file, "exec")


@pytest.mark.parametrize("name", sorted({name for row in ROWS for name in files_of(row)}))
def test_the_tests_of_a_row_exist(name: str) -> None:
    file, _, test = name.partition("::")
    assert (ROOT / file).exists()
    assert test.partition("[")[0] in (ROOT / file).read_text()


BLOCKS = """\
# A heading

@ a.py | tests/test_a.py -k sum
the sum
- a + b
+ a

the lines
-     one()
-
+

# Another heading

@ b.py | tests/test_b.py
the rest
- c
+ d
"""


@pytest.mark.parametrize(
    "row", [row for row in ROWS if "-k" in row.tests], ids=lambda row: row.what
)
def test_the_tests_that_a_row_chooses_exist(row: Mutation) -> None:
    """A renamed test would leave its row with nothing to run."""
    chosen = row.tests[row.tests.index("-k") + 1]
    defined = "".join((ROOT / name).read_text() for name in files_of(row))
    assert re.search(rf"def test_\w*{chosen}|\b{chosen.replace('_', '[_ ]')}\b", defined), chosen


def test_rows_are_read_from_blocks_of_text() -> None:
    tests = ("tests/test_a.py", "-k", "sum")
    assert list(read_rows(BLOCKS)) == [
        Mutation("the sum", "a.py", "a + b", "a", tests),
        Mutation("the lines", "a.py", "    one()\n", "", tests),
        Mutation("the rest", "b.py", "c", "d", ("tests/test_b.py",)),
    ]


@pytest.mark.parametrize(
    "text",
    [
        BLOCKS.replace("- a + b\n", ""),
        BLOCKS.replace("+ d\n", ""),
        BLOCKS.replace("the sum\n", ""),
        BLOCKS.replace(" | tests/test_b.py", ""),
        BLOCKS.replace("- c", "  c"),
    ],
)
def test_a_block_that_is_not_complete_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must name its file"):
        list(read_rows(text))


def test_no_two_rows_are_of_the_same() -> None:
    assert len({(row.what, row.file) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("status", "output", "catch", "by"),
    [
        (0, "9 passed in 1.2s", MutationOutcome.SURVIVED, "every test passed"),
        (
            1,
            "FAILED tests/a/test_a.py::test_it - assert 1 == 2\n1 failed",
            MutationOutcome.CAUGHT,
            "tests/a/test_a.py::test_it",
        ),
        (
            1,
            "FAILED tests/a/test_a.py::test_it[a - b, c] - x - y\n1 failed",
            MutationOutcome.CAUGHT,
            "tests/a/test_a.py::test_it[a",
        ),
        (
            1,
            "ERROR tests/a/test_a.py::test_it - KeyError: 'x'\n1 error",
            MutationOutcome.CAUGHT,
            "tests/a/test_a.py::test_it",
        ),
        # Not even collected: that guards nothing.
        (
            2,
            "ERROR tests/a/test_a.py - SyntaxError\n1 error",
            MutationOutcome.BROKE,
            "pytest ended with 2: tests/a/test_a.py",
        ),
        (
            5,
            "no tests ran in 0.1s\n",
            MutationOutcome.BROKE,
            "pytest ended with 5: no tests ran in 0.1s",
        ),
    ],
)
def test_an_outcome_is_read_from_the_output(
    status: int, output: str, catch: MutationOutcome, by: str
) -> None:
    assert read_outcome(status, output) == (catch, by)


def row(old: str, new: str) -> Mutation:
    return Mutation("the clip", SUBJECT, old, new, (TESTS,))


@pytest.fixture
def laboratory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MutationRunner:
    """Of a small tree with one module and its test."""

    def small(_: Path, tree: Path) -> None:
        for name, text in {
            "platform/baton/__init__.py": "",
            "platform/baton/domain/__init__.py": "",
            SUBJECT: MODULE,
            TESTS: PROGRAM,
            "pytest.ini": "[pytest]\nmarkers =\n  real\n  slow\n  thorough\n",
        }.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text)

    monkeypatch.setattr("tests.chaos.mutations.copy_tree", small)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # starts in a third of the time
    return MutationRunner(tmp_path / "tree")


def test_a_protection_that_a_test_guards_is_caught_and_one_that_none_does_survives(
    laboratory: MutationRunner, tmp_path: Path
) -> None:
    guarded, unguarded, unfit = map(
        laboratory.run_mutation,
        (row("min(amount, 10)", "amount"), row("2 * amount", "amount"), row("amount", "total")),
    )
    assert (guarded.outcome, guarded.detail) == (
        MutationOutcome.CAUGHT,
        f"{TESTS}::test_it_is_clipped",
    )
    assert unguarded.outcome is MutationOutcome.SURVIVED, "what was broken before was not put back"
    assert (unfit.outcome, unfit.detail) == (
        MutationOutcome.BROKE,
        "it is there 4 times, expected once",
    )
    assert (tmp_path / "tree" / SUBJECT).read_text() == MODULE
