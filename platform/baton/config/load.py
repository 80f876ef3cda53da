"""Reads files, environment and options into one frozen configuration, or a list of all errors."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path as FilePath

from baton.config.checks.topology import check_config
from baton.config.defaults import apply_defaults
from baton.config.language.build import Builder
from baton.config.language.read import Unreadable, read_file, read_text
from baton.config.language.renamed_keys import RENAMED_KEYS, RenamedKey, with_new_names
from baton.config.language.tree import (
    DefaultOrigin,
    Entry,
    FileOrigin,
    Finding,
    Path,
    Scalar,
    Section,
    describe_node,
    format_path,
    sort_key,
)
from baton.config.layers import Moved, add_env, add_sets, merge_configs
from baton.config.schema.deployment import DeploymentConfig
from baton.config.write.render import render
from baton.domain.errors import ConfigInvalid

MAX_FINDINGS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A configuration and the origin of each value."""

    config: DeploymentConfig
    origins: Mapping[str, str]
    """By path (`pools.decode.replicas.max`): `default`, `file:line:column`, `env NAME`, `--set`."""
    warnings: tuple[str, ...] = ()
    """Each deprecated key and its place."""


def load_config(
    paths: Sequence[str | FilePath],
    *,
    env: Mapping[str, str] | None = None,
    sets: Sequence[str] = (),
    renamed: Sequence[RenamedKey] = RENAMED_KEYS,
    for_simulation: bool = False,
) -> LoadedConfig:
    """The configuration of the files, later files on top, then `env`, then `sets`.

    Args:
        paths: YAML files; all but the first are overlays.
        env: the environment; only variables that begin with `BATON__` are used.
        sets: texts such as `pools.decode.replicas.max=6`.
        renamed: keys whose old names are accepted.
        for_simulation: also accept what no deployment starts: data-parallel groups.

    Raises:
        ConfigInvalid: with one line for each error.
    """
    findings: list[Finding] = []
    warnings: list[Finding] = []
    moved = partial(with_new_names, table=renamed, warnings=warnings, findings=findings)
    root = _merge_files([FilePath(path) for path in paths], findings, moved)
    root = add_env(root, env or {}, findings, moved)
    root = add_sets(root, sets, findings, moved)
    loaded = _build_config(root, findings, for_simulation=for_simulation)
    in_place = sorted(dict.fromkeys(warnings), key=sort_key)
    return replace(loaded, warnings=tuple(map(str, in_place)))


def load_text(text: str, renamed: Sequence[RenamedKey] = RENAMED_KEYS) -> DeploymentConfig:
    """The configuration from `render`'s text, of this or another version of baton.

    Missing keys get their defaults; old names of keys are accepted.

    Raises:
        ConfigInvalid: this version cannot use it.
    """
    findings: list[Finding] = []
    origin = FileOrigin("(kept)", 1, 1)
    try:
        root = read_text(text, origin, findings)
    except Unreadable as error:
        raise _config_invalid([error.finding], None) from error
    if not isinstance(root, Section):
        raise _config_invalid(
            [Finding(origin, (), "expected a mapping of keys such as 'pools'")], None
        )
    root = with_new_names(root, table=renamed, warnings=[], findings=findings)
    return _build_config(root, findings).config


def _as_text(config: DeploymentConfig) -> tuple[Callable[[str], DeploymentConfig], tuple[str]]:
    return load_text, (render(config),)


# A pickled configuration is its text, because another version of baton may unpickle it. A pickled
# dataclass is bare values in the order of fields: a new field in the middle would shift all later
# values. The package imports this module, so every process has this registration.
copyreg.pickle(DeploymentConfig, _as_text)


def _build_config(
    root: Section, findings: list[Finding], *, for_simulation: bool = False
) -> LoadedConfig:
    root, short_name = apply_defaults(root, findings)
    builder = Builder()
    config = builder.section(DeploymentConfig, Entry(root, root.origin), ())
    findings += builder.findings
    findings += check_config(root, builder, for_simulation=for_simulation)
    if findings or config is None:
        raise _config_invalid(findings, short_name)
    origins = {format_path(path): str(origin) for path, origin in builder.origins.items()}
    return LoadedConfig(config=config, origins=origins)


def _merge_files(files: Sequence[FilePath], findings: list[Finding], moved: Moved) -> Section:
    layers: list[Section] = []
    unreadable: list[Finding] = []
    for file in files:
        try:
            node = read_file(file, findings)
        except Unreadable as error:
            unreadable.append(error.finding)
            continue
        if isinstance(node, Section):
            layers.append(moved(node))
        elif not (isinstance(node, Scalar) and node.value is None):
            message = f"got {describe_node(node, ())}, expected a mapping of keys such as 'pools'"
            unreadable.append(Finding(node.origin, (), message))
    if unreadable:
        # Without the content of an unreadable file, no other check is meaningful.
        raise _config_invalid(findings + unreadable, None)
    origin = FileOrigin(str(files[0]), 1, 1) if files else DefaultOrigin()
    root = Section({}, origin)
    for layer in layers:
        root = merge_configs(root, layer)
    return root


def _config_invalid(findings: Sequence[Finding], short_name: str | None) -> ConfigInvalid:
    messages = [
        str(Finding(finding.origin, _display_path(finding.path, short_name), finding.message))
        for finding in sorted(_deduplicate(findings), key=sort_key)
    ]
    if len(messages) > MAX_FINDINGS:
        messages = [*messages[:MAX_FINDINGS], f"and {len(messages) - MAX_FINDINGS} more"]
    return ConfigInvalid(tuple(messages))


def _deduplicate(findings: Sequence[Finding]) -> list[Finding]:
    """Each finding once: an inherited error of a pool is reported only at its model."""
    model_findings = {
        (finding.origin, finding.path[2:], finding.message)
        for finding in findings
        if finding.path[:1] == ("models",)
    }
    return [
        finding
        for finding in dict.fromkeys(findings)
        if finding.path[:1] != ("pools",)
        or (finding.origin, finding.path[2:], finding.message) not in model_findings
    ]


def _display_path(path: Path, short_name: str | None) -> Path:
    """`models.tiny.source` as `model.source` when the file uses the short form."""
    if short_name is not None and path[:2] == ("models", short_name):
        return ("model", *path[2:])
    return path
