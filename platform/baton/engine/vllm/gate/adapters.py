"""Requests to load and unload LoRA adapters, in the form of vLLM's API server.

They never reach vLLM's handlers: the controller owns the adapters of a deployment.
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
class AdapterRequest:
    """A request to load an adapter, or, without a path, to unload it."""

    name: str
    path: str | None = None
    model: str | None = None
    """The base model, if the request names it (`base_model_name`)."""
    in_place: bool = False
    tenant: str


Administer: TypeAlias = Callable[[AdapterRequest], Awaitable[Problem | None]]
"""Carries out a request; returns the error, if any."""


def parse_adapter_request(path: str, body: bytes, tenant: str) -> AdapterRequest | Problem:
    """The request in a body to one of these paths, or the error."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        return _bad_request(f"the body is no JSON: {error}")
    if not isinstance(document, dict):
        return _bad_request("the body is no JSON object")
    required_fields = ("lora_name", "lora_path") if path == LOAD_PATH else ("lora_name",)
    for key in required_fields:
        if not isinstance(document.get(key), str) or not document[key]:
            return _bad_request(
                f"{_describe_field(key, document)}, expected a text that is not empty"
            )
    problem = _option_problem(document)
    if problem is not None:
        return problem
    return AdapterRequest(
        name=document["lora_name"],
        path=document["lora_path"] if path == LOAD_PATH else None,
        model=document.get("base_model_name"),
        in_place=document.get("load_inplace", False),
        tenant=tenant,
    )


def success_body(request: AdapterRequest) -> bytes:
    """The body of the answer to a successful request, in vLLM's words."""
    verb = "removed" if request.path is None else "added"
    return f"Success: LoRA adapter '{request.name}' {verb} successfully.".encode()


def _option_problem(document: Mapping[str, object]) -> Problem | None:
    for key in ("load_inplace", "is_3d_lora_weight"):
        if not isinstance(document.get(key, False), bool):
            return _bad_request(f"{_describe_field(key, document)}, expected true or false")
    if document.get("is_3d_lora_weight"):
        return _bad_request("'is_3d_lora_weight' is not taken here; leave it out")
    model = document.get("base_model_name")
    if model is not None and not isinstance(model, str):
        return _bad_request(
            f"{_describe_field('base_model_name', document)}, expected the name of a model"
        )
    return None


def _describe_field(key: str, document: Mapping[str, object]) -> str:
    return f"{key!r} is {str(document.get(key))[:80]!r}" if key in document else f"no {key!r}"


def _bad_request(message: str) -> Problem:
    return Problem(status=400, message=message)
