"""What vLLM's Rust frontend is told when it starts, and what cannot be had from it.

It takes one JSON object, in which it passes over names that it does not know: what it would pass
over is refused here instead, by a list of what it knows.

Source: `vllm-rs serve --help` of 0.33.0, tried with `vllm-rs frontend`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection

from baton.domain.errors import EngineStartFailed
from baton.engine.vllm.frontend_limits import FrontendLimits
from baton.engine.vllm.frontend_settings import Brought, FrontendSettings

SERVED = frozenset({"chat", "completions", "models", "tokenize", "health", "metrics"})
"""Groups of routes that it has; it answers 501 or 404 on the others."""
KNOWN = frozenset(
    {
        "chat_template",
        "chat_template_content_format",
        "default_chat_template_kwargs",
        "enable_auto_tool_choice",
        "enable_prompt_tokens_details",
        "exclude_tools_when_tool_choice_none",
        "generation_config",
        "hf_config_path",
        "hf_overrides",
        "max_logprobs",
        "reasoning_parser",
        "return_tokens_as_token_ids",
        "revision",
        "sse_keep_alive_interval",
        "stream_interval",
        "structured_outputs_config",
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
        "tool_call_parser",
        "tool_strict_level",
    }
)
"""Raw arguments that it heeds and that are nobody else's to say."""


def not_served(
    *, routes: Collection[str], limits: FrontendLimits, allow: Brought, extra: Collection[str]
) -> list[str]:
    """What of that cannot be had from the Rust frontend, each with what to do; usually nothing."""
    problems = []
    if closed := sorted(set(routes) - SERVED):
        problems.append(f"it has no {', '.join(closed)}: list the other groups in server.routes")
    if limits.default_max_tokens is not None:
        problems.append(
            "it does not tell a request that leaves open how much it wants: remove"
            " admission.default_max_tokens, admission.max_tokens holds for all"
        )
    if limits.max_messages is not None:
        problems.append("messages are not counted before it: remove admission.max_messages")
    if allow.media_domains:
        problems.append("it fetches media from anywhere: remove server.allow.media_domains")
    if allow.prompt_embeds:
        problems.append("it takes no prompt embeddings: remove server.allow.prompt_embeds")
    if unknown := sorted(name for name in map(_word, extra) if name not in KNOWN):
        problems.append(f"it would pass over {', '.join(unknown)}: remove them from models.*.api")
    return problems


def rust_arguments(settings: FrontendSettings, *, max_len_tokens: int) -> str:
    """The JSON object for this frontend.

    Raises:
        EngineStartFailed: the settings want what it cannot do.
    """
    problems = not_served(
        routes=settings.routes, limits=settings.limits, allow=settings.allow, extra=settings.extra
    )
    if problems:
        raise EngineStartFailed(
            f"vLLM's Rust frontend cannot be had as configured: {'; '.join(problems)}",
            "do that, or use 'python'",
        )
    told: dict[str, object] = {_word(name): value for name, value in settings.extra.items()}
    told |= {
        "model": settings.model,
        "model_tag": settings.model,
        "served_model_name": [settings.served_name],
        "max_model_len": max_len_tokens,
        "disable_log_stats": not settings.log_stats,
        "engine_ready_timeout_secs": math.ceil(settings.start_timeout_s),
        # It would fetch media from any host, in the name of this one.
        "language_model_only": True,
        "trust_request_chat_template": settings.allow.chat_templates,
    }
    if settings.adapters:
        modules = [{"name": name, "path": path} for name, path in settings.adapters.items()]
        told |= {"enable_lora": True, "lora_modules": modules}
    return json.dumps(told)


def _word(name: str) -> str:
    return name.replace("-", "_")
