"""`baton`: the verbs put together."""

from __future__ import annotations

from collections.abc import Callable

import typer

from baton.cli import (
    apply,
    bench,
    config,
    demo,
    doctor,
    down,
    explain,
    explain_scale,
    exports,
    fit,
    keys,
    links,
    logs,
    plan,
    replay,
    scale,
    simulate,
    status,
    top,
    trace,
    up,
    usage,
    version,
)
from baton.cli.headings import GroupedVerbs


def build_app() -> typer.Typer:
    """The command line with all its verbs."""
    app = typer.Typer(
        name="baton",
        cls=GroupedVerbs,
        help="Serve LLMs with vLLM in separate prefill and decode pools on Ray.",
        no_args_is_help=True,
        add_completion=False,
        # Plain text: what rich would draw costs more time than all else that --help does.
        rich_markup_mode=None,
        # Locals in a traceback could show what must not be shown.
        pretty_exceptions_enable=False,
    )
    app.command("up")(up.up)
    app.command("apply")(apply.apply)
    app.command("status")(status.status)
    app.command("links")(links.links)
    app.command("logs")(logs.logs)
    app.command("scale")(scale.scale)
    app.command("top")(top.top)
    app.command("trace")(trace.trace)
    app.command("doctor")(doctor.doctor)
    app.command("usage")(usage.usage)
    app.command("down")(down.down)
    app.command("demo")(demo.demo)
    app.command("fit")(fit.fit)
    app.command("plan")(plan.plan)
    app.command("simulate")(simulate.simulate)
    app.command("replay")(replay.replay)
    app.command("bench")(bench.bench)
    app.command("version")(version.version)
    _add_groups(app)
    return app


def _add_groups(app: typer.Typer) -> None:
    """Verbs that have verbs of their own."""
    _group(
        app,
        "config",
        "Look at a configuration.",
        validate=config.validate,
        show=config.show,
        schema=config.schema,
    )
    _group(
        app,
        "keys",
        "Manage API keys.",
        create=keys.create,
        list=keys.show,
        revoke=keys.revoke,
        rotate=keys.rotate,
    )
    explained = "Ask why something was decided."
    _group(app, "explain", explained, route=explain.route, scale=explain_scale.scale)
    _group(app, "dashboards", "Get the Grafana dashboards.", export=exports.dashboards)
    _group(app, "rules", "Get the rules for Prometheus.", export=exports.rules)


def _group(app: typer.Typer, name: str, text: str, **verbs: Callable[..., None]) -> None:
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=text)
    for verb, action in verbs.items():
        group.command(verb)(action)
    app.add_typer(group, name=name)


def main() -> None:
    """Run the command line; exits with 0 ok, 1 failure, 2 usage, 3 not running, 4 timeout."""
    build_app()()


if __name__ == "__main__":
    main()
