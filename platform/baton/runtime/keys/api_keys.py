"""API keys: format, stored form, and lookup of a key's tenant.

A key is `bt_<id>_<secret>`. Lists and logs show the id. The secret has 256 random bits, so a plain
SHA-256 of the key is stored. A slow hash protects only secrets that can be guessed, and would let
wrong keys keep a server busy.

A key file holds one key a line, with wall-clock times:

    k3v9q2m7xa  sha256:9f86d0...  acme  2026-11-20T21:00:00Z  expires=2027-02-18T21:00:00Z  # ci
    p7ke4c9wzd  sha256:2c26b4...  ops  2026-11-20T21:00:00Z  may=administer
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

KEY_PREFIX = "bt_"
"""Marks a key of baton, also for scanners of leaked secrets."""
MAX_LABEL_CHARS = 100
_ID_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
_ID_CHARS = 10
_SECRET_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # noqa: S105 - an alphabet, not-a-secret
# 62^43 > 2^256.
_SECRET_CHARS = 43
# Longer keys are none of ours and are not even hashed.
_MAX_TOKEN_CHARS = 128
_DIGEST_PREFIX = "sha256:"
_MAY_ADMINISTER = "may=administer"
_OPTIONAL = f"[expires=TIME] [revoked=TIME] [{_MAY_ADMINISTER}]"
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
_ID = re.compile(r"[a-z0-9]{4,32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TENANT = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


class KeyState(StrEnum):
    """The validity of a key."""

    ACTIVE = "active"
    EXPIRED = "expired"
    REVOKED = "revoked"


class BadKeyLine(ValueError):
    """A line of a key file cannot be read. The text never repeats what might be a secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """The stored form of a key: enough to check a token, not to make it."""

    key_id: str
    digest: str
    """SHA-256 of the token, in hex."""
    tenant: str
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    label: str = ""
    is_admin: bool = False
    """Whether it may also change the served models."""

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.key_id):
            raise BadKeyLine("its id is no id, expected 4 to 32 lower-case letters and digits")
        if not _DIGEST.fullmatch(self.digest):
            raise BadKeyLine(f"key {self.key_id}: expected {_DIGEST_PREFIX} and 64 hex digits")
        if not _TENANT.fullmatch(self.tenant):
            raise BadKeyLine(
                f"key {self.key_id}: its tenant is no name, expected at most 64 letters, digits,"
                " '.', '_' and '-'"
            )
        if len(self.label) > MAX_LABEL_CHARS or not self.label.isprintable():
            raise BadKeyLine(
                f"key {self.key_id}: expected a label of at most {MAX_LABEL_CHARS} printable"
                " characters"
            )

    def state(self, now: datetime) -> KeyState:
        """The validity at `now`."""
        if self.revoked_at is not None:
            return KeyState.REVOKED
        if self.expires_at is not None and now >= self.expires_at:
            return KeyState.EXPIRED
        return KeyState.ACTIVE

    def format_line(self) -> str:
        """Its line in a key file."""
        fields = [
            self.key_id,
            _DIGEST_PREFIX + self.digest,
            self.tenant,
            format_time(self.created_at),
        ]
        if self.expires_at is not None:
            fields.append(f"expires={format_time(self.expires_at)}")
        if self.revoked_at is not None:
            fields.append(f"revoked={format_time(self.revoked_at)}")
        if self.is_admin:
            fields.append(_MAY_ADMINISTER)
        text = "  ".join(fields)
        return f"{text}  # {self.label}" if self.label else text


def mint(
    tenant: str,
    *,
    now: datetime,
    expires_at: datetime | None = None,
    label: str = "",
    is_admin: bool = False,
    choose_char: Callable[[str], str] = secrets.choice,
) -> tuple[ApiKey, str]:
    """A new key: its stored form, and its token, which is kept nowhere.

    Raises:
        BadKeyLine: the tenant or the label cannot be written into a line.
    """
    key_id = "".join(choose_char(_ID_ALPHABET) for _ in range(_ID_CHARS))
    secret = "".join(choose_char(_SECRET_ALPHABET) for _ in range(_SECRET_CHARS))
    token = f"{KEY_PREFIX}{key_id}_{secret}"
    key = ApiKey(
        key_id=key_id,
        digest=_digest(token),
        tenant=tenant,
        created_at=now,
        expires_at=expires_at,
        label=label.strip(),
        is_admin=is_admin,
    )
    return key, token


def parse_line(line: str) -> ApiKey | None:
    """The key in a line of a key file; None when it is empty or a comment.

    Raises:
        BadKeyLine: it is neither.
    """
    text, _, label = line.partition("#")
    if not text.strip():
        return None
    words = text.split()
    if len(words) < 4 or not words[1].startswith(_DIGEST_PREFIX):  # noqa: PLR2004
        raise BadKeyLine(f"expected: id sha256:HEX tenant created {_OPTIONAL}")
    key_id, digest, tenant, created, *optional_words = words
    times = _parse_optional_times([word for word in optional_words if word != _MAY_ADMINISTER])
    return ApiKey(
        key_id=key_id,
        digest=digest.removeprefix(_DIGEST_PREFIX),
        tenant=tenant,
        created_at=_parse_time(created),
        expires_at=times.get("expires"),
        revoked_at=times.get("revoked"),
        label=label.strip(),
        is_admin=_MAY_ADMINISTER in optional_words,
    )


def format_time(moment: datetime) -> str:
    """A time as key files have it: UTC, to the second."""
    return moment.astimezone(UTC).strftime(_TIME_FORMAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidKey:
    """A valid key and its owner."""

    key_id: str
    tenant: str
    is_admin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidKey:
    """An invalid key. Only a caller with its secret learns the reason."""

    state: KeyState | None = None
    key_id: str | None = None
    """Of an expired or revoked key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantKeys:
    """The keys of one tenant."""

    valid: int
    """Of them are valid now."""
    expires_s: float | None = None
    """Until the last one expires that is not revoked; below 0: it has. None if one never does, or
    all are revoked."""


class KeyRing:
    """The keys of a deployment at one moment; immutable."""

    __slots__ = ("_by_id",)

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._by_id: Mapping[str, tuple[ApiKey, bytes]] = {
            key.key_id: (key, key.digest.encode()) for key in keys
        }

    def __len__(self) -> int:
        return len(self._by_id)

    def look_up(self, token: str, now: datetime) -> ValidKey | InvalidKey:
        """The key of `token`; takes as long for unknown ids."""
        if len(token) > _MAX_TOKEN_CHARS:
            return InvalidKey()
        key_id, _, _ = token.removeprefix(KEY_PREFIX).partition("_")
        key, digest = self._by_id.get(key_id, (None, _DUMMY_DIGEST))
        # The compared value is a hash, whose first bytes no caller can choose; in constant time all
        # the same.
        matches = hmac.compare_digest(_digest(token).encode(), digest)
        if key is None or not matches:
            return InvalidKey()
        state = key.state(now)
        if state is not KeyState.ACTIVE:
            return InvalidKey(state=state, key_id=key_id)
        return ValidKey(key_id=key_id, tenant=key.tenant, is_admin=key.is_admin)

    def by_digest(self, now: datetime) -> dict[str, ValidKey | InvalidKey]:
        """The validity of each key, by its digest."""
        results: dict[str, ValidKey | InvalidKey] = {}
        for key_id, (key, _digest) in self._by_id.items():
            state = key.state(now)
            if state is KeyState.ACTIVE:
                results[key.digest] = ValidKey(key_id=key_id, tenant=key.tenant)
            else:
                results[key.digest] = InvalidKey(state=state, key_id=key_id)
        return results

    def by_tenant(self, now: datetime) -> dict[str, TenantKeys]:
        """The valid keys of each tenant that has any key."""
        keys: dict[str, list[ApiKey]] = {}
        for key, _digest in self._by_id.values():
            keys.setdefault(key.tenant, []).append(key)
        return {
            tenant: TenantKeys(
                valid=sum(key.state(now) is KeyState.ACTIVE for key in tenant_keys),
                expires_s=_last_expiry_s(tenant_keys, now),
            )
            for tenant, tenant_keys in sorted(keys.items())
        }

    def tenant_of(self, token: str, now: datetime) -> str | None:
        """The tenant of a valid token, or None."""
        result = self.look_up(token, now)
        return result.tenant if isinstance(result, ValidKey) else None


def _last_expiry_s(keys: Iterable[ApiKey], now: datetime) -> float | None:
    """See `TenantKeys.expires_s`."""
    expiries = [key.expires_at for key in keys if key.revoked_at is None]
    if not expiries or None in expiries:
        return None
    return max((at - now).total_seconds() for at in expiries if at is not None)


_DUMMY_DIGEST = b"0" * 64


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _parse_optional_times(words: Iterable[str]) -> dict[str, datetime]:
    times: dict[str, datetime] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in {"expires", "revoked"} or name in times:
            raise BadKeyLine(f"after the time of creation expected {_OPTIONAL}, each once")
        times[name] = _parse_time(value)
    return times


def _parse_time(text: str) -> datetime:
    message = "expected a time such as 2026-11-20T21:00:00Z"
    if not _TIME.fullmatch(text):
        raise BadKeyLine(message)
    try:
        return datetime.strptime(text, _TIME_FORMAT).replace(tzinfo=UTC)
    except ValueError as error:
        raise BadKeyLine(message) from error
