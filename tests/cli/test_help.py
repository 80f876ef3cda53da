"""What `baton --help` and the help of every verb say, and that they say it at once."""

from __future__ import annotations

import inspect
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module

import pytest
from typer.testing import CliRunner

import baton
from baton.cli.main import COMPLETION_VARIABLE, SYNONYMS, VERBS, build_app
from baton.cli.setup.completion import Shell

ONE_FORMAT = {("demo",), ("config", "schema"), ("completion",), ("init",)}
"""What these print has one format: JSON, a script or a file."""
MOST_CPU_S = 0.3
BATON = (sys.executable, "-m", "baton.cli.main")


def verbs() -> Iterator[tuple[tuple[str, ...], str]]:
    """Every verb that does something, and where it is."""
    for under_heading in VERBS.values():
        for name, verb in under_heading.items():
            if isinstance(verb.entry_point, Mapping):
                yield from (((name, word), where) for word, where in verb.entry_point.items())
            else:
                yield (name,), verb.entry_point


EVERY = [words for words, _ in verbs()]


def help_of(*words: str) -> str:
    result = CliRunner().invoke(build_app(), [*words, "--help"])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_verb_stands_under_a_heading_in_one_line() -> None:
    lines = help_of().splitlines()
    assert not [line for line in lines if line.rstrip().endswith("...") and "Usage" not in line]
    for heading, under in VERBS.items():
        at = lines.index(f"{heading}:")
        told = [tuple(line.split(None, 1)) for line in lines[at + 1 : at + 1 + len(under)]]
        assert told == [(name, verb.help) for name, verb in under.items()]


@pytest.mark.parametrize(("words", "where"), list(verbs()), ids=str)
def test_a_verb_has_the_same_summary_in_the_list_and_in_its_help(
    words: tuple[str, ...], where: str
) -> None:
    module, _, function = where.partition(":")
    told = inspect.getdoc(getattr(import_module(f"baton.cli.{module}"), function))
    assert told, f"{where} says nothing"
    if len(words) == 1:
        (text,) = [entry[words[0]].help for entry in VERBS.values() if words[0] in entry]
        assert told.partition("\n")[0] == text


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_verb_has_help_and_prints_json_when_asked(words: tuple[str, ...]) -> None:
    told = help_of(*words)
    assert f"Usage: baton {' '.join(words)}" in told.replace("root", "baton")
    assert words in ONE_FORMAT or "--output" in told


@pytest.mark.parametrize("group", ["config", "keys", "explain", "dashboards", "rules"])
def test_a_verb_of_verbs_lists_them(group: str) -> None:
    (words,) = [entry[group].entry_point for entry in VERBS.values() if group in entry]
    assert isinstance(words, Mapping)
    told = help_of(group)
    assert all(f"\n  {word} " in told for word in words)


def test_a_word_that_is_nearly_a_verb_is_recognised() -> None:
    result = CliRunner().invoke(build_app(), ["tpo"])
    assert result.exit_code == 2
    assert "Did you mean 'top'?" in result.stderr


@pytest.mark.parametrize(("word", "verbs"), SYNONYMS.items())
def test_a_verb_of_another_tool_is_answered_with_ours(word: str, verbs: tuple[str, ...]) -> None:
    ours = {name for under in VERBS.values() for name in under}
    assert word not in ours >= set(verbs)
    result = CliRunner().invoke(build_app(), [word])
    assert result.exit_code == 2
    expected = " or ".join(f"'baton {verb}'" for verb in verbs)
    assert f"command: got '{word}', expected a verb of baton; use {expected}" in result.output


@pytest.mark.parametrize("words", [(), ("scale",), ("config", "show")], ids=" ".join)
def test_help_comes_by_a_short_option_and_by_a_word_too(words: tuple[str, ...]) -> None:
    short = CliRunner().invoke(build_app(), [*words, "-h"])
    by_word = CliRunner().invoke(build_app(), ["help", *words])
    assert short.stdout == by_word.stdout == help_of(*words)


def test_help_of_a_word_that_is_no_verb_is_an_error() -> None:
    result = CliRunner().invoke(build_app(), ["help", "stop"])
    assert result.exit_code == 2
    assert "use 'baton down'" in result.output


def test_the_version_is_one_line() -> None:
    result = CliRunner().invoke(build_app(), ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"baton {baton.__version__}\n")


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("baton st", {"status"}),
        ("baton config s", {"show", "schema"}),
        ("baton status --wat", {"--watch"}),
        ("baton fi", set()),  # a deprecated verb is not offered
    ],
)
def test_a_shell_completes_verbs_and_options(typed: str, completed: set[str]) -> None:
    asked = {
        "COMP_WORDS": typed,
        "COMP_CWORD": str(typed.count(" ")),
        COMPLETION_VARIABLE: "complete_bash",
    }
    program = "import sys; sys.argv = ['baton']; from baton.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | asked,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == completed


@pytest.mark.parametrize("shell", Shell)
def test_the_script_for_a_shell_asks_baton_for_completions(shell: Shell) -> None:
    result = CliRunner().invoke(build_app(), ["completion", shell])
    assert result.exit_code == 0
    assert f"{COMPLETION_VARIABLE}=complete_{shell}" in result.stdout
    assert "baton" in result.stdout


def test_help_of_every_verb_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from contextlib import redirect_stdout; from io import StringIO\n"
        "from baton.cli.main import build_app\n"
        "with redirect_stdout(StringIO()):\n"
        f"    for verb in {[(), *EVERY]!r}:\n"
        "        build_app()([*verb, '--help'], standalone_mode=False)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    heavy = {
        *("ray", "torch", "vllm", "nixl", "nixl_cu12", "transformers", "fastapi", "pydantic"),
        *("matplotlib", "numpy", "pyarrow", "rich", "httpx", "aiohttp", "prometheus_client"),
        *("zmq", "asyncio", "ruamel", "msgspec", "psutil", "opentelemetry"),
    }
    assert not set(done.stdout.split()) & heavy


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("words", [(), *EVERY], ids=" ".join)
def test_help_takes_little_time(words: tuple[str, ...]) -> None:
    took_s: list[float] = []
    while len(took_s) < 3 and min(took_s, default=1.0) >= MOST_CPU_S:
        took_s.append(_cpu_s(*words))
    assert min(took_s) < MOST_CPU_S, f"baton {' '.join(words)} --help took {took_s} s of CPU"


def _cpu_s(*words: str) -> float:
    """CPU time, for others use this machine, too; the least of several is what it takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*BATON, *words, "--help"], check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
