"""`baton keys`: what it prints, and what it leaves in the file."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from baton.runtime.keys.key_files import load_ring, read_keys
from tests.cli.invoked import run_baton


def keys(*arguments: str | Path) -> Result:
    return run_baton("keys", *arguments)


def made(file: Path, *options: str) -> str:
    result = keys("create", "--tenant", "acme", "--file", file, *options)
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


def listed(file: Path) -> list[dict[str, Any]]:
    result = keys("list", "--file", file, "-o", "json")
    assert result.exit_code == 0, result.stderr
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "acme.keys"


def now() -> datetime:
    return datetime.now(UTC)


def test_a_new_key_is_alone_on_stdout_and_lets_its_tenant_in(file: Path) -> None:
    token = made(file, "--label", "ci job", "--expires", "90d")
    assert len(token.split()) == 1
    assert load_ring({"acme": file}).tenant_of(token, now()) == "acme"
    (row,) = listed(file)
    assert (row["tenant"], row["state"], row["label"]) == ("acme", "active", "ci job")
    lasts = read_keys(file)[0].expires_at
    assert lasts is not None
    assert abs(lasts - now() - timedelta(days=90)) < timedelta(minutes=1)


def test_a_secret_is_shown_once_and_kept_nowhere(file: Path) -> None:
    token = made(file)
    secret = token.rpartition("_")[2]
    (row,) = listed(file)
    for arguments in (["list", "--file", file], ["revoke", row["id"], "--file", file]):
        result = keys(*arguments)
        assert result.exit_code == 0
        assert secret not in result.stdout + result.stderr
    for kept in file.parent.iterdir():
        assert secret not in kept.read_text()


def test_a_revoked_key_stays_on_record(file: Path) -> None:
    token = made(file)
    (row,) = listed(file)
    assert keys("revoke", row["id"], "--file", file).exit_code == 0
    assert load_ring({"acme": file}).tenant_of(token, now()) is None
    assert [row["state"] for row in listed(file)] == ["revoked"]


def test_a_rotated_key_is_good_for_a_while_beside_its_successor(file: Path) -> None:
    old = made(file, "--label", "ci", "--expires", "10d")
    (row,) = listed(file)
    result = keys("rotate", row["id"], "--file", file, "--grace", "1h", "--json")
    assert result.exit_code == 0, result.stderr
    new = json.loads(result.stdout)["key"]
    ring = load_ring({"acme": file})
    assert ring.tenant_of(old, now()) == ring.tenant_of(new, now()) == "acme"
    later = now() + timedelta(hours=2)
    assert ring.tenant_of(old, later) is None
    assert ring.tenant_of(new, later) == "acme"
    first, second = listed(file)
    assert second["label"] == "ci"
    lasts = read_keys(file)[1].expires_at
    assert lasts is not None
    assert timedelta(days=9) < lasts - now() <= timedelta(days=10)
    assert first["expires"] < second["expires"]


def test_a_key_that_is_revoked_is_not_rotated_back_into_use(file: Path) -> None:
    made(file)
    (row,) = listed(file)
    keys("revoke", row["id"], "--file", file)
    result = keys("rotate", row["id"], "--file", file)
    assert result.exit_code == 1
    assert "revoked" in result.stderr
    assert len(listed(file)) == 1


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["create", "--tenant", "a b", "--file", "FILE"], "tenant"),
        (["create", "--tenant", "acme", "--file", "FILE", "--label", "x" * 101], "label"),
        (["create", "--tenant", "acme", "--file", "FILE", "--expires", "90"], "--expires"),
        (["create", "--tenant", "acme", "--file", "FILE", "--expires", "999999d"], "100 years"),
        (["revoke", "nosuch", "--file", "FILE"], "no key file"),
        (["list", "--file", "FILE"], "no key file"),
    ],
)
def test_an_impossible_operation_is_explained_and_leaves_no_key(
    file: Path, arguments: list[str], wanted: str
) -> None:
    result = keys(*(str(file) if word == "FILE" else word for word in arguments))
    assert result.exit_code in {1, 2}
    assert wanted in result.stderr
    assert not file.exists()
