"""Cache salts: which prompts may share cached prefixes, and what a salt is called elsewhere.

A prompt finds only prefixes that were computed under the same salt. A tenant whose cache is its own
gets salts that no other caller can write: they begin with a word that is put in front of whatever
another client sends beginning with it. Inside, a client's own salt still tells prompts apart.
"""

from __future__ import annotations

from hashlib import sha256

MAX_SALT_CHARS = 256
"""Clients may choose salts of any length; the fleet link and the books carry short ones."""
_RESERVED_PREFIX = "baton:"


def scoped_salt(cache_scope: str | None, cache_salt: str | None) -> str | None:
    """The salt under which an engine computes a prompt. No two different arguments give the same.

    `cache_scope` is a tenant's name, which has no colon, or None for all who share.
    """
    if cache_scope is None:
        if cache_salt is None or not cache_salt.startswith(_RESERVED_PREFIX):
            return cache_salt
        return f"{_RESERVED_PREFIX}shared:{cache_salt}"
    if cache_salt is None:
        return f"{_RESERVED_PREFIX}tenant:{cache_scope}"
    return f"{_RESERVED_PREFIX}tenant:{cache_scope}:{cache_salt}"


def salt_name(cache_salt: str | None) -> str | None:
    """The name of a salt: itself, or a digest of one that is longer than `MAX_SALT_CHARS`.

    The engine hashes the salt as the client sent it, so two salts of one name, should anybody make
    them, share an entry in an index and never a block.
    """
    if cache_salt is None or len(cache_salt) <= MAX_SALT_CHARS:
        return cache_salt
    return f"sha256:{sha256(cache_salt.encode('utf-8', 'surrogatepass')).hexdigest()}"
