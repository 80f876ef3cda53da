"""`baton config`: look at a configuration without starting anything."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from baton.cli.options import ConfigFiles, Output, Sets, seam_of
from baton.cli.output import OutputFormat, print_report, reported_errors
from baton.domain.errors import ConfigInvalid


def validate(
    context: typer.Context,
    config: ConfigFiles,
    *,
    sets: Sets = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Check a configuration; everything that is wrong is said at once."""
    from baton.config import load_config  # here: keeps --help fast
    from baton.config.checks.contradictions import contradictions

    with reported_errors():
        try:
            loaded = load_config(config, env=seam_of(context).environ, sets=sets or ())
        except ConfigInvalid as error:
            if output is OutputFormat.JSON:
                print_report({"ok": False, "findings": error.findings}, output)
            raise
    pools = loaded.config.pools
    report = {
        "ok": True,
        "files": [str(file) for file in config],
        "models": list(loaded.config.models),
        "pools": list(pools),
        "replicas": sum(pool.replicas.start for pool in pools.values()),
        **({"warnings": list(found)} if (found := contradictions(loaded.config)) else {}),
    }
    print_report(report, output)


def show(
    context: typer.Context,
    config: ConfigFiles,
    *,
    sets: Sets = None,
    origins: Annotated[
        bool, typer.Option("--origins", help="Show where each value came from.")
    ] = False,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Print the effective configuration: every key, with defaults and layers applied.

    And what engines take for what they are not told, as comments.
    """
    from baton.config import load_config, render  # here: keeps --help fast
    from baton.config.derive.effective_options import taken_by_engines, taken_lines
    from baton.config.write.render import origin_lines, plain

    with reported_errors():
        loaded = load_config(config, env=seam_of(context).environ, sets=sets or ())
    taken = taken_by_engines(loaded.config, loaded.origins)
    if output is OutputFormat.JSON:
        engines = {
            pool: {key: one._asdict() for key, one in options.items()}
            for pool, options in taken.items()
        }
        report: dict[str, object] = {"config": plain(loaded.config), "engines": engines}
        print_report(report | ({"origins": loaded.origins} if origins else {}), output)
    elif origins:
        for line in origin_lines(loaded.config, loaded.origins):
            typer.echo(line)
    else:
        typer.echo(render(loaded.config), nl=False)
    if output is OutputFormat.TEXT and taken:
        typer.echo("# What engines take where this says nothing:")
        for line in taken_lines(taken):
            typer.echo(line)


def schema() -> None:
    """Print the JSON Schema of a configuration file, for editors."""
    from baton.config import schema as schema_of_config  # here: keeps --help fast

    typer.echo(json.dumps(schema_of_config(), indent=2))
