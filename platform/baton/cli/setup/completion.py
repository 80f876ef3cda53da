"""`baton completion`: the shell completes verbs and options."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from baton.cli.main import COMPLETION_VARIABLE


class Shell(StrEnum):
    """The shells that a script is there for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell that the script is for.")],
) -> None:
    """Print a script with which a shell completes verbs and options.

    For bash, try it with: source <(baton completion bash)
    """
    # Here: keeps --help fast. Typer prints the same for its own option.
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    typer.echo(
        get_completion_script(prog_name="baton", complete_var=COMPLETION_VARIABLE, shell=shell)
    )
