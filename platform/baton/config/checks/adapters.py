"""What no single key shows of LoRA adapters: names that are taken, room that contradicts itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

from baton.config.checks.check_context import Seen
from baton.config.language.tree import Finding
from baton.config.schema.adapters import AdapterSlots

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM makes room for. Source: vLLM 0.32, config/lora.py, `MaxLoRARanks`."""
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/")


def _check_runtime_adapters(seen: Seen) -> Iterator[Finding]:
    for model_name, model in seen.models().items():
        wanted, path = model.runtime_adapters, ("models", model_name, "runtime_adapters")
        if wanted.max and not wanted.paths:
            what = "got none, wanted the folders in which adapters lie; '/' stands for any"
            yield seen.wrong((*path, "paths"), what)
        for number, place in enumerate(wanted.paths or ()):
            if not place.startswith("/") and not _OWNER.fullmatch(place):
                what = f"got {place!r}, wanted an absolute path, or an owner on the hub as 'acme/'"
                yield seen.wrong((*path, "paths", str(number)), what)
        most = wanted.max_per_tenant
        if most is not None and most > wanted.max:
            what = f"got {most}, wanted at most max, {wanted.max}"
            yield seen.wrong((*path, "max_per_tenant"), what)


def check_adapters(seen: Seen) -> Iterator[Finding]:
    """Everything that is wrong between keys of adapters."""
    taken = {name: f"model {name!r}" for name in seen.model_names}
    for model_name, model in seen.models().items():
        for name in model.adapters:
            if name in taken:
                what = f"the name is taken by {taken[name]}, wanted another: requests go by it"
                yield seen.wrong(("models", model_name, "adapters", name), what)
            taken.setdefault(name, f"an adapter of model {model_name!r}")
    yield from _check_runtime_adapters(seen)
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
