"""What must agree with the API server that stands in front."""

from __future__ import annotations

from collections.abc import Iterator

from baton.config.checks.check_context import Seen
from baton.config.language.tree import Finding
from baton.config.schema.deployment import FrontendKind, FrontKind, Route, ServerConfig
from baton.config.schema.observability import TracingConfig
from baton.config.schema.service import AdmissionConfig

_FRONTEND = ("server", "frontend")
_FRONT = ("server", "front")


def check_frontend(seen: Seen) -> Iterator[Finding]:
    """What is asked of vLLM's Rust frontend that it cannot do, or of a gate that is not there."""
    server = seen.get(ServerConfig, "server")
    if server is None:
        return
    if server.frontend is not FrontendKind.RUST:
        if server.front is FrontKind.GATE:
            what = "there is a gate before the Rust frontend only; wanted server.frontend 'rust'"
            yield seen.wrong(_FRONT, f"got 'gate', {what}, or server.front 'serve'")
        return
    if len(seen.model_names) > 1:
        # Which model a request is for is in its body, which nobody reads before it.
        yield seen.wrong(_FRONTEND, "serves one model, remove the others or use 'python'")
    for name, model in seen.models().items():
        if model.runtime_adapters.max:
            what = "the Rust frontend takes no adapters while it serves, wanted 0"
            keys = ("models", name, "runtime_adapters", "max")
            yield seen.wrong(keys, f"{what}; or use server.frontend 'python'")
    for key, what in _not_served(seen, server).items():
        path = tuple(key.split("."))
        yield seen.wrong(path, f"{what}; or use server.frontend 'python'")
    tracing = seen.get(TracingConfig, "observability", "tracing")
    if tracing is not None and tracing.otlp is not None:
        what = "traces do not come through the Rust frontend; or use server.frontend 'python'"
        yield seen.wrong(("observability", "tracing", "otlp"), what)


def _not_served(seen: Seen, server: ServerConfig) -> dict[str, str]:
    # Imported only where it is asked for: what is configured is looked at by every command.
    from baton.engine.vllm.frontend.rust_arguments import not_served

    admission = seen.get(AdmissionConfig, "admission") or AdmissionConfig()
    # All of them, which is what holds unless it is said, are all that the frontend has.
    some = set(server.routes) != set(Route)
    return not_served(
        routes=[str(route) for route in server.routes] if some else (),
        max_messages=admission.max_messages,
        media_domains=server.allow.media_domains,
        prompt_embeds=server.allow.prompt_embeds,
        extra={name for model in seen.models().values() for name in model.api},
    )
