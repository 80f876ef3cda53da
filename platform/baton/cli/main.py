"""`baton`: the verbs put together."""

from __future__ import annotations

import typer

from baton.cli import (
    apply,
    config,
    demo,
    down,
    explain,
    explain_scale,
    fit,
    keys,
    links,
    plan,
    replay,
    scale,
    simulate,
    status,
    up,
    usage,
    version,
)


def build_app() -> typer.Typer:
    """The command line with all its verbs."""
    app = typer.Typer(
        name="baton",
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
    app.command("scale")(scale.scale)
    app.command("usage")(usage.usage)
    app.command("down")(down.down)
    app.command("demo")(demo.demo)
    app.command("fit")(fit.fit)
    app.command("plan")(plan.plan)
    app.command("simulate")(simulate.simulate)
    app.command("replay")(replay.replay)
    app.command("version")(version.version)
    group = typer.Typer(
        no_args_is_help=True, rich_markup_mode=None, help="Look at a configuration."
    )
    group.command("validate")(config.validate)
    group.command("show")(config.show)
    group.command("schema")(config.schema)
    app.add_typer(group, name="config")
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Manage API keys.")
    group.command("create")(keys.create)
    group.command("list")(keys.show)
    group.command("revoke")(keys.revoke)
    group.command("rotate")(keys.rotate)
    app.add_typer(group, name="keys")
    group = typer.Typer(
        no_args_is_help=True, rich_markup_mode=None, help="Ask why something was decided."
    )
    group.command("route")(explain.route)
    group.command("scale")(explain_scale.scale)
    app.add_typer(group, name="explain")
    return app


def main() -> None:
    """Run the command line; exits with 0 ok, 1 failure, 2 usage, 3 not running, 4 timeout."""
    build_app()()


if __name__ == "__main__":
    main()
