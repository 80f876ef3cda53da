"""`baton keys`: make, list, revoke and replace the API keys in a key file."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options import JsonFlag, Output, parse_seconds, resolve_format
from baton.cli.output import OutputFormat, print_report, report_errors, table_lines
from baton.domain.errors import OperatorError

if TYPE_CHECKING:  # imported where it is used: keeps --help fast
    from baton.runtime.keys.api_keys import ApiKey

_FILE = typer.Option("--file", metavar="FILE", help="The key file of the tenant, as in its config.")
_ID = typer.Argument(metavar="ID", help="Id of the key, as 'baton keys list' shows it.")
_EXPIRES = typer.Option(
    "--expires", metavar="DURATION", help="After which it is good for nothing, as 90d."
)
_SHOWN_ONCE = "this is the only time that it is shown; what is kept cannot be turned back into it"


def create(  # noqa: PLR0913 - each is an option of the verb
    tenant: Annotated[str, typer.Option("--tenant", help="Tenant of the key.")],
    file: Annotated[Path, _FILE],
    *,
    label: Annotated[str, typer.Option("--label", help="Purpose of the key.")] = "",
    expires: Annotated[str | None, _EXPIRES] = None,
    administer: Annotated[
        bool,
        typer.Option("--administer", help="Permit loading and unloading LoRA adapters, too."),
    ] = False,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Make a key and print it, this once.

    A running deployment knows it within two seconds.
    """
    now = _now()
    expires_at = None if expires is None else _time_after(expires, "--expires", now)
    with report_errors():
        from baton.runtime.keys.key_files import edit_key_file

        with edit_key_file(file, create=True) as document:
            key, token = _mint(tenant, now, expires_at, label, administers=administer)
            document.add(key)
    _print_key(key, token, resolve_format(output, as_json=as_json))


def show(
    file: Annotated[Path, _FILE], *, output: Output = OutputFormat.TEXT, as_json: JsonFlag = False
) -> None:
    """List the keys of a file.

    Not the keys themselves, which are kept nowhere.
    """
    now = _now()
    with report_errors():
        from baton.runtime.keys.key_files import read_keys

        rows = [_row(key, now) for key in read_keys(file)]
    if resolve_format(output, as_json=as_json) is OutputFormat.JSON:
        typer.echo(json.dumps(rows))
        return
    for text in table_lines(rows):
        typer.echo(text)


def revoke(
    key_id: Annotated[str, _ID],
    file: Annotated[Path, _FILE],
    *,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Have a key count no more.

    A running deployment knows it within two seconds. The key's line stays, as a record.
    """
    with report_errors():
        from baton.runtime.keys.key_files import edit_key_file

        with edit_key_file(file) as document:
            key = document.revoke(key_id, _now())
    if resolve_format(output, as_json=as_json) is OutputFormat.JSON:
        print_report(_row(key, _now()), OutputFormat.JSON)
    typer.echo(f"key {key.key_id} of tenant {key.tenant} is revoked", err=True)


def rotate(
    key_id: Annotated[str, _ID],
    file: Annotated[Path, _FILE],
    *,
    grace: Annotated[
        str, typer.Option("--grace", metavar="DURATION", help="Time that the old key stays valid.")
    ] = "24h",
    expires: Annotated[str | None, _EXPIRES] = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Make a key in place of another.

    The other stays good for a while, so that callers can change. The new one lasts
    as long as the other was made to last, unless set otherwise.
    """
    now = _now()
    grace_ends_at = _time_after(grace, "--grace", now)
    expires_at = None if expires is None else _time_after(expires, "--expires", now)
    with report_errors():
        from baton.runtime.keys.api_keys import KeyState, format_time
        from baton.runtime.keys.key_files import edit_key_file

        with edit_key_file(file) as document:
            old_key = document.key(key_id)
            if old_key.state(now) is not KeyState.ACTIVE:
                raise OperatorError(
                    f"key {key_id} is {old_key.state(now)}",
                    "make a new one with 'baton keys create'",
                )
            if expires_at is None and old_key.expires_at is not None:
                expires_at = now + (old_key.expires_at - old_key.created_at)
            key, token = _mint(
                old_key.tenant, now, expires_at, old_key.label, administers=old_key.is_admin
            )
            document.add(key)
            old_key = document.expire(key_id, grace_ends_at)
    _print_key(key, token, resolve_format(output, as_json=as_json))
    if old_key.expires_at is not None:
        typer.echo(f"key {key_id} stays good until {format_time(old_key.expires_at)}", err=True)


def _mint(
    tenant: str, now: datetime, expires_at: datetime | None, label: str, *, administers: bool
) -> tuple[ApiKey, str]:
    from baton.runtime.keys.api_keys import BadKeyLine, mint

    try:
        return mint(tenant, now=now, expires_at=expires_at, label=label, is_admin=administers)
    except BadKeyLine as error:
        raise OperatorError(str(error), "choose another tenant name or label") from error


def _print_key(key: ApiKey, token: str, output: OutputFormat) -> None:
    """Print the key alone on stdout, for scripts; the rest on stderr."""
    if output is OutputFormat.JSON:
        print_report({**_row(key, key.created_at), "key": token}, output)
    else:
        typer.echo(token)
    typer.echo(f"key {key.key_id} of tenant {key.tenant}: {_SHOWN_ONCE}", err=True)


def _row(key: ApiKey, now: datetime) -> dict[str, object]:
    from baton.runtime.keys.api_keys import format_time

    return {
        "id": key.key_id,
        "tenant": key.tenant,
        "state": str(key.state(now)),
        "created": format_time(key.created_at),
        "expires": None if key.expires_at is None else format_time(key.expires_at),
        "revoked": None if key.revoked_at is None else format_time(key.revoked_at),
        "administers": key.is_admin,
        "label": key.label,
    }


def _now() -> datetime:
    return datetime.now(UTC)


def _time_after(duration: str, option: str, now: datetime) -> datetime:
    return now + timedelta(seconds=parse_seconds(duration, option))
