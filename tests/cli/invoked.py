"""The command line in this process, in an empty environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from typer.testing import CliRunner, Result

from baton.cli.backend import Backend, Commands
from baton.cli.main import build_app


def invoke(commands: object, *arguments: str) -> Result:
    """Run `baton` with arguments against scripted commands."""
    seam = Backend(commands=lambda: cast(Commands, commands), environ={})
    return CliRunner().invoke(build_app(), arguments, obj=seam)


def run_baton(*arguments: object, environ: Mapping[str, str] | None = None) -> Result:
    """Run `baton` with arguments, as text, and what it is to find in its environment."""
    seam = Backend(environ=environ or {})
    return CliRunner().invoke(build_app(), [*map(str, arguments)], obj=seam)
