"""How vLLM's frontend and the fleet call an adapter that was added while it serves.

vLLM's handlers tell clients the name of a LoRA request; the fleet needs a key of the one load that
was meant (`control.adapter_registry`). So the frontend has the name, and the number of the load in
the id beside it, from which the seam makes the key.
"""

from __future__ import annotations

from vllm.lora.request import LoRARequest

from baton.control.fleet.adapter_registry import RuntimeAdapter, adapter_key

_FIRST_ID = 1 << 20
"""Ids of adapters in the file count from 1."""


def to_lora_request(adapter: RuntimeAdapter) -> LoRARequest:
    """What vLLM's handlers know of an adapter."""
    return LoRARequest(
        lora_name=adapter.name, lora_int_id=_FIRST_ID + adapter.number, lora_path=adapter.source
    )


def is_runtime_adapter(request: LoRARequest) -> bool:
    """Whether an adapter was added while the frontend serves."""
    return bool(request.lora_int_id >= _FIRST_ID)


def fleet_adapter_name(request: LoRARequest) -> str:
    """What the fleet calls the adapter of a request."""
    name = str(request.lora_name)
    return (
        adapter_key(name, request.lora_int_id - _FIRST_ID) if is_runtime_adapter(request) else name
    )
