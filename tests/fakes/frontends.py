"""What a frontend of vLLM is made of: its fleet's facts, its hooks, and requests that come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.domain.request import Request
from baton.engine.vllm.frontend.settings import FleetFacts, FrontendHooks

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest


def fleet_facts(max_len_tokens: int, **changes: int) -> FleetFacts:
    """Those of a fleet that takes whatever a test sends."""
    sizes = {"kv_blocks": 1000, "max_running_requests": 64, "max_batched_tokens": 2048}
    sizes = {"block_size_tokens": 16} | sizes | changes
    return FleetFacts(max_len_tokens=max_len_tokens, **sizes)


def open_hooks(
    on_request: Callable[[Request], object],
    on_abort: Callable[[tuple[str, ...]], object],
    healthy: Callable[[], bool] = lambda: True,
) -> FrontendHooks:
    """Hooks that let everybody in."""
    return FrontendHooks(
        on_request=on_request,  # type: ignore[arg-type]  # nobody looks at what it returns
        on_abort=on_abort,  # type: ignore[arg-type]  # likewise
        admit=lambda _requests, _caller: None,
        healthy=healthy,
    )


def engine_request(name: str, /, **changes: object) -> EngineCoreRequest:
    """A request as vLLM's API server sends it to its engine."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    fields: dict[str, object] = {
        "request_id": name,
        "prompt_token_ids": [1, 2, 3],
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=9),
        "pooling_params": None,
        "arrival_time": 0.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    return EngineCoreRequest(**(fields | changes))
