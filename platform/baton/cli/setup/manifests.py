"""`baton manifests export`: files for clusters and machines, from one configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options import (
    ConfigFiles,
    JsonFlag,
    Output,
    SetOptions,
    load_files,
    resolve_format,
)
from baton.cli.output import OutputFormat, report_errors
from baton.cli.setup.export_files import Force, print_written, write_files

if TYPE_CHECKING:
    from collections.abc import Mapping

TARGETS = ("kuberay", "helm", "kustomize", "ray", "compose", "systemd", "docker")


def export(  # noqa: PLR0913 - each is an option
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
    force: Force = False,
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
            name=name, namespace=namespace, image=image, gpus_per_node=gpus_per_node
        )
        loaded_config = load_files(context, config, sets)
        files: Mapping[str, bytes] = manifest_files(Target(target), loaded_config, settings)
        report = write_files(files, out, force=force)
    print_written(report, resolve_format(output, as_json=as_json), _NEXT_STEPS[target])


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
