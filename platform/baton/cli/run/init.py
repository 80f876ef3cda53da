"""`baton init`: a configuration to begin with; `baton up MODEL` starts it at once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import backend_of
from baton.cli.output import report_errors
from baton.domain.errors import OperatorError, UnknownModel
from baton.domain.names.words import count_text

MODEL = typer.Argument(
    metavar="MODEL", help="A model to serve without a file: a hub id, a folder, or tiny."
)
GPU = typer.Option(
    "--gpu", metavar="NAME", help="GPUs of the cluster, as H100; without: those of this machine."
)
PREFILL = typer.Option("--prefill", min=1, metavar="N", help="Prefill replicas.")
DECODE = typer.Option("--decode", min=1, metavar="N", help="Decode replicas.")
TP = typer.Option(
    "--tp", min=1, metavar="N", help="GPUs of a replica; by default as many as the model needs."
)
_WRITE = typer.Option("--write", "-w", metavar="FILE", help="Write it to a new file.")


class ModelTooLarge(OperatorError):
    """No split within a node holds the model."""


class FileExists(OperatorError):
    """A file that would be overwritten."""


def init(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    model: Annotated[str, MODEL] = "tiny",
    *,
    gpu: Annotated[str | None, GPU] = None,
    prefill: Annotated[int, PREFILL] = 1,
    decode: Annotated[int, DECODE] = 1,
    tp: Annotated[int | None, TP] = None,
    write: Annotated[Path | None, _WRITE] = None,
) -> None:
    """Print a commented configuration for one model."""
    with report_errors():
        text = starter_text(context, model, gpu=gpu, prefill=prefill, decode=decode, tp=tp)
        if write is None:
            typer.echo(text, nl=False)
            return
        write_new(write, text)
    typer.echo(f"written: {write}; start it with 'baton up -c {write}'", err=True)


def starter_text(
    context: typer.Context,
    model: str,
    *,
    gpu: str | None,
    prefill: int,
    decode: int,
    tp: int | None,
) -> str:
    """The YAML of a configuration for one model.

    Raises:
        OperatorError: this machine has too few GPUs, or the name of the GPUs is unknown.
    """
    from baton.config.write.starter import Starter  # here: keeps --help fast
    from baton.engine.gpus import count_gpus

    accelerator, needed, note = None, 1, ""
    if gpu is not None:
        accelerator, needed, note = _sized(model, gpu) if tp is None else (_ray_name(gpu), tp, "")
    starter = Starter(
        model=model,
        prefill=prefill,
        decode=decode,
        tp=needed if tp is None else tp,
        note=note,
        gpus_here=count_gpus(backend_of(context).environ) if gpu is None else 0,
        accelerator=accelerator,
    )
    return starter.render()


def _ray_name(gpu: str) -> str:
    from baton.config.write.render_plan import ray_accelerator_name
    from baton.perf.hardware.catalogue import find_accelerator

    return ray_accelerator_name(find_accelerator(gpu)) or gpu


def _sized(model: str, gpu: str) -> tuple[str, int, str]:
    """Ray's name of the accelerator, the GPUs that a replica needs, and a note on that."""
    from baton.cli.model.models import read_model
    from baton.perf.hardware.accelerators import Dtype
    from baton.perf.hardware.catalogue import find_accelerator
    from baton.perf.model.memory import MemoryModel

    name, accelerator = _ray_name(gpu), find_accelerator(gpu)
    try:
        shape, weights, *_ = read_model(model)
    except UnknownModel:
        return name, 1, "The model's size is not known here: check it with 'baton size', or --tp."
    memory = MemoryModel(
        shape=shape,
        accelerator=accelerator,
        weights_dtype=weights,
        kv_dtype=Dtype.BF16,
        # vLLM does not start where one request of the full length has no room.
        min_kv_tokens=math.ceil(
            shape.kv_bytes(shape.max_len_tokens, Dtype.BF16) / shape.kv_token_bytes(Dtype.BF16)
        ),
    )
    most = accelerator.devices_per_node
    tp = next((fit.split.tp for fit in memory.fits(most) if fit.split.pp == 1), None)
    if tp is None:
        raise ModelTooLarge(
            f"{model}: its {weights} weights and one request of {shape.max_len_tokens:,} tokens do"
            f" not fit {count_text(most, f'{name} GPU')}, those of a node",
            f"see 'baton size {model} --gpu {gpu}'; engines of several nodes need a file with"
            " parallel.pp",
        )
    gpus = count_text(tp, f"{name} GPU holds", f"{name} GPUs hold")
    return name, tp, f"{gpus} its {weights} weights and a request of full length: 'baton size'."


def write_new(path: Path, text: str) -> None:
    """Write a file that was not there.

    Raises:
        FileExists: it is there.
        OSError: it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise FileExists(f"{path}: got a file, expected none", "name another file") from error
