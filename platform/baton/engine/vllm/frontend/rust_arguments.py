"""Arguments of vLLM's Rust frontend, and settings that it does not support.

It takes a JSON object and ignores unknown names. A list of known names refuses those here instead.

Source: `vllm-rs serve --help` of 0.33.0, tried with `vllm-rs frontend`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection

from baton.domain.errors import EngineStartFailed
from baton.engine.vllm.frontend.settings import FrontendSettings

SUPPORTED_ROUTES = frozenset({"chat", "completions", "models", "tokenize", "health", "metrics"})
"""Groups of routes that it has; it answers 501 or 404 on the others."""
SUPPORTED_ARGUMENTS = frozenset(
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
"""Raw arguments that it reads and that baton does not set itself."""


def unsupported_settings(
    *,
    routes: Collection[str] = (),
    max_messages: int | None = None,
    media_domains: Collection[str] | None = None,
    prompt_embeds: bool = False,
    extra: Collection[str] = (),
) -> dict[str, str]:
    """Problems of the Rust frontend with these settings, by configuration key."""
    problems = {}
    if unsupported_routes := sorted(set(routes) - SUPPORTED_ROUTES):
        problems["server.routes"] = (
            f"the Rust frontend has no {', '.join(unsupported_routes)}, list others"
        )
    if max_messages is not None:
        problems["admission.max_messages"] = "there is no counter before the Rust frontend"
    if media_domains:
        problems["server.allow.media_domains"] = (
            "the Rust frontend would fetch media from anywhere, so that none are taken with it"
        )
    if prompt_embeds:
        problems["server.allow.prompt_embeds"] = "the Rust frontend takes none"
    if unknown := sorted(
        name for name in map(_underscored, extra) if name not in SUPPORTED_ARGUMENTS
    ):
        problems["models.*.api"] = f"the Rust frontend would pass over {', '.join(unknown)}"
    return problems


def build_rust_arguments(settings: FrontendSettings, *, max_len_tokens: int) -> str:
    """The JSON object for this frontend.

    Raises:
        EngineStartFailed: the frontend does not support the settings.
    """
    limits, allow = settings.limits, settings.capabilities
    problems = unsupported_settings(
        routes=settings.routes,
        max_messages=limits.max_messages,
        media_domains=allow.media_domains,
        prompt_embeds=allow.prompt_embeds,
        extra=settings.extra,
    )
    if problems:
        details = "; ".join(f"{key}: {problem}" for key, problem in problems.items())
        raise EngineStartFailed(
            f"vLLM's Rust frontend cannot do what is configured: {details}",
            "remove these, or use server.api_server 'python'",
        )
    document: dict[str, object] = {
        _underscored(name): value for name, value in settings.extra.items()
    }
    document |= {
        "model": settings.model,
        "model_tag": settings.model,
        "served_model_name": [settings.served_model_name],
        "max_model_len": max_len_tokens,
        "disable_log_stats": not settings.log_stats,
        "engine_ready_timeout_secs": math.ceil(settings.start_timeout_s),
        # It would fetch media from any host, with this machine's address.
        "language_model_only": True,
        "trust_request_chat_template": settings.capabilities.chat_templates,
    }
    if settings.adapters:
        modules = [{"name": name, "path": path} for name, path in settings.adapters.items()]
        document |= {"enable_lora": True, "lora_modules": modules}
    return json.dumps(document)


def _underscored(name: str) -> str:
    return name.replace("-", "_")
