"""What a frontend is told when it is built, and whom it tells what clients want."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.domain.errors import BatonError
from baton.domain.fleet import ReplicaFacts
from baton.domain.request import Request
from baton.engine.vllm.gate.access import Access
from baton.engine.vllm.gate.gate import ROUTES
from baton.engine.vllm.gate.limits import FrontendLimits
from baton.engine.vllm.wire.identity import Caller

NO_MEDIA_HOST = "media-of-other-hosts-are-refused.invalid"
"""No host has this name, now or ever; clients read it in a refusal. Source: RFC 2606 §2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    """What vLLM's frontend wants to know of its one engine."""

    max_len_tokens: int
    block_size_tokens: int
    kv_blocks: int
    max_running_requests: int
    max_batched_tokens: int
    adapters: int = 0
    """That may run at the same time; 0: none is served."""

    @classmethod
    def from_replicas(cls, replicas: Sequence[ReplicaFacts]) -> FleetFacts:
        """The facts of a fleet: what every replica can do, and what all of them hold."""
        return cls(
            max_len_tokens=min(facts.max_len_tokens for facts in replicas),
            block_size_tokens=max(facts.block_size_tokens for facts in replicas),
            kv_blocks=sum(facts.kv_blocks for facts in replicas),
            max_running_requests=sum(facts.max_running_requests for facts in replicas),
            max_batched_tokens=max(facts.max_batched_tokens for facts in replicas),
            adapters=sum(facts.adapter_slots for facts in replicas),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendHooks:
    """Whom a frontend tells and asks. All are called in its event loop and must not block."""

    on_request: Callable[[Request], None]
    on_abort: Callable[[tuple[str, ...]], None]
    """Requests that their clients no longer want, or that ended on a stop string."""
    admit: Callable[[int, Caller], BatonError | None]
    """Why the fleet does not take this many more requests of a caller, who is then refused; None
    when it does. Asked up to three times for each, and not again once they are refused."""
    healthy: Callable[[], bool]
    """Whether the fleet can serve at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCapabilities:
    """What a request may bring along; vLLM alone would fetch media from anywhere."""

    chat_templates: bool = False
    media_domains: tuple[str, ...] = ()
    prompt_embeds: bool = False

    def argv(self) -> list[str]:
        """Spell it for vLLM's command line."""
        # An empty list of hosts means any host to vLLM.
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
"""Arguments of vLLM's that are answered before its app, and what the layer that does calls them.

Browsers ask without a key, and read errors of the gate's only where these say that they may.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSettings:
    """Which model a frontend speaks for, and how."""

    model: str
    served_model_name: str
    routes: tuple[str, ...] = tuple(ROUTES)
    limits: FrontendLimits = field(default_factory=FrontendLimits)
    """What it starts with; `VllmFrontend.reconfigure` replaces them."""
    access: Access = field(default_factory=Access)
    """Likewise."""
    log_stats: bool = False
    """Serve vLLM's own frontend series on /metrics, at a cost for each token."""
    capabilities: RequestCapabilities = field(default_factory=RequestCapabilities)
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Names under which LoRA adapters over the model are asked for, and where they are kept."""
    runtime_adapters: bool = False
    """Whether others may come while it serves."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Raw vLLM server arguments, as in {"tool-call-parser": "hermes"}."""
    start_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if unknown := [name for name in self.routes if name not in ROUTES]:
            raise ValueError(f"unknown routes {unknown}, expected some of {list(ROUTES)}")

    @property
    def cors_options(self) -> dict[str, object]:
        """What browsers of other origins may do; empty where none is let in."""
        options = {
            option: self.extra[name]
            for name, option in CORS_ARGUMENTS.items()
            if name in self.extra
        }
        if not options.get("allow_origins"):
            return {}
        return {"allow_methods": ["*"], "allow_headers": ["*"]} | options

    def argv(self, *, max_len_tokens: int) -> list[str]:
        """Spell vLLM's command line for this frontend."""
        argv = ["--model", self.model, "--served-model-name", self.served_model_name]
        argv += ["--max-model-len", str(max_len_tokens), "--disable-fastapi-docs"]
        # It would leave out of a request what it has sent before, to another engine perhaps.
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
            return []  # as vLLM has it
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
