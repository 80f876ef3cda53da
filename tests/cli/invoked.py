"""The command line in this process, in front of scripted commands."""

from __future__ import annotations

from typing import cast

from typer.testing import CliRunner, Result

from baton.cli.backend import Backend, Commands
from baton.cli.main import build_app


def invoke(commands: object, *arguments: str) -> Result:
    """Run `baton` with arguments in an empty environment, against `commands`."""
    seam = Backend(commands=lambda: cast(Commands, commands), environ={})
    return CliRunner().invoke(build_app(), arguments, obj=seam)
