"""A secret that was forgotten in a file fails the check."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import pytest

from baton.runtime.keys.api_keys import mint
from tests.repo.project import ROOT

SCRIPT = ROOT / "scripts" / "find-secrets"
RANDOM = "q8Zr2Lw7Kx0Vt5Bn3Mj9Hg4Fd6Sa1Pc8Yq2Wz7Ex0Rv5Tn3Ym9Ug4If6Oa1Lp8Kq2Jz7HB"
_, KEY = mint("acme", now=datetime(2026, 11, 20, tzinfo=UTC))


@pytest.fixture(scope="module")
def finder() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("find_secrets", str(SCRIPT))
    spec = importlib.util.spec_from_loader("find_secrets", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


PLANTED = {
    "a baton API key": KEY,
    "a private key": "-----BEGIN " + "OPENSSH PRIVATE KEY-----",
    "an AWS key id": "AKIA" + RANDOM.upper()[:16],
    "a GitHub token": "ghp_" + RANDOM[:36],
    "a Hugging Face token": "hf_" + RANDOM[:34],
    "an OpenAI or Anthropic key": "sk-ant-api03-" + RANDOM[:40],
    "a Google API key": "AIza" + RANDOM[:35],
    "a Slack token": "xoxb-" + RANDOM[:24],
    "an NVIDIA key": "nvapi-" + RANDOM[:64],
    "a PyPI token": "pypi-" + RANDOM[:64],
    "a JSON web token": f"eyJ{RANDOM[:20]}.eyJ{RANDOM[20:40]}.{RANDOM[40:60]}",
    "a password in an address": "postgres://admin:" + "hunter2hunter2" + "@db.example/x",
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_secret_is_found_on_its_line(finder: ModuleType, what: str) -> None:
    data = f"one\ntwo = '{PLANTED[what]}'\nthree\n".encode()
    assert list(finder.findings(data)) == [(2, what)]
    assert set(finder._KNOWN.values()) == set(PLANTED)


@pytest.mark.parametrize(
    "line", ["PASSWORD = '{}'", 'api_key: "{}"', '"hf_token": "{}"', "Secret-Key='{}'"]
)
def test_so_is_a_random_word_that_is_called_a_secret(finder: ModuleType, line: str) -> None:
    found = list(finder.findings(line.format(RANDOM[:28]).encode()))
    assert found == [(1, "a random word")]


@pytest.mark.parametrize(
    "line",
    [
        "token = 'the-quick-brown-fox-jumps-over'",
        "token = read(path)  # " + RANDOM[:28],
        "secret: {env: HF_TOKEN}",
        "url = 'http://127.0.0.1:8000/v1'",
        "sha256:" + "0123456789abcdef" * 4,
        "password = 'aaaaaaaaaaaaaaaaaaaa1111'",
    ],
)
def test_text_without_a_secret_is_no_finding(finder: ModuleType, line: str) -> None:
    assert list(finder.findings(line.encode())) == []


def test_a_line_may_say_that_it_is_none(finder: ModuleType) -> None:
    line = f"token = '{KEY}'  # {'not-a'}-secret: an example"
    assert list(finder.findings(line.encode())) == []


def test_the_check_fails_by_name_and_does_not_repeat_the_secret(tmp_path: Path) -> None:
    planted = tmp_path / "notes.md"
    planted.write_text(f"# notes\n\nthe key is {KEY}\n", encoding="utf-8")
    names = b"\0".join([bytes(planted), b"no/such/file", b""])
    done = subprocess.run(
        [sys.executable, SCRIPT], input=names, capture_output=True, check=False, timeout=30
    )
    assert done.returncode == 1
    assert f"{planted}:3: looks like a baton API key" in done.stdout.decode()
    assert KEY not in done.stdout.decode()
    planted.write_text("nothing here\n", encoding="utf-8")
    clean = subprocess.run([sys.executable, SCRIPT], input=names, check=False, timeout=30)
    assert clean.returncode == 0
