"""Checks of the files of a LoRA adapter, before an engine needs it.

This imports no vendor's package, so that simulated engines check the same as real engines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from baton.control.fleet.adapter_registry import AdapterRejection

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_MAX_CONFIG_BYTES = 1024 * 1024


def adapter_refusal(
    folder: str, *, max_rank: int, allowed_roots: Sequence[str] = ("/",)
) -> AdapterRejection | None:
    """Why the adapter in a folder cannot be served from this machine; blocks on the disk.

    Args:
        folder: Its path.
        max_rank: The highest rank that engines allow.
        allowed_roots: Its real path, after links, must be in one of these.
    """
    path = Path(folder)
    if not path.is_dir():
        return AdapterRejection(
            status=404, reason=f"No adapter found for {folder!r}: no such folder"
        )
    resolved = path.resolve()
    if not any(
        resolved.is_relative_to(Path(allowed_root).resolve())
        for allowed_root in allowed_roots
        if allowed_root.startswith("/")
    ):
        return AdapterRejection(
            status=403, reason=f"{folder!r} leads out of the places that are allowed"
        )
    try:
        config = _read_config(path / _CONFIG)
    except (OSError, ValueError) as error:
        return AdapterRejection(status=400, reason=f"{folder}/{_CONFIG} cannot be read: {error}")
    if not any((path / name).is_file() for name in _WEIGHTS):
        expected_files = " or ".join(_WEIGHTS)
        return AdapterRejection(
            status=400, reason=f"{folder} has no weights, expected {expected_files}"
        )
    reason = _config_problem(config, max_rank)
    return None if reason is None else AdapterRejection(status=400, reason=f"{folder}: {reason}")


def _read_config(path: Path) -> dict[str, object]:
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ValueError(f"it has more than {_MAX_CONFIG_BYTES} bytes")
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - as for invalid JSON
    return config


def _config_problem(config: dict[str, object], max_rank: int) -> str | None:
    """The setting of an adapter that no engine supports, as in vLLM's own check."""
    pattern = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [pattern])]
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        return f"its rank 'r' is {ranks[0]!r}, expected a number above 0"
    rank = max(other for other in ranks if isinstance(other, int))
    if rank > max_rank:
        return f"its rank is {rank}, engines have room for {max_rank} (engine.adapters.max_rank)"
    if config.get("bias", "none") != "none":
        return f"its bias is {config['bias']!r}, expected 'none'"
    for key in ("modules_to_save", "use_dora"):
        if config.get(key):
            return f"it sets {key!r}, which engines do not take"
    return None
