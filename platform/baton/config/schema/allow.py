"""The keys that let clients bring along what reaches into the machines that serve them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowConfig:
    """What a request may bring along; nothing unless it is said here."""

    chat_templates: bool = False
    """Templates of its own: programs, run in the ingress for as long as they like."""
    media_domains: tuple[str, ...] | None = None
    """Hosts from which the ingress fetches media that a request names; null: from none. Media in a
    request itself (`data:`) are always taken where the model understands them."""
    prompt_embeds: bool = False
    """Tensors in place of a prompt. The engines must take them, too
    (`engine.extra.enable_prompt_embeds`)."""
