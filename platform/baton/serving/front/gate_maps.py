"""Map entries for the gate before vLLM's Rust frontend.

Keys are mapped by their SHA-256, as they are stored: a valid one to the word of its tenant
(`rust_requests`), another one to its state. The map of rejected callers has the tenant's word,
alone or with a class, and the seconds to wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from baton.domain.names.retry_after import retry_after_seconds
from baton.runtime.keys.api_keys import InvalidKey, ValidKey

SEPARATOR = "~"
"""Between the words of a request's id, for `rust_requests`."""
SESSION_MARK = "+"
"""Before the session, behind the class; likewise."""
REJECTED_PREFIX = "!"
"""Before a bad key's state; in no tenant's word."""
_MAX_COMMAND_BYTES = 8000
"""HAProxy reads a command into a buffer of 16 KiB."""


def key_entries(
    keys: Mapping[str, ValidKey | InvalidKey], handles: Mapping[str, str]
) -> dict[str, str]:
    """The map of keys, by their digests; `handles` has the word of each tenant."""
    return {
        digest: handles[key.tenant]
        if isinstance(key, ValidKey)
        else f"{REJECTED_PREFIX}{key.state}"
        for digest, key in keys.items()
    }


def shed_entries(refused: Mapping[tuple[str, str | None], float]) -> dict[str, str]:
    """The map of rejected callers, by the tenant's word and the class.

    Class None: requests of any class; the empty class: requests that name none.
    """
    return {
        handle if slo_class is None else f"{handle}{SEPARATOR}{slo_class}": str(
            retry_after_seconds(retry_after_s)
        )
        for (handle, slo_class), retry_after_s in refused.items()
    }


def class_entries(allowed: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The map of permitted classes, from pairs of the tenant's word and a class."""
    return {f"{handle}{SEPARATOR}{slo_class}": "1" for handle, slo_class in allowed}


def state_entries(*, healthy: bool, anonymous: str | None, keys: bool) -> dict[str, str]:
    """The map of the gate's state.

    Args:
        healthy: Whether the fleet can serve.
        anonymous: The word for callers without a key; None: they are rejected.
        keys: Whether keys are checked; otherwise the gate ignores them.
    """
    entries = {"healthy": "1"} if healthy else {}
    if anonymous is not None:
        entries["anonymous"] = anonymous
    return entries | ({"keys": "1"} if keys else {})


def map_commands(path: Path, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    """Commands that change a map, each short enough for HAProxy.

    Deletions come first: a revoked key must not stay valid while new keys are written.
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
