"""Models and files that a configuration names, on the nodes whose processes read them.

Theory of operation: a path means another file on each node. Every ingress reads the keys, so a node
without a key file would reject all its callers. So each node is asked for missing files of the
processes that may run on it; only findings and digests come back, no contents. Nodes that an
autoscaler starts later cannot be asked.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.config.derive.options import adapter_sources, engine_env, key_files
from baton.config.schema.deployment import DeploymentConfig, ModelConfig
from baton.config.schema.security import TlsConfig
from baton.domain.errors import ConfigInvalid
from baton.domain.names.addresses import is_loopback
from baton.domain.names.model_sources import TINY, is_in_object_store, is_path
from baton.domain.names.words import few
from baton.runtime.keys.key_files import load_ring
from baton.serving.checks.autoscaling_capacity import may_host
from baton.serving.checks.result import Check, CheckStatus, Finding, Topic
from baton.serving.ray.autoscaler import NodeType
from baton.serving.ray.context import HEAD_NODE_RESOURCE

_KEY_REMEDY = "correct these lines; see 'baton keys list'"
_MISSING_REMEDY = (
    "put it on every node where it may be read, or keep what reads it away from there: ingresses"
    " stay on the head with server.host 127.0.0.1, engines go by pools.*.placement.labels"
)
_NODE_FILES = Topic(
    "files of nodes", "a process that misses a file starts nowhere, or rejects all callers"
)
_NODE_KEYS = Topic("key files of nodes", "every ingress knows callers by its node's file")
_STREAMER_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEligibility:
    """The processes that may run on a node."""

    ingress: bool
    controller: bool
    pools: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFiles:
    """The files of one node."""

    missing: tuple[str, ...] = ()
    key_digests: Mapping[str, str] | None = None
    """Of the key files, by path; None on a node without ingresses."""


def node_eligibility(config: DeploymentConfig, node: NodeType) -> NodeEligibility:
    """The processes that may run on a node of an existing cluster."""
    has_cpus = node.resources.get("CPU", 0.0) > 0
    is_head_only = is_loopback(config.server.host)
    return NodeEligibility(
        ingress=HEAD_NODE_RESOURCE in node.resources if is_head_only else has_cpus,
        controller=has_cpus,
        pools=tuple(name for name in config.pools if may_host(config, name, node)),
    )


def inspect_node_files(config: DeploymentConfig, eligibility: NodeEligibility) -> NodeFiles:
    """Look for the files of these processes on this machine. Blocks on the disk."""
    missing = list(_missing_models(config, eligibility))
    for pool in eligibility.pools:
        try:
            engine_env(config, pool, os.environ)
        except ConfigInvalid as error:
            missing += error.problems
    token = config.observability.token_file
    if eligibility.controller and token is not None and (reason := why_unreadable(token)):
        missing.append(f"observability.token_file: {token} cannot be read: {reason}")
    if not eligibility.ingress:
        return NodeFiles(missing=tuple(dict.fromkeys(missing)))
    missing += [f"keys of a tenant: {finding.found}" for finding in key_findings(config)]
    digests = {str(path): _digest(path) for path in key_files(config).values()}
    return NodeFiles(missing=tuple(dict.fromkeys(missing)), key_digests=digests)


def _missing_models(config: DeploymentConfig, eligibility: NodeEligibility) -> Iterator[str]:
    """Models and adapters of engines; an ingress reads every model's tokenizer."""
    served = {config.pools[pool].model for pool in eligibility.pools}
    names = set(config.models) if eligibility.ingress else served
    yield from map(str, source_findings({name: config.models[name] for name in names}))
    for name in served:
        for adapter, source in adapter_sources(config.models[name]).items():
            if is_path(source) and not Path(source).expanduser().is_dir():
                yield f"models.{name}.adapters.{adapter}.source: {source} is no directory"


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:  # unreadable files have their own finding
        return ""


def check_node_files(files_by_node: Mapping[str, NodeFiles]) -> tuple[Check, Check]:
    """Files that are missing on nodes, and key files that differ between them."""
    nodes_by_line: dict[str, list[str]] = {}
    for node, files in sorted(files_by_node.items()):
        for line in files.missing:
            nodes_by_line.setdefault(line, []).append(node)
    missing = (
        Finding(f"{line} (on {few(nodes, separator=', ')})", _MISSING_REMEDY)
        for line, nodes in nodes_by_line.items()
    )
    return (
        _NODE_FILES.from_findings(missing, otherwise="every node has what its processes read"),
        _NODE_KEYS.from_findings(
            _key_file_differences(files_by_node),
            otherwise="every node has the same",
            status=CheckStatus.WARN,
        ),
    )


def _key_file_differences(files_by_node: Mapping[str, NodeFiles]) -> Iterator[Finding]:
    versions: dict[str, dict[str, list[str]]] = {}
    for node, files in sorted(files_by_node.items()):
        for path, digest in (files.key_digests or {}).items():
            if digest:
                versions.setdefault(path, {}).setdefault(digest, []).append(node)
    for path, by_digest in versions.items():
        if len(by_digest) > 1:
            groups = ", another on ".join(
                few(nodes, separator=", ") for nodes in by_digest.values()
            )
            yield Finding(
                f"the key file {path} is one on {groups}: a key may be good for one ingress and not"
                " for the next",
                "copy one file to all of them, each time that it changes",
            )


def source_findings(models: Mapping[str, ModelConfig]) -> tuple[Finding, ...]:
    """Models with a path at which no model is. Hub ids are not looked up."""
    findings = []
    for name, model in models.items():
        source = model.source
        path = Path(source).expanduser()
        if is_in_object_store(source):
            findings += _streamer_findings(name, source)
        remedy = "give the directory of a model, or its id on the hub"
        if source == TINY or not (is_path(source) or path.is_dir()):
            continue
        if path.is_dir():
            if (path / "config.json").is_file():
                continue
            problem, remedy = "has no config.json", "give the directory that the model was saved to"
        else:
            problem = "is not a directory" if path.exists() else "does not exist"
        findings.append(Finding(f"models.{name}.source: {source} {problem}", remedy))
    return tuple(findings)


def _streamer_findings(model: str, source: str) -> list[Finding]:
    """The package that reads object stores does not come with vLLM."""
    if importlib.util.find_spec("runai_model_streamer") is not None:
        return []
    extra = _STREAMER_EXTRAS[source.partition("://")[0].lower()]
    return [
        Finding(
            f"models.{model}.source: {source} is read by a package that is not installed",
            f"pip install 'runai-model-streamer[{extra}]' on every node",
        )
    ]


def key_findings(config: DeploymentConfig) -> tuple[Finding, ...]:
    """Files of API keys that cannot be read, and their bad lines."""
    try:
        load_ring(key_files(config))
    except ConfigInvalid as error:
        return tuple(Finding(line, _KEY_REMEDY) for line in error.problems)
    return ()


def tls_findings(config: DeploymentConfig) -> tuple[Finding, ...]:
    """Certificates and keys that cannot be used."""
    return tuple(_tls_findings(config.security.tls))


def _tls_findings(tls: TlsConfig) -> Iterator[Finding]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    unreadable = set()
    for key in ("cert_file", "key_file", "client_ca_file"):
        path = getattr(tls, key)
        if path is not None and (reason := why_unreadable(path)):
            unreadable.add(key)
            yield Finding(
                f"security.tls.{key}: {path} cannot be read: {reason}",
                "give a file that this user may read",
            )
    try:
        if tls.cert_file and tls.key_file and not unreadable & {"cert_file", "key_file"}:
            context.load_cert_chain(tls.cert_file, tls.key_file, password=_reject_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        yield Finding(
            f"security.tls: {tls.cert_file} and {tls.key_file} are no certificate and its key:"
            f" {_first_line(error)}",
            "give both in PEM, the key without a password",
        )
    try:
        if tls.client_ca_file and "client_ca_file" not in unreadable:
            context.load_verify_locations(cafile=tls.client_ca_file)
    except (OSError, ValueError) as error:
        yield Finding(
            f"security.tls.client_ca_file: {tls.client_ca_file} holds no certificates:"
            f" {_first_line(error)}",
            "give those of the authorities, in PEM",
        )


def why_unreadable(path: str) -> str:
    """Why this user cannot read a file; empty if it can."""
    try:
        with Path(path).open("rb"):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _reject_password() -> str:
    """For an encrypted key: the start is not interactive, so it cannot be used."""
    raise ValueError("it is locked with a password")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
