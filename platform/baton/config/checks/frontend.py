"""What must agree with the API server that stands in front."""

from __future__ import annotations

from collections.abc import Iterator

from baton.config.checks.check_context import CheckContext
from baton.config.language.tree import Finding
from baton.config.schema.deployment import ApiServerKind, ListenerKind, Route, ServerConfig
from baton.config.schema.observability import TracingConfig
from baton.config.schema.service import AdmissionConfig

_API_SERVER_KEY = ("server", "frontend")
_LISTENER_KEY = ("server", "front")


def check_frontend(context: CheckContext) -> Iterator[Finding]:
    """What is asked of vLLM's Rust frontend that it cannot do, or of a gate that is not there."""
    server = context.get(ServerConfig, "server")
    if server is None:
        return
    if server.frontend is not ApiServerKind.RUST:
        if server.front is ListenerKind.INGRESS:
            message = "there is a gate before the Rust frontend only; wanted server.frontend 'rust'"
            yield context.finding(_LISTENER_KEY, f"got 'gate', {message}, or server.front 'serve'")
        return
    if len(context.model_names) > 1:
        # Which model a request is for is in its body, which nobody reads before it.
        yield context.finding(
            _API_SERVER_KEY, "serves one model, remove the others or use 'python'"
        )
    for name, model in context.models().items():
        if model.runtime_adapters.max:
            message = "the Rust frontend takes no adapters while it serves, wanted 0"
            adapters_path = ("models", name, "runtime_adapters", "max")
            yield context.finding(adapters_path, f"{message}; or use server.frontend 'python'")
    for key, message in _unsupported_by_rust(context, server).items():
        path = tuple(key.split("."))
        yield context.finding(path, f"{message}; or use server.frontend 'python'")
    tracing = context.get(TracingConfig, "observability", "tracing")
    if tracing is not None and tracing.otlp is not None:
        message = "traces do not come through the Rust frontend; or use server.frontend 'python'"
        yield context.finding(("observability", "tracing", "otlp"), message)


def _unsupported_by_rust(context: CheckContext, server: ServerConfig) -> dict[str, str]:
    # Imported only where it is asked for: what is configured is looked at by every command.
    from baton.engine.vllm.frontend.rust_arguments import unsupported_settings

    admission = context.get(AdmissionConfig, "admission") or AdmissionConfig()
    # All of them, which is what holds unless it is said, are all that the frontend has.
    is_restricted = set(server.routes) != set(Route)
    return unsupported_settings(
        routes=[str(route) for route in server.routes] if is_restricted else (),
        max_messages=admission.max_messages,
        media_domains=server.allow.media_domains,
        prompt_embeds=server.allow.prompt_embeds,
        extra={name for model in context.models().values() for name in model.api},
    )
