"""Every verb of `baton` as a page: what its help says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from typer.testing import CliRunner

from baton.cli.main import VERBS, Verb, build_app

HEAD = """\
# The command line

Written by `scripts/render-reference`: what each verb says of itself with `--help`. In a checkout
the command is `.venv/bin/baton`. Every verb exits with 0 (done), 1 (it failed, and says why), 2
(it was called wrongly), 3 (nothing runs here) or 4 (not done in time). What prints a result has
`-o json` or `--json`: one object.
"""
_WIDTH = 100


def render_page() -> str:
    """The page in Markdown."""
    return "\n".join([HEAD, *_contents(), "", *_verbs()])


def command_words(name: str, verb: Verb) -> list[tuple[str, ...]]:
    """What is typed after `baton` for a verb, or for each of its own verbs."""
    if isinstance(verb.entry_point, Mapping):
        return [(name, word) for word in verb.entry_point]
    return [(name,)]


def _contents() -> Iterator[str]:
    for heading, verbs in VERBS.items():
        links = [
            f"[{' '.join(words)}](#baton-{'-'.join(words)})"
            for name, verb in verbs.items()
            for words in command_words(name, verb)
        ]
        yield f"- {heading}: {', '.join(links)}"


def _verbs() -> Iterator[str]:
    for heading, verbs in VERBS.items():
        yield f"## {heading}\n"
        for name, verb in verbs.items():
            for words in command_words(name, verb):
                yield f"### baton {' '.join(words)}\n\n```text\n{_help(words)}\n```\n"


def _help(words: tuple[str, ...]) -> str:
    result = CliRunner().invoke(
        build_app(),
        [*words, "--help"],
        max_content_width=_WIDTH,
        terminal_width=_WIDTH,
        env={"COLUMNS": str(_WIDTH)},
    )
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.stdout.strip().splitlines())
