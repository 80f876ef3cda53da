"""What no single key shows of the arguments that are passed on to vLLM's API servers."""

from __future__ import annotations

from collections.abc import Iterator

from baton.config.checks.check_context import Seen
from baton.config.derive.api_arguments import (
    CROSS_ORIGIN,
    READS_MODEL,
    missing_with,
    problem_with,
)
from baton.config.language.tree import Finding


def check_api(seen: Seen) -> Iterator[Finding]:
    """Everything that is wrong with them."""
    models = seen.models()
    for name, model in models.items():
        for argument, value in model.api.items():
            if (what := problem_with(argument, value)) is not None:
                yield seen.wrong(("models", name, "api", argument), what)
        for argument in READS_MODEL:
            extra = model.engine.extra
            if argument in extra and extra[argument] != model.api.get(argument, extra[argument]):
                what = f"differs from engine.extra.{argument}; say it once, both are told"
                yield seen.wrong(("models", name, "api", argument), what)
        for argument, what in missing_with(model.api).items():
            yield seen.wrong(("models", name, "api", argument), what)
    for argument in CROSS_ORIGIN:
        said = [model.api.get(argument) for model in models.values()]
        if any(one != said[0] for one in said[1:]):
            name = next(name for name, model in models.items() if argument in model.api)
            what = "is answered by one front for all models; give each of them the same"
            yield seen.wrong(("models", name, "api", argument), what)
