"""`baton`: the command line."""

from __future__ import annotations

import typer

from baton.cli.verbs import GroupedVerbs


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
    app.callback()(_no_op)
    return app


def _no_op() -> None:
    """The verbs do it all: see `baton.cli.verbs`."""


def main() -> None:
    """Run the command line; exits with 0 ok, 1 failure, 2 usage, 3 not running, 4 timeout."""
    build_app()()


if __name__ == "__main__":
    main()
