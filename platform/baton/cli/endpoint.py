"""The endpoint of the verbs that send requests: its URL, API key and certificates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from baton.bench.client.trust import TlsTrust
from baton.cli.backend import Commands
from baton.cli.options import backend_of
from baton.domain.errors import NotRunning, OperatorError

KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        "--api-key-file",
        metavar="FILE",
        help="File with the API key; else OPENAI_API_KEY.",
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-file", metavar="FILE", help="Certificates that sign the endpoint's certificate."
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Accept every certificate: another server may see the key."),
]
_RUNNING_REMEDY = "start one with 'baton up -c FILE', or name the URL of an endpoint"


class KeyFileUnusable(OperatorError):
    """A file with an API key cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How to reach an endpoint."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """May hold a key."""
    trust: TlsTrust = field(default_factory=TlsTrust)
    commands: Commands | None = None
    """Of the running deployment; None for a URL that was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionArgs:
    """The options of a verb that say how to reach its endpoint."""

    url: str | None
    """None for the running deployment."""
    key_file: Path | None
    ca_file: Path | None
    insecure: bool
    address: str | None = None
    headers: Sequence[str] = ()
    """Each as `NAME: VALUE`."""


def connect(context: typer.Context, args: ConnectionArgs) -> Connection:
    """The endpoint that was named, else that of the running deployment.

    A running deployment of this machine is trusted by its own certificate.

    Raises:
        BadParameter: a header is none.
        NotRunning: there is no deployment.
        OperatorError: a file cannot be used.
    """
    headers = parse_headers(context, args.headers, args.key_file)
    url, commands, own_certificate = args.url, None, None
    if url is None:
        commands = backend_of(context).commands()
        status = commands.status(address=args.address)
        if "endpoint" not in status:
            raise NotRunning("the deployment has noted no endpoint", _RUNNING_REMEDY)
        url = str(status["endpoint"])
        own_certificate = status.get("certificate")
    trust = TlsTrust(
        ca_file=args.ca_file,
        endpoint_file=None
        if args.ca_file is not None or own_certificate is None
        else Path(str(own_certificate)),
        is_insecure=args.insecure,
    )
    if args.ca_file is not None:
        trust.context()  # before anything is sent
    return Connection(url=url, headers=headers, trust=trust, commands=commands)


def parse_headers(
    context: typer.Context, texts: Sequence[str], key_file: Path | None
) -> dict[str, str]:
    """Headers, with the key where there is one.

    Raises:
        KeyFileUnusable: the file cannot be read, or is empty.
    """
    headers = dict(parse_header(text) for text in texts)
    key = backend_of(context).environ.get("OPENAI_API_KEY")
    if key_file is not None:
        key = _read_key(key_file)
    if key and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _read_key(file: Path) -> str:
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileUnusable(f"--key-file: {file}: {error}", "name a text file") from error
    if not key:
        raise KeyFileUnusable(f"--key-file: {file} is empty, expected a key", "write the key to it")
    return key


def parse_header(text: str) -> tuple[str, str]:
    """A header's name and value."""
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise typer.BadParameter(
            f"got {text!r}, expected NAME:VALUE such as X-Team:search", param_hint="--header"
        )
    return name.strip(), value.strip()
