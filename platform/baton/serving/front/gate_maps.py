"""What the gate before vLLM's Rust frontend is told while it runs: entries of HAProxy's maps.

Keys are in one map by their SHA-256, as they are kept at rest. The value of one that is good is the
word for its tenant (`rust_identity`), of another why it is not. Who is refused for now is in a map
of its own, by the word for the tenant or by that and a class; the value is when to come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from baton.domain.names.retry_after import retry_after_seconds
from baton.runtime.keys.api_keys import InvalidKey, ValidKey

SEPARATOR = "~"
"""Between the words of a request's id; as `rust_identity` reads it."""
SESSION_MARK = "+"
"""Before the session, behind the class; likewise."""
REJECTED_PREFIX = "!"
"""Before why a key is not good; in no word for a tenant."""
_MAX_COMMAND_BYTES = 8000
"""HAProxy reads a command into a buffer of 16 KiB."""


def key_entries(
    keys: Mapping[str, ValidKey | InvalidKey], handles: Mapping[str, str]
) -> dict[str, str]:
    """The map of keys, by their digests; `handles` has a word for each of their tenants."""
    return {
        digest: handles[key.tenant]
        if isinstance(key, ValidKey)
        else f"{REJECTED_PREFIX}{key.state}"
        for digest, key in keys.items()
    }


def shed_entries(refused: Mapping[tuple[str, str | None], float]) -> dict[str, str]:
    """The map of who is refused, by the word for the tenant and the class.

    Without a class at all (None): whoever it asks for; with the empty one: who asks for none.
    """
    return {
        handle if slo_class is None else f"{handle}{SEPARATOR}{slo_class}": str(
            retry_after_seconds(retry_after_s)
        )
        for (handle, slo_class), retry_after_s in refused.items()
    }


def class_entries(allowed: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The map of who may ask for which class: the word for the tenant, and the class."""
    return {f"{handle}{SEPARATOR}{slo_class}": "1" for handle, slo_class in allowed}


def state_entries(*, healthy: bool, anonymous: str | None, keys: bool) -> dict[str, str]:
    """The map of the rest.

    Args:
        healthy: Whether the fleet can serve.
        anonymous: The word for callers without a key; None: they are refused.
        keys: Whether keys are looked at; without, what a caller sends as one is passed over.
    """
    entries = {"healthy": "1"} if healthy else {}
    if anonymous is not None:
        entries["anonymous"] = anonymous
    return entries | ({"keys": "1"} if keys else {})


def map_commands(path: Path, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    """Commands that make a map what it should be, each short enough to be read.

    What is taken away goes first: a revoked key is not good for as long as new ones are written.
    """
    deletions = [f"del map {path} {key}" for key in old if key not in new]
    updates = [
        f"{'set' if key in old else 'add'} map {path} {key} {value}"
        for key, value in new.items()
        if old.get(key) != value
    ]
    batch: list[str] = []
    batch_bytes = 0
    for command in (*deletions, *updates):
        if batch_bytes + len(command) > _MAX_COMMAND_BYTES:
            yield "; ".join(batch)
            batch, batch_bytes = [], 0
        batch.append(command)
        batch_bytes += len(command) + 2
    if batch:
        yield "; ".join(batch)
