"""Keys of request content that can reach into the serving machines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowConfig:
    """Content that requests may bring. Everything is off by default."""

    chat_templates: bool = False
    """Chat templates in requests. These are programs that run in the ingress, without a time limit.
    """
    media_domains: tuple[str, ...] | None = None
    """Hosts from which the ingress fetches media of a request; null: none. Media inside a request
    (`data:`) are always accepted if the model supports them."""
    prompt_embeds: bool = False
    """Tensors instead of a prompt. The engines need `engine.extra.enable_prompt_embeds`, too."""
