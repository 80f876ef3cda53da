"""Deprecated keys: every verb that loads a configuration names them on stderr."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.invoked import invoke

CONFIG = "version: 1\nmodel: {source: tiny, max_len: 4096, engine: {kind: sim}}\n"
CONFIG += "pools: {main: {role: mixed}}\nadmission: {max_queue: 7}\n"


class Commands:
    """Answers every verb with an empty report."""

    def up(self, *_: object, **__: object) -> dict[str, object]:
        return {"ok": True, "checks": []}

    apply = demo = doctor = up


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "old.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "words",
    [
        ("up",),
        ("demo", "--once"),
        ("apply", "-o", "json"),
        ("doctor", "-o", "json"),
        ("config", "validate"),
        ("config", "show"),
        ("manifests", "export", "--target", "compose", "--out", "OUT"),
        ("simulate", "--workload", "conv", "--rate", "5", "--duration", "2s"),
    ],
    ids=" ".join,
)
def test_a_deprecated_key_is_named_once_on_stderr(
    words: tuple[str, ...], file: str, tmp_path: Path
) -> None:
    arguments = [str(tmp_path / "out") if word == "OUT" else word for word in words]
    result = invoke(Commands(), *arguments, "-c", file)
    warning = (
        f"warning: {file}:4:13: admission.max_queue: deprecated, use admission.max_queued_requests"
    )
    assert result.stderr.count(warning) == 1, result.output
    assert warning not in result.stdout


def test_a_comparison_does_not_repeat_what_it_says_of_the_file(file: str) -> None:
    words = ("simulate", "-c", file, "--workload", "conv", "--rate", "5", "--duration", "2s")
    result = invoke(Commands(), *words, "--compare", "policy=random")
    assert result.stderr.count("deprecated, use admission.max_queued_requests") == 1
