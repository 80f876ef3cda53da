"""Files, environment and options in; one frozen configuration out, or everything that is wrong."""

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
    Origin,
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
    """A configuration and where each of its values came from."""

    config: DeploymentConfig
    origins: Mapping[str, str]
    """By path (`pools.decode.replicas.max`): `default`, `file:line:column`, `env NAME`, `--set`."""
    warnings: tuple[str, ...] = ()
    """Each deprecated key with its place."""


def load_config(
    paths: Sequence[str | FilePath],
    *,
    env: Mapping[str, str] | None = None,
    sets: Sequence[str] = (),
    renamed: Sequence[RenamedKey] = RENAMED_KEYS,
) -> LoadedConfig:
    """The configuration of some files, later ones on top, then `env`, then `sets`.

    Args:
        paths: YAML files; all but the first are overlays.
        env: the environment; only variables that begin with `BATON__` are looked at.
        sets: texts such as `pools.decode.replicas.max=6`.
        renamed: the keys whose old names are read.

    Raises:
        ConfigInvalid: with one line for each thing that is wrong.
    """
    findings: list[Finding] = []
    warnings: list[Finding] = []
    moved = partial(with_new_names, table=renamed, warnings=warnings, findings=findings)
    root = _merge_files([FilePath(path) for path in paths], findings, moved)
    root = add_env(root, env or {}, findings, moved)
    loaded = _build_config(add_sets(root, sets, findings, moved), findings)
    in_place = sorted(dict.fromkeys(warnings), key=sort_key)
    return replace(loaded, warnings=tuple(map(str, in_place)))


def load_text(text: str, renamed: Sequence[RenamedKey] = RENAMED_KEYS) -> DeploymentConfig:
    """The configuration that `render` has written, here or by another version of baton.

    Keys that this version has and the other had not get their defaults. Keys by their old names
    get their new ones.

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


# A pickled configuration is its text, because another version of baton may unpickle it. Pickled as
# a dataclass it would be bare values in the order of the fields: with one more field in the middle,
# each later field would get the value of its neighbour. This is registered here, where the schema
# and the text are known; the package imports this module, so every process has it.
copyreg.pickle(DeploymentConfig, _as_text)


def _build_config(root: Section, findings: list[Finding]) -> LoadedConfig:
    root, short_name = apply_defaults(root, findings)
    builder = Builder()
    config = builder.section(DeploymentConfig, Entry(root, root.origin), ())
    findings += builder.findings
    findings += check_config(root, builder)
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
        # What a file that cannot be read would have said is unknown: nothing else can be judged.
        raise _config_invalid(findings + unreadable, None)
    root = Section({}, _root_origin(files))
    for layer in layers:
        root = merge_configs(root, layer)
    return root


def _root_origin(files: Sequence[FilePath]) -> Origin:
    return FileOrigin(str(files[0]), 1, 1) if files else DefaultOrigin()


def _config_invalid(findings: Sequence[Finding], short_name: str | None) -> ConfigInvalid:
    messages = [
        str(Finding(finding.origin, _display_path(finding.path, short_name), finding.message))
        for finding in sorted(_deduplicate(findings), key=sort_key)
    ]
    if len(messages) > MAX_FINDINGS:
        messages = [*messages[:MAX_FINDINGS], f"and {len(messages) - MAX_FINDINGS} more"]
    return ConfigInvalid(tuple(messages))


def _deduplicate(findings: Sequence[Finding]) -> list[Finding]:
    """Each finding once: what a pool inherits from its model is wrong where the model says it."""
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
    """`models.tiny.source` as `model.source` when the file has the short form."""
    if short_name is not None and path[:2] == ("models", short_name):
        return ("model", *path[2:])
    return path
