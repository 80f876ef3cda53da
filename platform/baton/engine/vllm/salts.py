"""What a cache salt is called outside the engine that uses it: long ones by a digest."""

from __future__ import annotations

from hashlib import sha256

MAX_SALT_CHARS = 256
"""Clients may choose salts of any length; the fleet link and the books carry short ones."""


def known_salt(cache_salt: str | None) -> str | None:
    """The name of a salt: itself, or a digest of one that is longer than `MAX_SALT_CHARS`.

    The engine hashes the salt as the client sent it, so two salts of one name, should anybody make
    them, share an entry in an index and never a block.
    """
    if cache_salt is None or len(cache_salt) <= MAX_SALT_CHARS:
        return cache_salt
    return f"sha256:{sha256(cache_salt.encode('utf-8', 'surrogatepass')).hexdigest()}"
