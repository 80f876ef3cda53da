"""Settings of a frontend, and the hooks that it calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.domain.errors import BatonError
from baton.domain.request import Request
from baton.engine.vllm.gate.access import Access
from baton.engine.vllm.gate.gate import ROUTES
from baton.engine.vllm.gate.limits import FrontendLimits
from baton.engine.vllm.wire.identity import Caller

NO_MEDIA_HOST = "media-of-other-hosts-are-refused.invalid"
"""No host has this name, now or ever; clients read it in a refusal. Source: RFC 2606 §2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    """The fleet's properties for a frontend."""

    max_len_tokens: int
    block_size_tokens: int
    kv_blocks: int
    max_running_requests: int
    max_batched_tokens: int
    adapters: int = 0
    """That can be loaded at the same time; 0: no adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendHooks:
    """Callbacks of a frontend. They run in its event loop and must not block."""

    on_request: Callable[[Request], None]
    on_abort: Callable[[tuple[str, ...]], None]
    """Requests that their clients no longer want, or that ended on a stop string."""
    admit: Callable[[int, Caller], BatonError | None]
    """Why the fleet rejects this many more requests of a caller, or None. Called up to three times
    per request, and not again after a rejection."""
    healthy: Callable[[], bool]
    """Whether the fleet can serve at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCapabilities:
    """Optional content of requests; vLLM by itself would fetch media from anywhere."""

    chat_templates: bool = False
    media_domains: tuple[str, ...] = ()
    prompt_embeds: bool = False

    def argv(self) -> list[str]:
        """The options of vLLM's command line."""
        # vLLM takes an empty list of hosts for any host.
        argv = ["--allowed-media-domains", *(self.media_domains or (NO_MEDIA_HOST,))]
        if self.chat_templates:
            argv.append("--trust-request-chat-template")
        if self.prompt_embeds:
            argv.append("--enable-prompt-embeds")
        return argv


CORS_ARGUMENTS: Mapping[str, str] = {
    "allowed_origins": "allow_origins",
    "allowed_methods": "allow_methods",
    "allowed_headers": "allow_headers",
    "allow_credentials": "allow_credentials",
}
"""Arguments of vLLM for CORS, with the names that the layer before the gate has for them.

Browsers ask without a key, and read errors of the gate only where these allow it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSettings:
    """Settings of a model's frontend."""

    model: str
    served_model_name: str
    routes: tuple[str, ...] = tuple(ROUTES)
    limits: FrontendLimits = field(default_factory=FrontendLimits)
    """At the start; `VllmFrontend.reconfigure` replaces them."""
    access: Access = field(default_factory=Access)
    """Likewise."""
    log_stats: bool = False
    """Serve vLLM's own frontend series on /metrics, at a cost for each token."""
    capabilities: RequestCapabilities = field(default_factory=RequestCapabilities)
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters by name, with their paths."""
    runtime_adapters: bool = False
    """Whether adapters may be added while it serves."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Raw vLLM server arguments, as in {"tool-call-parser": "hermes"}."""
    start_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if unknown := [name for name in self.routes if name not in ROUTES]:
            raise ValueError(f"unknown routes {unknown}, expected some of {list(ROUTES)}")

    @property
    def cors_options(self) -> dict[str, object]:
        """Options of the CORS layer; empty if no origin is allowed."""
        options = {
            option: self.extra[name]
            for name, option in CORS_ARGUMENTS.items()
            if name in self.extra
        }
        if not options.get("allow_origins"):
            return {}
        return {"allow_methods": ["*"], "allow_headers": ["*"]} | options

    def argv(self, *, max_len_tokens: int) -> list[str]:
        """The command line of vLLM for this frontend."""
        argv = ["--model", self.model, "--served-model-name", self.served_model_name]
        argv += ["--max-model-len", str(max_len_tokens), "--disable-fastapi-docs"]
        # The cache omits media that were sent before, perhaps to another engine.
        argv += ["--mm-processor-cache-gb", "0"]
        argv += self.capabilities.argv()
        if self.adapters or self.runtime_adapters:
            argv.append("--enable-lora")
        if self.adapters:
            modules = [{"name": name, "path": path} for name, path in self.adapters.items()]
            argv += ["--lora-modules", *map(json.dumps, modules)]
        if not self.log_stats:
            argv.append("--disable-log-stats")
        for name, value in self.extra.items():
            if name not in CORS_ARGUMENTS:
                argv += _flag(name, value)
        return argv


def _flag(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    match value:
        case None:
            return []  # vLLM's default
        case bool():
            return [f"--{flag}" if value else f"--no-{flag}"]
        case str() | int() | float():
            return [f"--{flag}", str(value)]
        case list() | tuple() if name == "middleware":  # one at a time
            return [word for item in value for word in (f"--{flag}", str(item))]
        case list() | tuple():
            return [f"--{flag}", *map(str, value)]
        case _:
            return [f"--{flag}", json.dumps(value)]
