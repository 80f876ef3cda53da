"""`baton`: the command line, and every verb under the heading where an operator looks for it.

Theory of operation: `baton --help` shows the table below and imports no verb; `baton VERB` imports
only its own. A test compares the table with the verbs' help.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple, Protocol

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

import baton

_CommandOrGroup = TyperCommand | TyperGroup


class Verb(NamedTuple):
    """One word after `baton`."""

    help: str
    """Its text in `baton --help`: the first sentence of its own help."""
    entry_point: str | Mapping[str, str]
    """Module and function below `baton.cli`; of a group, those of its verbs by name."""


VERBS: Mapping[str, Mapping[str, Verb]] = MappingProxyType(
    {
        "Run a deployment": {
            "demo": Verb(
                "Start a deployment and stream a few requests through it.", "run.demo:demo"
            ),
            "init": Verb("Print a commented configuration for one model.", "run.init:init"),
            "up": Verb("Start a deployment, and hold it until Ctrl-C.", "run.up:up"),
            "apply": Verb(
                "Apply a configuration: all of it, or nothing.",
                "run.apply:apply",
            ),
            "rollback": Verb(
                "Go back to an earlier configuration, as another generation.",
                "run.rollback:rollback",
            ),
            "upgrade": Verb(
                "Replace every process by a process of this version of baton.",
                "run.upgrade:upgrade",
            ),
            "scale": Verb("Set a pool's replicas, in place of the autoscaler.", "run.scale:scale"),
            "join": Verb(
                "Print what another machine runs to join the deployment's cluster.", "run.join:join"
            ),
            "chat": Verb(
                "Chat with a deployment: answers stream to the terminal.", "run.chat:chat"
            ),
            "down": Verb(
                "Drain and stop the deployment; a cluster that ran before goes on.",
                "run.down:down",
            ),
        },
        "Look at it": {
            "status": Verb("Show what runs: pools, replicas, health.", "inspect.status:status"),
            "history": Verb(
                "Show past configurations, their changes, authors and results.",
                "inspect.history:history",
            ),
            "top": Verb(
                "Watch goodput, pools, links and the slowest requests live.", "inspect.top:top"
            ),
            "links": Verb(
                "Show the links that KV blocks move over: speed, failures.", "inspect.links:links"
            ),
            "usage": Verb(
                "Show tokens, device time and money of each tenant.", "inspect.usage:usage"
            ),
            "logs": Verb(
                "Show what the processes of the deployment have logged.", "inspect.logs:logs"
            ),
        },
        "Ask why": {
            "trace": Verb(
                "Show where a request's time went, predicted against actual.", "explain.trace:trace"
            ),
            "explain": Verb(
                "Ask why something was decided.",
                {"route": "explain.explain:route", "scale": "explain.explain_scale:scale"},
            ),
            "doctor": Verb(
                "Find what is wrong, why it matters, and the fix.", "inspect.doctor:doctor"
            ),
        },
        "Measure and plan": {
            "bench": Verb(
                "Send a load to an endpoint and measure what its users would meet.",
                "measure.bench:bench",
            ),
            "plan": Verb("Find the cheapest fleet that meets its objectives.", "model.plan:plan"),
            "simulate": Verb(
                "Serve a trace or a workload in virtual time.", "model.simulate:simulate"
            ),
            "replay": Verb(
                "Send a trace to a running endpoint, and measure.", "measure.replay:replay"
            ),
            "size": Verb("Compute whether a model fits a number of devices.", "model.size:size"),
            "calibrate": Verb(
                "Compare predicted with measured latencies.", "model.calibrate:calibrate"
            ),
        },
        "Set it up": {
            "config": Verb(
                "Look at a configuration.",
                {
                    "validate": "setup.config:validate",
                    "show": "setup.config:show",
                    "schema": "setup.config:schema",
                },
            ),
            "keys": Verb(
                "Manage API keys.",
                {
                    "create": "setup.keys:create",
                    "list": "setup.keys:show",
                    "revoke": "setup.keys:revoke",
                    "rotate": "setup.keys:rotate",
                },
            ),
            "dashboards": Verb(
                "Get the Grafana dashboards.", {"export": "setup.export_files:dashboards"}
            ),
            "rules": Verb("Get the rules for Prometheus.", {"export": "setup.export_files:rules"}),
            "manifests": Verb(
                "Get files for clusters and machines.", {"export": "setup.export_files:manifests"}
            ),
            "completion": Verb(
                "Print a script with which a shell completes verbs and options.",
                "setup.completion:completion",
            ),
            "version": Verb("Show which versions are installed.", "setup.version:version"),
        },
    }
)

SYNONYMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "start": ("up",),
        "serve": ("up",),
        "run": ("up",),
        "deploy": ("up", "apply"),
        "stop": ("down",),
        "kill": ("down",),
        "delete": ("down",),
        "restart": ("apply", "upgrade"),
        "update": ("apply",),
        "ps": ("status",),
        "ls": ("status",),
        "list": ("status",),
        "get": ("status",),
        "describe": ("status", "explain"),
        "info": ("status", "version"),
        "check": ("doctor", "config"),
        "validate": ("config",),
        "metrics": ("top",),
        "watch": ("top",),
        "log": ("logs",),
        "benchmark": ("bench",),
    }
)
"""Verbs of other tools, each with the verbs of baton that do this."""

COMPLETION_VARIABLE = "_BATON_COMPLETE"
"""By which a shell asks for completions. Source: Typer's name for a program called `baton`."""

DEBUG_OPTION = "--debug"
DEBUG_VARIABLE = "BATON_DEBUG"
"""Either shows the traceback of an unexpected error; the option stands before the verb."""

DEPRECATED_VERBS: Mapping[str, str] = MappingProxyType({"fit": "model.calibrate:fit"})
"""Hidden verbs: module and function by name. Their words are passed on unparsed."""


class _Formatter(Protocol):
    """Click's writer of help."""

    width: int

    def section(self, name: str) -> AbstractContextManager[None]:
        """A part with a heading."""
        ...

    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None:
        """Write names and their meanings, in two columns."""
        ...


def build_app() -> typer.Typer:
    """The command line with all its verbs."""
    app = typer.Typer(
        name="baton",
        cls=_GroupedVerbs,
        help="Serve LLMs with vLLM in separate prefill and decode pools on Ray.",
        no_args_is_help=True,
        add_completion=False,
        # Plain text: rich would take more time than the rest of --help.
        rich_markup_mode=None,
        # Locals in a traceback could show what must not be shown.
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},  # verbs inherit them
    )
    app.callback()(_no_op)
    return app


def _no_op() -> None:
    """The callback of a group, which does nothing."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0 ok, 1 failure, 2 usage, 3 not running, 4 timeout.

    An unexpected error is one line, and its traceback is in a file; --debug and BATON_DEBUG show
    it.
    """
    if COMPLETION_VARIABLE in os.environ:
        # Here: keeps --help fast.
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_debug = words[:1] == [DEBUG_OPTION] or bool(os.environ.get(DEBUG_VARIABLE))
    try:
        build_app()(words[1:] if words[:1] == [DEBUG_OPTION] else words)
    except Exception as error:
        if is_debug:
            raise
        from baton.cli.output import report_unexpected  # here: keeps --help fast

        sys.exit(report_unexpected(error, debug=f"baton {DEBUG_OPTION}"))


class _LazyCommands(MutableMapping[str, _CommandOrGroup]):
    """Commands by name; a verb is imported and built on use."""

    def __init__(self) -> None:
        self._verbs = {name: verb for verbs in VERBS.values() for name, verb in verbs.items()}
        self._loaded: dict[str, _CommandOrGroup] = {}

    def __getitem__(self, name: str) -> _CommandOrGroup:
        if name not in self._loaded:
            entry_point = DEPRECATED_VERBS.get(name)
            self._loaded[name] = (
                _build(name, self._verbs[name])
                if entry_point is None
                else _build_deprecated(name, entry_point)
            )
        return self._loaded[name]

    def __setitem__(self, name: str, command: _CommandOrGroup) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        self._loaded.pop(name, None)
        del self._verbs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._verbs)

    def __len__(self) -> int:
        return len(self._verbs)


class _FastGroup(TyperGroup):
    """A group without Typer's slow parsing of its options."""

    def get_help_option(self, ctx: object) -> TyperOption | None:
        """Typer's option with a default: without, Typer imports pydantic."""
        option = super().get_help_option(ctx)  # type: ignore[arg-type]  # Typer's, handed on
        if option is not None:
            option.default = False
        return option


class _GroupedVerbs(_FastGroup):
    """The group of `baton` itself."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]  # Typer's, handed on
        self.commands = _LazyCommands()  # type: ignore[assignment]  # Typer's own private types

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Understand `baton --version` and `baton help VERB`, too."""
        match args:
            case ["--version", *_]:
                typer.echo(f"baton {baton.__version__}")
                ctx.exit()
            case ["help", *words]:
                args = [*words, "--help"]
        return super().parse_args(ctx, args)

    def resolve_command(  # type: ignore[override]
        self, ctx: typer.Context, args: list[str]
    ) -> tuple[str | None, _CommandOrGroup | None, list[str]]:
        """Find a verb; one of another tool is answered with those of baton that do the same."""
        if args and args[0] not in self.commands and (verbs := SYNONYMS.get(args[0])):
            ours = " or ".join(f"'baton {verb}'" for verb in verbs)
            ctx.fail(f"command: got {args[0]!r}, expected a verb of baton; use {ours}")
        return super().resolve_command(ctx, args)  # type: ignore[return-value]  # Typer's own

    def format_options(self, ctx: object, formatter: _Formatter) -> None:
        """Write the options, and the verbs."""
        with formatter.section("Options"):
            formatter.write_dl(
                [
                    ("--version", "Show the version and exit."),
                    (f"{DEBUG_OPTION} VERB", "Show the traceback of an unexpected error."),
                    ("-h, --help", "Show this message and exit."),
                ]
            )
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: object, formatter: _Formatter) -> None:
        """Write the verbs under their headings, aligned over all of them."""
        longest = max(len(name) for name in self.commands)
        for heading, verbs in VERBS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(name.ljust(longest), verb.help) for name, verb in verbs.items()]
                )


def _build(name: str, verb: Verb) -> _CommandOrGroup:
    app = _app(
        name,
        help_text=verb.help if isinstance(verb.entry_point, Mapping) else None,
        no_args_is_help=isinstance(verb.entry_point, Mapping),
    )
    if isinstance(verb.entry_point, Mapping):
        for subcommand, entry_point in verb.entry_point.items():
            app.command(subcommand)(_load_function(entry_point))
        app.callback()(_no_op)  # also a single subcommand stays a subcommand
    else:
        app.command(name)(_load_function(verb.entry_point))
    return _command(app)


def _build_deprecated(name: str, entry_point: str) -> _CommandOrGroup:
    app = _app(name)
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(name, context_settings=settings)(_load_function(entry_point))
    return _command(app)


def _app(name: str, *, help_text: str | None = None, no_args_is_help: bool = False) -> typer.Typer:
    return typer.Typer(
        name=name,
        cls=_FastGroup,
        help=help_text,
        add_completion=False,
        no_args_is_help=no_args_is_help,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def _command(app: typer.Typer) -> _CommandOrGroup:
    command: _CommandOrGroup = typer.main.get_command(app)  # type: ignore[assignment]  # likewise
    return command


def _load_function(entry_point: str) -> Callable[..., None]:
    module, _, function = entry_point.partition(":")
    loaded: Callable[..., None] = getattr(import_module(f"baton.cli.{module}"), function)
    return loaded


if __name__ == "__main__":
    main()
