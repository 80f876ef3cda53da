"""`baton config`: look at a configuration without starting anything."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options import (
    Address,
    ConfigFiles,
    OptionalConfigFiles,
    Output,
    SetOptions,
    backend_of,
    load_files,
)
from baton.cli.output import OutputFormat, print_report, report_errors
from baton.domain.errors import ConfigInvalid

if TYPE_CHECKING:
    from baton.config import LoadedConfig


def validate(
    context: typer.Context,
    config: ConfigFiles,
    *,
    sets: SetOptions = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Check a configuration; all errors are reported at once."""
    from baton.config.checks.contradictions import contradictions  # here: keeps --help fast

    with report_errors():
        try:
            loaded_config = load_files(context, config, sets)
        except ConfigInvalid as error:
            if output is OutputFormat.JSON:
                print_report({"ok": False, "findings": error.problems}, output)
            raise
    pools = loaded_config.config.pools
    report = {
        "ok": True,
        "files": [str(file) for file in config],
        "models": list(loaded_config.config.models),
        "pools": list(pools),
        "replicas": sum(pool.replicas.initial for pool in pools.values()),
        **(
            {"warnings": list(warnings)}
            if (warnings := contradictions(loaded_config.config))
            else {}
        ),
    }
    if labelled := [name for name, pool in pools.items() if pool.placement.labels]:
        report["not_checked"] = (
            f"whether nodes have the labels of pools {', '.join(labelled)}:"
            " 'baton apply --dry-run' compares them with the running cluster"
        )
    print_report(report, output)


def show(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    config: OptionalConfigFiles = None,
    *,
    sets: SetOptions = None,
    running: Annotated[
        bool,
        typer.Option("--running", help="Show the configuration that runs, in place of files."),
    ] = False,
    address: Address = None,
    origins: Annotated[
        bool, typer.Option("--origins", help="Show where each value came from.")
    ] = False,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Print the effective configuration: every key, with defaults and layers applied.

    Defaults of engines are in comments. 'baton apply' takes what this prints.
    """
    from baton.config import render  # here: keeps --help fast
    from baton.config.derive.effective_options import (
        effective_engine_options,
        engine_option_comments,
    )
    from baton.config.write.render import origin_lines, to_plain

    if bool(config) == running:
        raise typer.BadParameter("give one of --config FILE and --running", param_hint="--config")
    if running and (sets or origins):
        raise typer.BadParameter("--set and --origins are for files", param_hint="--running")
    with report_errors():
        if running:
            loaded_config = _running_config(context, address)
        else:
            loaded_config = load_files(context, config or [], sets)
    engine_options = effective_engine_options(loaded_config.config, loaded_config.origins)
    if output is OutputFormat.JSON:
        engines = {
            pool: {key: option._asdict() for key, option in options.items()}
            for pool, options in engine_options.items()
        }
        report: dict[str, object] = {"config": to_plain(loaded_config.config), "engines": engines}
        print_report(report | ({"origins": loaded_config.origins} if origins else {}), output)
    elif origins:
        for line in origin_lines(loaded_config.config, loaded_config.origins):
            typer.echo(line)
    else:
        typer.echo(render(loaded_config.config), nl=False)
    if output is OutputFormat.TEXT and engine_options:
        typer.echo("# What engines take where this says nothing:")
        for line in engine_option_comments(engine_options):
            typer.echo(line)


def _running_config(context: typer.Context, address: str | None) -> LoadedConfig:
    """The configuration in force; its generation is a line on stderr."""
    from baton.config import LoadedConfig  # here: keeps --help fast

    generation, config = backend_of(context).commands().running_config(address=address)
    typer.echo(f"generation {generation} runs", err=True)
    return LoadedConfig(config=config, origins={})


def schema() -> None:
    """Print the JSON Schema of a configuration file, for editors."""
    from baton.config import json_schema as schema_of_config  # here: keeps --help fast

    typer.echo(json.dumps(schema_of_config(), indent=2))
