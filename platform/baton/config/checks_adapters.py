"""What no single key shows of LoRA adapters: names that are taken, room that contradicts itself."""

from __future__ import annotations

from collections.abc import Iterator

from baton.config.schema_adapters import AdapterSlots
from baton.config.seen import Seen
from baton.config.tree import Finding

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM makes room for. Source: vLLM 0.32, config/lora.py, `MaxLoRARanks`."""


def check_adapters(seen: Seen) -> Iterator[Finding]:
    """Everything that is wrong between keys of adapters."""
    taken = {name: f"model {name!r}" for name in seen.model_names}
    for model_name, model in seen.models().items():
        for name in model.adapters:
            if name in taken:
                what = f"the name is taken by {taken[name]}, wanted another: requests go by it"
                yield seen.wrong(("models", model_name, "adapters", name), what)
            taken.setdefault(name, f"an adapter of model {model_name!r}")
    owners = [("models", name) for name in seen.model_names]
    owners += [("pools", name) for name in seen.pool_names]
    for owner in owners:
        path = (*owner, "engine", "adapters")
        slots = seen.get(AdapterSlots, *path)
        if slots is None:
            continue
        if slots.max_loaded < slots.max_batched:
            what = f"got {slots.max_loaded}, wanted at least max_batched, {slots.max_batched}"
            yield seen.wrong((*path, "max_loaded"), what)
        if slots.max_rank not in RANKS:
            wanted = ", ".join(map(str, RANKS))
            yield seen.wrong((*path, "max_rank"), f"got {slots.max_rank}, wanted one of {wanted}")
