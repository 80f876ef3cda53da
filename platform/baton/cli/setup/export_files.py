"""`baton dashboards export`, `rules export`, `manifests export`: files for other programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import (
    ConfigFiles,
    JsonFlag,
    Output,
    SetOptions,
    backend_of,
    load_files,
    resolve_format,
)
from baton.cli.output import OutputFormat, print_report, report_errors
from baton.domain.errors import OperatorError
from baton.domain.names.words import count_text

_Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder for the files; made where it is missing.")
]
_Force = Annotated[bool, typer.Option("--force", help="Replace existing files that differ, too.")]
_RunbookBase = Annotated[
    str | None,
    typer.Option(
        "--runbook-base",
        metavar="URL",
        help="URL of a copy of the runbooks, to which alerts link; else alerts name the page.",
    ),
]
_MAX_NAMED = 5
TARGETS = ("kuberay", "helm", "kustomize", "ray", "compose", "systemd", "docker")
_NEXT_STEPS = {
    "kuberay": "make its secrets, then: kubectl apply -f DIR",
    "helm": "make its secrets, then: helm install NAME DIR",
    "kustomize": "make its secrets, then: kubectl apply -k DIR/overlays/gpu",
    "ray": (
        "ray up DIR/cluster.yaml, then serve deploy DIR/serve.yaml through ray attach;"
        " on a cluster that runs already: serve deploy DIR/serve-anywhere.yaml"
    ),
    "compose": "docker compose --file DIR/compose.yaml up --detach",
    "systemd": "copy units to /etc/systemd/system and the rest to /etc/baton",
    "docker": "docker build --file DIR/Dockerfile.cuda in the project's folder",
}


class FilesDiffer(OperatorError):
    """Files with other content exist."""


def dashboards(
    context: typer.Context,
    folder: _Folder,
    *,
    force: _Force = False,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Write the Grafana dashboards into a folder.

    With them goes what provisions Grafana, and the scrape configuration of Prometheus.
    """
    with report_errors():
        report = _write_files(backend_of(context).dashboards(), folder, force=force)
    _print_written(
        report, resolve_format(output, as_json=as_json), "import them in Grafana, or provision DIR"
    )


def rules(
    context: typer.Context,
    folder: _Folder,
    *,
    runbook_base: _RunbookBase = None,
    force: _Force = False,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Write the rules for Prometheus into a folder.

    Recording rules and alerts; a rule file serves every configuration.
    """
    with report_errors():
        report = _write_files(backend_of(context).rules(runbook_base), folder, force=force)
    _print_written(
        report, resolve_format(output, as_json=as_json), "name them under rule_files in Prometheus"
    )


def manifests(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    config: ConfigFiles,
    *,
    target: Annotated[
        str, typer.Option("--target", metavar="TARGET", help=f"One of {', '.join(TARGETS)}.")
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for the files; made when missing.")
    ] = Path("manifests"),
    sets: SetOptions = None,
    name: Annotated[str, typer.Option("--name", help="Name of the deployment.")] = "baton",
    namespace: Annotated[str, typer.Option("--namespace", help="Kubernetes namespace.")] = "baton",
    image: Annotated[
        str | None,
        typer.Option("--image", help="Image of the nodes; else that of the Dockerfiles."),
    ] = None,
    gpus_per_node: Annotated[
        int, typer.Option("--gpus-per-node", metavar="COUNT", help="GPUs of the largest node.")
    ] = 8,
    runbook_base: _RunbookBase = None,
    force: _Force = False,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Write what runs a configuration on a cluster, or on a machine as a service."""
    if target not in TARGETS:
        raise typer.BadParameter(
            f"got {target!r}, expected one of {', '.join(TARGETS)}", param_hint="--target"
        )
    with report_errors():
        from baton.manifests.export import Target, manifest_files  # here: keeps --help fast
        from baton.manifests.settings import ManifestSettings

        settings = ManifestSettings(
            name=name,
            namespace=namespace,
            image=image,
            gpus_per_node=gpus_per_node,
            runbook_base=runbook_base,
        )
        loaded_config = load_files(context, config, sets)
        files = manifest_files(Target(target), loaded_config, settings)
        report = _write_files(files, out, force=force)
    _print_written(report, resolve_format(output, as_json=as_json), _NEXT_STEPS[target])


def _write_files(files: Mapping[str, bytes], folder: Path, *, force: bool) -> Mapping[str, object]:
    """Write files into a folder; reports which were written and which existed.

    Raises:
        FilesDiffer: some exist with other content, without `force`; nothing was written.
        OSError: a file or a folder cannot be written.
    """
    existing = {name: _read_if_exists(folder / name) for name in files}
    differing = [name for name, content in existing.items() if content not in {None, files[name]}]
    if differing and not force:
        names = ", ".join(differing[:_MAX_NAMED]) + (", ..." if differing[_MAX_NAMED:] else "")
        raise FilesDiffer(
            f"{folder}: {len(differing)} of {count_text(len(files), 'file')} differ: {names}",
            "write to another folder, or replace them with --force",
        )
    to_write = [name for name, content in existing.items() if content != files[name]]
    for name in to_write:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[name])
    unchanged = [name for name in files if name not in to_write]
    return {
        "folder": str(folder),
        "written": to_write,
        "replaced": differing,
        "unchanged": unchanged,
    }


def _read_if_exists(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _print_written(report: Mapping[str, object], output: OutputFormat, next_step: str) -> None:
    """Print which files were written, and the next step."""
    if output is OutputFormat.JSON:
        print_report(report, output)
        return
    written, unchanged = report["written"], report["unchanged"]
    assert isinstance(written, list)
    assert isinstance(unchanged, list)
    for name in written:
        typer.echo(str(Path(str(report["folder"])) / name))
    unchanged_text = f", {len(unchanged)} were there already" if unchanged else ""
    typer.echo(f"{count_text(len(written), 'file')} written{unchanged_text}; {next_step}", err=True)
