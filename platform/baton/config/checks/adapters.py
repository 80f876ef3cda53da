"""What no single key shows of LoRA adapters: names that are taken, room that contradicts itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

from baton.config.checks.check_context import CheckContext
from baton.config.language.tree import Finding
from baton.config.schema.adapters import AdapterSlots

ALLOWED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM makes room for. Source: vLLM 0.32, config/lora.py, `MaxLoRARanks`."""
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/")


def _check_runtime_adapters(context: CheckContext) -> Iterator[Finding]:
    for model_name, model in context.models().items():
        adapters, path = model.runtime_adapters, ("models", model_name, "runtime_adapters")
        if adapters.max and not adapters.paths:
            message = "got none, wanted the folders in which adapters lie; '/' stands for any"
            yield context.finding((*path, "paths"), message)
        for index, adapter_path in enumerate(adapters.paths or ()):
            if not adapter_path.startswith("/") and not _OWNER.fullmatch(adapter_path):
                message = (
                    f"got {adapter_path!r}, wanted an absolute path, or an owner on the"
                    " hub as 'acme/'"
                )
                yield context.finding((*path, "paths", str(index)), message)
        max_per_tenant = adapters.max_per_tenant
        if max_per_tenant is not None and max_per_tenant > adapters.max:
            message = f"got {max_per_tenant}, wanted at most max, {adapters.max}"
            yield context.finding((*path, "max_per_tenant"), message)


def check_adapters(context: CheckContext) -> Iterator[Finding]:
    """Everything that is wrong between keys of adapters."""
    owner_of_name = {name: f"model {name!r}" for name in context.model_names}
    for model_name, model in context.models().items():
        for name in model.adapters:
            if name in owner_of_name:
                message = (
                    f"the name is taken by {owner_of_name[name]}, wanted another: requests go by it"
                )
                yield context.finding(("models", model_name, "adapters", name), message)
            owner_of_name.setdefault(name, f"an adapter of model {model_name!r}")
    yield from _check_runtime_adapters(context)
    owners = [("models", name) for name in context.model_names]
    owners += [("pools", name) for name in context.pool_names]
    for owner in owners:
        path = (*owner, "engine", "adapters")
        slots = context.get(AdapterSlots, *path)
        if slots is None:
            continue
        if slots.max_loaded < slots.max_batched:
            message = f"got {slots.max_loaded}, wanted at least max_batched, {slots.max_batched}"
            yield context.finding((*path, "max_loaded"), message)
        if slots.max_rank not in ALLOWED_RANKS:
            allowed_ranks = ", ".join(map(str, ALLOWED_RANKS))
            yield context.finding(
                (*path, "max_rank"), f"got {slots.max_rank}, wanted one of {allowed_ranks}"
            )
