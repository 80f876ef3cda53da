"""Checks of TLS files, keys and Ray's authentication before a start."""

from __future__ import annotations

import ssl
from pathlib import Path

from baton.config.derive.options import allows_anonymous
from baton.config.schema.deployment import DeploymentConfig
from baton.domain.names.addresses import format_address, is_loopback, is_loopback_address

_TLS = "security.tls"


def tls_findings(config: DeploymentConfig) -> tuple[str, ...]:
    """Certificates and keys that cannot be used."""
    tls = config.security.tls
    findings: list[str] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if tls.cert_file is not None and tls.key_file is not None:
        for key, path in (("cert_file", tls.cert_file), ("key_file", tls.key_file)):
            findings += _read_findings(key, path)
        if not findings:
            try:
                context.load_cert_chain(tls.cert_file, tls.key_file, password=_reject_password)
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                findings.append(
                    f"{_TLS}: {tls.cert_file} and {tls.key_file} are no certificate and its key:"
                    f" {_first_line(error)}; give both in PEM, the key without a password"
                )
    if tls.client_ca_file is not None:
        findings += _client_ca_findings(context, tls.client_ca_file)
    return tuple(findings)


def _client_ca_findings(context: ssl.SSLContext, path: str) -> list[str]:
    if unreadable := _read_findings("client_ca_file", path):
        return unreadable
    try:
        context.load_verify_locations(cafile=path)
    except (OSError, ValueError) as error:
        return [
            f"{_TLS}.client_ca_file: {path} holds no certificates: {_first_line(error)};"
            " give those of the authorities, in PEM"
        ]
    return []


def exposure_findings(config: DeploymentConfig) -> tuple[str, ...]:
    """Unauthenticated or unencrypted access from other machines; empty on loopback."""
    server, tls = config.server, config.security.tls
    if is_loopback(server.host):
        return ()
    findings, address = [], format_address(server.host, server.port)
    if allows_anonymous(config):
        findings.append(
            f"whoever reaches {address} is served without a key;"
            " give tenants keys with 'baton keys create', or set server.host to 127.0.0.1"
        )
    elif tls.cert_file is None and not tls.required:
        findings.append(
            f"keys come to {address} in clear; set {_TLS}.cert_file and"
            " key_file, or end TLS on this machine and refuse the rest with security.tls.required"
        )
    return tuple(findings)


def ray_auth_findings(
    gcs_address: str, auth: str, *, allowed: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Findings about a Ray that other machines reach without a token (`auth_probe`).

    Returns:
        Errors, and warnings in their place if it is `allowed`.
    """
    if auth != "open" or is_loopback_address(gcs_address):
        return (), ()
    problem = (
        f"the Ray cluster at {gcs_address} lets in whoever reaches it, and whoever it lets in"
        " runs code"
        " on every node"
    )
    if allowed:
        return (), (f"{problem}; cluster.allow_open says that this is meant",)
    remedy = "start Ray with RAY_AUTH_MODE=token on every node, or say that it is meant: "
    return (f"{problem}; {remedy}cluster.allow_open: true",), ()


def why_unreadable(path: str) -> str:
    """Why this user cannot read a file; empty if it can."""
    try:
        with Path(path).open("rb"):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _read_findings(key: str, path: str) -> list[str]:
    if why := why_unreadable(path):
        return [f"{_TLS}.{key}: {path} cannot be read: {why}; give a file that this user may read"]
    return []


def _reject_password() -> str:
    """For an encrypted key: the start is not interactive, so it cannot be used."""
    raise ValueError("it is locked with a password")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
