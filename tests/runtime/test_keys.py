"""API keys: the ring, the files, and what happens while they change."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import random
import string
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.errors import ConfigInvalid, OperatorError
from baton.runtime.keys import key_files
from baton.runtime.keys.api_keys import (
    KEY_PREFIX,
    ApiKey,
    BadKeyLine,
    InvalidKey,
    KeyRing,
    KeyState,
    TenantKeys,
    ValidKey,
    mint,
    parse_line,
)
from baton.runtime.keys.key_files import KeyFiles, edit_key_file, load_ring, read_keys, read_lines

NOW = datetime(2026, 11, 20, 21, 0, 0, tzinfo=UTC)
DAY = timedelta(days=1)
moments = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)).map(  # noqa: DTZ001
    lambda moment: moment.replace(microsecond=0, tzinfo=UTC)
)
tenants = st.from_regex(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?", fullmatch=True)
labels = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=20)
keys = st.builds(
    ApiKey,
    key_id=st.from_regex(r"[a-z0-9]{4,32}", fullmatch=True),
    digest=st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    tenant=tenants,
    created_at=moments,
    expires_at=st.none() | moments,
    revoked_at=st.none() | moments,
    label=labels,
)


def put(path: Path, *made: ApiKey) -> None:
    path.write_text("".join(f"{key.format_line()}\n" for key in made))


def test_the_last_expiry_of_a_tenant_is_that_of_its_last_key_that_is_not_revoked() -> None:
    soon, _ = mint("acme", now=NOW, expires_at=NOW + DAY)
    later, _ = mint("acme", now=NOW, expires_at=NOW + 9 * DAY)
    forever, _ = mint("beta", now=NOW)
    over, _ = mint("late", now=NOW, expires_at=NOW - DAY)
    revoked = replace(forever, key_id="revoked9", tenant="late", revoked_at=NOW)
    assert KeyRing([soon, later, forever, over, revoked]).by_tenant(NOW) == {
        "acme": TenantKeys(valid=2, expires_s=9 * 86_400.0),
        "beta": TenantKeys(valid=1, expires_s=None),
        "late": TenantKeys(valid=0, expires_s=-86_400.0),
    }


@given(key=keys)
@settings(max_examples=40)
def test_a_key_is_read_from_its_line_as_it_was_written(key: ApiKey) -> None:
    assert parse_line(key.format_line()) == key


@pytest.mark.parametrize("line", ["", "   ", "# a comment", "  # sha256:x"])
def test_empty_lines_and_comments_are_no_keys(line: str) -> None:
    assert parse_line(line) is None


DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("bt_k3v9q2m7xa_secretsecret", "expected: id sha256:HEX"),
        (f"k3v9 md5:{'a' * 64} acme 2026-11-20T21:00:00Z", "expected: id sha256:HEX"),
        (f"k3v9 {DIGEST}", "expected: id sha256:HEX"),
        ("k3v9 sha256:abc acme 2026-11-20T21:00:00Z", "64 hex digits"),
        (f"K3 {DIGEST} acme 2026-11-20T21:00:00Z", "4 to 32"),
        (f"k3v9 {DIGEST} a/b 2026-11-20T21:00:00Z", "tenant"),
        (f"k3v9 {DIGEST} acme yesterday", "2026-11-20T21:00:00Z"),
        (f"k3v9 {DIGEST} acme 2026-13-20T21:00:00Z", "2026-11-20T21:00:00Z"),
        (f"k3v9 {DIGEST} acme 2026-11-20T21:00:00+01:00", "2026-11-20T21:00:00Z"),
        (f"k3v9 {DIGEST} acme 2026-11-20T21:00:00Z until=x", "expires=TIME"),
        (
            f"k3v9 {DIGEST} acme 2026-11-20T21:00:00Z"
            " expires=2026-11-20T21:00:00Z expires=2026-11-20T21:00:00Z",
            "once",
        ),
        (f"k3v9 {DIGEST} acme 2026-11-20T21:00:00Z # {'x' * 101}", "label"),
        (f"k3v9 {DIGEST} acme 2026-11-20T21:00:00Z # a\x1bb", "label"),
    ],
)
def test_a_bad_line_is_refused_and_its_text_is_not_repeated(line: str, wanted: str) -> None:
    with pytest.raises(BadKeyLine, match=wanted) as refused:
        parse_line(line)
    assert "secretsecret" not in str(refused.value)


def test_a_key_is_made_of_more_than_256_bits_and_kept_as_a_hash() -> None:
    key, token = mint("acme", now=NOW, label=" ci ")
    prefix, key_id, secret = token.split("_")
    assert (prefix + "_", key_id, key.label) == (KEY_PREFIX, key.key_id, "ci")
    assert len(secret) == 43
    assert set(secret) <= set(string.ascii_letters + string.digits)
    assert secret not in key.format_line()
    assert 62**43 > 2**256
    assert mint("acme", now=NOW)[1] != token


def test_a_key_is_known_by_all_of_it_and_by_nothing_else() -> None:
    key, token = mint("acme", now=NOW)
    other, other_token = mint("beta", now=NOW)
    ring = KeyRing([key, other])
    assert ring.look_up(token, NOW) == ValidKey(key_id=key.key_id, tenant="acme")
    assert ring.tenant_of(other_token, NOW) == "beta"
    mixed = f"{KEY_PREFIX}{key.key_id}_{other_token.rpartition('_')[2]}"
    for wrong in (
        mixed,
        token[:-1],
        token + "x",
        token.upper(),
        f" {token}",
        token.removeprefix(KEY_PREFIX),
        key.digest,
        f"{KEY_PREFIX}{key.key_id}_",
        KEY_PREFIX,
        "",
        "\ud800",
        token + "x" * 10_000,
    ):
        assert ring.look_up(wrong, NOW) == InvalidKey(), wrong
        assert ring.tenant_of(wrong, NOW) is None


def test_an_empty_ring_accepts_no_key_not_even_its_placeholder_hash() -> None:
    ring = KeyRing()
    assert len(ring) == 0
    assert ring.look_up("0" * 64, NOW) == InvalidKey()


def test_every_check_hashes_and_compares_whether_the_id_is_known_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted rather than timed: what takes the time is done for unknown ids, too."""
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    key, token = mint("acme", now=NOW)
    ring = KeyRing([key])
    monkeypatch.setattr(hmac, "compare_digest", counting)
    for shown in (
        token,
        f"{KEY_PREFIX}{key.key_id}_wrong",
        f"{KEY_PREFIX}nosuchkey0_wrong",
        "EMPTY",
    ):
        compared.clear()
        ring.look_up(shown, NOW)
        ((one, other),) = compared
        assert len(one) == len(other) == 64


@given(expires=st.none() | st.integers(-3, 3), revoked=st.none() | st.integers(-3, 3))
def test_a_key_is_good_until_it_expires_or_is_revoked(
    expires: int | None, revoked: int | None
) -> None:
    key, token = mint("acme", now=NOW)
    key = replace(
        key,
        expires_at=None if expires is None else NOW + expires * DAY,
        revoked_at=None if revoked is None else NOW + revoked * DAY,
    )
    found = KeyRing([key]).look_up(token, NOW)
    if revoked is not None:
        assert found == InvalidKey(state=KeyState.REVOKED, key_id=key.key_id)
    elif expires is not None and expires <= 0:
        assert found == InvalidKey(state=KeyState.EXPIRED, key_id=key.key_id)
    else:
        assert found == ValidKey(key_id=key.key_id, tenant="acme")


def test_validity_of_keys_is_known_by_their_digests() -> None:
    good, token = mint("acme", now=NOW)
    bad = replace(mint("acme", now=NOW)[0], revoked_at=NOW)
    found = KeyRing([good, bad]).by_digest(NOW)
    assert found == {
        hashlib.sha256(token.encode()).hexdigest(): ValidKey(key_id=good.key_id, tenant="acme"),
        bad.digest: InvalidKey(state=KeyState.REVOKED, key_id=bad.key_id),
    }


def test_ten_thousand_wrong_keys_leave_nothing_behind() -> None:
    key, _ = mint("acme", now=NOW)
    ring = KeyRing([key])
    rng = random.Random(1)
    for _ in range(10_000):
        wrong = f"{KEY_PREFIX}{''.join(rng.choices(string.ascii_lowercase, k=10))}_x"
        assert ring.tenant_of(wrong, NOW) is None
    assert len(ring) == 1


# ------------------------------------------------------------------------------------------ files


def test_a_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "acme.keys"
    key, token = mint("acme", now=NOW)
    put(path, key)
    files = KeyFiles({"acme": path})
    assert files.ring.tenant_of(token, NOW) is None
    (notice,) = files.poll()
    assert (notice.keys, notice.reason) == (1, None)
    assert files.ring.tenant_of(token, NOW) == "acme"
    assert files.poll() == ()

    put(path, replace(key, revoked_at=NOW))
    assert len(files.poll()) == 1
    assert files.ring.look_up(token, NOW) == InvalidKey(state=KeyState.REVOKED, key_id=key.key_id)


def test_a_file_that_is_replaced_within_one_tick_of_its_clock_is_read_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "acme.keys"
    (one, _), (other, token) = mint("acme", now=NOW), mint("acme", now=NOW)
    put(path, one)
    files = KeyFiles({"acme": path})
    files.poll()
    times = path.stat()
    new = tmp_path / "new"
    put(new, other)
    assert new.stat().st_size == times.st_size
    os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))
    new.replace(path)
    files.poll()
    assert files.ring.tenant_of(token, NOW) == "acme"


def test_a_poll_under_way_brings_no_key_back_of_a_tenant_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acme, beta = tmp_path / "acme.keys", tmp_path / "beta.keys"
    (key, token), (other, _) = mint("acme", now=NOW), mint("beta", now=NOW)
    put(acme, key)
    put(beta, other)
    files = KeyFiles({"acme": acme, "beta": beta})
    begun, go_on = threading.Event(), threading.Event()

    def slow(found: Iterator[ApiKey]) -> KeyRing:
        ring = KeyRing(found)
        if threading.current_thread() is polling:
            begun.set()
            assert go_on.wait(10)
        return ring

    monkeypatch.setattr(key_files, "KeyRing", slow)
    polling = threading.Thread(target=files.poll)
    polling.start()
    assert begun.wait(10)
    watching = threading.Thread(target=files.watch, args=({"beta": beta},))
    watching.start()
    watching.join(0.1)  # it is over by then, or waits for the ring that is being made
    go_on.set()
    for thread in (polling, watching):
        thread.join(10)
    assert files.ring.tenant_of(token, NOW) is None


def _break(path: Path) -> None:
    path.write_text("nonsense\n")


def _empty_line_and_twice(path: Path) -> None:
    path.write_text(path.read_text() * 2)


def _remove(path: Path) -> None:
    path.unlink()


def _huge(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(key_files.MAX_FILE_BYTES + 1)


@pytest.mark.parametrize("harm", [_break, _empty_line_and_twice, _remove, _huge])
def test_a_broken_file_keeps_its_last_good_keys_and_is_said_once(
    harm: Callable[[Path], None], tmp_path: Path
) -> None:
    path, other = tmp_path / "acme.keys", tmp_path / "beta.keys"
    (key, token), (late, late_token) = mint("acme", now=NOW), mint("beta", now=NOW)
    put(path, key)
    put(other)
    files = KeyFiles({"acme": path, "beta": other})
    files.poll()
    harm(path)
    put(other, late)
    notices = {notice.path: notice for notice in files.poll()}
    assert notices[str(path)].reason is not None
    assert str(path) in str(notices[str(path)].reason)
    assert files.ring.tenant_of(token, NOW) == "acme"
    assert files.ring.tenant_of(late_token, NOW) == "beta"
    assert files.poll() == ()

    path.unlink(missing_ok=True)
    put(path, replace(key, revoked_at=NOW))
    assert [notice.reason for notice in files.poll()] == [None]
    assert files.ring.tenant_of(token, NOW) is None


def test_a_file_that_is_mended_as_it_was_is_said_to_be_good_again(tmp_path: Path) -> None:
    path = tmp_path / "acme.keys"
    key, _ = mint("acme", now=NOW)
    put(path, key)
    files = KeyFiles({"acme": path})
    files.poll()
    _break(path)
    files.poll()
    put(path, key)
    assert [notice.reason for notice in files.poll()] == [None]


def test_a_file_that_was_away_is_read_again_though_it_has_not_changed(tmp_path: Path) -> None:
    """As with one whose permissions were taken away for a while: nothing of it tells."""
    path, away = tmp_path / "acme.keys", tmp_path / "away"
    key, _ = mint("acme", now=NOW)
    put(path, key)
    files = KeyFiles({"acme": path})
    files.poll()
    path.rename(away)
    assert [notice.reason is None for notice in files.poll()] == [False]
    away.rename(path)
    assert [notice.reason for notice in files.poll()] == [None]


def test_a_repeated_error_is_reported_again(tmp_path: Path) -> None:
    path = tmp_path / "acme.keys"
    files = KeyFiles({"acme": path})
    key, _ = mint("acme", now=NOW)
    for _ in range(2):
        _break(path)
        assert [notice.reason is None for notice in files.poll()] == [False]
        put(path, key)
        assert [notice.reason for notice in files.poll()] == [None]


def test_a_key_of_a_tenant_outside_the_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "acme.keys"
    key, token = mint("beta", now=NOW)
    put(path, key)
    files = KeyFiles({"acme": path})
    (notice,) = files.poll()
    assert "of tenant 'beta', expected 'acme'" in str(notice.reason)
    assert files.ring.tenant_of(token, NOW) is None
    files.watch({"acme": path, "beta": path})
    files.poll()
    assert files.ring.tenant_of(token, NOW) == "beta"


def test_a_key_that_is_in_two_files_counts_where_it_was_until_it_has_moved(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    key, token = mint("acme", now=NOW)
    moved = replace(key, tenant="beta")
    put(one, key)
    put(other)
    files = KeyFiles({"beta": other, "acme": one})
    files.poll()
    put(other, moved)
    (notice,) = files.poll()
    assert key.key_id in str(notice.reason)
    assert files.ring.tenant_of(token, NOW) == "acme"
    put(one)
    files.poll()
    files.poll()
    assert files.ring.tenant_of(token, NOW) == "beta"


def test_keys_of_a_tenant_that_is_no_longer_configured_stop_at_once(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    made = {name: mint(name, now=NOW) for name in ("acme", "beta", "gamma")}
    put(shared, made["acme"][0], made["beta"][0])
    put(own, made["gamma"][0])
    files = KeyFiles({"acme": shared, "beta": shared, "gamma": own})
    files.poll()
    files.watch({"acme": shared, "gamma": own})

    def let_in() -> dict[str, str | None]:
        return {name: files.ring.tenant_of(token, NOW) for name, (_, token) in made.items()}

    assert let_in() == {"acme": "acme", "beta": None, "gamma": "gamma"}
    files.poll()
    assert let_in() == {"acme": "acme", "beta": None, "gamma": "gamma"}
    files.watch({})
    assert set(let_in().values()) == {None}


def test_loading_names_everything_that_is_wrong(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    key, token = mint("acme", now=NOW)
    put(good, key)
    bad.write_text(f"\n{key.format_line()}\nx\n# fine\ny z\n")
    assert load_ring({"acme": good}).tenant_of(token, NOW) == "acme"
    with pytest.raises(ConfigInvalid) as refused:
        load_ring({"acme": good, "beta": bad, "gamma": tmp_path / "none"})
    lines = str(refused.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        f"{bad}:3",
        f"{bad}:5",
        str(tmp_path / "none"),
    ]


def test_comments_stay_where_they_are_and_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "acme.keys"
    first, _ = mint("acme", now=NOW)
    second, _ = mint("acme", now=NOW)
    with edit_key_file(path, create=True) as document:
        document.add(first)
    path.write_text(f"# of the ci\n{path.read_text()}\n# the end\n")
    path.chmod(0o644)
    with edit_key_file(path) as document:
        document.add(second)
        document.revoke(first.key_id, NOW)
    revoked = replace(first, revoked_at=NOW)
    assert read_lines(path) == ["# of the ci", revoked, "", "# the end", second]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert sorted(file.name for file in path.parent.iterdir()) == ["acme.keys", "acme.keys.lock"]


def test_a_change_that_fails_halfway_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "acme.keys"
    key, _ = mint("acme", now=NOW)
    put(path, key)
    before = path.stat()

    def revoke(*key_ids: str) -> None:
        with edit_key_file(path) as document:
            for key_id in key_ids:
                document.revoke(key_id, NOW)

    with pytest.raises(OperatorError, match="nosuch"):
        revoke(key.key_id, "nosuch")
    assert read_keys(path) == (key,)
    with pytest.raises(OperatorError, match="already"), edit_key_file(path) as document:
        document.add(key)
    with edit_key_file(path) as document:
        document.expire(key.key_id, NOW + DAY)
    assert path.stat().st_ino != before.st_ino
    unchanged = path.stat()
    with edit_key_file(path) as document:
        document.expire(key.key_id, NOW + 2 * DAY)
    assert path.stat().st_ino == unchanged.st_ino
    assert read_keys(path)[0].expires_at == NOW + DAY


def test_revoking_twice_keeps_the_first_time(tmp_path: Path) -> None:
    path = tmp_path / "acme.keys"
    key, _ = mint("acme", now=NOW)
    put(path, key)
    for later in (NOW, NOW + DAY):
        with edit_key_file(path) as document:
            document.revoke(key.key_id, later)
    assert read_keys(path)[0].revoked_at == NOW


def test_a_file_that_is_a_link_stays_one(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    key, _ = mint("acme", now=NOW)
    put(real, key)
    link.symlink_to(real)
    with edit_key_file(link) as document:
        document.revoke(key.key_id, NOW)
    assert link.is_symlink()
    assert read_keys(real)[0].revoked_at == NOW


def test_two_concurrent_changes_of_a_file_both_hold(tmp_path: Path) -> None:
    path = tmp_path / "acme.keys"
    start = threading.Barrier(4)

    def add() -> None:
        start.wait(5)
        for _ in range(5):
            with edit_key_file(path, create=True) as document:
                document.add(mint("acme", now=NOW)[0])

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(read_keys(path)) == 20


def test_a_file_locked_by_another_process_is_waited_for_with_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_files, "_LOCK_WAIT_S", 0.0)
    path = tmp_path / "acme.keys"
    put(path)
    with (tmp_path / "acme.keys.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OperatorError, match="another process"), edit_key_file(path):
            raise AssertionError("nobody else may change it")


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "none"
    with pytest.raises(OperatorError, match="there is no key file"), edit_key_file(path):
        pass
    with pytest.raises(OperatorError, match="baton keys create"):
        read_keys(path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_bad_lines_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "acme.keys"
    path.write_text("nonsense\n")
    with pytest.raises(ConfigInvalid, match=r"acme\.keys:1"), edit_key_file(path):
        pass
    assert path.read_text() == "nonsense\n"


def test_a_key_that_may_administer_says_so_in_its_line_and_others_do_not() -> None:
    now = datetime(2026, 11, 20, 21, tzinfo=UTC)
    for administers in (True, False):
        key, token = mint("ops", now=now, is_admin=administers, label="deploys")
        assert parse_line(key.format_line()) == key
        assert ("may=administer" in key.format_line()) == administers
        found = KeyRing([key]).look_up(token, now)
        assert isinstance(found, ValidKey)
        assert found.is_admin == administers
