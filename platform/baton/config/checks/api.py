"""What no single key shows of the arguments that are passed on to vLLM's API servers."""

from __future__ import annotations

from collections.abc import Iterator

from baton.config.checks.check_context import CheckContext
from baton.config.derive.api_arguments import (
    CORS_ARGUMENTS,
    MODEL_LOADING_ARGUMENTS,
    missing_companions,
    problem_with,
)
from baton.config.language.tree import Finding


def check_api(context: CheckContext) -> Iterator[Finding]:
    """Everything that is wrong with them."""
    models = context.models()
    for name, model in models.items():
        for argument, value in model.api.items():
            if (message := problem_with(argument, value)) is not None:
                yield context.finding(("models", name, "api", argument), message)
        for argument in MODEL_LOADING_ARGUMENTS:
            extra = model.engine.extra
            if argument in extra and extra[argument] != model.api.get(argument, extra[argument]):
                message = f"differs from engine.extra.{argument}; say it once, both are told"
                yield context.finding(("models", name, "api", argument), message)
        for argument, message in missing_companions(model.api).items():
            yield context.finding(("models", name, "api", argument), message)
    for argument in CORS_ARGUMENTS:
        values = [model.api.get(argument) for model in models.values()]
        if any(value != values[0] for value in values[1:]):
            name = next(name for name, model in models.items() if argument in model.api)
            message = "is answered by one front for all models; give each of them the same"
            yield context.finding(("models", name, "api", argument), message)
