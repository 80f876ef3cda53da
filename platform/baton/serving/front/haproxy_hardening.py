"""Guards Ray Serve's HAProxy of a local deployment: a wrapper program, and TLS.

`haproxy_wrapper` does the work; this module writes its settings and has Ray Serve run it. A gate at
the public port gets the same settings without a wrapper.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from baton.config.schema.security import TlsConfig
from baton.domain.errors import ClusterFailed
from baton.domain.names.addresses import bracket_ipv6, is_any_address, is_ipv6
from baton.serving.front import haproxy_wrapper
from baton.serving.front.data_path import DataPath, FrontSettings, find_haproxy

_HAPROXY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
_GUARD_FILE = "front.json"
_WILDCARD_HOSTS = frozenset({"", "0.0.0.0"})  # noqa: S104 - compared, not bound
_WRAPPER_FILE = "haproxy"
_CERT_FILE = "front.pem"
_KEY_FILE = f"{_CERT_FILE}.key"
"""HAProxy looks there for the key to a certificate; only this user reads the folder."""


def harden_front(
    environ: Mapping[str, str], front: FrontSettings, *, host: str, tls: TlsConfig
) -> dict[str, str]:
    """Write the wrapper and its settings; returns the variables with which Ray Serve runs it.

    `host` is the address of clients; Serve itself stays on loopback. Certificates and keys are not
    copied: HAProxy reads their files with each reload.

    Raises:
        ClusterFailed: TLS is configured, and there is no HAProxy.
    """
    run_dir = front.run_dir
    haproxy = find_haproxy(environ) if front.data_path is DataPath.SERVE_HAPROXY else None
    if haproxy is None:
        if tls != TlsConfig():
            raise ClusterFailed(
                "security.tls is set, and without HAProxy nothing here terminates or requires TLS",
                "install ray[serve] on Linux, or end TLS before baton and remove security.tls",
            )
        return {}
    guard = gate_guard_fields(run_dir, haproxy, host=host, tls=tls)
    (run_dir / _GUARD_FILE).write_text(json.dumps(guard))
    wrapper = run_dir / _WRAPPER_FILE
    command = [
        sys.executable,
        "-I",
        str(Path(haproxy_wrapper.__file__)),
        str(run_dir / _GUARD_FILE),
    ]
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    wrapper.chmod(0o700)
    return {_HAPROXY_VARIABLE: str(wrapper)}


def certificate_path(folder: Path) -> Path:
    """HAProxy's name of its certificate."""
    return folder / _CERT_FILE


def real_haproxy_environment(run_dir: Path) -> dict[str, str]:
    """The variables with which Ray Serve runs the real HAProxy again."""
    try:
        guard = json.loads((run_dir / _GUARD_FILE).read_text())
    except OSError:  # there was none
        return {}
    return {_HAPROXY_VARIABLE: guard["haproxy"]}


def gate_guard_fields(
    folder: Path, haproxy: str, *, host: str, tls: TlsConfig
) -> haproxy_wrapper.GuardFields:
    """The settings of the public port; links certificate and key into the folder."""
    cert = None
    if tls.cert_file is not None and tls.key_file is not None:
        cert = certificate_path(folder)
        cert.symlink_to(Path(tls.cert_file).absolute())
        (folder / _KEY_FILE).symlink_to(Path(tls.key_file).absolute())
    authorities = tls.client_ca_file
    return {
        "haproxy": haproxy,
        "bind_host": "*" if host in _WILDCARD_HOSTS else bracket_ipv6(host),
        "bind_options": " v4v6" if is_any_address(host) and is_ipv6(host) else "",
        "cert_file": None if cert is None else str(cert),
        "client_ca_file": None if authorities is None else str(Path(authorities).absolute()),
        "require_tls": tls.required,
    }
