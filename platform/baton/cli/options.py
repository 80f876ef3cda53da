"""Options that several verbs share."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.backend import Backend
from baton.cli.output import OutputFormat, print_warnings
from baton.serving.versions import FLAG, KEY
from baton.simulator.workloads.arrivals import TimeUnit

if TYPE_CHECKING:
    from baton.config import LoadedConfig
    from baton.simulator.workloads.arrivals import UserLoad

_CONFIG = typer.Option(
    "--config",
    "-c",
    metavar="FILE",
    help="A configuration; repeat for overlays.",
    show_default=False,
)
ConfigFiles = Annotated[list[Path], _CONFIG]
OptionalConfigFiles = Annotated[list[Path] | None, _CONFIG]
SetOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Set one key, as pools.decode.replicas.max=6; repeatable.",
    ),
]
AllowUntested = Annotated[
    bool,
    typer.Option(
        FLAG,
        help="Start also with versions of Ray, vLLM, torch or NIXL that baton was not tested with.",
    ),
]
AllowOpenCluster = Annotated[
    bool,
    typer.Option(
        "--allow-open-cluster",
        help="Deploy also to a Ray cluster without token authentication.",
    ),
]
Output = Annotated[OutputFormat, typer.Option("--output", "-o", help="Format of the result.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="The same as --output json.")]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Address of the Ray cluster, if it is remote or several run here; else RAY_ADDRESS.",
    ),
]
LocalAddress = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Address of the deployment's Ray cluster or endpoint, if several run here.",
    ),
]
CalibrationFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Measured rows of vLLM to calibrate on, as for 'baton calibrate'; repeatable.",
    ),
]
TimeUnitOption = Annotated[
    TimeUnit | None,
    typer.Option(
        "--time-unit", help="Unit of the trace's arrival times, if the data do not show it."
    ),
]
Users = Annotated[
    int | None,
    typer.Option(
        "--users",
        metavar="N",
        help="Number of users instead of a rate: each waits for its answer, thinks, and sends the"
        " next request.",
        min=1,
    ),
]
ThinkTime = Annotated[
    str | None,
    typer.Option(
        "--think-time",
        metavar="DURATION",
        help="Mean time from an answer to a user's next request, as 10s.",
    ),
]
Timeout = Annotated[
    str, typer.Option("--timeout", metavar="DURATION", help="Time limit, as 90s or 5m.")
]
Interval = Annotated[
    str, typer.Option("--interval", metavar="DURATION", help="Between two looks, as 1s or 500ms.")
]
_MIN_INTERVAL_S = 0.1
_MAX_DURATION_S = 100 * 365 * 86_400.0
"""Python's timers end at three hundred years, and its calendar at the year 9999."""


def parse_interval(text: str) -> float:
    """A refresh interval in seconds.

    Raises:
        BadParameter: it is no duration, or too short.
    """
    interval_s = parse_seconds(text, "--interval")
    if interval_s < _MIN_INTERVAL_S:
        raise typer.BadParameter(
            f"got {text!r}, expected at least {_MIN_INTERVAL_S:g} s", param_hint="--interval"
        )
    return interval_s


def load_files(
    context: typer.Context, files: Sequence[Path], sets: Sequence[str] | None
) -> LoadedConfig:
    """The configuration of some files; prints its warnings.

    Raises:
        ConfigInvalid: with a line for each fault.
    """
    from baton.config import load_config  # here: keeps --help fast

    loaded_config = load_config(files, env=backend_of(context).environ, sets=sets or ())
    print_warnings(loaded_config.warnings)
    return loaded_config


def config_overrides(sets: list[str] | None, *, allow_untested: bool) -> list[str]:
    """The overrides of a configuration from options."""
    return [*(sets or ()), *([f"{KEY}=true"] if allow_untested else ())]


def resolve_format(output: OutputFormat, *, as_json: bool) -> OutputFormat:
    """The format, from either of the two options."""
    return OutputFormat.JSON if as_json else output


def backend_of(context: typer.Context) -> Backend:
    """This verb's backend; tests inject their own."""
    return context.obj if isinstance(context.obj, Backend) else Backend()


def parse_seconds(text: str, option: str = "--timeout") -> float:
    """A duration option in seconds.

    Raises:
        BadParameter: it is none, or too long for a timer.
    """
    from baton.config.language.units import Unit, parse_quantity  # here: keeps --help fast

    duration_s = parse_quantity(text, Unit.SECONDS)
    if not duration_s:
        raise typer.BadParameter(f"got {text!r}, expected {Unit.SECONDS}", param_hint=option)
    if duration_s > _MAX_DURATION_S:
        raise typer.BadParameter(f"got {text!r}, expected at most 100 years", param_hint=option)
    return duration_s


def check_time_unit(time_unit: TimeUnit | None, trace: Path | None) -> None:
    """Refuse a unit of times without a trace.

    Raises:
        BadParameter: there is no trace.
    """
    if time_unit is not None and trace is None:
        raise typer.BadParameter("is of a trace, and none is given", param_hint="--time-unit")


def parse_users(users: int | None, think_time: str | None) -> UserLoad | None:
    """The users of a closed loop; None if none are given.

    Raises:
        BadParameter: one of the two options is missing, or the time is no duration.
    """
    from baton.simulator.workloads.arrivals import UserLoad  # here: keeps --help fast

    if users is None and think_time is None:
        return None
    if users is None:
        raise typer.BadParameter("is of users: give --users, too", param_hint="--think-time")
    if think_time is None:
        raise typer.BadParameter(
            "needs the time from an answer to the next request: give --think-time, as 10s or 0s",
            param_hint="--users",
        )
    is_zero = think_time in {"0", "0s"}
    think_s = 0.0 if is_zero else parse_seconds(think_time, "--think-time")
    return UserLoad(users=users, think_s=think_s)


def positive(number: float, option: str) -> float:
    """A number above 0.

    Raises:
        BadParameter: it is 0 or less, infinite, or no number.
    """
    if not 0 < number < math.inf:
        raise typer.BadParameter(f"got {number:g}, expected more than 0", param_hint=option)
    return number


def command_line(context: typer.Context) -> str:
    """The command with the given options, for reports."""
    args = ["baton", *context.command_path.split()[1:]]
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is None or source.name != "COMMANDLINE":
            continue
        option_value: object = context.params[parameter.name or ""]
        option = [parameter.opts[0]] if parameter.opts[0].startswith("-") else []
        for value in option_value if isinstance(option_value, list | tuple) else [option_value]:
            args += option if isinstance(value, bool) else [*option, str(value)]
    return shlex.join(args)
