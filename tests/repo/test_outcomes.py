"""What was skipped in every run is found, and stops CI unless it may be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.outcomes import ALLOWED_SKIPS, AllowedSkip, find_allowed_skip, main, summarize

pytest_plugins = ["pytester"]
GPU = "tests/engine/test_one_gpu.py::test_it"


def test_a_test_that_ran_once_was_not_skipped() -> None:
    here = {"a.py::b": ("skipped", "no chromium"), "a.py::c": ("passed", "")}
    there = {"a.py::b": ("passed", "")}
    assert summarize([here, there]) == (2, {}, [])
    assert summarize([there, here]) == (2, {}, [])


def test_a_test_that_failed_has_run() -> None:
    assert summarize([{"a.py::b": ("failed", "")}]) == (1, {}, [])


def test_a_test_that_ran_nowhere_is_reported_and_fails_unless_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {GPU: ["skipped", "Skipped: no NVIDIA GPU, or ..."], "a.py::b": ["passed", ""]}
    (tmp_path / "one.json").write_text(json.dumps(runs))
    assert main(tmp_path) == 0
    assert "for want of a GPU" in capsys.readouterr().out
    (tmp_path / "two.json").write_text(json.dumps({"a.py::c": ["skipped", "no chromium"]}))
    assert main(tmp_path) == 1
    assert "a.py::c: NOT ON THE LIST: no chromium" in capsys.readouterr().out


def test_no_run_at_all_is_no_success(tmp_path: Path) -> None:
    assert main(tmp_path) == 1


def test_a_reason_of_the_list_holds_for_its_tests_alone() -> None:
    assert find_allowed_skip(GPU, "no NVIDIA GPU") is not None
    assert find_allowed_skip("tests/engine/test_x.py::test_it", "no NVIDIA GPU") is None
    assert find_allowed_skip(GPU, "no chromium") is None


@pytest.mark.parametrize("lack", ALLOWED_SKIPS, ids=lambda lack: lack.missing)
def test_each_reason_of_the_list_is_one_that_a_test_gives(lack: AllowedSkip) -> None:
    """A list that names what no test says any more is one that nobody looks at."""
    root = Path(__file__).parents[1]
    texts = [path.read_text() for path in root.rglob("*.py") if path.name != "outcomes.py"]
    words = [word.strip("\\") for word in lack.reason.split("|")]
    assert any(word in text for word in words for text in texts), lack


def test_each_run_keeps_what_became_of_its_tests(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytester.makeconftest(
        "from tests.outcomes import record_outcomes\n"
        "def pytest_configure(config):\n"
        "    record_outcomes(config)\n"
    )
    pytester.makepyfile(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.skip(reason='no moon')\n"
        "def test_none(): pass\n"
        "@pytest.fixture\n"
        "def broken(): pytest.skip('no sun')\n"
        "def test_later(broken): pass\n"
    )
    root = Path(__file__).parents[2]
    monkeypatch.setenv("BATON_OUTCOMES", str(tmp_path / "kept"))
    monkeypatch.setenv("PYTHONPATH", str(root))
    pytester.runpytest_subprocess("-p", "no:cacheprovider")
    (kept,) = (tmp_path / "kept").glob("*.json")
    found = {name.partition("::")[2]: seen for name, seen in json.loads(kept.read_text()).items()}
    assert found["test_good"] == ["passed", ""]
    assert found["test_bad"] == ["failed", ""]
    assert found["test_none"] == ["skipped", "Skipped: no moon"]
    assert found["test_later"] == ["skipped", "Skipped: no sun"]
