"""Requests to load and unload LoRA adapters, in the shapes that vLLM's API server takes.

They never reach vLLM's handlers: an adapter belongs to the whole deployment, whose controller is
asked. What is known here is how such a request is written, and how it is answered.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from baton.engine.vllm.gate.errors import Problem

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADAPTER_PATHS = (LOAD_PATH, UNLOAD_PATH)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOrder:
    """What a client asks for; without a path, to unload."""

    name: str
    path: str | None = None
    model: str | None = None
    """Over which model, where a request says it (`base_model_name`)."""
    in_place: bool = False
    tenant: str


Administer: TypeAlias = Callable[[AdapterOrder], Awaitable[Problem | None]]
"""Carries an order out; says why it is not."""


def order_of(path: str, body: bytes, tenant: str) -> AdapterOrder | Problem:
    """What the body of a request to one of these paths asks for, or what is wrong with it."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        return _bad(f"the body is no JSON: {error}")
    if not isinstance(document, dict):
        return _bad("the body is no JSON object")
    wanted = ("lora_name", "lora_path") if path == LOAD_PATH else ("lora_name",)
    for key in wanted:
        if not isinstance(document.get(key), str) or not document[key]:
            return _bad(f"{_shown(key, document)}, wanted a text that is not empty")
    problem = _wrong_options(document)
    if problem is not None:
        return problem
    return AdapterOrder(
        name=document["lora_name"],
        path=document["lora_path"] if path == LOAD_PATH else None,
        model=document.get("base_model_name"),
        in_place=document.get("load_inplace", False),
        tenant=tenant,
    )


def success(order: AdapterOrder) -> bytes:
    """The body of the answer to an order that was carried out, in vLLM's words."""
    done = "removed" if order.path is None else "added"
    return f"Success: LoRA adapter '{order.name}' {done} successfully.".encode()


def _wrong_options(document: Mapping[str, object]) -> Problem | None:
    for key in ("load_inplace", "is_3d_lora_weight"):
        if not isinstance(document.get(key, False), bool):
            return _bad(f"{_shown(key, document)}, wanted true or false")
    if document.get("is_3d_lora_weight"):
        return _bad("'is_3d_lora_weight' is not taken here; leave it out")
    model = document.get("base_model_name")
    if model is not None and not isinstance(model, str):
        return _bad(f"{_shown('base_model_name', document)}, wanted the name of a model")
    return None


def _shown(key: str, document: Mapping[str, object]) -> str:
    return f"{key!r} is {str(document.get(key))[:80]!r}" if key in document else f"no {key!r}"


def _bad(message: str) -> Problem:
    return Problem(status=400, message=message)
