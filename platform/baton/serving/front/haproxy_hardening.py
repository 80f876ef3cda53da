"""What the front of a local deployment is closed by: a program in HAProxy's place, and TLS.

`haproxy_front` does the work; here is what it is told, and how Ray Serve comes to run it. A gate
that is the front itself needs no such program, and is told the same.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.config.schema.security import TlsConfig
from baton.domain.errors import ClusterFailed
from baton.domain.names.addresses import bracket_ipv6, is_any_address, is_ipv6
from baton.serving.front import haproxy_wrapper as haproxy_front
from baton.serving.front.data_path import DataPath, FrontSettings, find_haproxy

_HAPROXY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
_GUARD_FILE = "front.json"
_WILDCARD_HOSTS = frozenset({"", "0.0.0.0"})  # noqa: S104 - compared, not bound
_WRAPPER_FILE = "haproxy"
_CERT_FILE = "front.pem"
_KEY_FILE = f"{_CERT_FILE}.key"
"""HAProxy looks there for the key to a certificate, and this folder is its owner's alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """What `haproxy_front` reads."""

    haproxy: str
    """The real one."""
    bind_host: str
    """Where clients come, as HAProxy has it before a port; `*` for everywhere."""
    bind_options: str
    """What its `bind` says after the port."""
    cert_file: str | None = None
    """With its key beside it, under the same name and `.key`."""
    client_ca_file: str | None = None
    require_tls: bool = False
    """Refuse keys that came from other machines in clear."""


def harden_front(
    environ: Mapping[str, str], front: FrontSettings, *, host: str, tls: TlsConfig
) -> dict[str, str]:
    """Write what stands in for HAProxy; returns the variables by which Ray Serve finds it.

    `host` is where clients come; Serve itself is told to keep to loopback.

    Nothing of a certificate or key is copied: HAProxy reads the files that are named, again with
    each reload.

    Raises:
        ClusterFailed: TLS is wanted where there is no HAProxy.
    """
    run_dir = front.run_dir
    haproxy = find_haproxy(environ) if front.data_path is DataPath.SERVE_HAPROXY else None
    if haproxy is None:
        if tls != TlsConfig():
            raise ClusterFailed(
                "security.tls is set, and without HAProxy nothing here speaks TLS or asks for it",
                "install ray[serve] on Linux, or end TLS before baton and remove security.tls",
            )
        return {}
    (run_dir / _GUARD_FILE).write_text(
        json.dumps(asdict(_guard_settings(run_dir, haproxy, host, tls)))
    )
    wrapper = run_dir / _WRAPPER_FILE
    command = [sys.executable, "-I", str(Path(haproxy_front.__file__)), str(run_dir / _GUARD_FILE)]
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    wrapper.chmod(0o700)
    return {_HAPROXY_VARIABLE: str(wrapper)}


def gate_guard_fields(
    folder: Path, haproxy: str, *, host: str, tls: TlsConfig
) -> haproxy_front.GuardFields:
    """What a gate that is the front is told; its certificate's name is made in the folder."""
    return asdict(_guard_settings(folder, haproxy, host, tls))


def certificate_path(folder: Path) -> Path:
    """The name by which HAProxy knows its certificate."""
    return folder / _CERT_FILE


def real_haproxy_environment(run_dir: Path) -> dict[str, str]:
    """The variables by which Ray Serve, and whoever comes next, finds the real HAProxy again."""
    try:
        guard = json.loads((run_dir / _GUARD_FILE).read_text())
    except OSError:  # there was none
        return {}
    return {_HAPROXY_VARIABLE: guard["haproxy"]}


def _guard_settings(run_dir: Path, haproxy: str, host: str, tls: TlsConfig) -> GuardSettings:
    cert = None
    if tls.cert_file is not None and tls.key_file is not None:
        cert = certificate_path(run_dir)
        cert.symlink_to(Path(tls.cert_file).absolute())
        (run_dir / _KEY_FILE).symlink_to(Path(tls.key_file).absolute())
    authorities = tls.client_ca_file
    return GuardSettings(
        haproxy=haproxy,
        bind_host="*" if host in _WILDCARD_HOSTS else bracket_ipv6(host),
        bind_options=" v4v6" if is_any_address(host) and is_ipv6(host) else "",
        cert_file=None if cert is None else str(cert),
        client_ca_file=None if authorities is None else str(Path(authorities).absolute()),
        require_tls=tls.required,
    )
