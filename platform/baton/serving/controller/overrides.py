"""An operator's overrides as they are kept: they outlive the controller that was told of them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from baton.control.autoscaling.autoscaler import Override

Overrides = Mapping[str, Override]
"""By pool."""


def encode(overrides: Overrides, *, now_s: float, wall_s: float) -> bytes:
    """As bytes that another process can read: their ends are in seconds since 1970.

    A monotonic clock means nothing to another process. A wall clock that jumps in between shortens
    or lengthens an override; a running controller never looks at it.
    """
    rows = {
        pool: {
            "replicas": override.replicas,
            "until": None if override.until_s is None else wall_s + override.until_s - now_s,
        }
        for pool, override in sorted(overrides.items())
    }
    return json.dumps(rows).encode()


def decode(data: bytes | None, *, now_s: float, wall_s: float) -> dict[str, Override]:
    """What `encode` has written, also what has run out meanwhile; nothing for no bytes.

    Raises:
        ValueError: it was not written by `encode`.
    """
    if data is None:
        return {}
    try:
        rows = json.loads(data)
        return {
            str(pool): Override(
                replicas=int(row["replicas"]),
                until_s=None if row["until"] is None else now_s + float(row["until"]) - wall_s,
            )
            for pool, row in rows.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"scaling overrides cannot be read: {data[:200]!r}") from error
